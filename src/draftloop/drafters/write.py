"""How drafts get into the row state.

Shape suffixes: R rows, K drafts, J drafts of each row that come at once, N = R * J, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from draftloop.kernels.argmax import best_index, takes_argmax
from draftloop.kernels.write_draft import DraftRows, write_draft, write_draft_triton, write_likeliest
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.models.output_head import Vocabulary
from draftloop.sampling.draw_drafts import draw_drafts_triton
from draftloop.sampling.noise import Stream, gumbel_argmax, in_block
from draftloop.sampling.sampler import SamplingRows, probabilities


class WriteOptions(TypedDict):
    """What `write_next` and `write_block` take of a drafter, whatever it drafts."""

    vocab_size: int
    vocabulary: Vocabulary
    target_ids_W: Tensor | None
    longest: int | None


def write_all(state: RowState, rows_R: Tensor, drafts_RK: Tensor) -> None:
    """Replace the rows' drafts; those past a request's own limit become NO_DRAFT."""
    index_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    allowed_RK = index_K < state.draft_limit_M[rows_R][:, None]
    state.drafts_MK.index_copy_(0, rows_R.long(), torch.where(allowed_RK, drafts_RK, NO_DRAFT).int())


def write_next(
    state: RowState,
    rows_R: Tensor,
    logits_RW: Tensor,
    *,
    vocab_size: int,
    sampled: bool,
    first: bool = False,
    vocabulary: Vocabulary | None = None,
    target_ids_W: Tensor | None = None,
    longest: int | None = None,
) -> None:
    """Choose the next draft of each row from its logits, write it, and count it.

    `first`: it is the first of a new round; whatever was counted before is over. `vocabulary`: of the logits, where
    ranks have parts of them. Ids from `vocab_size` on are never drafted: models of one tokenizer may be padded
    differently. `target_ids_W` (int64, distinct) says which id of the target each logit stands for, where the drafter
    has a vocabulary of its own. A row drafts nothing once it has `longest` tokens, drafts included.
    """
    draft_rows = DraftRows(state.drafts_MK, state.num_drafted_M, state.draft_limit_M, state.num_tokens_M)
    vocabulary = vocabulary or Vocabulary(logits_RW.shape[1])
    if vocabulary.is_divided and not sampled:
        best_RC = vocabulary.maxima(logits_RW, known=vocab_size)
        write_draft(rows_R, best_RC, draft_rows, target_ids_W, first=first, longest=longest)
        return
    logits_RW = vocabulary.whole(logits_RW)[:, :vocab_size]
    if sampled and takes_argmax(logits_RW):
        best_RC = draw_drafts_triton(state, rows_R, logits_RW, target_ids_W, counted=not first)
        write_draft_triton(rows_R, best_RC, draft_rows, target_ids_W, first=first, longest=longest)
    elif sampled:
        index_R = torch.zeros_like(rows_R) if first else state.num_drafted_M[rows_R]
        token_R = _sample(state, rows_R.long(), index_R.long()[:, None], logits_RW, target_ids_W)
        write_draft(rows_R, token_R, draft_rows, target_ids_W, first=first, longest=longest)
    else:
        write_likeliest(rows_R, logits_RW, draft_rows, target_ids_W, first=first, longest=longest)


def write_block(
    state: RowState,
    rows_R: Tensor,
    logits_NW: Tensor,
    *,
    vocab_size: int,
    sampled: bool,
    vocabulary: Vocabulary | None = None,
    target_ids_W: Tensor | None = None,
    longest: int | None = None,
) -> None:
    """Choose all drafts of each row, each from its own logits ([R * K, W], row after row), and write them.

    Nothing is counted; the rest is as in `write_next`.
    """
    rows_R, num_drafts = rows_R.long(), state.drafts_MK.shape[1]
    index_RK = torch.arange(num_drafts, device=rows_R.device).expand(rows_R.shape[0], -1)
    vocabulary = vocabulary or Vocabulary(logits_NW.shape[1])
    if not sampled:
        choice_N = vocabulary.likeliest(logits_NW, known=vocab_size)
    else:
        logits_NW = vocabulary.whole(logits_NW)[:, :vocab_size]
        if takes_argmax(logits_NW):
            choice_N = best_index(draw_drafts_triton(state, rows_R, logits_NW, target_ids_W, counted=False))
        else:
            choice_N = _sample(state, rows_R, index_RK, logits_NW, target_ids_W)
    if target_ids_W is not None:
        choice_N = target_ids_W[choice_N]
    drafts_RK = choice_N.view(index_RK.shape)
    if longest is not None:
        short_RK = state.num_tokens_M[rows_R][:, None] + index_RK < longest
        drafts_RK = torch.where(short_RK, drafts_RK, NO_DRAFT)
    write_all(state, rows_R, drafts_RK)


def _sample(
    state: RowState, rows_R: Tensor, index_RJ: Tensor, logits_NW: Tensor, target_ids_W: Tensor | None
) -> Tensor:
    """int64 [N]: an index into W for each draft, whose distribution is kept for the acceptance test."""
    assert state.draft_probs_MKV is not None
    sampling = SamplingRows.gather(state, rows_R).repeat(index_RJ.shape[1])
    # any distribution drafts without loss; leaving top_k and top_p to the target saves a sort
    probs_NW = probabilities(logits_NW, sampling, truncate=False)
    positions_N = in_block(state.num_tokens_M[rows_R][:, None], index_RJ).flatten()
    choice_N = gumbel_argmax(probs_NW.log(), sampling.seed_N, positions_N, Stream.DRAFT)
    if target_ids_W is not None:
        # what has no logit is never drafted, and its probability must say so to stay lossless
        whole_NV = probs_NW.new_zeros(probs_NW.shape[0], state.draft_probs_MKV.shape[2])
        probs_NW = whole_NV.index_copy(1, target_ids_W, probs_NW)
    elif missing := state.draft_probs_MKV.shape[2] - probs_NW.shape[1]:
        probs_NW = torch.nn.functional.pad(probs_NW, (0, missing))  # what we do not know is never drafted
    state.draft_probs_MKV.index_put_((rows_R[:, None], index_RJ), probs_NW.unflatten(0, index_RJ.shape))
    return choice_N
