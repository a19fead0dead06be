"""Accept a verified block for a set of engine rows and write what was emitted into their state.

These are the functions that the accept phases run. Each takes the target's logits of all verified
positions, finds drafts and parameters in the row state, and leaves the state one step further.
With `num_drafts=0` they are plain sampling: the first token of a prompt, or decoding without
speculation.

Shape suffixes: R rows, M rows of the engine, K drafts, Q = 1 + K verified positions, L sequence
length, V vocabulary, W its entries on one rank, X = R * Q, O columns of an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.argmax import takes_argmax, unpack_maxima
from draftloop.kernels.native import row_ops
from draftloop.kernels.native.functions import available
from draftloop.kernels.softmax_statistics import Changed, Statistics, Truncation, softmax_statistics_triton
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.models.output_head import Vocabulary
from draftloop.sampling.accept import (
    NO_TOKEN,
    accept_sampled_rows,
    accept_synthetic,
    accept_synthetic_rows,
    accept_targets,
    clip_to_limit,
    prefix_length,
)
from draftloop.sampling.accept_block import TokenRows, accept_block_triton, outcome_memory
from draftloop.sampling.accept_drawn import DrawnRule, accept_drawn_triton
from draftloop.sampling.block_verification import accept_block_rows
from draftloop.sampling.constrain_block import constrain_triton
from draftloop.sampling.constraints import constrain
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.sampling.sampler import SamplingKind, SamplingRows, probabilities, probabilities_from

Rule = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""How sampled drafts are accepted: the arguments and results of `accept_sampled_rows`."""

KERNEL_RULES: dict[Any, DrawnRule] = {
    accept_sampled_rows: DrawnRule.STANDARD,
    accept_block_rows: DrawnRule.BLOCK,
    accept_synthetic_rows: DrawnRule.COIN,
}
"""Rules that need no probabilities on a GPU. Of others the rule itself is run, on probabilities."""

OUTCOME_COUNTS = ("num_emitted", "num_accepted", "num_drafted")
"""The first columns of `outcome`: emitted tokens, accepted drafts among them, and drafts that the row had."""


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


