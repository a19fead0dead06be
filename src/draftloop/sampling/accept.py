"""Which drafts become output, and which token follows them.

Every rule emits, for each row, a prefix of its drafts and one more token: the *bonus* where all
drafts were accepted, else the target's replacement of the first one that was not. Emitted tokens
are int32 [R, Q] padded with -1; `num_emitted_R` counts them.

Nothing here reads a value on the host, so that the rules can be part of a captured graph.

Shape suffixes: R rows, K drafts, Q = 1 + K verified positions, V target vocabulary, W draft
vocabulary (may be padded to another size than V), M rows of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kvcache.rows import NO_DRAFT
from draftloop.sampling.noise import Stream, gumbel_argmax, uniform
from draftloop.sampling.sampler import greedy_tokens

NO_TOKEN = -1
"""Pads emitted tokens."""


def prefix_length(accepted_RK: Tensor) -> Tensor:
    """int64 [R]: how many drafts stand before the first one that was not accepted."""
    return accepted_RK.to(torch.int64).cumprod(-1).sum(-1)


def emit(drafts_RK: Tensor, num_accepted_R: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted drafts, then the last token: [R, 1], or [R, Q] with one for each place to end at."""
    index_Q = torch.arange(drafts_RK.shape[1] + 1, device=drafts_RK.device)
    drafts_RQ = F.pad(drafts_RK.to(torch.int32), (0, 1), value=NO_TOKEN)
    ends_R1 = num_accepted_R[:, None]
    emitted_RQ = torch.where(index_Q < ends_R1, drafts_RQ, last_tokens.to(torch.int32))
    return emitted_RQ.masked_fill(index_Q > ends_R1, NO_TOKEN), (num_accepted_R + 1).to(torch.int32)


