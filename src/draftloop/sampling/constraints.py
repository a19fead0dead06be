"""Logits as a request wants them, at every position of a verified block.

What a position sees before it is the row's tokens and the drafts up to there: if it is reached, those drafts
were accepted. Order and meaning are vLLM's: masks (allowed ids, grammar, min_tokens), bad words, logit_bias,
custom processors, then the penalties; temperature and truncation come after, in `sampler`.

Shape suffixes: R rows, K drafts, Q = 1 + K positions, V vocabulary, W words of a mask, B biased ids, S bad words,
N tokens of a bad word, L sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kvcache.constraint_rows import NO_ID, ConstraintRows, forbidden
from draftloop.kvcache.rows import RowState
from draftloop.sampling.logits_processors import BlockPositions, LogitsProcessor

NEVER = float("-inf")


def constrain(
    state: RowState,
    rows_R: Tensor,
    logits_RQV: Tensor,
    processors: Sequence[LogitsProcessor] = (),
    *,
    lengths_R: Tensor | None = None,
) -> Tensor:
    """float32 [R, Q, V]: a copy of the logits, changed as each row's request asks.

    `lengths_R`: tokens that each row had before the block; None: it has not been accepted yet.
    """
    rules = state.constraints
    assert rules is not None
    at = BlockPositions.gather(state, rows_R, logits_RQV.shape[1] - 1, lengths_R)
    logits_RQV = logits_RQV.to(torch.float32, copy=True)
    _mask(rules, at, logits_RQV)
    _forbid_bad_words(rules, at, logits_RQV)
    _add_bias(rules, at, logits_RQV)
    for processor in processors:
        logits_RQV = processor.apply(logits_RQV, at)
    _penalise(rules, at, logits_RQV)
    return logits_RQV


def _mask(rules: ConstraintRows, at: BlockPositions, logits_RQV: Tensor) -> None:
    num_positions, vocab = logits_RQV.shape[1:]
    index_Q = torch.arange(num_positions, device=logits_RQV.device)
    least_R = rules.min_length_M.index_select(0, at.rows_R)
    is_early_RQ = at.lengths_R[:, None] + index_Q < least_R[:, None]
    allowed_RW, early_RW = (mask.index_select(0, at.rows_R) for mask in (rules.allowed_MW, rules.early_MW))
    words_RQW = torch.where(is_early_RQ[..., None], early_RW[:, None], allowed_RW[:, None])
    words_RQW = words_RQW & rules.grammar_MQW.index_select(0, at.rows_R)[:, :num_positions]
    logits_RQV.masked_fill_(forbidden(words_RQW, vocab), NEVER)


def _forbid_bad_words(rules: ConstraintRows, at: BlockPositions, logits_RQV: Tensor) -> None:
    words_RSN = rules.bad_words_MSN.index_select(0, at.rows_R).long()
    before_RSN, last_RS = words_RSN[:, :, :-1], words_RSN[:, :, -1]
    said_RQN = at.last_outputs(before_RSN.shape[2])
    is_said_RQS = ((before_RSN[:, None] == NO_ID) | (before_RSN[:, None] == said_RQN[:, :, None])).all(-1)
    is_next_RQS = is_said_RQS & (last_RS >= 0)[:, None]
    change_RQS = logits_RQV.new_zeros(is_next_RQS.shape).masked_fill_(is_next_RQS, NEVER)
    logits_RQV.scatter_add_(2, last_RS.clamp(min=0)[:, None].expand(change_RQS.shape), change_RQS)


def _add_bias(rules: ConstraintRows, at: BlockPositions, logits_RQV: Tensor) -> None:
    ids_RB = rules.bias_ids_MB.index_select(0, at.rows_R).long()
    bias_RB = torch.where(ids_RB >= 0, rules.bias_MB.index_select(0, at.rows_R), 0.0)
    shape = (-1, logits_RQV.shape[1], -1)
    # ids are distinct, so nothing depends on the order of the additions
    logits_RQV.scatter_add_(2, ids_RB.clamp(min=0)[:, None].expand(shape), bias_RB[:, None].expand(shape))


def _penalise(rules: ConstraintRows, at: BlockPositions, logits_RQV: Tensor) -> None:
    num_rows, num_positions, vocab = logits_RQV.shape
    index_L = torch.arange(at.tokens_RL.shape[1], device=logits_RQV.device)
    is_known_RL = index_L < at.lengths_R[:, None]
    is_output_RL = is_known_RL & (index_L >= at.num_prompt_R[:, None])
    ids_RL = at.tokens_RL.clamp(0, vocab - 1).long()
    zeros_RV = logits_RQV.new_zeros(num_rows, vocab)
    known_RV = zeros_RV.scatter_add(1, ids_RL, is_known_RL.float())
    outputs_RV = zeros_RV.scatter_add(1, ids_RL, is_output_RL.float())
    penalties = [x.index_select(0, at.rows_R)[:, None, None] for x in (rules.repetition_M, rules.frequency_M)]
    penalties.append(rules.presence_M.index_select(0, at.rows_R)[:, None, None])

    # drafts count for the positions behind them; of a block, only their own ids differ from what the row has
    is_real_RK = (at.drafts_RK >= 0) & (at.drafts_RK < vocab)
    ids_RK = at.drafts_RK.clamp(0, vocab - 1)
    is_same_RKK = (ids_RK[:, :, None] == ids_RK[:, None]) & is_real_RK[:, :, None]
    more_RQK = F.pad(is_same_RKK.float().cumsum(1), (0, 0, 1, 0))
    known_RQK, outputs_RQK = (count.gather(1, ids_RK)[:, None] + more_RQK for count in (known_RV, outputs_RV))
    ids_RQK = ids_RK[:, None].expand(more_RQK.shape)
    drafted_RQK = _penalty(logits_RQV.gather(2, ids_RQK), known_RQK, outputs_RQK, *penalties)

    # only tokens that are there change: of short rows that is much less than the vocabulary
    if ids_RL.shape[1] < vocab:
        known_RL, outputs_RL = known_RV.gather(1, ids_RL), outputs_RV.gather(1, ids_RL)
        ids_RQL = ids_RL[:, None].expand(-1, num_positions, -1)
        said_RQL = _penalty(logits_RQV.gather(2, ids_RQL), known_RL[:, None], outputs_RL[:, None], *penalties)
        logits_RQV.scatter_(2, ids_RQL, said_RQL)  # copies of one id get the same value, here and below
    else:
        logits_RQV.copy_(_penalty(logits_RQV, known_RV[:, None], outputs_RV[:, None], *penalties))
    logits_RQV.scatter_(2, ids_RQK, drafted_RQK)


def _penalty(x: Tensor, known: Tensor, outputs: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor):
    x = torch.where(known > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * outputs - presence * (outputs > 0)
