"""The target's choice at every place of a tree, drawn in one pass over the logits that writes no probabilities.

Shape suffixes: R rows, M rows of the engine, Q places, X = R * Q, V vocabulary, C chunks of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.ordered import logits_at, order_of, pack
from draftloop.kernels.softmax_statistics import LARGEST_SCALE, Truncation, softmax_statistics_triton
from draftloop.kernels.triton_import import jit, pdl_options, tl
from draftloop.kvcache.rows import RowState
from draftloop.sampling.noise import SAMPLE_NOISE, log_exponential, noise_key

CHUNK = 2048
"""Logits that one program reads."""


@jit("num_places")
def _draw_kernel(
    best_ptr, logits_ptr, rows_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr, temperature_ptr, seed_ptr,
    num_tokens_ptr, heights_ptr, logits_stride, size, num_places,
    LARGEST_SCALE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One place, one chunk: its best token by p and noise, or a greedy row's likeliest one."""
    place = tl.program_id(0)
    height = tl.load(heights_ptr + place % num_places)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + place // num_places).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    token = tl.load(token_ptr + place)
    score = tl.where((index == token) & (token >= 0), 0.0, float("-inf"))
    if (temperature > 0) & (token >= 0):
        x = logits_at(logits_ptr + place.to(tl.int64) * logits_stride, logits_ptr, 0, index, size, False)
        scale = 1.0 / tl.maximum(temperature, 1.0 / LARGEST_SCALE)
        p = tl.exp((x - tl.load(top_ptr + place)) * scale) / tl.load(mass_ptr + place)
        p = tl.where(x >= tl.load(threshold_ptr + place), p, 0.0)
        key = noise_key(tl.load(seed_ptr + row), tl.load(num_tokens_ptr + row) + height, SAMPLE_NOISE)
        score = tl.log(tl.where(p > 0, p, 1.0)) - log_exponential(key, index)
        score = tl.where(p > 0, score, float("-inf"))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    best = tl.max(pack(order_of(score), index, index < size), 0)
    tl.store(best_ptr + place * tl.num_programs(1) + tl.program_id(1), best)


def draw_places_triton(
    state: RowState, rows_R: Tensor, logits_XV: Tensor, heights_Q: Tensor, *, truncate: bool
) -> Tensor:
    """int64 [X, C]: each place's choice, packed as `argmax.chunk_maxima` packs the likeliest token.

    Drawn by each row's parameters and the noise of the position, which is `heights_Q` (int32) past the row's
    tokens. Of places whose logits say nothing, all maxima are -inf. `truncate` False: no row asks for top_k or top_p.
    """
    num_entries, size = logits_XV.shape
    num_chunks = -(-size // CHUNK)
    best_XC = torch.empty(num_entries, num_chunks, dtype=torch.int64, device=rows_R.device)
    truncation = Truncation(state.temperature_M, state.top_k_M, state.top_p_M, state.min_p_M)
    statistics = softmax_statistics_triton(logits_XV, rows_R, truncation, truncate=truncate)
    if num_entries:
        _draw_kernel[(num_entries, num_chunks)](
            best_XC, logits_XV, rows_R, *statistics, state.temperature_M, state.seed_M, state.num_tokens_M, heights_Q,
            logits_XV.stride(0), size, heights_Q.shape[0], LARGEST_SCALE=LARGEST_SCALE, CHUNK=CHUNK, num_warps=4,
            **pdl_options(rows_R.device),
        )  # fmt: skip
    return best_XC
