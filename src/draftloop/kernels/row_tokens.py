"""Which tokens a uniform pass runs: ids, positions and cache slots, from the rows' lengths of the moment.

A row's tokens and, behind them, its drafts are taken as one sequence, and every row brings a block of it.
Where blocks start is said relative to the number of tokens, so that one captured launch serves all lengths.

Shape suffixes: R rows of the pass, T = R * Q tokens, Q tokens per row, M engine rows, L sequence length,
K drafts, N pages per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.native import row_ops
from draftloop.kernels.native.functions import available
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl


class Sequences(NamedTuple):
    """Where the rows' sequences are; int32 each."""

    tokens_ML: Tensor
    num_tokens_M: Tensor
    drafts_MK: Tensor
    page_table_MN: Tensor


class RowTokens(NamedTuple):
    """The tokens of a pass; the padding row's are all at position 0, and see nothing."""

    ids_T: Tensor
    """int64: never outside of the embedding."""
    positions_T: Tensor
    """int64"""
    slots_T: Tensor
    """int64: `page * page_size + offset`; unassigned positions lead to the null page."""
    kv_lens_R: Tensor
    """int32: keys that the row's last token sees."""
    query_starts_R1: Tensor
    """int32: `0, Q, 2Q, ...`"""
    last_R: Tensor
    """int64: index into T of the last emitted token's, where `emitted_R` is given; else of the row's last."""