def drafted_probs(
    probs_RQV: Tensor, drafts_RK: Tensor, draft_probs_MKW: Tensor | None, rows_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """p and q of each draft, and whether q can have drawn it; [R, K] each.

    p is 0 for drafts that are none, or that the target does not know. q is 1 where drafts were chosen
    without chance. Drafts are int64.
    """
    vocab = probs_RQV.shape[2]
    known_RK = (drafts_RK >= 0) & (drafts_RK < vocab)
    safe_RK1 = drafts_RK.clamp(0, vocab - 1)[..., None]
    p_RK = probs_RQV[:, :-1].gather(2, safe_RK1).squeeze(-1).masked_fill(~known_RK, 0)
    if draft_probs_MKW is None:
        return p_RK, torch.ones_like(p_RK), drafts_RK >= 0
    width, index_K = draft_probs_MKW.shape[2], torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    q_RK = draft_probs_MKW[rows_R.to(torch.int64)[:, None], index_K, drafts_RK.clamp(0, width - 1)]
    return p_RK, q_RK, (drafts_RK >= 0) & (drafts_RK < width) & (q_RK > 0) & q_RK.isfinite()


def accept_greedy(logits_RQV: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafts that are the target's likeliest tokens.

    Returns emitted int32 [R, Q] and num_emitted int32 [R].
    """
    return accept_targets(greedy_tokens(logits_RQV), drafts_RK)


def accept_targets(targets_RQ: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """`accept_greedy` where the likeliest tokens are known."""
    num_accepted_R = prefix_length(targets_RQ[:, :-1] == drafts_RK)
    return emit(drafts_RK, num_accepted_R, targets_RQ)


def accept_sampled(
    probs_RQV: Tensor, drafts_RK: Tensor, draft_probs_RKW: Tensor | None, seeds_R: Tensor, positions_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Lossless rejection sampling: emitted tokens are distributed as `probs_RQV` says, whatever the drafts.

    Draft x is accepted with probability min(1, p(x) / q(x)); where one is rejected, its replacement
    is drawn from max(p - q, 0), normalised. Sources: Leviathan et al. 2023 (arXiv 2211.17192),
    Chen et al. 2023 (arXiv 2302.01318). A one-hot p (temperature 0) accepts as `accept_greedy`.

    `draft_probs_RKW` is q, the distribution that each draft was drawn from; None: drafts were chosen
    without chance (q is one-hot). Where nothing was drafted, or q cannot have produced the draft (0,
    NaN, outside W), the chain ends and the token comes from p itself. A draft outside V is rejected.

    `positions_R` is the position at which index 0 of `emitted` lands. Noise is keyed by the row's
    seed and the position of each token, so a row's result depends on nothing else in the batch.

    Returns emitted int32 [R, Q] and num_emitted int32 [R].
    """
    index_R = torch.arange(probs_RQV.shape[0], device=probs_RQV.device)
    return accept_sampled_rows(probs_RQV, drafts_RK, draft_probs_RKW, index_R, seeds_R, positions_R)


def accept_sampled_rows(
    probs_RQV: Tensor,
    drafts_RK: Tensor,
    draft_probs_MKW: Tensor | None,
    rows_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """`accept_sampled` with q of row r at `draft_probs_MKW[rows_R[r]]`; spares a copy of all of q."""
    num_rows, num_positions, vocab = probs_RQV.shape
    num_drafts = num_positions - 1
    index_R = torch.arange(num_rows, device=probs_RQV.device)
    index_K = torch.arange(num_drafts, device=probs_RQV.device)
    drafts_RK = drafts_RK.to(torch.int64)

    if num_drafts == 0:
        draft_probs_MKW = None
    p_RK, q_RK, valid_RK = drafted_probs(probs_RQV, drafts_RK, draft_probs_MKW, rows_R)
    noise_RK = uniform(seeds_R[:, None], positions_R[:, None] + index_K, Stream.ACCEPT)

    if draft_probs_MKW is None:
        num_accepted_R = prefix_length(noise_RK < p_RK)
        # q of the draft at which the chain ended; past the last draft there is none
        ended_at_R1 = F.pad(drafts_RK, (0, 1), value=NO_DRAFT).gather(1, num_accepted_R[:, None])
        q_RV = torch.arange(vocab, device=probs_RQV.device) == ended_at_R1
    else:
        width = draft_probs_MKW.shape[2]
        rows_R = rows_R.to(torch.int64)
        # p(x) = 1 leaves no other token, so the draft may stand however it was chosen
        num_accepted_R = prefix_length((valid_RK & (noise_RK * q_RK < p_RK)) | (p_RK >= 1))
        ended_validly_R1 = F.pad(valid_RK, (0, 1)).gather(1, num_accepted_R[:, None])
        common = min(vocab, width)
        # mass of q beyond V never met p, so leaving it out is right and not only safe
        q_RV = draft_probs_MKW[rows_R, num_accepted_R.clamp(max=num_drafts - 1)][:, :common]
        q_RV = F.pad(q_RV.masked_fill(~ended_validly_R1, 0), (0, vocab - common))

    p_RV = probs_RQV[index_R, num_accepted_R]
    residual_RV = (p_RV - q_RV.to(torch.float32)).clamp(min=0)
    # no residual: p and q are the same but for rounding. NaN fails the comparison too
    weights_RV = torch.where(residual_RV.sum(-1, keepdim=True) > 0, residual_RV, p_RV)
    last_R = gumbel_argmax(weights_RV.log(), seeds_R, positions_R + num_accepted_R, Stream.SAMPLE)
    return emit(drafts_RK, num_accepted_R, last_R[:, None])


def accept_synthetic(
    target_tokens_RQ: Tensor, drafts_RK: Tensor, rates_K: Tensor, seeds_R: Tensor, positions_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafts by coin flip, whatever the target says: speed at a chosen acceptance, not text.

    Draft j is accepted with probability `rates_K[j]`, given that those before it were. Where the
    chain ends the target's token is emitted. vLLM's `rejection_sample_method="synthetic"`.

    Returns emitted int32 [R, Q] and num_emitted int32 [R].
    """
    index_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    noise_RK = uniform(seeds_R[:, None], positions_R[:, None] + index_K, Stream.ACCEPT)
    num_accepted_R = prefix_length((noise_RK < rates_K) & (drafts_RK >= 0))
    return emit(drafts_RK, num_accepted_R, target_tokens_RQ)


def accept_synthetic_rows(
    probs_RQV: Tensor,
    drafts_RK: Tensor,
    draft_probs_MKW: Tensor | None,
    rows_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    rates_K: Tensor,
) -> tuple[Tensor, Tensor]:
    """`accept_synthetic` where the target's tokens are drawn from `probs_RQV`; arguments of `accept_sampled_rows`."""
    num_positions, vocab = probs_RQV.shape[1:]
    positions_RQ = positions_R[:, None] + torch.arange(num_positions, device=probs_RQV.device)
    seeds_RQ = seeds_R[:, None].expand(-1, num_positions)
    log_probs_XV = probs_RQV.flatten(0, 1).log()
    targets_X = gumbel_argmax(log_probs_XV, seeds_RQ.flatten(), positions_RQ.flatten(), Stream.SAMPLE)
    # an accepted draft becomes input of the target, which must know it
    known_RK = drafts_RK.masked_fill(drafts_RK >= vocab, NO_DRAFT)
    return accept_synthetic(targets_X.view(positions_RQ.shape), known_RK, rates_K, seeds_R, positions_R)


def conditional_rates(
    num_drafts: int,
    *,
    synthetic_acceptance_rates: Sequence[float] | None = None,
    synthetic_acceptance_length: float | None = None,
) -> list[float]:
    """Probability that draft j is accepted given that those before it were, for `accept_synthetic`.

    Given is one of vLLM's two options: the share of steps that accept draft j, for each j, or the
    mean number of tokens per step, bonus included. From a length follows one rate for all drafts.
    Raises ConfigError naming the option, its value and the range.
    """
    if (synthetic_acceptance_rates is None) == (synthetic_acceptance_length is None):
        raise ConfigError(
            "synthetic acceptance needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length; "
            f"got {synthetic_acceptance_rates!r} and {synthetic_acceptance_length!r}"
        )
    if synthetic_acceptance_rates is not None:
        return _rates_from_shares(num_drafts, list(synthetic_acceptance_rates))
    assert synthetic_acceptance_length is not None
    return [_rate_from_length(num_drafts, synthetic_acceptance_length)] * num_drafts


def _rates_from_shares(num_drafts: int, shares: list[float]) -> list[float]:
    name = f"synthetic_acceptance_rates is {shares!r}"
    if len(shares) != num_drafts:
        raise ConfigError(f"{name}; it must have one value per draft token, {num_drafts} in all")
    # written so that NaN fails too
    if not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"{name}; every value must be in [0, 1]")
    if any(later > earlier for earlier, later in pairwise(shares)):
        raise ConfigError(f"{name}; values must not rise, as a draft counts only if all before it were accepted")
    return [share / before if before > 0 else 0.0 for before, share in pairwise([1.0, *shares])]


def _rate_from_length(num_drafts: int, length: float) -> float:
    if not 1 <= length <= num_drafts + 1:
        raise ConfigError(
            f"synthetic_acceptance_length is {length!r}; it must be in [1, {num_drafts + 1}]: "
            f"the bonus token and up to {num_drafts} drafts"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if 1 + sum(rate**j for j in range(1, num_drafts + 1)) < length:
            low = rate
        else:
            high = rate
    return high


def clip_to_limit(emitted_RQ: Tensor, num_emitted_R: Tensor, room_R: Tensor) -> tuple[Tensor, Tensor]:
    """Emit at most `room_R` tokens per row; none where there is no room."""
    num_emitted_R = torch.minimum(num_emitted_R, room_R.to(num_emitted_R.dtype)).clamp(min=0)
    index_Q = torch.arange(emitted_RQ.shape[1], device=emitted_RQ.device)
    return emitted_RQ.masked_fill(index_Q >= num_emitted_R[:, None], NO_TOKEN), num_emitted_R
