"""The sum of a token's experts, of those that are here.

Shape suffixes: K experts per token, T tokens, C hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.moe_route import Router
from draftloop.kernels.triton_import import jit, pdl_options, tl

BLOCK = 1024


def combine_torch(out_KTC: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference of `combine_triton`, for outputs that are zero where an expert is not here."""
    total_TC = out_KTC[0].clone()
    for out_TC in out_KTC[1:]:
        total_TC += out_TC
    return total_TC.to(dtype)


@jit("num_tokens")
def _combine_kernel(
    parts_ptr,
    experts_ptr,
    out_ptr,
    num_tokens,
    first,
    num_here,
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one block of columns."""
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        expert = tl.load(experts_ptr + token * PER_TOKEN + rank)
        size = tl.where((expert >= first) & (expert < first + num_here), SIZE, 0)  # what is not here was not written
        row = (rank * num_tokens + token).to(tl.int64)
        total += tl.load(parts_ptr + row * SIZE + c, mask=c < size, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + token.to(tl.int64) * SIZE + c, total.to(out_ptr.dtype.element_ty), mask=c < SIZE)


def combine_triton(out_KTC: Tensor, experts_TK: Tensor, router: Router, dtype: torch.dtype) -> Tensor:
    """[T, C]: the outputs of `experts_triton` added up by rank in fp32, rounded once."""
    num_per_token, num_tokens, size = out_KTC.shape
    out_TC = torch.empty(num_tokens, size, dtype=dtype, device=out_KTC.device)
    _combine_kernel[(num_tokens, -(-size // BLOCK))](
        out_KTC,
        experts_TK,
        out_TC,
        num_tokens,
        router.first,
        router.num_here,
        SIZE=size,
        PER_TOKEN=num_per_token,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(out_KTC.device),
    )
    return out_TC
