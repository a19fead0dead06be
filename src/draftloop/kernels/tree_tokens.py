"""Which tokens a pass over a tree of drafts runs: ids, positions and cache slots, from the rows' lengths of the moment.

Keys of a tree lie one behind the other in the cache, whatever their positions are: all tokens of one height have the
same. Shape suffixes: R rows of the pass, T = R * Q tokens, Q tokens per row, M engine rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.row_tokens import RowTokens, Sequences, empty_tokens, store_tokens
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl


class TreeTokens(NamedTuple):
    """The tokens that each row brings; constants, int32 on the device."""

    drafts_Q: Tensor
    """Which draft; -1 is the bonus token, the last that the row has."""
    heights_Q: Tensor
    """Positions past the bonus token's."""
    first_key: int
    """The first one's key, counted from the bonus token's position; the others follow."""


def tree_tokens_torch(
    rows_R: Tensor, sequences: Sequences, tokens: TreeTokens, *, page_size: int, num_ids: int
) -> RowTokens:
    """Reference of `tree_tokens`."""
    tokens_ML, num_tokens_M, drafts_MK, page_table_MN = sequences
    rows_R1 = rows_R.long()[:, None]
    is_padding_R1 = rows_R1 == num_tokens_M.shape[0] - 1
    bonus_R1 = num_tokens_M[rows_R1].long() - 1
    num_per_row = tokens.drafts_Q.shape[0]
    first_R1 = bonus_R1 + tokens.first_key
    keys_RQ = (first_R1 + torch.arange(num_per_row, device=rows_R.device)).masked_fill(is_padding_R1, 0)
    positions_RQ = (bonus_R1 + tokens.heights_Q).masked_fill(is_padding_R1, 0)
    slots_RQ = page_table_MN[rows_R1, keys_RQ // page_size].long() * page_size + keys_RQ % page_size
    drafted_RQ = drafts_MK[rows_R1, tokens.drafts_Q.long().clamp(min=0)]
    ids_RQ = torch.where(tokens.drafts_Q < 0, tokens_ML[rows_R1, bonus_R1], drafted_RQ)
    ids_RQ = torch.where((ids_RQ >= 0) & (ids_RQ < num_ids), ids_RQ, 0)
    starts_R1 = torch.arange(0, (rows_R.shape[0] + 1) * num_per_row, num_per_row, device=rows_R.device)
    return RowTokens(
        ids_T=ids_RQ.long().flatten(),
        positions_T=positions_RQ.flatten(),
        slots_T=slots_RQ.flatten(),
        kv_lens_R=(first_R1 + num_per_row).masked_fill(is_padding_R1, 0).flatten().int(),
        query_starts_R1=starts_R1.int(),
        last_R=starts_R1[1:] - 1,
    )


@jit("tokens_width", "num_drafts", "table_width", "first_key", "num_ids", "padding_row", "num_per_row")
def _tree_tokens_kernel(
    rows_ptr,
    tokens_ptr,
    num_tokens_ptr,
    drafts_ptr,
    table_ptr,
    tree_drafts_ptr,
    heights_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    kv_lens_ptr,
    starts_ptr,
    last_ptr,
    tokens_width,
    num_drafts,
    table_width,
    first_key,
    num_ids,
    padding_row,
    num_per_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    live = q < num_per_row
    which = tl.load(tree_drafts_ptr + q, mask=live, other=0)
    height = tl.load(heights_ptr + q, mask=live, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    is_padding = row == padding_row
    bonus = tl.load(num_tokens_ptr + row) - 1
    first = bonus + first_key
    key = tl.where(is_padding, 0, first + q)
    position = tl.where(is_padding, 0, bonus + height)
    page = tl.load(table_ptr + row * table_width + key // PAGE_SIZE, mask=live, other=0)
    bonus_id = tl.load(tokens_ptr + row * tokens_width + bonus)
    drafted = tl.load(drafts_ptr + row * num_drafts + which, mask=live & (which >= 0), other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token_id = tl.where(which < 0, bonus_id, drafted)
    kv_len = tl.where(is_padding, 0, first + num_per_row)
    store_tokens(
        entry, q, token_id, position, page, key % PAGE_SIZE, kv_len, num_per_row - 1, num_ids, num_per_row,
        ids_ptr, positions_ptr, slots_ptr, kv_lens_ptr, starts_ptr, last_ptr, PAGE_SIZE,
    )  # fmt: skip


def tree_tokens_triton(
    rows_R: Tensor, sequences: Sequences, tokens: TreeTokens, *, page_size: int, num_ids: int
) -> RowTokens:
    """Twin of `tree_tokens_torch`, one launch."""
    num_per_row = tokens.drafts_Q.shape[0]
    out = empty_tokens(rows_R.shape[0], num_per_row, rows_R.device)
    _tree_tokens_kernel[(rows_R.shape[0],)](
        rows_R,
        *sequences,
        tokens.drafts_Q,
        tokens.heights_Q,
        *out,
        sequences.tokens_ML.shape[1],
        sequences.drafts_MK.shape[1],
        sequences.page_table_MN.shape[1],
        tokens.first_key,
        num_ids,
        sequences.num_tokens_M.shape[0] - 1,
        num_per_row,
        PAGE_SIZE=page_size,
        BLOCK_Q=next_power_of_2(num_per_row),
        num_warps=1,
        **pdl_options(rows_R.device),
    )
    return out


def tree_tokens(rows_R: Tensor, sequences: Sequences, tokens: TreeTokens, *, page_size: int, num_ids: int) -> RowTokens:
    """The tokens of each row's tree; what is none of the `num_ids` in the embedding (NO_DRAFT too) becomes 0.

    The last of the M rows is the padding row: its tokens are at position 0, and see nothing.
    """
    run = tree_tokens_triton if rows_R.is_cuda else tree_tokens_torch
    return run(rows_R, sequences, tokens, page_size=page_size, num_ids=num_ids)
