"""Drafts drawn from their logits, and their distributions kept for acceptance, in one pass over them.

Shape suffixes: R rows, J drafts of each row that come at once, N = R * J, K drafts, M rows of the engine, W draft
vocabulary, V vocabulary of the kept distributions, C chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.ordered import logits_at, order_of, pack
from draftloop.kernels.softmax_statistics import LARGEST_SCALE, Truncation, softmax_statistics_triton
from draftloop.kernels.triton_import import jit, pdl_options, tl
from draftloop.kvcache.rows import RowState
from draftloop.sampling.noise import DRAFT_NOISE, MAX_BLOCK, log_exponential, noise_key

CHUNK = 2048
"""Logits that one program reads."""


@jit()
def _place_of_draft(rows_ptr, num_drafted_ptr, num_per_row, COUNTED: tl.constexpr):
    """The row of the engine and the draft's place in its block."""
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry // num_per_row).to(tl.int64)
    draft = entry % num_per_row
    if COUNTED:
        draft = tl.load(num_drafted_ptr + row)
    return row, draft


@jit("num_per_row", "drafts_width")
def _clear_kernel(
    probs_ptr, rows_ptr, num_drafted_ptr, num_per_row, drafts_width, probs_width,
    COUNTED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One draft, one chunk of V: nothing has any probability."""
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row, draft = _place_of_draft(rows_ptr, num_drafted_ptr, num_per_row, COUNTED)
    width = tl.where(draft < drafts_width, probs_width, 0)
    probs_ptr += (row * drafts_width + draft) * probs_width
    tl.store(probs_ptr + index, tl.zeros([CHUNK], tl.float32), mask=index < width)


@jit("num_per_row", "drafts_width")
def _draw_drafts_kernel(
    best_ptr, probs_ptr, logits_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr, rows_ptr, temperature_ptr, seed_ptr,
    num_tokens_ptr, num_drafted_ptr, target_ids_ptr, logits_stride, size, num_per_row, drafts_width, probs_width,
    LARGEST_SCALE: tl.constexpr, MAX_BLOCK: tl.constexpr, COUNTED: tl.constexpr, MAPPED: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One draft, one chunk: its probabilities, and its best token by them and noise."""
    place = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    target = index
    if MAPPED:
        target = tl.load(target_ids_ptr + index, mask=index < size, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row, draft = _place_of_draft(rows_ptr, num_drafted_ptr, num_per_row, COUNTED)
    temperature = tl.load(temperature_ptr + row)
    token = tl.load(token_ptr + place)
    x = logits_at(logits_ptr + place * logits_stride, logits_ptr, 0, index, size, False)
    scale = 1.0 / tl.maximum(temperature, 1.0 / LARGEST_SCALE)
    p = tl.exp((x - tl.load(top_ptr + place)) * scale) / tl.load(mass_ptr + place)
    p = tl.where(x >= tl.load(threshold_ptr + place), p, 0.0)
    p = tl.where(temperature == 0, tl.where(index == token, 1.0, 0.0), p)
    position = tl.load(num_tokens_ptr + row).to(tl.int64) * MAX_BLOCK + draft
    noise = log_exponential(noise_key(tl.load(seed_ptr + row), position, DRAFT_NOISE), index)
    score = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)) - noise, float("-inf"))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # logits that say nothing: acceptance must not take the draft for one that was drawn
    p = tl.where(token < 0, tl.where(index < size, float("nan"), 0.0), p)
    width = size if MAPPED else probs_width
    width = tl.where(draft < drafts_width, width, 0)
    probs_ptr += (row * drafts_width + draft) * probs_width
    tl.store(probs_ptr + target, p, mask=index < width)
    best = tl.max(pack(order_of(score), index, index < size), 0)
    tl.store(best_ptr + place * tl.num_programs(1) + tl.program_id(1), best)


def draw_drafts_triton(
    state: RowState, rows_R: Tensor, logits_NW: Tensor, target_ids_W: Tensor | None, *, counted: bool
) -> Tensor:
    """Draw a draft from each row of logits, by temperature and min_p of its request, and keep its distribution.

    Rows bring J logits each: the first J places of their block, or with `counted` one for the next place. Returns
    int64 [N, C], of which the largest of a draft is the index of its token in W; see `argmax.chunk_maxima`.
    """
    probs_MKV = state.draft_probs_MKV
    assert probs_MKV is not None
    num_drafts, size, device = *logits_NW.shape, logits_NW.device
    drafts_width, probs_width = probs_MKV.shape[1:]
    num_per_row = num_drafts // max(rows_R.shape[0], 1)
    mapped = target_ids_W is not None
    num_chunks = -(-(size if mapped else max(size, probs_width)) // CHUNK)
    best_NC = torch.empty(num_drafts, num_chunks, dtype=torch.int64, device=device)
    if not num_drafts:
        return best_NC
    # any distribution drafts without loss; top_k and top_p are left to the target
    truncation = Truncation(state.temperature_M, state.top_k_M, state.top_p_M, state.min_p_M)
    statistics = softmax_statistics_triton(logits_NW, rows_R, truncation, truncate=False)
    options = pdl_options(device)
    if mapped:  # other drafters, with other vocabularies, may have drafted here
        _clear_kernel[(num_drafts, -(-probs_width // CHUNK))](
            probs_MKV, rows_R, state.num_drafted_M, num_per_row, drafts_width, probs_width, COUNTED=counted,
            CHUNK=CHUNK, num_warps=4, **options,
        )  # fmt: skip
    _draw_drafts_kernel[(num_drafts, num_chunks)](
        best_NC, probs_MKV, logits_NW, *statistics, rows_R, state.temperature_M, state.seed_M, state.num_tokens_M,
        state.num_drafted_M, target_ids_W if mapped else rows_R, logits_NW.stride(0), size, num_per_row, drafts_width,
        probs_width, LARGEST_SCALE=LARGEST_SCALE, MAX_BLOCK=MAX_BLOCK, COUNTED=counted, MAPPED=mapped, CHUNK=CHUNK,
        num_warps=8, **options,
    )  # fmt: skip
    return best_NC
