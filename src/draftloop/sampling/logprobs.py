"""Logarithms of probabilities: of the token that was produced, and of the likeliest ones.

Shape suffixes: N positions, V vocabulary, P = 1 + reported likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256
"""Positions whose float32 logits are in memory at once, where many are reported (prompts)."""


def token_logprobs(logprobs_NV: Tensor, tokens_N: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Report on `tokens_N` and the `num_top` likeliest tokens of each position.

    Returns int32 [N, P]: the token's rank (1 is the likeliest), then the likeliest ids; and float32
    [N, P]: their logarithms in the same order, the token's own first. Tokens outside V give anything.
    """
    tokens_N1 = tokens_N.long().clamp(0, logprobs_NV.shape[1] - 1)[:, None]
    chosen_N1 = logprobs_NV.gather(1, tokens_N1)
    rank_N1 = (logprobs_NV > chosen_N1).sum(-1, keepdim=True) + 1
    top = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=-1)
    ids_NP = torch.cat([rank_N1, top.indices], 1).to(torch.int32)
    values_NP = torch.cat([chosen_N1, top.values], 1)
    missing = num_top - top.indices.shape[1]
    if missing:  # a vocabulary smaller than what may be asked for
        ids_NP = torch.nn.functional.pad(ids_NP, (0, missing), value=-1)
        values_NP = torch.nn.functional.pad(values_NP, (0, missing), value=float("-inf"))
    return ids_NP, values_NP


def raw_logprobs(logits_NV: Tensor) -> Tensor:
    """float32 [N, V]: what the model says, before any parameter of the request."""
    return logits_NV.to(torch.float32).log_softmax(-1)
