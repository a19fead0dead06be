"""Sampling parameters, one token at a time: a second implementation, in numpy, that knows nothing of drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from draftloop.errors import RequestError
from draftloop.request import SamplingParams
from draftloop.sampling.logits_processors import BlockPositions, LogitsProcessor


def wanted_logits(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    ends: Collection[int] = (),
    bad_words: Collection[Sequence[int]] = (),
    allowed: Collection[int] | None = None,
) -> np.ndarray:
    """What the next token after `output` is chosen from, before temperature.

    `ends` are the ids that end the request, `bad_words` the ids of `params.bad_words`, and `allowed` what a
    grammar allows here.
    """
    x = np.array(logits, dtype=np.float64)
    for limit in (params.allowed_token_ids, allowed):
        if limit is not None:
            x[[i for i in range(len(x)) if i not in set(limit)]] = -np.inf
    if len(output) < params.min_tokens:
        x[[i for i in ends if i < len(x)]] = -np.inf
    for word in bad_words:
        *before, last = word
        if not before or list(output[-len(before) :]) == before:
            x[last] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def wanted_probs(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """After temperature and truncation. Tokens that tie at a cut stay together."""
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    weights = np.exp((x - x.max()) / params.temperature)
    weights[weights < params.min_p] = 0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[::-1][min(params.top_k, len(x)) - 1]] = 0
    probs = weights / weights.sum()
    total = cut = 0.0
    for p in np.sort(probs)[::-1]:
        cut = p
        total += p
        if params.top_p < 1 and total >= params.top_p:
            break
    probs[probs < cut] = 0
    return probs / probs.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = np.asarray(logits, dtype=np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


class Only(LogitsProcessor):
    """From its n-th token on (and up to another one), a request says nothing but one token."""

    arguments = frozenset({"only_token", "only_after", "only_until"})

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.token_M = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.after_M = torch.full((num_rows,), 10**6, device=device)
        self.until_M = torch.full((num_rows,), 10**6, device=device)

    def check(self, params: SamplingParams) -> None:
        wanted = (params.extra_args or {}).get("only_token", 0)
        if not 0 <= wanted < self.vocab_size:
            raise RequestError(f"only_token is {wanted}; this model's ids are 0 to {self.vocab_size - 1}")

    def admit(self, row: int, params: SamplingParams) -> None:
        asked = params.extra_args or {}
        self.token_M[row].fill_(asked.get("only_token", 0))
        self.after_M[row].fill_(asked.get("only_after", 10**6))
        self.until_M[row].fill_(asked.get("only_until", 10**6))

    def apply(self, logits_RQV: torch.Tensor, positions: BlockPositions) -> torch.Tensor:
        token_R = self.token_M.index_select(0, positions.rows_R)
        after_R1, until_R1 = (x.index_select(0, positions.rows_R)[:, None] for x in (self.after_M, self.until_M))
        is_on_RQ = (positions.num_outputs >= after_R1) & (positions.num_outputs < until_R1)
        is_other_RV = torch.arange(self.vocab_size, device=token_R.device) != token_R[:, None]
        return logits_RQV.masked_fill(is_on_RQ[..., None] & is_other_RV[:, None], float("-inf"))
