"""Two root-mean-square norms, side by side: what the attention of an EAGLE-3 layer reads.

Shape suffixes: T tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.native import ops as native
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl


def norm_concat_torch(
    first_TH: Tensor, second_TH: Tensor, first_weight_H: Tensor, second_weight_H: Tensor, eps: float
) -> Tensor:
    """Reference of `norm_concat`."""
    sides = ((first_TH, first_weight_H), (second_TH, second_weight_H))
    return torch.cat([torch.rms_norm(x, weight.shape, weight, eps) for x, weight in sides], -1)


@jit()
def _norm_concat_kernel(
    first_ptr,
    second_ptr,
    first_weight_ptr,
    second_weight_ptr,
    out_ptr,
    first_stride,
    second_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one side."""
    token = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    h = tl.arange(0, BLOCK)
    live = h < SIZE
    if side == 0:
        x_ptr, weight_ptr = first_ptr + token * first_stride, first_weight_ptr
    else:
        x_ptr, weight_ptr = second_ptr + token * second_stride, second_weight_ptr
    weight = tl.load(weight_ptr + h, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + h, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + (2 * token + side) * SIZE + h, normed.to(out_ptr.dtype.element_ty), mask=live)


def norm_concat_triton(
    first_TH: Tensor, second_TH: Tensor, first_weight_H: Tensor, second_weight_H: Tensor, eps: float
) -> Tensor:
    """Twin of `norm_concat_torch`."""
    num_tokens, size = first_TH.shape
    assert first_TH.stride(1) == second_TH.stride(1) == 1
    out_T2H = torch.empty(num_tokens, 2 * size, dtype=first_TH.dtype, device=first_TH.device)
    block = next_power_of_2(size)
    if num_tokens:
        _norm_concat_kernel[(num_tokens, 2)](
            first_TH,
            second_TH,
            first_weight_H,
            second_weight_H,
            out_T2H,
            first_TH.stride(0),
            second_TH.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **pdl_options(first_TH.device),
        )
    return out_T2H


def norm_concat(
    first_TH: Tensor, second_TH: Tensor, first_weight_H: Tensor, second_weight_H: Tensor, eps: float
) -> Tensor:
    """[T, 2H]: `rms_norm` of each with its own weight; see `rms_norm.rms_norm`."""
    if first_TH.is_cuda:
        return norm_concat_triton(first_TH, second_TH, first_weight_H, second_weight_H, eps)
    if native.takes_serial(first_TH, second_TH, first_weight_H, second_weight_H):
        return native.norm_concat(first_TH, second_TH, first_weight_H, second_weight_H, eps)
    return norm_concat_torch(first_TH, second_TH, first_weight_H, second_weight_H, eps)
