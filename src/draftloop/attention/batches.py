"""Attention batches from row state: the two shapes in which tokens go through a model.

Everything is computed on the device from the rows' lengths of the moment.

Shape suffixes: R rows of the pass, T tokens of the pass, Q tokens per row, M engine rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.graphs.phase import Launch
from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.page_slots import page_slots
from draftloop.kernels.row_tokens import RowTokens, Sequences, row_tokens
from draftloop.kvcache.rows import RowState


def tail_batch(
    state: RowState,
    rows_R: Tensor,
    num_per_row: int,
    page_size: int,
    launch: Launch,
    *,
    offset: int,
    ahead: int = 0,
    num_ids: int,
    drafted: bool = False,
    emitted_R: Tensor | None = None,
) -> tuple[AttentionBatch, RowTokens]:
    """Every row brings `num_per_row` tokens from the end of its sequence: its tokens, then its drafts.

    They start `offset` past its tokens; `drafted` adds the drafts that the row has made this round, and
    `emitted_R` (int32, per entry) goes that far back. Ids are of the positions `ahead`; see `row_tokens`.
    """
    sequences = Sequences(state.tokens_ML, state.num_tokens_M, state.drafts_MK, state.page_table_MN)
    tokens = row_tokens(
        rows_R,
        sequences,
        state.num_drafted_M if drafted else None,
        emitted_R,
        num_per_row=num_per_row,
        page_size=page_size,
        offset=offset,
        ahead=ahead,
        num_ids=num_ids,
    )
    batch = AttentionBatch(
        rows_R=rows_R,
        query_starts_R1=tokens.query_starts_R1,
        kv_lens_R=tokens.kv_lens_R,
        positions_T=tokens.positions_T,
        slots_T=tokens.slots_T,
        page_table_MN=state.page_table_MN,
        max_query_len=num_per_row,
        uniform=True,
        invariant=is_wanted(),
        attend=launch.attend,
    )
    return batch, tokens


def ragged_batch(
    state: RowState, rows_R: Tensor, query_starts_R1: Tensor, kv_lens_R: Tensor, page_size: int, launch: Launch
) -> tuple[AttentionBatch, Tensor]:
    """Row r brings tokens `query_starts[r] : query_starts[r+1]`, the last of them at `kv_lens[r]` - 1.

    Returns the batch and, for each token, its engine row (int64 [T]); tokens past the last
    boundary belong to the padding row.
    """
    tokens_T = torch.arange(launch.tokens, dtype=torch.int32, device=rows_R.device)
    entry_T = torch.searchsorted(query_starts_R1, tokens_T, right=True) - 1
    live_T = entry_T < launch.rows
    entry_T = entry_T.clamp(max=launch.rows - 1)
    row_T = torch.where(live_T, rows_R[entry_T], state.padding_row).long()
    position_T = kv_lens_R[entry_T] - query_starts_R1[entry_T + 1] + tokens_T
    position_T = torch.where(row_T == state.padding_row, 0, position_T).long()
    page_T = state.page_table_MN[row_T, position_T // page_size].long()
    batch = AttentionBatch(
        rows_R=rows_R,
        query_starts_R1=query_starts_R1,
        kv_lens_R=kv_lens_R,
        positions_T=position_T,
        slots_T=page_T * page_size + position_T % page_size,
        page_table_MN=state.page_table_MN,
        max_query_len=launch.tokens,
        uniform=False,
        invariant=is_wanted(),
        attend=launch.attend,
    )
    return batch, row_T


def with_windows(batch: AttentionBatch, tables: Mapping[int, Tensor], row_T: Tensor, page_size: int) -> AttentionBatch:
    """The batch, with what layers attend by that have pages of their own: by their window, `tables` (int32 [M, N]).

    `row_T` (int64): the engine row of each token, where the batch is ragged.
    """
    windows = {}
    for window, table_MN in tables.items():
        if batch.uniform:
            slots_T = page_slots(
                batch.rows_R, batch.kv_lens_R, table_MN, num_per_row=batch.max_query_len, page_size=page_size
            )
        else:
            page_T = table_MN[row_T, batch.positions_T // page_size].long()
            slots_T = page_T * page_size + batch.positions_T % page_size
        windows[window] = replace(batch, slots_T=slots_T, page_table_MN=table_MN)
    return replace(batch, windows=windows)
