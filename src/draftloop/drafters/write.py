"""How drafts get into the row state. Shape suffixes: R rows, K drafts, V vocabulary, W draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.write_draft import DraftRows, write_draft, write_likeliest
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.noise import Stream, gumbel_argmax
from draftloop.sampling.sampler import SamplingRows, probabilities


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
    target_ids_W: Tensor | None = None,
    longest: int | None = None,
) -> None:
    """Choose the next draft of each row from its logits, write it, and count it.

    `first`: it is the first of a new round; whatever was counted before is over. Ids from `vocab_size` on
    are never drafted: models of one tokenizer may be padded differently. `target_ids_W` (int64, distinct)
    says which id of the target each logit stands for, where the drafter has a vocabulary of its own. A row
    drafts nothing once it has `longest` tokens, drafts included.
    """
    logits_RW = logits_RW[:, :vocab_size]
    draft_rows = DraftRows(state.drafts_MK, state.num_drafted_M, state.draft_limit_M, state.num_tokens_M)
    if sampled:
        token_R = _sample(state, rows_R.long(), logits_RW, target_ids_W, first=first)
        write_draft(rows_R, token_R, draft_rows, target_ids_W, first=first, longest=longest)
    else:
        write_likeliest(rows_R, logits_RW, draft_rows, target_ids_W, first=first, longest=longest)


def _sample(state: RowState, rows_R: Tensor, logits_RW: Tensor, target_ids_W: Tensor | None, *, first: bool) -> Tensor:
    """int64 [R]: an index into W for each row, whose distribution is kept for the acceptance test."""
    assert state.draft_probs_MKV is not None
    index_R = torch.zeros_like(rows_R) if first else state.num_drafted_M[rows_R].long()
    sampling = SamplingRows.gather(state, rows_R)
    # any distribution drafts without loss; leaving top_k and top_p to the target saves a sort
    probs_RW = probabilities(logits_RW, sampling, truncate=False)
    positions_R = state.num_tokens_M[rows_R] + index_R
    token_R = gumbel_argmax(probs_RW.log(), sampling.seed_N, positions_R.long(), Stream.DRAFT)
    if target_ids_W is not None:
        # what has no logit is never drafted, and its probability must say so to stay lossless
        whole_RV = probs_RW.new_zeros(probs_RW.shape[0], state.draft_probs_MKV.shape[2])
        probs_RW = whole_RV.index_copy(1, target_ids_W, probs_RW)
    elif missing := state.draft_probs_MKV.shape[2] - probs_RW.shape[1]:
        probs_RW = torch.nn.functional.pad(probs_RW, (0, missing))  # what we do not know is never drafted
    state.draft_probs_MKV.index_put_((rows_R, index_R), probs_RW)
    return token_R
