"""Root-mean-square norm, alone or with the residual addition in front of it.

Shape suffixes: T tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.triton_import import jit, next_power_of_2, tl


def rms_norm_torch(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Reference of `rms_norm`."""
    return torch.rms_norm(x_TH, weight_H.shape, weight_H, eps)


def add_rms_norm_torch(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Reference of `add_rms_norm`."""
    residual_TH = residual_TH + x_TH
    return torch.rms_norm(residual_TH, weight_H.shape, weight_H, eps), residual_TH


@jit()
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """One token. With ADD, the residual is added first and the sum stored too."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    live = h < SIZE
    weight = tl.load(weight_ptr + h, mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_stride + h, mask=live, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + token * residual_stride + h, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * SIZE + h, rounded, mask=live)
        x = rounded.to(tl.float32)
    mean = tl.sum(x * x, 0) / SIZE
    normed = x * tl.rsqrt(mean + eps) * weight
    tl.store(normed_ptr + token * SIZE + h, normed.to(normed_ptr.dtype.element_ty), mask=live)


def _launch(x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_tokens, size = x_TH.shape
    assert x_TH.stride(1) == 1
    normed_TH = torch.empty(num_tokens, size, dtype=x_TH.dtype, device=x_TH.device)
    sum_TH = torch.empty_like(normed_TH) if residual_TH is not None else normed_TH
    block = next_power_of_2(size)
    if num_tokens:
        _rms_norm_kernel[(num_tokens,)](
            x_TH,
            x_TH if residual_TH is None else residual_TH,
            weight_H,
            normed_TH,
            sum_TH,
            x_TH.stride(0),
            0 if residual_TH is None else residual_TH.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            ADD=residual_TH is not None,
            num_warps=min(16, max(1, block // 512)),
        )
    return normed_TH, sum_TH


def rms_norm_triton(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Twin of `rms_norm_torch`."""
    return _launch(x_TH, None, weight_H, eps)[0]


def add_rms_norm_triton(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `add_rms_norm_torch`."""
    return _launch(x_TH, residual_TH, weight_H, eps)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight`, computed in fp32, in the dtype of x."""
    return rms_norm_triton(x_TH, weight_H, eps) if x_TH.is_cuda else rms_norm_torch(x_TH, weight_H, eps)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(residual + x), residual + x)`. The inputs are left as they are.

    The sum is rounded to the model's dtype before it is normed, as the model was trained.
    """
    if x_TH.is_cuda:
        return add_rms_norm_triton(x_TH, residual_TH, weight_H, eps)
    return add_rms_norm_torch(x_TH, residual_TH, weight_H, eps)
