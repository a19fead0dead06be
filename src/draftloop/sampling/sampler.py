"""From logits to the distribution that a request asked for, every row with its own parameters.

Shape suffixes: N positions (rows x verified positions), R rows, M rows of the engine, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from draftloop.kernels.argmax import argmax
from draftloop.kvcache.rows import RowState
from draftloop.request import SamplingParams


class SamplingKind(StrEnum):
    """The most that some request of a batch asks for. Batches that ask for less pay for less."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    """Temperature and min_p."""
    TRUNCATED = "truncated"
    """top_k or top_p too, which need a sort."""
    CONSTRAINED = "constrained"
    """Logits are changed first: penalties, masks, biases; see `constraints`."""

    @property
    def truncates(self) -> bool:
        return self in (SamplingKind.TRUNCATED, SamplingKind.CONSTRAINED)

    @classmethod
    def of(cls, batch: Iterable[SamplingParams]) -> SamplingKind:
        kind = cls.GREEDY
        for params in batch:
            if params.constrained:
                return cls.CONSTRAINED
            if params.greedy or kind is cls.TRUNCATED:
                continue
            kind = cls.TRUNCATED if params.top_k > 0 or params.top_p < 1 else cls.SAMPLED
        return kind


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of N positions."""

    temperature_N: Tensor
    """float32: 0 is greedy."""
    top_k_N: Tensor
    """int32: 0 or below keeps all tokens."""
    top_p_N: Tensor
    """float32: 1 keeps all tokens."""
    min_p_N: Tensor
    """float32: 0 keeps all tokens."""
    seed_N: Tensor
    """int64"""

    @classmethod
    def gather(cls, state: RowState, rows_R: Tensor) -> SamplingRows:
        """The parameters of these engine rows."""
        columns = (state.temperature_M, state.top_k_M, state.top_p_M, state.min_p_M, state.seed_M)
        return cls(*(column.index_select(0, rows_R) for column in columns))

    def repeat(self, num_positions: int) -> SamplingRows:
        """Each row `num_positions` times in a row, as the rows of [R * Q, V] logits are laid out."""
        # repeat_interleave would read its repeats on the host
        columns = (self.temperature_N, self.top_k_N, self.top_p_N, self.min_p_N, self.seed_N)
        return SamplingRows(*(column[:, None].expand(-1, num_positions).reshape(-1) for column in columns))


def greedy_tokens(logits_NV: Tensor) -> Tensor:
    """int64 [N]: the most likely token, the lowest id on ties."""
    return argmax(logits_NV)


def probabilities(logits_NV: Tensor, rows: SamplingRows, *, truncate: bool = True) -> Tensor:
    """float32 [N, V]: what each position samples from, after temperature, min_p, top_k and top_p.

    Order and meaning are vLLM's: min_p is relative to the likeliest token after temperature, top_k
    counts what min_p left, top_p sums the renormalised rest. Tokens that tie at a cut are all kept,
    so that the result does not depend on how a sort orders them. Temperature 0 gives a one-hot row.
    Logits that say nothing (NaN or inf among them, or nothing but -inf) give a row of NaN.

    `truncate=False` leaves out top_k and top_p, and with them the sort; for callers who know that
    no row of the batch asks for them.
    """
    logits = logits_NV.to(torch.float32)
    greedy_N1 = (rows.temperature_N == 0)[:, None]
    # the maximum goes first, so that no temperature, however small, makes inf - inf
    top_N1, best_N1 = logits.max(-1, keepdim=True)
    scaled = (logits - top_N1) / rows.temperature_N[:, None].masked_fill(greedy_N1, 1)
    # every rule keeps what is at least as likely as some token, so together they are one threshold
    threshold_N1 = rows.min_p_N[:, None].log()
    if truncate:
        threshold_N1 = _truncation_threshold(scaled, threshold_N1, rows)
    probs = scaled.masked_fill(scaled < threshold_N1, float("-inf")).softmax(-1)
    ids_V = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(greedy_N1 & top_N1.isfinite(), (ids_V == best_N1).to(torch.float32), probs)


def _truncation_threshold(scaled_NV: Tensor, threshold_N1: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [N, 1]: lowest scaled logit that min_p (the incoming threshold), top_k and top_p keep."""
    vocab = scaled_NV.shape[1]
    descending_NV = scaled_NV.sort(dim=-1, descending=True).values
    top_k_N1 = rows.top_k_N[:, None].to(torch.int64)
    last_N1 = torch.where(top_k_N1 > 0, top_k_N1, vocab).clamp(max=vocab) - 1
    threshold_N1 = torch.maximum(threshold_N1, descending_NV.gather(1, last_N1))
    probs_NV = descending_NV.masked_fill(descending_NV < threshold_N1, float("-inf")).softmax(-1)
    # a token stays while those before it have not reached top_p: the likeliest one always does
    before_NV = probs_NV.cumsum(-1) - probs_NV
    top_p_N1 = rows.top_p_N[:, None]
    # rounding may push the sum to 1 before the last token
    kept_N1 = ((before_NV < top_p_N1) | (top_p_N1 >= 1)).sum(-1, keepdim=True)
    return torch.maximum(threshold_N1, descending_NV.gather(1, (kept_N1 - 1).clamp(min=0)))


def request_seed(params: SamplingParams, engine_seed: int, request_number: int) -> int:
    """The seed of a request: its own, or one hashed from the engine's and the request's number.

    Each request has its own, so that nothing a neighbour does or leaves out changes its noise.
    """
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{engine_seed} {request_number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
