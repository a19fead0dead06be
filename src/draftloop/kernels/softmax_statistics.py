"""What a token's probability follows from, without a softmax being written; top_k and top_p without a sort.

min_p, top_k and top_p each keep what is at least as likely as some token, so together they are one threshold. The
kernel finds it by search, one program per position: it guesses three thresholds at a time, and one pass over the
logits (which L2 serves after the first) says how much each keeps. Two guesses divide the values that are left, as
suits logits, and one the bit patterns, which ends the search after at most 32 passes whatever they are.

Tokens of equal logits stay or go together: top_k keeps all that tie with the k-th likeliest, and top_p a token if
what is likelier has less than p. So nothing depends on an order among equals.

Shape suffixes: R rows, Q positions of each, X = R * Q, M rows of the engine, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.argmax import NO_INDEX, chunk_maxima
from draftloop.kernels.ordered import logits_at, order_of, value_of
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

LARGEST_SCALE = 1e30
"""Smaller temperatures than its inverse count as that: nothing but ties with the likeliest token is left anyway."""


class Truncation(NamedTuple):
    """Sampling parameters of the engine's rows."""

    temperature_M: Tensor
    """float32: 0 is greedy."""
    top_k_M: Tensor
    """int32: 0 or below keeps all tokens."""
    top_p_M: Tensor
    """float32: 1 keeps all tokens."""
    min_p_M: Tensor
    """float32: 0 keeps all tokens."""


class Changed(NamedTuple):
    """Logits that some rows have instead of the target's."""

    logits_XV: Tensor
    """float32; undefined for rows that keep theirs."""
    is_changed_M: Tensor
    """int32: 1 for the rows of the engine that they are of, else 0."""


class Statistics(NamedTuple):
    """A token of logit x has probability `exp((x - top) / temperature) / mass`, or 0 if x is below `threshold`.

    Of greedy rows only `token` and `top` mean something.
    """

    token_X: Tensor
    """int32: the likeliest token, the lowest id on ties; -1 where logits say nothing (NaN, inf, or only -inf)."""
    top_X: Tensor
    """float32: its logit."""
    threshold_X: Tensor
    """float32"""
    mass_X: Tensor
    """float32: the sum of `exp((x - top) / temperature)` over what is kept; NaN where logits say nothing."""


