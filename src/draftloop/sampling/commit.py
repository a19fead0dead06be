"""Accept a verified block for a set of engine rows and write what was emitted into their state.

These are the functions that the accept phases run. Each takes the target's logits of all verified
positions, finds drafts and parameters in the row state, and leaves the state one step further.
With `num_drafts=0` they are plain sampling: the first token of a prompt, or decoding without
speculation.

Shape suffixes: R rows, M rows of the engine, K drafts, Q = 1 + K verified positions, L sequence
length, V vocabulary, X = R * Q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.accept import accept_greedy, accept_sampled_rows, accept_synthetic, clip_to_limit
from draftloop.sampling.sampler import SamplingRows, greedy_tokens, probabilities


def commit(state: RowState, rows_R: Tensor, emitted_RQ: Tensor, num_emitted_R: Tensor) -> None:
    """Append the first `num_emitted_R` tokens of each row to its sequence, in place.

    Rows are distinct, except that the padding row may come many times; it must emit nothing.
    """
    rows_R = rows_R.to(torch.int64)
    num_tokens_R1 = state.num_tokens_M.index_select(0, rows_R)[:, None]
    # past its last token a row writes that token again, and a row that emits nothing writes what it
    # holds: no write lands outside the sequence, and all copies of the padding row write the same
    last_R1 = num_emitted_R.to(torch.int64)[:, None] - 1
    index_RQ = torch.minimum(torch.arange(emitted_RQ.shape[1], device=emitted_RQ.device), last_R1)
    where = (rows_R[:, None], num_tokens_R1 + index_RQ)
    tokens_RQ = torch.where(last_R1 >= 0, emitted_RQ.gather(1, index_RQ.clamp(min=0)), state.tokens_ML[where])
    state.tokens_ML.index_put_(where, tokens_RQ)
    state.num_tokens_M.index_add_(0, rows_R, num_emitted_R)


def accept_rows_greedy(state: RowState, rows_R: Tensor, logits_XV: Tensor, num_drafts: int) -> dict[str, Tensor]:
    """Accept for a batch in which every row is greedy. See `_finish` for what is returned."""
    drafts_RK = _drafts(state, rows_R, num_drafts)
    emitted = accept_greedy(_by_row(logits_XV, num_drafts), drafts_RK)
    return _finish(state, rows_R, drafts_RK, *emitted)


def accept_rows_sampled(
    state: RowState, rows_R: Tensor, logits_XV: Tensor, num_drafts: int, *, truncate: bool = True
) -> dict[str, Tensor]:
    """Accept for a batch of greedy and sampled rows in any mixture, without loss.

    Uses the drafts' distributions where the state keeps them. `truncate=False` promises that no
    row uses top_k or top_p and saves a sort. See `_finish` for what is returned.
    """
    drafts_RK = _drafts(state, rows_R, num_drafts)
    sampling = SamplingRows.gather(state, rows_R)
    probs_XV = probabilities(logits_XV, sampling.repeat(num_drafts + 1), truncate=truncate)
    emitted = accept_sampled_rows(
        _by_row(probs_XV, num_drafts),
        drafts_RK,
        state.draft_probs_MKV,
        rows_R,
        sampling.seed_N,
        state.num_tokens_M.index_select(0, rows_R),
    )
    return _finish(state, rows_R, drafts_RK, *emitted)


def accept_rows_synthetic(
    state: RowState, rows_R: Tensor, logits_XV: Tensor, num_drafts: int, rates_K: Tensor
) -> dict[str, Tensor]:
    """Accept drafts at the given conditional rates; see `accept_synthetic` and `_finish`."""
    drafts_RK = _drafts(state, rows_R, num_drafts)
    # an accepted draft becomes input of the target, which must know it
    known_RK = drafts_RK.masked_fill(drafts_RK >= logits_XV.shape[1], NO_DRAFT)
    emitted = accept_synthetic(
        _by_row(greedy_tokens(logits_XV)[:, None], num_drafts).squeeze(-1),
        known_RK,
        rates_K,
        state.seed_M.index_select(0, rows_R),
        state.num_tokens_M.index_select(0, rows_R),
    )
    return _finish(state, rows_R, drafts_RK, *emitted)


def _drafts(state: RowState, rows_R: Tensor, num_drafts: int) -> Tensor:
    """int32 [R, K]: the first `num_drafts` drafts of each row."""
    return state.drafts_MK.index_select(0, rows_R)[:, :num_drafts]


def _by_row(x_XV: Tensor, num_drafts: int) -> Tensor:
    """[R, Q, V] from [R * Q, V]."""
    return x_XV.unflatten(0, (-1, num_drafts + 1))


def _finish(
    state: RowState, rows_R: Tensor, drafts_RK: Tensor, emitted_RQ: Tensor, num_emitted_R: Tensor
) -> dict[str, Tensor]:
    """Clip to the rows' limits, commit, and report.

    Returns `emitted` int32 [R, Q] padded with -1, and int32 [R] each: `num_emitted`,
    `num_accepted`, how many of those are accepted drafts, and `num_drafted`, how many drafts the
    row had.
    """
    num_accepted_R = num_emitted_R - 1
    room_R = state.max_tokens_M.index_select(0, rows_R) - state.num_tokens_M.index_select(0, rows_R)
    emitted_RQ, num_emitted_R = clip_to_limit(emitted_RQ, num_emitted_R, room_R)
    commit(state, rows_R, emitted_RQ, num_emitted_R)
    num_drafted_R = (drafts_RK != NO_DRAFT).sum(-1, dtype=torch.int32)
    return {
        "emitted": emitted_RQ,
        "num_emitted": num_emitted_R,
        "num_accepted": torch.minimum(num_accepted_R, num_emitted_R),
        "num_drafted": num_drafted_R,
    }