def likeliest(logits_XW: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """int64 [X], each position's likeliest token, and whether its logits say anything; for code without a kernel."""
    if vocabulary.is_divided:
        return unpack_maxima(vocabulary.maxima(logits_XW))
    top_X, targets_X = logits_XW.max(-1)
    return targets_X, top_X.isfinite()


def _accept_by_argmax(
    state: RowState,
    rows_R: Tensor,
    logits_XW: Tensor,
    rates_K: Tensor | None,
    vocabulary: Vocabulary,
    num_drafts: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """On a GPU, where all that is asked of the logits is which token is likeliest."""
    return accept_block_triton(
        rows_R,
        vocabulary.maxima(logits_XW),
        _token_rows(state),
        rates_K,
        vocab_size=vocabulary.size,
        num_drafts=num_drafts,
        width=width,
    )


def accept_rows_greedy(
    state: RowState,
    rows_R: Tensor,
    logits_XW: Tensor,
    num_drafts: int,
    *,
    vocabulary: Vocabulary | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept for a batch in which every row is greedy. See `_finish` for what is returned.

    `vocabulary`: of the logits, where ranks have parts of them.
    """
    width, vocabulary = width or num_drafts + 1, vocabulary or Vocabulary(logits_XW.shape[1])
    if takes_argmax(logits_XW):
        return _accept_by_argmax(state, rows_R, logits_XW, None, vocabulary, num_drafts, width)
    targets_X, is_good_X = likeliest(logits_XW, vocabulary)
    if available() and rows_R.device.type == "cpu":
        targets_X = torch.where(is_good_X, targets_X, NO_TOKEN)
        num_emitted_R, outcome_RO = outcome_memory(rows_R, width)
        row_ops.accept_block(rows_R, targets_X, *_token_rows(state)[:4], num_emitted_R, outcome_RO, num_drafts)
        return num_emitted_R, outcome_RO
    drafts_RK = _drafts(state, rows_R, num_drafts)
    emitted = accept_targets(_by_row(targets_X, num_drafts), drafts_RK)
    return _finish(state, rows_R, drafts_RK, *emitted, ~_by_row(is_good_X, num_drafts), width=width)


def accept_rows_sampled(
    state: RowState,
    rows_R: Tensor,
    logits_XV: Tensor,
    num_drafts: int,
    *,
    kind: SamplingKind = SamplingKind.TRUNCATED,
    processors: Sequence[LogitsProcessor] = (),
    rule: Rule = accept_sampled_rows,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept for a batch of greedy and sampled rows in any mixture.

    Uses the drafts' distributions where the state keeps them. `kind` promises that no row asks for
    more; only CONSTRAINED runs `processors`. See `_finish` for what is returned.
    """
    width = width or num_drafts + 1
    function, options = (rule.func, rule.keywords) if isinstance(rule, partial) else (rule, {})
    if takes_argmax(logits_XV) and function in KERNEL_RULES:
        position = _read_positions(state, rows_R, logits_XV, num_drafts, kind=kind, processors=processors)
        return accept_drawn_triton(
            rows_R,
            position.logits_XV,
            position.statistics,
            _token_rows(state),
            state.temperature_M,
            state.draft_probs_MKV,
            rule=KERNEL_RULES[function],
            changed=position.changed,
            num_drafts=num_drafts,
            width=width,
            **options,
        )
    drafts_RK = _drafts(state, rows_R, num_drafts)
    probs_RQV = target_probabilities(state, rows_R, logits_XV, num_drafts, kind=kind, processors=processors)
    emitted = rule(
        probs_RQV,
        drafts_RK,
        state.draft_probs_MKV,
        rows_R,
        state.seed_M.index_select(0, rows_R),
        state.num_tokens_M.index_select(0, rows_R),
    )
    is_bad_RQ = probs_RQV[:, :, 0].isnan()
    return _finish(state, rows_R, drafts_RK, *emitted, is_bad_RQ, width=width)


class _Positions(NamedTuple):
    logits_XV: Tensor
    changed: Changed | None
    statistics: Statistics


def _read_positions(
    state: RowState,
    rows_R: Tensor,
    logits_XV: Tensor,
    num_drafts: int,
    *,
    kind: SamplingKind,
    processors: Sequence[LogitsProcessor] = (),
    lengths_R: Tensor | None = None,
) -> _Positions:
    """By kernels: logits as the rows want them, and what probabilities follow from."""
    changed = best_XC = None
    if kind is SamplingKind.CONSTRAINED:
        if processors or lengths_R is not None:
            by_row_RQV = constrain(state, rows_R, _by_row(logits_XV, num_drafts), processors, lengths_R=lengths_R)
            logits_XV = by_row_RQV.flatten(0, 1)
        else:
            changed, best_XC = constrain_triton(state, rows_R, logits_XV)
    truncation = Truncation(state.temperature_M, state.top_k_M, state.top_p_M, state.min_p_M)
    statistics = softmax_statistics_triton(
        logits_XV, rows_R, truncation, best_XC=best_XC, changed=changed, truncate=kind.truncates
    )
    return _Positions(logits_XV, changed, statistics)


def target_probabilities(
    state: RowState,
    rows_R: Tensor,
    logits_XV: Tensor,
    num_drafts: int,
    *,
    kind: SamplingKind,
    processors: Sequence[LogitsProcessor] = (),
    lengths_R: Tensor | None = None,
) -> Tensor:
    """float32 [R, Q, V]: what each position's token is drawn from.

    `lengths_R`: tokens that each row had before the block; None: it has not been accepted yet.
    """
    if takes_argmax(logits_XV):
        logits_XV, changed, statistics = _read_positions(
            state, rows_R, logits_XV, num_drafts, kind=kind, processors=processors, lengths_R=lengths_R
        )
        rows_X = rows_R.long()[:, None].expand(-1, num_drafts + 1).reshape(-1)
        if changed is not None:
            is_changed_X1 = changed.is_changed_M.index_select(0, rows_X)[:, None] != 0
            logits_XV = torch.where(is_changed_X1, changed.logits_XV, logits_XV.float())
        temperature_X = state.temperature_M.index_select(0, rows_X)
        return _by_row(probabilities_from(logits_XV, statistics, temperature_X), num_drafts)
    if kind is SamplingKind.CONSTRAINED:
        logits_RQV = constrain(state, rows_R, _by_row(logits_XV, num_drafts), processors, lengths_R=lengths_R)
        logits_XV = logits_RQV.flatten(0, 1)
    sampling = SamplingRows.gather(state, rows_R).repeat(num_drafts + 1)
    return _by_row(probabilities(logits_XV, sampling, truncate=kind.truncates), num_drafts)


def accept_rows_synthetic(
    state: RowState,
    rows_R: Tensor,
    logits_XW: Tensor,
    num_drafts: int,
    rates_K: Tensor,
    *,
    vocabulary: Vocabulary | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafts at the given conditional rates; see `accept_synthetic`, `accept_rows_greedy` and `_finish`."""
    width, vocabulary = width or num_drafts + 1, vocabulary or Vocabulary(logits_XW.shape[1])
    if takes_argmax(logits_XW):
        return _accept_by_argmax(state, rows_R, logits_XW, rates_K, vocabulary, num_drafts, width)
    drafts_RK = _drafts(state, rows_R, num_drafts)
    # an accepted draft becomes input of the target, which must know it
    known_RK = drafts_RK.masked_fill(drafts_RK >= vocabulary.size, NO_DRAFT)
    targets_RQ, is_good_RQ = (_by_row(x, num_drafts) for x in likeliest(logits_XW, vocabulary))
    emitted = accept_synthetic(
        targets_RQ,
        known_RK,
        rates_K,
        state.seed_M.index_select(0, rows_R),
        state.num_tokens_M.index_select(0, rows_R),
    )
    return _finish(state, rows_R, drafts_RK, *emitted, ~is_good_RQ, width=width)


def _token_rows(state: RowState) -> TokenRows:
    return TokenRows(
        drafts_MK=state.drafts_MK,
        tokens_ML=state.tokens_ML,
        num_tokens_M=state.num_tokens_M,
        max_tokens_M=state.max_tokens_M,
        seed_M=state.seed_M,
    )


def _drafts(state: RowState, rows_R: Tensor, num_drafts: int) -> Tensor:
    """int32 [R, K]: the first `num_drafts` drafts of each row."""
    return state.drafts_MK.index_select(0, rows_R)[:, :num_drafts]


def _by_row(x_XV: Tensor, num_drafts: int) -> Tensor:
    """[R, Q, ..] from [R * Q, ..]."""
    return x_XV.unflatten(0, (-1, num_drafts + 1))


def _finish(
    state: RowState,
    rows_R: Tensor,
    drafts_RK: Tensor,
    emitted_RQ: Tensor,
    num_emitted_R: Tensor,
    is_bad_RQ: Tensor,
    *,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Clip to the rows' limits and before the first position whose logits say nothing, commit, and report.

    A live row that has room and emits nothing therefore has bad logits: nobody else emits nothing.
    Returns `num_emitted` int32 [R], and `outcome` int32 [R, 3 + width]: `OUTCOME_COUNTS`, then the
    emitted tokens padded with -1.
    """
    num_accepted_R = num_emitted_R - 1
    room_R = state.max_tokens_M.index_select(0, rows_R) - state.num_tokens_M.index_select(0, rows_R)
    room_R = torch.minimum(room_R, prefix_length(~is_bad_RQ))
    emitted_RQ, num_emitted_R = clip_to_limit(emitted_RQ, num_emitted_R, room_R)
    commit(state, rows_R, emitted_RQ, num_emitted_R)
    num_drafted_R = (drafts_RK != NO_DRAFT).sum(-1, dtype=torch.int32)
    counts_RO = torch.stack([num_emitted_R, torch.minimum(num_accepted_R, num_emitted_R), num_drafted_R], 1)
    emitted_RQ = F.pad(emitted_RQ, (0, width - emitted_RQ.shape[1]), value=NO_TOKEN)
    return num_emitted_R, torch.cat([counts_RO, emitted_RQ], 1)
