"""Acceptance of sampled rows in a few launches that write no probabilities.

Whether a draft stands depends on its own p and q, which follow from its logit and its position's
`softmax_statistics`; what follows it is drawn in one pass over the logits of the position where the drafts end.
Greedy rows are judged by their likeliest tokens and draw nothing.

Shape suffixes: R rows, M rows of the engine, K drafts, Q = 1 + K positions, X = R * Q, V vocabulary, W draft
vocabulary, C chunks of V.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from draftloop.kernels.argmax import NO_INDEX
from draftloop.kernels.ordered import logits_at, order_of, pack
from draftloop.kernels.softmax_statistics import LARGEST_SCALE, Changed, Statistics
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl
from draftloop.sampling.accept_block import TokenRows, append, num_good, outcome_memory
from draftloop.sampling.noise import ACCEPT_NOISE, MAX_BLOCK, SAMPLE_NOISE, log_exponential, noise_key, unit_noise

CHUNK = 2048
"""Logits that one program reads."""


class DrawnRule(IntEnum):
    """How drafts are accepted: the rules of `accept` and `block_verification` that this file knows."""

    STANDARD = 0
    BLOCK = 1
    COIN = 2


@jit()
def _drafted(
    entry, row, q, logits_ptr, changed_ptr, is_changed_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr,
    temperature_ptr, drafts_ptr, draft_probs_ptr, logits_stride, size, num_positions, drafts_width, draft_vocab,
    LARGEST_SCALE: tl.constexpr, DRAWN: tl.constexpr, CHANGED: tl.constexpr,
):  # fmt: skip
    """Of each draft of a row: its id, p, q, and whether q can have drawn it; `accept.drafted_probs`."""
    draft = tl.load(drafts_ptr + row * drafts_width + q, mask=q < num_positions - 1, other=-1)
    place = entry.to(tl.int64) * num_positions + q
    token = tl.load(token_ptr + place, mask=q < num_positions, other=-1)
    known = (draft >= 0) & (draft < size) & (token >= 0)
    top = tl.load(top_ptr + place, mask=known, other=0.0)
    threshold = tl.load(threshold_ptr + place, mask=known, other=0.0)
    mass = tl.load(mass_ptr + place, mask=known, other=1.0)
    is_changed = 0
    if CHANGED:
        is_changed = tl.load(is_changed_ptr + row)
    at = tl.where(known, draft, size)
    x = logits_at(logits_ptr + place * logits_stride, changed_ptr + place * size, is_changed, at, size, CHANGED)
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.maximum(temperature, 1.0 / LARGEST_SCALE)
    p = tl.where(x >= threshold, tl.exp((x - top) * scale) / mass, 0.0)
    p = tl.where(temperature == 0, tl.where(draft == token, 1.0, 0.0), p)
    p = tl.where(known, p, 0.0)
    drawn = tl.zeros_like(p) + 1.0
    valid = (draft >= 0) & (token >= 0)
    if DRAWN:
        inside = (draft >= 0) & (draft < draft_vocab)
        at = (row * drafts_width + q) * draft_vocab + tl.where(inside, draft, 0)
        drawn = tl.load(draft_probs_ptr + at, mask=inside, other=0.0)
        valid = valid & (drawn > 0) & (drawn < float("inf"))
    return draft, p, drawn, valid


@jit()
def _shares(q, p, drawn, valid, num_positions, BLOCK_Q: tl.constexpr):
    """Block verification's c before each position, which drafts are certain, and where the chain must end."""
    certain = (p >= 1) & (valid == 0)
    last = tl.min(tl.where(valid | certain, BLOCK_Q, q), 0)
    ratio = tl.where(valid, p / tl.where(valid, drawn, 1.0), tl.where(certain, 1.0, 0.0))
    shares = tl.zeros_like(p) + 1.0
    share = 1.0
    for draft in range(0, num_positions - 1):
        share = tl.minimum(share * tl.sum(tl.where(q == draft, ratio, 0.0), 0), 1.0)
        shares = tl.where(q == draft + 1, share, shares)
    return shares, certain, last


