"""Typical acceptance: drafts stand where the target finds them plausible. Lossy: it changes the text's distribution.

Source: Cai et al., "Medusa", 2024 (arXiv 2401.10774), section 2.3.1.

Shape suffixes: R rows, K drafts, Q = 1 + K positions, V target vocabulary, W draft vocabulary, M rows of the engine.
"""

from __future__ import annotations

from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear import linear
from draftloop.sampling.accept import drafted_probs, emit, prefix_length
from draftloop.sampling.noise import Stream, gumbel_argmax

TYPICAL_THRESHOLD = 0.09
"""A draft at least this likely always stands."""
TYPICAL_ALPHA = 0.3
"""Where the target is unsure, less is enough: this much of exp(-entropy). The paper takes the threshold's root."""


def accept_typical_rows(
    probs_RQV: Tensor,
    drafts_RK: Tensor,
    draft_probs_MKW: Tensor | None,
    rows_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    threshold: float = TYPICAL_THRESHOLD,
    alpha: float = TYPICAL_ALPHA,
) -> tuple[Tensor, Tensor]:
    """`accept_sampled_rows` by a rule that is not lossless; arguments and results are the same.

    Draft x stands where p(x) > min(threshold, alpha * exp(-entropy of p)), whatever it was drawn from: no chance
    is left in it. Behind the last draft that stands, a token is drawn from p. A one-hot p (temperature 0) accepts
    as `accept_greedy`, and a draft that p cannot give never stands.
    """
    p_RK, _, _ = drafted_probs(probs_RQV, drafts_RK.long(), None, rows_R)
    probs_RKV = probs_RQV[:, :-1]
    # 0 * log 0 is 0
    entropy_RK = -_sum(probs_RKV * probs_RKV.clamp(min=1e-30).log())
    num_accepted_R = prefix_length(p_RK > (alpha * (-entropy_RK).exp()).clamp(max=threshold))
    p_RV = probs_RQV.gather(1, num_accepted_R[:, None, None].expand(-1, 1, probs_RQV.shape[2])).squeeze(1)
    last_R = gumbel_argmax(p_RV.log(), seeds_R, positions_R + num_accepted_R, Stream.SAMPLE)
    return emit(drafts_RK, num_accepted_R, last_R[:, None])


def _sum(x_RKV: Tensor) -> Tensor:
    """[R, K]. torch adds up a row in an order that depends on how many there are."""
    if not is_wanted():
        return x_RKV.sum(-1)
    return linear(x_RKV.flatten(0, 1), x_RKV.new_ones(1, x_RKV.shape[2])).view(x_RKV.shape[:2])
