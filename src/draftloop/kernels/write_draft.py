"""Writing the next draft of each row into the row state, chosen already or as the likeliest of its logits.

Shape suffixes: R rows of the pass, M engine rows, K drafts, W draft vocabulary, C chunks of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.argmax import NO_INDEX, UNPACK, argmax, chunk_maxima, takes_argmax, unpack_maxima
from draftloop.kernels.native import row_ops
from draftloop.kernels.native.functions import available
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl


class DraftRows(NamedTuple):
    """Where the rows' drafts are; int32 each."""

    drafts_MK: Tensor
    num_drafted_M: Tensor
    draft_limit_M: Tensor
    num_tokens_M: Tensor


def write_draft_torch(
    rows_R: Tensor,
    tokens_R: Tensor,
    state: DraftRows,
    target_ids_W: Tensor | None,
    *,
    first: bool,
    longest: int | None,
) -> None:
    """Reference of `write_draft`."""
    drafts_MK, num_drafted_M, draft_limit_M, num_tokens_M = state
    rows_R = rows_R.long()
    if target_ids_W is not None:
        tokens_R = target_ids_W[tokens_R]
    index_R = torch.zeros_like(rows_R) if first else num_drafted_M[rows_R].long()
    allowed_R = index_R < draft_limit_M[rows_R]
    if longest is not None:
        allowed_R &= num_tokens_M[rows_R] + index_R < longest
    is_padding_R = rows_R == num_tokens_M.shape[0] - 1
    drafts_MK.index_put_((rows_R, index_R), torch.where(allowed_R, tokens_R, -1).int())
    num_drafted_M.index_copy_(0, rows_R, torch.where(is_padding_R, 0, index_R + 1).int())


@jit("num_drafts", "padding_row", "longest", "num_choices")
def _write_draft_kernel(
    rows_ptr,
    choice_ptr,
    drafts_ptr,
    num_drafted_ptr,
    draft_limit_ptr,
    num_tokens_ptr,
    target_ids_ptr,
    num_drafts,
    padding_row,
    longest,
    num_choices,
    PACKED: tl.constexpr,  # choices are maxima of chunks, not a token
    MAPPED: tl.constexpr,
    FIRST: tl.constexpr,
    NO_INDEX: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    entry = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    if PACKED:
        chunk = tl.arange(0, BLOCK_C)
        best = tl.load(choice_ptr + entry * num_choices + chunk, mask=chunk < num_choices, other=NO_INDEX)
        token = UNPACK - (tl.max(best, 0) & UNPACK)
    else:
        token = tl.load(choice_ptr + entry)
    if MAPPED:
        token = tl.load(target_ids_ptr + token)
    index = tl.zeros([], tl.int32)
    if not FIRST:
        index = tl.load(num_drafted_ptr + row)
    allowed = (index < tl.load(draft_limit_ptr + row)) & (tl.load(num_tokens_ptr + row) + index < longest)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # all copies of the padding row write the same: no draft, and a count of 0
    tl.store(drafts_ptr + row * num_drafts + index, tl.where(allowed, token, -1).to(tl.int32), mask=index < num_drafts)
    tl.store(num_drafted_ptr + row, tl.where(row == padding_row, 0, index + 1))


def write_draft_triton(
    rows_R: Tensor,
    choice: Tensor,
    state: DraftRows,
    target_ids_W: Tensor | None,
    *,
    first: bool,
    longest: int | None,
) -> None:
    """Twin of `write_draft_torch`; `choice` is the tokens, or the `chunk_maxima` of their logits."""
    num_choices = choice.shape[1] if choice.dim() == 2 else 1
    if not rows_R.shape[0]:
        return
    _write_draft_kernel[(rows_R.shape[0],)](
        rows_R,
        choice,
        *state,
        rows_R if target_ids_W is None else target_ids_W,
        state.drafts_MK.shape[1],
        state.num_tokens_M.shape[0] - 1,
        2**31 - 1 if longest is None else longest,
        num_choices,
        PACKED=choice.dim() == 2,
        MAPPED=target_ids_W is not None,
        FIRST=first,
        NO_INDEX=NO_INDEX,
        UNPACK=UNPACK,
        BLOCK_C=next_power_of_2(num_choices),
        num_warps=1,
        **pdl_options(rows_R.device),
    )


def write_draft(
    rows_R: Tensor,
    choice: Tensor,
    state: DraftRows,
    target_ids_W: Tensor | None = None,
    *,
    first: bool = False,
    longest: int | None = None,
) -> None:
    """Append a draft to each row's and count it; `first`: it is the first one of a new round.

    `choice` (int64) are ids of the target, or indices into `target_ids_W`: [R], or [R, C] packed as by `chunk_maxima`.
    A row that has its own limit of drafts, or `longest` tokens with those drafted so far, gets NO_DRAFT (-1). The
    padding row, the last of M, gets none and never counts.
    """
    if rows_R.is_cuda:
        write_draft_triton(rows_R, choice, state, target_ids_W, first=first, longest=longest)
        return
    tokens_R = unpack_maxima(choice)[0] if choice.dim() == 2 else choice
    if available():
        row_ops.write_draft(rows_R, tokens_R, *state, target_ids_W, first, 2**31 - 1 if longest is None else longest)
    else:
        write_draft_torch(rows_R, tokens_R, state, target_ids_W, first=first, longest=longest)


def write_likeliest(
    rows_R: Tensor,
    logits_RW: Tensor,
    state: DraftRows,
    target_ids_W: Tensor | None = None,
    *,
    first: bool = False,
    longest: int | None = None,
) -> None:
    """`write_draft` of each row's likeliest token."""
    choice = chunk_maxima(logits_RW) if takes_argmax(logits_RW) else argmax(logits_RW)
    write_draft(rows_R, choice, state, target_ids_W, first=first, longest=longest)