@jit("num_positions", "drafts_width", "num_chunks")
def _rest_kernel(
    rest_ptr, logits_ptr, changed_ptr, is_changed_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr, temperature_ptr,
    drafts_ptr, draft_probs_ptr, rows_ptr, logits_stride, size, num_positions, drafts_width, draft_vocab, num_chunks,
    LARGEST_SCALE: tl.constexpr, CHANGED: tl.constexpr, BLOCK_Q: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One draft, one chunk of V: what is left of `share * p` beyond q."""
    entry = tl.program_id(0) // (num_positions - 1)
    draft_index = tl.program_id(0) % (num_positions - 1)
    q = tl.arange(0, BLOCK_Q)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    rest = 0.0
    place = entry.to(tl.int64) * num_positions + draft_index
    token = tl.load(token_ptr + place)
    if token >= 0:
        _, p, drawn, valid = _drafted(
            entry, row, q, logits_ptr, changed_ptr, is_changed_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr,
            temperature_ptr, drafts_ptr, draft_probs_ptr, logits_stride, size, num_positions, drafts_width,
            draft_vocab, LARGEST_SCALE, True, CHANGED,
        )  # fmt: skip
        shares, _, _ = _shares(q, p, drawn, valid, num_positions, BLOCK_Q)
        share = tl.sum(tl.where(q == draft_index, shares, 0.0), 0)
        is_changed = 0
        if CHANGED:
            is_changed = tl.load(is_changed_ptr + row)
        index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        logits_ptr += place * logits_stride
        changed_ptr += place * size
        x = logits_at(logits_ptr, changed_ptr, is_changed, index, size, CHANGED)
        scale = 1.0 / tl.maximum(temperature, 1.0 / LARGEST_SCALE)
        weight = tl.exp((x - tl.load(top_ptr + place)) * scale) / tl.load(mass_ptr + place)
        weight = tl.where(x >= tl.load(threshold_ptr + place), weight, 0.0)
        weight = tl.where(temperature == 0, tl.where(index == token, 1.0, 0.0), weight)
        draft_probs_ptr += (row * drafts_width + draft_index) * draft_vocab
        drawn_C = tl.load(draft_probs_ptr + index, mask=index < tl.minimum(draft_vocab, size), other=0.0)
        rest = tl.sum(tl.maximum(share * weight - drawn_C, 0.0), 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(rest_ptr + tl.program_id(0) * num_chunks + tl.program_id(1), rest)


@jit("num_positions", "drafts_width", "num_chunks")
def _decide_kernel(
    num_accepted_ptr, subtracts_ptr, share_ptr, rest_ptr, rates_ptr, seed_ptr, num_tokens_ptr,
    logits_ptr, changed_ptr, is_changed_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr, temperature_ptr,
    drafts_ptr, draft_probs_ptr, rows_ptr, logits_stride, size, num_positions, drafts_width, draft_vocab, num_chunks,
    STANDARD: tl.constexpr, BLOCK: tl.constexpr, LARGEST_SCALE: tl.constexpr, MAX_BLOCK: tl.constexpr,
    DRAWN: tl.constexpr, CHANGED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: how many drafts stand, whether q is subtracted from what follows, and from which share of p."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    draft, p, drawn, valid = _drafted(
        entry, row, q, logits_ptr, changed_ptr, is_changed_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr,
        temperature_ptr, drafts_ptr, draft_probs_ptr, logits_stride, size, num_positions, drafts_width, draft_vocab,
        LARGEST_SCALE, DRAWN, CHANGED,
    )  # fmt: skip
    is_draft = q < num_positions - 1
    seed = tl.load(seed_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + row).to(tl.int64)
    share = 1.0
    if BLOCK:
        shares, certain, last = _shares(q, p, drawn, valid, num_positions, BLOCK_Q)
        rest = shares * (1.0 - p)
        if DRAWN:
            chunk = tl.arange(0, BLOCK_C)
            parts = tl.load(
                rest_ptr + (entry * (num_positions - 1) + q)[:, None] * num_chunks + chunk[None, :],
                mask=is_draft[:, None] & (chunk < num_chunks)[None, :],
                other=0.0,
            )
            rest = tl.where(certain, 0.0, tl.sum(parts, 1))
        whole = rest + 1.0 - shares
        # 0 / 0 where p and q are the same and everything before stands: then everything behind does too
        chance = tl.where(whole == 0.0, 1.0, rest / tl.where(whole == 0.0, 1.0, whole))
        chance = tl.where(q == last, shares, chance)
        # draft i stands by the chance behind it, with its own noise
        noise = unit_noise(noise_key(seed, num_tokens * MAX_BLOCK + q - 1, ACCEPT_NOISE))
        may_stand = (q > 0) & (q <= last) & (q < num_positions) & (noise < chance)
        num_accepted = tl.max(tl.where(may_stand, q, 0), 0)
        subtracts = (num_accepted < last).to(tl.int32)
        share = tl.sum(tl.where(q == num_accepted, shares, 0.0), 0)
    else:
        noise = unit_noise(noise_key(seed, num_tokens + q, ACCEPT_NOISE))
        if STANDARD:
            # p(x) = 1 leaves no other token, so the draft may stand however it was chosen
            accepted = ((valid & (noise * drawn < p)) | (p >= 1)) if DRAWN else noise < p
        else:
            rate = tl.load(rates_ptr + q, mask=is_draft, other=0.0)
            accepted = (noise < rate) & (draft >= 0) & (draft < size)
        num_accepted = tl.min(tl.where(accepted & is_draft, BLOCK_Q, q), 0)
        subtracts = tl.sum(tl.where((q == num_accepted) & is_draft & valid, 1, 0), 0)
        if not STANDARD:
            subtracts = 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(num_accepted_ptr + entry, num_accepted)
    tl.store(subtracts_ptr + entry, subtracts)
    tl.store(share_ptr + entry, share)


@jit("num_positions", "drafts_width", "num_chunks")
def _draw_kernel(
    best_ptr, num_accepted_ptr, subtracts_ptr, share_ptr, seed_ptr, num_tokens_ptr,
    logits_ptr, changed_ptr, is_changed_ptr, token_ptr, top_ptr, threshold_ptr, mass_ptr, temperature_ptr,
    drafts_ptr, draft_probs_ptr, rows_ptr, logits_stride, size, num_positions, drafts_width, draft_vocab, num_chunks,
    LARGEST_SCALE: tl.constexpr, NO_INDEX: tl.constexpr, DRAWN: tl.constexpr, CHANGED: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, one chunk: its best token by p and noise, and by what q leaves of p."""
    entry = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    num_accepted = tl.load(num_accepted_ptr + entry)
    place = entry.to(tl.int64) * num_positions + num_accepted
    temperature = tl.load(temperature_ptr + row)
    token = tl.load(token_ptr + place)
    best = tl.full([], NO_INDEX, tl.int64)
    best_left = tl.full([], NO_INDEX, tl.int64)
    if (temperature > 0) & (token >= 0):
        is_changed = 0
        if CHANGED:
            is_changed = tl.load(is_changed_ptr + row)
        index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        logits_ptr += place * logits_stride
        changed_ptr += place * size
        x = logits_at(logits_ptr, changed_ptr, is_changed, index, size, CHANGED)
        scale = 1.0 / tl.maximum(temperature, 1.0 / LARGEST_SCALE)
        p = tl.exp((x - tl.load(top_ptr + place)) * scale) / tl.load(mass_ptr + place)
        p = tl.where(x >= tl.load(threshold_ptr + place), p, 0.0)
        key = noise_key(tl.load(seed_ptr + row), tl.load(num_tokens_ptr + row) + num_accepted, SAMPLE_NOISE)
        noise = log_exponential(key, index)
        score = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)) - noise, float("-inf"))
        best = tl.max(pack(order_of(score), index, index < size), 0)
        if tl.load(subtracts_ptr + entry) != 0:
            if DRAWN:
                draft_probs_ptr += (row * drafts_width + num_accepted) * draft_vocab
                drawn = tl.load(draft_probs_ptr + index, mask=index < draft_vocab, other=0.0)
            else:
                drawn = tl.where(index == tl.load(drafts_ptr + row * drafts_width + num_accepted), 1.0, 0.0)
            left = tl.load(share_ptr + entry) * p - drawn
            score = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)) - noise, float("-inf"))
            best_left = tl.max(pack(order_of(score), index, index < size), 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    best_ptr += (entry * num_chunks + tl.program_id(1)) * 2
    tl.store(best_ptr, best)
    tl.store(best_ptr + 1, best_left)


@jit("num_positions", "drafts_width", "num_chunks", "tokens_width", "outcome_width")
def _finish_kernel(
    best_ptr, num_accepted_ptr, token_ptr, temperature_ptr, rows_ptr, drafts_ptr, tokens_ptr, num_tokens_ptr,
    max_tokens_ptr, num_emitted_ptr, outcome_ptr, num_positions, drafts_width, num_chunks, tokens_width, outcome_width,
    NO_INDEX: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    chunk = tl.arange(0, BLOCK_C)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    num_accepted = tl.load(num_accepted_ptr + entry)
    best_ptr += (entry * num_chunks + chunk) * 2
    best = tl.max(tl.load(best_ptr, mask=chunk < num_chunks, other=NO_INDEX), 0)
    left = tl.max(tl.load(best_ptr + 1, mask=chunk < num_chunks, other=NO_INDEX), 0)
    # where q leaves nothing, p and q are the same but for rounding
    chosen = tl.where((left >> 32) > -0x7F800001, left, best)
    target = 0x7FFFFFFF - (chosen & 0x7FFFFFFF).to(tl.int32)
    token = tl.load(token_ptr + entry * num_positions + q, mask=q < num_positions, other=-1)
    likeliest = tl.sum(tl.where(q == num_accepted, token, 0), 0)
    target = tl.where(tl.load(temperature_ptr + row) == 0, likeliest, target)
    is_draft = q < num_positions - 1
    draft = tl.load(drafts_ptr + row * drafts_width + q, mask=is_draft, other=-1)
    num_tokens = tl.load(num_tokens_ptr + row)
    room = tl.load(max_tokens_ptr + row) - num_tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    append(
        entry, row, q, draft, num_accepted, target, num_good(token < 0, q, num_accepted, BLOCK_Q),
        tl.sum((draft != -1).to(tl.int32), 0), num_tokens, room,
        tokens_ptr, num_tokens_ptr, num_emitted_ptr, outcome_ptr, tokens_width, outcome_width,
    )  # fmt: skip


def accept_drawn_triton(
    rows_R: Tensor,
    logits_XV: Tensor,
    statistics: Statistics,
    state: TokenRows,
    temperature_M: Tensor,
    draft_probs_MKW: Tensor | None,
    *,
    rule: DrawnRule = DrawnRule.STANDARD,
    rates_K: Tensor | None = None,
    changed: Changed | None = None,
    num_drafts: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Twin of `commit.accept_rows_sampled` by `rule`; COIN takes `rates_K`. See `accept_block_triton`."""
    num_rows, num_positions, device = rows_R.shape[0], num_drafts + 1, rows_R.device
    num_emitted_R, outcome_RO = outcome_memory(rows_R, width)
    if not num_rows:
        return num_emitted_R, outcome_RO
    size, drafts_width = logits_XV.shape[1], state.drafts_MK.shape[1]
    num_chunks = -(-size // CHUNK)
    if not num_drafts or rule is DrawnRule.COIN:
        draft_probs_MKW = None
    if not num_drafts:
        rule = DrawnRule.STANDARD
    drawn = draft_probs_MKW is not None
    num_accepted_R, subtracts_R = torch.empty_like(num_emitted_R), torch.empty_like(num_emitted_R)
    share_R = torch.empty_like(num_emitted_R, dtype=torch.float32)
    sources = (
        logits_XV, logits_XV if changed is None else changed.logits_XV,
        rows_R if changed is None else changed.is_changed_M, *statistics, temperature_M, state.drafts_MK,
        logits_XV if draft_probs_MKW is None else draft_probs_MKW, rows_R, logits_XV.stride(0), size, num_positions,
        drafts_width, 0 if draft_probs_MKW is None else draft_probs_MKW.shape[2], num_chunks,
    )  # fmt: skip
    common = {"LARGEST_SCALE": LARGEST_SCALE, "CHANGED": changed is not None, **pdl_options(device)}
    block_q, block_c = next_power_of_2(width), next_power_of_2(num_chunks)
    rest_XC = share_R
    if drawn and rule is DrawnRule.BLOCK:
        rest_XC = torch.empty(num_rows * num_drafts, num_chunks, dtype=torch.float32, device=device)
        _rest_kernel[(num_rows * num_drafts, num_chunks)](
            rest_XC, *sources, BLOCK_Q=block_q, CHUNK=CHUNK, num_warps=8, **common
        )
    _decide_kernel[(num_rows,)](
        num_accepted_R, subtracts_R, share_R, rest_XC, share_R if rates_K is None else rates_K, state.seed_M,
        state.num_tokens_M, *sources, STANDARD=rule is DrawnRule.STANDARD, BLOCK=rule is DrawnRule.BLOCK,
        MAX_BLOCK=MAX_BLOCK, DRAWN=drawn, BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=1, **common,
    )  # fmt: skip
    best_RC2 = torch.empty(num_rows, num_chunks, 2, dtype=torch.int64, device=device)
    _draw_kernel[(num_rows, num_chunks)](
        best_RC2, num_accepted_R, subtracts_R, share_R, state.seed_M, state.num_tokens_M, *sources,
        NO_INDEX=NO_INDEX, DRAWN=drawn, CHUNK=CHUNK, num_warps=8, **common,
    )  # fmt: skip
    _finish_kernel[(num_rows,)](
        best_RC2, num_accepted_R, statistics.token_X, temperature_M, rows_R, state.drafts_MK, state.tokens_ML,
        state.num_tokens_M, state.max_tokens_M, num_emitted_R, outcome_RO, num_positions, drafts_width, num_chunks,
        state.tokens_ML.shape[1], 3 + width, NO_INDEX=NO_INDEX, BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=1,
        **pdl_options(device),
    )  # fmt: skip
    return num_emitted_R, outcome_RO
