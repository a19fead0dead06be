"""The likeliest tokens behind each place of a tree become the drafts that stand there.

Shape suffixes: R rows of the pass, M engine rows, K drafts, N = R * P places of the pass, P places of each row,
W draft vocabulary, C chunks of it, B most children of a place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.argmax import CHUNK, NO_INDEX, UNPACK, takes_argmax
from draftloop.kernels.ordered import order_of, pack
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl
from draftloop.kernels.write_draft import DraftRows


class Children(NamedTuple):
    """The drafts behind P places of one height; tensors are constants on the device."""

    counts_P: Tensor
    """int32"""
    firsts_P: Tensor
    """int32: each place's first one."""
    places_C: Tensor
    """int64: the place, 0 to P - 1, that each of them stands behind."""
    ranks_C: Tensor
    """int64: which of that place's it is, 0 the likeliest."""
    most: int
    """B"""
    height: int
    """Of these drafts; 1 for those right behind the bonus token."""


def top_torch(x_NW: Tensor, k: int, *, first: int = 0, num_live: int | None = None) -> Tensor:
    """Reference of `top_triton`, of one chunk: the largest first, of equal ones the lower index; NaN is largest."""
    x_NW = x_NW[:, :num_live].float()
    bits_NW = torch.where(x_NW == 0, 0.0, x_NW).view(torch.int32)
    keys_NW = torch.where(bits_NW < 0, bits_NW ^ UNPACK, bits_NW).masked_fill(x_NW.isnan(), UNPACK).long()
    packed_NW = (keys_NW << 32) | (UNPACK - first - torch.arange(x_NW.shape[1], device=x_NW.device))
    return F.pad(packed_NW, (0, max(k - x_NW.shape[1], 0)), value=NO_INDEX).topk(k, -1).values


def write_children_torch(
    rows_R: Tensor,
    choice: Tensor,
    state: DraftRows,
    children: Children,
    target_ids_W: Tensor | None,
    *,
    longest: int | None,
) -> None:
    """Reference of `write_children`."""
    drafts_MK, _, draft_limit_M, num_tokens_M = state
    rows_R1 = rows_R.long()[:, None]
    packed_NX = top_torch(choice, children.most) if choice.is_floating_point() else choice
    best_NB = UNPACK - (packed_NX.topk(children.most, -1).values & UNPACK)
    tokens_RC = best_NB.unflatten(0, (rows_R.shape[0], -1))[:, children.places_C, children.ranks_C]
    if target_ids_W is not None:
        tokens_RC = target_ids_W[tokens_RC]
    drafts_C = children.firsts_P.long()[children.places_C] + children.ranks_C
    allowed_RC = drafts_C < draft_limit_M[rows_R1]
    if longest is not None:
        allowed_RC &= num_tokens_M[rows_R1] + children.height - 1 < longest
    drafts_MK.index_put_((rows_R1, drafts_C), torch.where(allowed_RC, tokens_RC, -1).int())


