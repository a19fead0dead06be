"""Root-mean-square norm, alone or with the residual addition in front of it.

Shape suffixes: T tokens, H hidden size, X splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.native import ops as native
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl


class Store(NamedTuple):
    """Where `add_rms_norm` also writes its result: token t to row `rows_T[t]`. Padding rows may collide."""

    memory_MH: Tensor
    rows_T: Tensor
    """int32"""
    normed: bool = False
    """The norm rather than the sum."""


def rms_norm_torch(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Reference of `rms_norm`."""
    if weight_H.dtype != x_TH.dtype:
        return torch.rms_norm(x_TH.float(), weight_H.shape, weight_H, eps).to(x_TH.dtype)
    return torch.rms_norm(x_TH, weight_H.shape, weight_H, eps)


def add_rms_norm_torch(
    x: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, *, store: Store | None = None
) -> tuple[Tensor, Tensor]:
    """Reference of `add_rms_norm`."""
    x_TH = x.sum(0).to(residual_TH.dtype) if x.dim() == 3 else x
    residual_TH = residual_TH + x_TH
    return _stored(rms_norm_torch(residual_TH, weight_H, eps), residual_TH, store)


def _stored(normed_TH: Tensor, sum_TH: Tensor, store: Store | None) -> tuple[Tensor, Tensor]:
    if store is not None:
        store.memory_MH.index_copy_(0, store.rows_T.long(), normed_TH if store.normed else sum_TH)
    return normed_TH, sum_TH


@jit()
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    memory_ptr,
    rows_ptr,
    x_stride,
    split_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    STORE_SUM: tl.constexpr,
    STORE_NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. With ADD, the residual is added first and the sum stored too."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    live = h < SIZE
    weight = tl.load(weight_ptr + h, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + h, mask=live, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + split * split_stride + token * x_stride + h, mask=live, other=0.0)
    residual = x
    if ADD:
        residual = tl.load(residual_ptr + token * residual_stride + h, mask=live, other=0.0).to(tl.float32)
    row = token
    if STORE_SUM or STORE_NORMED:
        row = tl.load(rows_ptr + token).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if ADD:
        # rounded as the layer's output would have been without splits
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32) + residual
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * SIZE + h, rounded, mask=live)
        if STORE_SUM:
            tl.store(memory_ptr + row * SIZE + h, rounded, mask=live)
        x = rounded.to(tl.float32)
    mean = tl.sum(x * x, 0) / SIZE
    normed = x * tl.rsqrt(mean + eps) * weight
    rounded = normed.to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + token * SIZE + h, rounded, mask=live)
    if STORE_NORMED:
        tl.store(memory_ptr + row * SIZE + h, rounded, mask=live)


def _launch(
    x: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, store: Store | None = None
) -> tuple[Tensor, Tensor]:
    x_XTH = x if x.dim() == 3 else x.unsqueeze(0)
    splits, num_tokens, size = x_XTH.shape
    assert x_XTH.stride(2) == 1
    dtype = x.dtype if residual_TH is None else residual_TH.dtype
    normed_TH = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    sum_TH = torch.empty_like(normed_TH) if residual_TH is not None else normed_TH
    block = next_power_of_2(size)
    if num_tokens:
        _rms_norm_kernel[(num_tokens,)](
            x,
            x if residual_TH is None else residual_TH,
            weight_H,
            normed_TH,
            sum_TH,
            normed_TH if store is None else store.memory_MH,
            normed_TH if store is None else store.rows_T,
            x_XTH.stride(1),
            x_XTH.stride(0),
            0 if residual_TH is None else residual_TH.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            ADD=residual_TH is not None,
            SPLITS=splits,
            STORE_SUM=store is not None and not store.normed,
            STORE_NORMED=store is not None and store.normed,
            num_warps=min(16, max(1, block // 512)),
            **pdl_options(x.device),
        )
    return normed_TH, sum_TH


def rms_norm_triton(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Twin of `rms_norm_torch`."""
    return _launch(x_TH, None, weight_H, eps)[0]


def add_rms_norm_triton(
    x: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, *, store: Store | None = None
) -> tuple[Tensor, Tensor]:
    """Twin of `add_rms_norm_torch`."""
    assert store is None or store.memory_MH.is_contiguous()
    return _launch(x, residual_TH, weight_H, eps, store)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight`, computed in fp32, in the dtype of x; the weight may be fp32 beside any."""
    if x_TH.is_cuda:
        return rms_norm_triton(x_TH, weight_H, eps)
    if native.takes_serial(x_TH, weight_H):
        return native.rms_norm(x_TH, weight_H, eps)
    return rms_norm_torch(x_TH, weight_H, eps)


def add_rms_norm(
    x: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, *, store: Store | None = None
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(residual + x), residual + x)`. The inputs are left as they are; see `Store` for `store`.

    x is [T, H], or fp32 [X, T, H]: sums that a linear layer split along K left to be added up. That is
    done in order, in fp32, and rounded to the model's dtype.

    The sum is rounded to the model's dtype before it is normed, as the model was trained.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual_TH, weight_H, eps, store=store)
    if native.takes_serial(x, residual_TH, weight_H):
        normed_TH, sum_TH = native.add_rms_norm(x, residual_TH, weight_H, eps)
        return _stored(normed_TH, sum_TH, store)
    return add_rms_norm_torch(x, residual_TH, weight_H, eps, store=store)