def row_tokens_torch(
    rows_R: Tensor,
    sequences: Sequences,
    num_drafted_M: Tensor | None,
    emitted_R: Tensor | None,
    *,
    num_per_row: int,
    page_size: int,
    offset: int,
    ahead: int,
    num_ids: int,
) -> RowTokens:
    """Reference of `row_tokens`."""
    tokens_ML, num_tokens_M, drafts_MK, page_table_MN = sequences
    rows_R1 = rows_R.long()[:, None]
    is_padding_R1 = rows_R1 == num_tokens_M.shape[0] - 1
    index_Q = torch.arange(num_per_row, device=rows_R.device)
    length_R1 = num_tokens_M[rows_R1].long()
    first_R1 = length_R1 + offset
    if num_drafted_M is not None:
        first_R1 = first_R1 + num_drafted_M[rows_R1]
    if emitted_R is not None:
        first_R1 = first_R1 - emitted_R[:, None]
    positions_RQ = (first_R1 + index_Q).masked_fill(is_padding_R1, 0)
    slots_RQ = page_table_MN[rows_R1, positions_RQ // page_size].long() * page_size + positions_RQ % page_size
    wanted_RQ = positions_RQ + ahead
    ids_RQ = tokens_ML[rows_R1, wanted_RQ.clamp(max=tokens_ML.shape[1] - 1)]
    if num_drafts := drafts_MK.shape[1]:
        draft_RQ = wanted_RQ - length_R1
        drafted_RQ = drafts_MK[rows_R1, draft_RQ.clamp(0, num_drafts - 1)]
        ids_RQ = torch.where(draft_RQ < 0, ids_RQ, torch.where(draft_RQ < num_drafts, drafted_RQ, 0))
    ids_RQ = torch.where((ids_RQ >= 0) & (ids_RQ < num_ids), ids_RQ, 0)
    starts_R1 = torch.arange(0, (rows_R.shape[0] + 1) * num_per_row, num_per_row, device=rows_R.device)
    last_Rx = num_per_row - 1 if emitted_R is None else (emitted_R.long() - 1).clamp(0, num_per_row - 1)
    return RowTokens(
        ids_T=ids_RQ.long().flatten(),
        positions_T=positions_RQ.flatten(),
        slots_T=slots_RQ.flatten(),
        kv_lens_R=(first_R1 + num_per_row).masked_fill(is_padding_R1, 0).flatten().int(),
        query_starts_R1=starts_R1.int(),
        last_R=starts_R1[:-1] + last_Rx,
    )


@jit()
def store_tokens(
    entry, q, token_id, position, page, place, kv_len, last, num_ids, num_per_row,
    ids_ptr, positions_ptr, slots_ptr, kv_lens_ptr, starts_ptr, last_ptr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One row of `RowTokens`. `place` is that in the page; `last` among the row's own tokens."""
    live = q < num_per_row
    token_id = tl.where((token_id >= 0) & (token_id < num_ids), token_id, 0)
    out = entry * num_per_row + q
    tl.store(ids_ptr + out, token_id.to(tl.int64), mask=live)
    tl.store(positions_ptr + out, position.to(tl.int64), mask=live)
    tl.store(slots_ptr + out, page.to(tl.int64) * PAGE_SIZE + place, mask=live)
    tl.store(kv_lens_ptr + entry, kv_len)
    tl.store(starts_ptr + entry, entry * num_per_row)
    tl.store(last_ptr + entry, (entry * num_per_row + last).to(tl.int64))
    if entry == tl.num_programs(0) - 1:
        tl.store(starts_ptr + entry + 1, (entry + 1) * num_per_row)


@jit("tokens_width", "num_drafts", "table_width", "offset", "ahead", "num_ids", "padding_row", "num_per_row")
def _row_tokens_kernel(
    rows_ptr,
    tokens_ptr,
    num_tokens_ptr,
    drafts_ptr,
    table_ptr,
    num_drafted_ptr,
    emitted_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    kv_lens_ptr,
    starts_ptr,
    last_ptr,
    tokens_width,
    num_drafts,
    table_width,
    offset,
    ahead,
    num_ids,
    padding_row,
    num_per_row,
    PAGE_SIZE: tl.constexpr,
    DRAFTED: tl.constexpr,
    EMITTED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    live = q < num_per_row
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    is_padding = row == padding_row
    length = tl.load(num_tokens_ptr + row)
    first = length + offset
    if DRAFTED:
        first += tl.load(num_drafted_ptr + row)
    last = num_per_row - 1
    if EMITTED:
        emitted = tl.load(emitted_ptr + entry)
        first -= emitted
        last = tl.minimum(tl.maximum(emitted - 1, 0), last)
    position = tl.where(is_padding, 0, first + q)
    page = tl.load(table_ptr + row * table_width + position // PAGE_SIZE, mask=live, other=0)
    wanted = position + ahead
    draft = wanted - length
    token_id = tl.load(tokens_ptr + row * tokens_width + wanted, mask=live & (draft < 0), other=0)
    drafted = tl.load(drafts_ptr + row * num_drafts + draft, mask=live & (draft >= 0) & (draft < num_drafts), other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token_id = tl.where(draft < 0, token_id, drafted)
    kv_len = tl.where(is_padding, 0, first + num_per_row)
    store_tokens(
        entry, q, token_id, position, page, position % PAGE_SIZE, kv_len, last, num_ids, num_per_row,
        ids_ptr, positions_ptr, slots_ptr, kv_lens_ptr, starts_ptr, last_ptr, PAGE_SIZE,
    )  # fmt: skip


def empty_tokens(num_rows: int, num_per_row: int, device: torch.device) -> RowTokens:
    """Uninitialised memory for the tokens of a pass."""
    ids_T, positions_T, slots_T = torch.empty(3, num_rows * num_per_row, dtype=torch.int64, device=device).unbind(0)
    return RowTokens(
        ids_T=ids_T,
        positions_T=positions_T,
        slots_T=slots_T,
        kv_lens_R=torch.empty(num_rows, dtype=torch.int32, device=device),
        query_starts_R1=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        last_R=torch.empty(num_rows, dtype=torch.int64, device=device),
    )


def row_tokens_triton(
    rows_R: Tensor,
    sequences: Sequences,
    num_drafted_M: Tensor | None,
    emitted_R: Tensor | None,
    *,
    num_per_row: int,
    page_size: int,
    offset: int,
    ahead: int,
    num_ids: int,
) -> RowTokens:
    """Twin of `row_tokens_torch`, one launch."""
    out = empty_tokens(rows_R.shape[0], num_per_row, rows_R.device)
    _row_tokens_kernel[(rows_R.shape[0],)](
        rows_R,
        *sequences,
        rows_R if num_drafted_M is None else num_drafted_M,
        rows_R if emitted_R is None else emitted_R,
        *out,
        sequences.tokens_ML.shape[1],
        sequences.drafts_MK.shape[1],
        sequences.page_table_MN.shape[1],
        offset,
        ahead,
        num_ids,
        sequences.num_tokens_M.shape[0] - 1,
        num_per_row,
        PAGE_SIZE=page_size,
        DRAFTED=num_drafted_M is not None,
        EMITTED=emitted_R is not None,
        BLOCK_Q=next_power_of_2(num_per_row),
        num_warps=1,
        **pdl_options(rows_R.device),
    )
    return out


def row_tokens(
    rows_R: Tensor,
    sequences: Sequences,
    num_drafted_M: Tensor | None = None,
    emitted_R: Tensor | None = None,
    *,
    num_per_row: int,
    page_size: int,
    offset: int,
    ahead: int = 0,
    num_ids: int,
) -> RowTokens:
    """The block of `num_per_row` tokens of each row that starts `offset` past the end of its tokens.

    `num_drafted_M` is added to where it starts, `emitted_R` (one per entry) taken off. Ids are those `ahead`
    positions further on; what is none of the `num_ids` in the embedding (NO_DRAFT, past the last draft, or a
    larger vocabulary's) becomes 0: whoever asks for those makes no use of them. The last of the M rows is
    the padding row.
    """
    if rows_R.is_cuda:
        run = row_tokens_triton
    elif available() and rows_R.device.type == "cpu":
        out = empty_tokens(rows_R.shape[0], num_per_row, rows_R.device)
        row_ops.row_tokens(
            rows_R, *sequences, num_drafted_M, emitted_R, *out, num_per_row, page_size, offset, ahead, num_ids
        )
        return out
    else:
        run = row_tokens_torch
    return run(
        rows_R,
        sequences,
        num_drafted_M,
        emitted_R,
        num_per_row=num_per_row,
        page_size=page_size,
        offset=offset,
        ahead=ahead,
        num_ids=num_ids,
    )
