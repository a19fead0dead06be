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
from draftloop.kernels.softmax_statistics import Statistics, kept_from
from draftloop.kvcache.rows import RowState
from draftloop.request import SamplingParams


class SamplingKind(StrEnum):
    """The most that some request of a batch asks for. Batches that ask for less pay for less."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    """Temperature and min_p."""
    TRUNCATED = "truncated"
    """top_k or top_p too: a search per row on a GPU, a sort on a CPU."""
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
    divisor_N1 = rows.temperature_N[:, None].masked_fill(greedy_N1, 1)
    scaled = (logits - top_N1) / divisor_N1
    if truncate:
        descending = logits.sort(dim=-1, descending=True).values
        scaled_descending = (descending - top_N1) / divisor_N1
        is_out = logits < kept_from(descending, scaled_descending, rows.top_k_N, rows.top_p_N, rows.min_p_N)
    else:
        is_out = scaled < rows.min_p_N[:, None].log()
    probs = scaled.masked_fill(is_out, float("-inf")).softmax(-1)
    ids_V = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(greedy_N1 & top_N1.isfinite(), (ids_V == best_N1).to(torch.float32), probs)


def probabilities_from(logits_NV: Tensor, statistics: Statistics, temperature_N: Tensor) -> Tensor:
    """`probabilities` of logits whose statistics are known."""
    token_N1, top_N1, threshold_N1, mass_N1 = (column[:, None] for column in statistics)
    greedy_N1 = (temperature_N == 0)[:, None]
    logits = logits_NV.to(torch.float32)
    weights = ((logits - top_N1) / temperature_N[:, None].masked_fill(greedy_N1, 1)).exp() / mass_N1
    weights = weights.masked_fill(logits < threshold_N1, 0)
    ids_V = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(greedy_N1 & (token_N1 >= 0), (ids_V == token_N1).to(torch.float32), weights)


def request_seed(params: SamplingParams, engine_seed: int | str, request_number: int) -> int:
    """The seed of a request: its own, or one hashed from the engine's and the request's number.

    Each request has its own, so that nothing a neighbour does or leaves out changes its noise.
    """
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{engine_seed} {request_number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
