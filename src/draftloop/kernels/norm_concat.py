"""Two root-mean-square norms, side by side: what the attention of an EAGLE-3 layer reads.

Shape suffixes: T tokens, H hidden size, X and Y rows that tokens are taken from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.native import ops as native
from draftloop.kernels.native.functions import takes
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl
from draftloop.kernels.widened import embedding, is_narrow


def norm_concat_torch(
    first_XH: Tensor,
    second_YH: Tensor,
    first_weight_H: Tensor,
    second_weight_H: Tensor,
    eps: float,
    *,
    first_T: Tensor | None = None,
    second_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of `norm_concat`."""
    first_TH = first_XH if first_T is None else first_XH.index_select(0, first_T)
    second_TH = second_YH if second_T is None else second_YH.index_select(0, second_T)
    sides = ((first_TH, first_weight_H), (second_TH, second_weight_H))
    return torch.cat([torch.rms_norm(x, weight.shape, weight, eps) for x, weight in sides], -1), second_TH


@jit()
def _norm_concat_kernel(
    first_ptr,
    second_ptr,
    first_index_ptr,
    second_index_ptr,
    first_weight_ptr,
    second_weight_ptr,
    out_ptr,
    taken_ptr,
    first_stride,
    second_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TAKE_FIRST: tl.constexpr,
    TAKE_SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one side."""
    token = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    h = tl.arange(0, BLOCK)
    live = h < SIZE
    weight_ptr = first_weight_ptr
    if side == 1:
        weight_ptr = second_weight_ptr
    weight = tl.load(weight_ptr + h, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    index = token
    if side == 0:
        if TAKE_FIRST:
            index = tl.load(first_index_ptr + token).to(tl.int64)
        x_ptr = first_ptr + index * first_stride
    else:
        if TAKE_SECOND:
            index = tl.load(second_index_ptr + token).to(tl.int64)
        x_ptr = second_ptr + index * second_stride
    x = tl.load(x_ptr + h, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if TAKE_SECOND and side == 1:
        tl.store(taken_ptr + token * SIZE + h, x, mask=live)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + (2 * token + side) * SIZE + h, normed.to(out_ptr.dtype.element_ty), mask=live)


def norm_concat_triton(
    first_XH: Tensor,
    second_YH: Tensor,
    first_weight_H: Tensor,
    second_weight_H: Tensor,
    eps: float,
    *,
    first_T: Tensor | None = None,
    second_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of `norm_concat_torch`."""
    size = first_XH.shape[1]
    num_tokens = first_XH.shape[0] if first_T is None else first_T.shape[0]
    assert first_XH.stride(1) == second_YH.stride(1) == 1
    out_T2H = torch.empty(num_tokens, 2 * size, dtype=first_XH.dtype, device=first_XH.device)
    second_TH = second_YH
    if second_T is not None:
        second_TH = torch.empty(num_tokens, size, dtype=second_YH.dtype, device=second_YH.device)
    block = next_power_of_2(size)
    if num_tokens:
        _norm_concat_kernel[(num_tokens, 2)](
            first_XH,
            second_YH,
            out_T2H if first_T is None else first_T,
            out_T2H if second_T is None else second_T,
            first_weight_H,
            second_weight_H,
            out_T2H,
            second_TH,
            first_XH.stride(0),
            second_YH.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            TAKE_FIRST=first_T is not None,
            TAKE_SECOND=second_T is not None,
            num_warps=min(16, max(1, block // 512)),
            **pdl_options(first_XH.device),
        )
    return out_T2H, second_TH


def norm_concat(
    first_XH: Tensor,
    second_YH: Tensor,
    first_weight_H: Tensor,
    second_weight_H: Tensor,
    eps: float,
    *,
    first_T: Tensor | None = None,
    second_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of each with its own weight, side by side, [T, 2H]; and the second as it went in, [T, H].

    `first_T` and `second_T` (int32 or int64) say which row of each is token t's; None: row t. The first may be a table
    that is kept narrower than the second (kernels/widened.py).
    """
    if first_T is not None and is_narrow(first_XH, second_YH.dtype):
        first_XH, first_T = embedding(first_T, first_XH, second_YH.dtype), None
    taken = {"first_T": first_T, "second_T": second_T}
    if first_XH.is_cuda:
        return norm_concat_triton(first_XH, second_YH, first_weight_H, second_weight_H, eps, **taken)
    if takes(first_XH, second_YH, first_weight_H, second_weight_H):
        first_TH = first_XH if first_T is None else first_XH.index_select(0, first_T)
        second_TH = second_YH if second_T is None else second_YH.index_select(0, second_T)
        if native.takes_serial(first_TH, second_TH):
            return native.norm_concat(first_TH, second_TH, first_weight_H, second_weight_H, eps), second_TH
    return norm_concat_torch(first_XH, second_YH, first_weight_H, second_weight_H, eps, **taken)
