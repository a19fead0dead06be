"""Block verification: all drafts of a block are judged together, so that more of them stand, still without loss.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding", 2024 (arXiv 2403.10444).

Shape suffixes: R rows, K drafts, Q = 1 + K positions, V target vocabulary, W draft vocabulary, M rows of the engine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.sampling.accept import accept_sampled_rows, drafted_probs, emit, prefix_length
from draftloop.sampling.noise import Stream, gumbel_argmax, in_block, uniform


def accept_block_rows(
    probs_RQV: Tensor,
    drafts_RK: Tensor,
    draft_probs_MKW: Tensor | None,
    rows_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """`accept_sampled_rows` by the other rule: same arguments, same distribution, no fewer tokens per block.

    With c_i the running product of p / q, cut at 1 after each factor, the first i drafts may stand with
    probability S_i / (S_i + 1 - c_i), where S_i is the mass of max(c_i * p - q, 0) behind them; all n of them with
    probability c_n. The longest prefix that may stand does, so drafts past it have had a say: their noise is
    never used again (`noise.in_block`).
    """
    num_rows, num_positions, vocab = probs_RQV.shape
    num_drafts = num_positions - 1
    if num_drafts == 0:
        return accept_sampled_rows(probs_RQV, drafts_RK, draft_probs_MKW, rows_R, seeds_R, positions_R)
    device = probs_RQV.device
    index_Q = torch.arange(num_positions, device=device)
    drafts_RK = drafts_RK.to(torch.int64)
    p_RK, q_RK, is_valid_RK = drafted_probs(probs_RQV, drafts_RK, draft_probs_MKW, rows_R)
    is_valid_RK = is_valid_RK & p_RK.isfinite()  # where the target says nothing, a block ends
    # a draft that is the only possible token may stand however it was chosen, as if it had been certain
    is_certain_RK = (p_RK >= 1) & ~is_valid_RK
    num_valid_R1 = prefix_length(is_valid_RK | is_certain_RK)[:, None]
    ratio_RK = torch.where(is_valid_RK, p_RK / q_RK, is_certain_RK.to(p_RK.dtype))

    share = torch.ones_like(p_RK[:, 0])
    shares = [share]
    for ratio_R in ratio_RK.unbind(1):
        share = (share * ratio_R).clamp(max=1)
        shares.append(share)
    share_RQ = torch.stack(shares, 1)

    if draft_probs_MKW is None:
        q_RKV = None
        rest_RK = share_RQ[:, :-1] * (1 - p_RK)  # q is one-hot
    else:
        common = min(vocab, draft_probs_MKW.shape[2])
        q_RKV = draft_probs_MKW.index_select(0, rows_R.to(torch.int64))[:, :num_drafts, :common].to(torch.float32)
        q_RKV = F.pad(q_RKV, (0, vocab - common))
        rest_RK = (share_RQ[:, :-1, None] * probs_RQV[:, :-1] - q_RKV).clamp(min=0).sum(-1)
        rest_RK = rest_RK.masked_fill(is_certain_RK, 0)
    whole_RK = rest_RK + 1 - share_RQ[:, :-1]
    # 0 / 0 where p and q are the same and everything before stands: then everything behind does too
    chance_RK = torch.where(whole_RK == 0, 1.0, rest_RK / whole_RK)
    chance_RQ = torch.where(index_Q == num_valid_R1, share_RQ, F.pad(chance_RK, (0, 1)))
    noise_RK = uniform(seeds_R[:, None], in_block(positions_R[:, None], index_Q[:-1]), Stream.ACCEPT)
    may_stand_RK = (noise_RK < chance_RQ[:, 1:]) & (index_Q[1:] <= num_valid_R1)
    num_accepted_R = (may_stand_RK * index_Q[1:]).amax(-1)

    ends_R1 = num_accepted_R[:, None]
    p_RV = probs_RQV[torch.arange(num_rows, device=device), num_accepted_R]
    ended_at_R1 = num_accepted_R.clamp(max=num_drafts - 1)[:, None]
    if q_RKV is None:
        q_RV = (torch.arange(vocab, device=device) == drafts_RK.gather(1, ended_at_R1)).to(torch.float32)
    else:
        q_RV = q_RKV[torch.arange(num_rows, device=device), ended_at_R1[:, 0]]
    residual_RV = (share_RQ.gather(1, ends_R1) * p_RV - q_RV).clamp(min=0)
    is_residual_R1 = (ends_R1 < num_valid_R1) & (residual_RV.sum(-1, keepdim=True) > 0)
    weights_RV = torch.where(is_residual_R1, residual_RV, p_RV)
    last_R = gumbel_argmax(weights_RV.log(), seeds_R, positions_R + num_accepted_R, Stream.SAMPLE)
    return emit(drafts_RK, num_accepted_R, last_R[:, None])
