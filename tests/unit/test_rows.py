"""Row state: sizes, the padding row, and the batches that are made from it."""

from __future__ import annotations

import pytest
import torch

from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.graphs.phase import Launch
from draftloop.kvcache.rows import NO_DRAFT, NULL_PAGE, RowState

PAGE = 16


def make_state(*, num_rows: int = 3, max_model_len: int = 64, num_drafts: int = 3, draft_vocab: int = 0) -> RowState:
    return RowState.create(
        num_rows=num_rows,
        max_model_len=max_model_len,
        num_drafts=num_drafts,
        page_size=PAGE,
        draft_vocab=draft_vocab,
        device=torch.device("cpu"),
    )


def launch(rows: int, tokens: int) -> Launch:
    return Launch(rows=rows, tokens=tokens, attend=lambda call: call())


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_padding_row_is_one_more_than_there_are_requests():
    state = make_state()
    assert state.padding_row == 3
    assert state.num_tokens_M[3] == state.max_tokens_M[3] == 1, "it has no room, so it never grows"
    assert state.page_table_MN[3].eq(NULL_PAGE).all()
    assert state.drafts_MK[3].eq(NO_DRAFT).all()
    assert state.draft_limit_M[3] == 0


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 15, 32])
def test_a_verify_block_at_the_length_limit_stays_inside_tokens_and_pages(num_drafts):
    state = make_state(max_model_len=64, num_drafts=num_drafts)
    last = 64 - 1 + num_drafts  # bonus token at the last position, drafts after it
    assert last < state.tokens_ML.shape[1]
    assert last // PAGE < state.page_table_MN.shape[1]
    # a row that ended in the step before runs once more: its block begins one further
    assert last + 1 < state.tokens_ML.shape[1]


@pytest.mark.parametrize("vocab", [0, 7])
def test_draft_distributions_are_kept_only_where_drafts_are_sampled(vocab):
    probs = make_state(draft_vocab=vocab).draft_probs_MKV
    assert (probs is None) == (vocab == 0)
    if probs is not None:
        assert probs.shape == (4, 3, 7)


def test_a_tail_batch_reads_lengths_of_the_moment():
    state = make_state()
    state.page_table_MN[0, :3] = ints(5, 6, 7)
    state.page_table_MN[2, :2] = ints(9, 4)
    rows = ints(2, 0, state.padding_row)
    state.num_tokens_M[2], state.num_tokens_M[0] = 15, 31
    batch, _ = tail_batch(state, rows, 4, PAGE, launch(3, 12), offset=-1, num_ids=9)
    assert batch.kv_lens_R.tolist() == [18, 34, 0], "the padding row has no keys"
    assert batch.query_starts_R1.tolist() == [0, 4, 8, 12]
    assert batch.positions_T.tolist() == [14, 15, 16, 17, 30, 31, 32, 33, 0, 0, 0, 0]
    page = lambda number, offset: number * PAGE + offset  # noqa: E731
    assert batch.slots_T.tolist() == [
        page(9, 14), page(9, 15), page(4, 0), page(4, 1), page(6, 14), page(6, 15), page(7, 0), page(7, 1), 0, 0, 0, 0,
    ]  # fmt: skip
    assert batch.uniform
    assert batch.max_query_len == 4


def test_padding_tokens_of_a_ragged_batch_belong_to_the_padding_row():
    state = make_state()
    state.page_table_MN[0, :2] = ints(5, 6)
    state.page_table_MN[1, :2] = ints(7, 8)
    padding = state.padding_row
    # two chunks: 3 tokens that end a prompt of 18, and 2 tokens that begin one; padded to 3 rows, 8 tokens
    batch, row_T = ragged_batch(state, ints(0, 1, padding), ints(0, 3, 5, 5), ints(18, 2, 0), PAGE, launch(3, 8))
    assert row_T.tolist() == [0, 0, 0, 1, 1, padding, padding, padding]
    assert batch.positions_T.tolist() == [15, 16, 17, 0, 1, 0, 0, 0]
    assert batch.slots_T.tolist() == [5 * PAGE + 15, 6 * PAGE, 6 * PAGE + 1, 7 * PAGE, 7 * PAGE + 1, 0, 0, 0]


def test_a_full_ragged_batch_needs_no_padding():
    state = make_state()
    batch, row_T = ragged_batch(state, ints(2, 0), ints(0, 1, 4), ints(1, 3), PAGE, launch(2, 4))
    assert row_T.tolist() == [2, 0, 0, 0]
    assert batch.positions_T.tolist() == [0, 0, 1, 2]