@jit("first")
def _chunk_top_kernel(
    x_ptr,
    best_ptr,
    x_stride,
    size,
    first,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    NO_INDEX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One place, one chunk: its K largest elements, packed as `argmax.chunk_maxima` packs them."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    live = index < size
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + index, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    packed = pack(tl.where(x != x, 0x7FFFFFFF, order_of(x)), first + index, live)
    for i in range(K):
        best = tl.max(packed, 0)
        tl.store(best_ptr + (row * tl.num_programs(1) + chunk) * K + i, best)
        packed = tl.where(packed == best, NO_INDEX, packed)


@jit("num_drafts", "longest", "num_places", "num_choices")
def _write_children_kernel(
    rows_ptr,
    best_ptr,
    drafts_ptr,
    draft_limit_ptr,
    num_tokens_ptr,
    target_ids_ptr,
    counts_ptr,
    firsts_ptr,
    num_drafts,
    longest,
    num_places,
    num_choices,
    HEIGHT: tl.constexpr,
    MAPPED: tl.constexpr,
    NO_INDEX: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One place of one row."""
    place = tl.program_id(0)
    in_row = place % num_places
    choice = tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + in_row)
    first = tl.load(firsts_ptr + in_row)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + place // num_places).to(tl.int64)
    packed = tl.load(best_ptr + place * num_choices + choice, mask=choice < num_choices, other=NO_INDEX)
    is_short = tl.load(num_tokens_ptr + row) + (HEIGHT - 1) < longest
    limit = tl.load(draft_limit_ptr + row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for i in range(count):
        best = tl.max(packed, 0)
        packed = tl.where(packed == best, NO_INDEX, packed)
        token = UNPACK - (best & UNPACK)
        if MAPPED:
            token = tl.load(target_ids_ptr + token)
        allowed = is_short & (first + i < limit)
        tl.store(drafts_ptr + row * num_drafts + first + i, tl.where(allowed, token, -1).to(tl.int32))


def top_triton(x_NW: Tensor, k: int, *, first: int = 0, num_live: int | None = None) -> Tensor:
    """int64 [N, C * k]: the k largest elements of each chunk, packed; arguments of `argmax.chunk_maxima`."""
    num_entries, size = x_NW.shape
    assert x_NW.stride(1) == 1
    num_chunks = -(-size // CHUNK)
    best_NX = torch.empty(num_entries, num_chunks * k, dtype=torch.int64, device=x_NW.device)
    if num_entries:
        _chunk_top_kernel[(num_entries, num_chunks)](
            x_NW,
            best_NX,
            x_NW.stride(0),
            size if num_live is None else num_live,
            first,
            K=k,
            CHUNK=CHUNK,
            NO_INDEX=NO_INDEX,
            num_warps=4,
            **pdl_options(x_NW.device),
        )
    return best_NX


def top(x_NW: Tensor, k: int, *, first: int = 0, num_live: int | None = None) -> Tensor:
    """int64 [N, X]: the k largest elements of each row among others, packed; arguments of `argmax.chunk_maxima`."""
    return (top_triton if takes_argmax(x_NW) else top_torch)(x_NW, k, first=first, num_live=num_live)


def write_children_triton(
    rows_R: Tensor,
    choice: Tensor,
    state: DraftRows,
    children: Children,
    target_ids_W: Tensor | None,
    *,
    longest: int | None,
) -> None:
    """Twin of `write_children_torch`, two launches, or one where choices are packed."""
    best_NX = top_triton(choice, children.most) if choice.is_floating_point() else choice
    if not best_NX.shape[0]:
        return
    _write_children_kernel[(best_NX.shape[0],)](
        rows_R,
        best_NX,
        state.drafts_MK,
        state.draft_limit_M,
        state.num_tokens_M,
        rows_R if target_ids_W is None else target_ids_W,
        children.counts_P,
        children.firsts_P,
        state.drafts_MK.shape[1],
        2**31 - 1 if longest is None else longest,
        children.counts_P.shape[0],
        best_NX.shape[1],
        HEIGHT=children.height,
        MAPPED=target_ids_W is not None,
        NO_INDEX=NO_INDEX,
        UNPACK=UNPACK,
        BLOCK=next_power_of_2(best_NX.shape[1]),
        num_warps=1,
        **pdl_options(rows_R.device),
    )


def write_children(
    rows_R: Tensor,
    choice: Tensor,
    state: DraftRows,
    children: Children,
    target_ids_W: Tensor | None = None,
    *,
    longest: int | None = None,
) -> None:
    """Write the likeliest tokens of each place of each row as its children.

    `choice` are the places' logits, [N, W] row after row, or what `top` makes of them. `target_ids_W` (int64) are the
    target's ids of the logits. Past a row's own limit of drafts, or where it has `longest` tokens with those drafts
    that lead there, stands NO_DRAFT (-1); the padding row's limit is 0.
    """
    run = write_children_triton if rows_R.is_cuda else write_children_torch
    run(rows_R, choice, state, children, target_ids_W, longest=longest)