def kept_from(descending_NV: Tensor, scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """float32 [N, 1]: the lowest logit that min_p, top_k and top_p keep.

    `descending_NV` are logits, sorted, and `scaled_NV` the same less the largest, over the temperature.
    """
    vocab = descending_NV.shape[1]
    top_k_N1 = top_k_N[:, None].to(torch.int64)
    last_N1 = torch.where(top_k_N1 > 0, top_k_N1, vocab).clamp(max=vocab) - 1
    is_out_NV = (scaled_NV < min_p_N[:, None].log()) | (descending_NV < descending_NV.gather(1, last_N1))
    probs_NV = scaled_NV.masked_fill(is_out_NV, float("-inf")).softmax(-1)
    # a token stays while those before it have not reached top_p: the likeliest one always does
    before_NV = probs_NV.cumsum(-1) - probs_NV
    top_p_N1 = top_p_N[:, None]
    # rounding may push the sum to 1 before the last token
    is_kept_NV = ~is_out_NV & ((before_NV < top_p_N1) | (top_p_N1 >= 1))
    return descending_NV.gather(1, (is_kept_NV.sum(-1, keepdim=True) - 1).clamp(min=0))


def softmax_statistics_torch(
    logits_XV: Tensor,
    rows_R: Tensor,
    truncation: Truncation,
    *,
    changed: Changed | None = None,
    truncate: bool = True,
) -> Statistics:
    """Reference of `softmax_statistics`."""
    places = logits_XV.shape[0] // max(rows_R.shape[0], 1)
    rows_X = rows_R.long()[:, None].expand(-1, places).reshape(-1)
    temperature_X, top_k_X, top_p_X, min_p_X = (column[rows_X] for column in truncation)
    logits = logits_XV.float()
    if changed is not None:
        logits = torch.where(changed.is_changed_M[rows_X].bool()[:, None], changed.logits_XV, logits)
    top_X, token_X = logits.max(-1)
    is_bad_X = ~top_X.isfinite()
    scale_X1 = temperature_X.masked_fill(temperature_X == 0, 1).clamp(min=1 / LARGEST_SCALE)[:, None]
    descending_XV = logits.masked_fill(is_bad_X[:, None], 0).sort(-1, descending=True).values
    scaled_XV = (descending_XV - descending_XV[:, :1]) / scale_X1
    if not truncate:
        top_k_X, top_p_X = torch.zeros_like(top_k_X), torch.ones_like(top_p_X)
    threshold_X1 = kept_from(descending_XV, scaled_XV, top_k_X, top_p_X, min_p_X)
    mass_X = scaled_XV.masked_fill(descending_XV < threshold_X1, float("-inf")).exp().sum(-1)
    return Statistics(
        token_X=torch.where(is_bad_X, -1, token_X).int(),
        top_X=top_X,
        threshold_X=threshold_X1[:, 0],
        mass_X=mass_X.masked_fill(is_bad_X, float("nan")),
    )


@jit()
def _search(
    logits_ptr, changed_ptr, is_changed, size, top, scale, low, high, kept, wanted,
    BY_MASS: tl.constexpr, CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest threshold that keeps at least `wanted`, as an order, and what it keeps: tokens, or their mass.

    `low` keeps `kept`, which is enough, and `high` too little. Sums are added up in the same order for every
    threshold, so a lower one never seems to keep less.
    """
    while high - 1 > low:
        lowest, highest = value_of(low), value_of(high)
        a = tl.maximum(tl.minimum(order_of(lowest + (highest - lowest) * 0.33333334), high - 1), low + 1)
        b = tl.maximum(tl.minimum(order_of(lowest + (highest - lowest) * 0.6666667), high - 1), low + 1)
        c = tl.maximum((low & high) + ((low ^ high) >> 1), low + 1)
        value_a, value_b, value_c = value_of(a), value_of(b), value_of(c)
        kept_a = tl.zeros([BLOCK], tl.float32)
        kept_b = tl.zeros([BLOCK], tl.float32)
        kept_c = tl.zeros([BLOCK], tl.float32)
        least = tl.zeros([BLOCK], tl.float32) + highest
        most = tl.zeros([BLOCK], tl.float32) + lowest
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = logits_at(logits_ptr, changed_ptr, is_changed, index, size, CHANGED)
            weight = tl.exp((x - top) * scale) if BY_MASS else 1.0
            kept_a += tl.where(x >= value_a, weight, 0.0)
            kept_b += tl.where(x >= value_b, weight, 0.0)
            kept_c += tl.where(x >= value_c, weight, 0.0)
            least = tl.minimum(least, tl.where(x >= lowest, x, highest))
            most = tl.maximum(most, tl.where(x < highest, x, lowest))
        sum_a, sum_b, sum_c = tl.sum(kept_a, 0), tl.sum(kept_b, 0), tl.sum(kept_c, 0)
        # between `low` and the least logit from there on is no token, nor between the greatest below `high` and it
        low = tl.maximum(low, order_of(tl.min(least, 0)))
        high = tl.minimum(high, order_of(tl.max(most, 0)) + 1)
        low = tl.where(sum_a >= wanted, tl.maximum(low, a), low)
        low = tl.where(sum_b >= wanted, tl.maximum(low, b), low)
        low = tl.where(sum_c >= wanted, tl.maximum(low, c), low)
        high = tl.where(sum_a >= wanted, high, tl.minimum(high, a))
        high = tl.where(sum_b >= wanted, high, tl.minimum(high, b))
        high = tl.where(sum_c >= wanted, high, tl.minimum(high, c))
        kept = tl.where(sum_a >= wanted, tl.minimum(kept, sum_a), kept)
        kept = tl.where(sum_b >= wanted, tl.minimum(kept, sum_b), kept)
        kept = tl.where(sum_c >= wanted, tl.minimum(kept, sum_c), kept)
    return low, kept


@jit()
def _mass(
    logits_ptr, changed_ptr, is_changed, size, top, scale, low, least_weight,
    CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What is kept from the logit `low` and the weight `least_weight` on: its mass, its number, its least order."""
    mass = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    least = tl.zeros([BLOCK], tl.float32) + top
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = logits_at(logits_ptr, changed_ptr, is_changed, index, size, CHANGED)
        weight = tl.exp((x - top) * scale)
        is_kept = (x >= low) & (weight >= least_weight)
        mass += tl.where(is_kept, weight, 0.0)
        count += is_kept.to(tl.int32)
        least = tl.where(is_kept, tl.minimum(least, x), least)
    return tl.sum(mass, 0), tl.sum(count, 0), order_of(tl.min(least, 0))


@jit("num_chunks", "num_positions")
def _statistics_kernel(
    logits_ptr, changed_ptr, best_ptr, rows_ptr, is_changed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    token_ptr, top_ptr, threshold_ptr, mass_ptr, logits_stride, size, num_chunks, num_positions,
    NO_INDEX: tl.constexpr, LARGEST_SCALE: tl.constexpr, TRUNCATE: tl.constexpr, CHANGED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One position."""
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + tl.program_id(0) // num_positions).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best = tl.max(tl.load(best_ptr + place * num_chunks + chunk, mask=chunk < num_chunks, other=NO_INDEX), 0)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    order = (best >> 32).to(tl.int32)
    # NaN and inf, or nothing but -inf
    is_bad = (order >= 0x7F800000) | (order <= -0x7F800001)
    top = value_of(order)
    low = order
    mass = 1.0
    is_changed = 0
    if CHANGED:
        is_changed = tl.load(is_changed_ptr + row)
        changed_ptr += place * size
    logits_ptr += place * logits_stride
    if (temperature > 0) & (is_bad == 0):
        scale = 1.0 / tl.maximum(temperature, 1.0 / LARGEST_SCALE)
        min_p = tl.load(min_p_ptr + row)
        lowest = -3.4028234663852886e38  # all but -inf
        mass, count, low = _mass(logits_ptr, changed_ptr, is_changed, size, top, scale, lowest, min_p, CHANGED, BLOCK)
        if TRUNCATE:
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            if (top_k > 0) & (top_k < count):
                low, _ = _search(
                    logits_ptr, changed_ptr, is_changed, size, top, scale, low, order + 1,
                    count.to(tl.float32), top_k.to(tl.float32), False, CHANGED, BLOCK,
                )  # fmt: skip
                mass, count, low = _mass(
                    logits_ptr, changed_ptr, is_changed, size, top, scale, value_of(low), min_p, CHANGED, BLOCK
                )
            if top_p < 1.0:
                low, mass = _search(
                    logits_ptr, changed_ptr, is_changed, size, top, scale, low, order + 1,
                    mass, mass * top_p, True, CHANGED, BLOCK,
                )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(token_ptr + place, tl.where(is_bad, -1, token))
    tl.store(top_ptr + place, top)
    tl.store(threshold_ptr + place, value_of(low))
    tl.store(mass_ptr + place, tl.where(is_bad, float("nan"), mass))


def softmax_statistics_triton(
    logits_XV: Tensor,
    rows_R: Tensor,
    truncation: Truncation,
    *,
    best_XC: Tensor | None = None,
    changed: Changed | None = None,
    truncate: bool = True,
) -> Statistics:
    """Twin of `softmax_statistics_torch`. `best_XC`: the `chunk_maxima` of the logits, if they are known."""
    if best_XC is None:
        assert changed is None
        best_XC = chunk_maxima(logits_XV)
    num_places, size = logits_XV.shape
    token_X = torch.empty(num_places, dtype=torch.int32, device=logits_XV.device)
    # not rows of one tensor: kernels are compiled for how pointers are aligned
    top_X, threshold_X, mass_X = (torch.empty_like(token_X, dtype=torch.float32) for _ in range(3))
    if num_places:
        num_chunks = best_XC.shape[1]
        _statistics_kernel[(num_places,)](
            logits_XV, logits_XV if changed is None else changed.logits_XV, best_XC, rows_R,
            rows_R if changed is None else changed.is_changed_M, *truncation, token_X, top_X, threshold_X, mass_X,
            logits_XV.stride(0), size, num_chunks, num_places // rows_R.shape[0],
            NO_INDEX=NO_INDEX, LARGEST_SCALE=LARGEST_SCALE, TRUNCATE=truncate, CHANGED=changed is not None,
            BLOCK=min(4096, next_power_of_2(size)), BLOCK_C=next_power_of_2(num_chunks), num_warps=16,
            **pdl_options(logits_XV.device),
        )  # fmt: skip
    return Statistics(token_X, top_X, threshold_X, mass_X)
