"""How drafts get into the row state. Shape suffixes: R rows, K drafts, V vocabulary, W draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.noise import Stream, gumbel_argmax
from draftloop.sampling.sampler import SamplingRows, greedy_tokens, probabilities


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
    target_ids_W: Tensor | None = None,
    longest: int | None = None,
) -> None:
    """Choose the next draft of each row from its logits, write it, and count it.

    Ids from `vocab_size` on are never drafted: models of one tokenizer may be padded differently.
    `target_ids_W` (int64, distinct) says which id of the target each logit stands for, where the
    drafter has a vocabulary of its own. A row drafts nothing once it has `longest` tokens, drafts
    included.
    """
    rows_R = rows_R.long()
    logits_RW = logits_RW[:, :vocab_size]
    index_R = state.num_drafted_M[rows_R].long()
    index_R = index_R.clamp(max=state.drafts_MK.shape[1] - 1)  # the padding row counts on and on
    if sampled:
        assert state.draft_probs_MKV is not None
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
    else:
        token_R = greedy_tokens(logits_RW)
    if target_ids_W is not None:
        token_R = target_ids_W[token_R]
    allowed_R = index_R < state.draft_limit_M[rows_R]
    if longest is not None:
        allowed_R &= state.num_tokens_M[rows_R] + index_R < longest
    state.drafts_MK.index_put_((rows_R, index_R), torch.where(allowed_R, token_R, NO_DRAFT).int())
    state.num_drafted_M.index_copy_(0, rows_R, (index_R + 1).int())
