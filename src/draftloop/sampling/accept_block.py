"""Greedy and synthetic acceptance of a block, and what follows from it, in one launch per batch.

Compares drafts with the target's choices, clips to the row's limit, appends what is emitted to its tokens,
and reports: what `sampling.commit` does in some thirty small operations.

Shape suffixes: R rows, M rows of the engine, K drafts, Q = 1 + K verified positions, V vocabulary, L sequence
length, C chunks of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.argmax import NO_INDEX, UNPACK
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl
from draftloop.sampling.noise import ACCEPT_NOISE, noise_key, unit_noise


class TokenRows(NamedTuple):
    """What acceptance reads and writes of the row state; int32, seeds int64."""

    drafts_MK: Tensor
    tokens_ML: Tensor
    num_tokens_M: Tensor
    max_tokens_M: Tensor
    seed_M: Tensor


@jit()
def num_good(bad, q, num_accepted, BLOCK_Q: tl.constexpr):
    """Tokens up to the one behind the accepted drafts, or before the first position whose logits say nothing."""
    return tl.minimum(num_accepted + 1, tl.min(tl.where(bad, q, BLOCK_Q), 0))


@jit()
def append(
    entry, row, q, accepted, num_accepted, target, most, num_drafted, num_tokens, room,
    tokens_ptr, num_tokens_ptr, num_emitted_ptr, outcome_ptr, tokens_width, outcome_width,
):  # fmt: skip
    """Lengthen a row by its accepted drafts and the `target` behind them, at most `most`, and report."""
    num_emitted = tl.maximum(tl.minimum(most, room), 0)
    emitted = tl.where(q < num_accepted, accepted, target)
    emitted = tl.where(q < num_emitted, emitted, -1)
    # the padding row has no room: nothing of it changes
    tl.store(tokens_ptr + row * tokens_width + num_tokens + q, emitted, mask=q < num_emitted)
    tl.store(num_tokens_ptr + row, num_tokens + num_emitted, mask=num_emitted > 0)
    tl.store(num_emitted_ptr + entry, num_emitted)
    outcome_row_ptr = outcome_ptr + entry * outcome_width
    tl.store(outcome_row_ptr, num_emitted)
    tl.store(outcome_row_ptr + 1, tl.minimum(num_accepted, num_emitted))
    tl.store(outcome_row_ptr + 2, num_drafted)
    tl.store(outcome_row_ptr + 3 + q, emitted, mask=q < outcome_width - 3)


@jit("drafts_width", "tokens_width", "outcome_width", "num_chunks", "num_positions", "vocab_size")
def _accept_kernel(
    choice_ptr,
    rows_ptr,
    drafts_ptr,
    tokens_ptr,
    num_tokens_ptr,
    max_tokens_ptr,
    seed_ptr,
    rates_ptr,
    num_emitted_ptr,
    outcome_ptr,
    drafts_width,
    tokens_width,
    outcome_width,
    num_chunks,
    num_positions,
    vocab_size,
    RATES: tl.constexpr,
    NO_INDEX: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    chunk = tl.arange(0, BLOCK_C)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    best = tl.load(
        choice_ptr + (entry * num_positions + q)[:, None] * num_chunks + chunk[None, :],
        mask=(q < num_positions)[:, None] & (chunk < num_chunks)[None, :],
        other=NO_INDEX,
    )
    top = tl.max(best, 1)
    target = (UNPACK - (top & UNPACK)).to(tl.int32)
    # as integers in the order of floats: NaN and inf, or nothing but -inf
    largest = (top >> 32).to(tl.int32)
    bad = (largest >= 0x7F800000) | (largest <= -0x7F800001)
    is_draft = q < num_positions - 1
    draft = tl.load(drafts_ptr + row * drafts_width + q, mask=is_draft, other=-1)
    num_tokens = tl.load(num_tokens_ptr + row)
    room = tl.load(max_tokens_ptr + row) - num_tokens
    if RATES:
        noise = unit_noise(noise_key(tl.load(seed_ptr + row), num_tokens + q, ACCEPT_NOISE))
        rate = tl.load(rates_ptr + q, mask=is_draft, other=0.0)
        # a target can only read what it knows
        accepted = is_draft & (noise < rate) & (draft >= 0) & (draft < vocab_size)
    else:
        accepted = is_draft & (draft == target)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # the place after the last draft is never accepted, so there is always an end
    num_accepted = tl.min(tl.where(accepted, BLOCK_Q, q), 0)
    append(
        entry, row, q, draft, num_accepted, target, num_good(bad, q, num_accepted, BLOCK_Q),
        tl.sum((draft != -1).to(tl.int32), 0), num_tokens, room,
        tokens_ptr, num_tokens_ptr, num_emitted_ptr, outcome_ptr, tokens_width, outcome_width,
    )  # fmt: skip


def outcome_memory(rows_R: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Uninitialised `num_emitted` int32 [R] and `outcome` int32 [R, 3 + width]."""
    num_rows, device = rows_R.shape[0], rows_R.device
    num_emitted_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    return num_emitted_R, torch.empty(num_rows, 3 + width, dtype=torch.int32, device=device)


def accept_block_triton(
    rows_R: Tensor,
    best_XC: Tensor,
    state: TokenRows,
    rates_K: Tensor | None,
    *,
    vocab_size: int,
    num_drafts: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Twin of `commit.accept_rows_greedy`, or with `rates_K` (float32) of `commit.accept_rows_synthetic`, given the
    `chunk_maxima` of the logits.

    Returns `num_emitted` int32 [R] and `outcome` int32 [R, 3 + width]; see `commit.Outcome`.
    """
    num_rows = rows_R.shape[0]
    num_emitted_R, outcome_RO = outcome_memory(rows_R, width)
    if num_rows:
        _accept_kernel[(num_rows,)](
            best_XC,
            rows_R,
            *state,
            rows_R if rates_K is None else rates_K,
            num_emitted_R,
            outcome_RO,
            state.drafts_MK.shape[1],
            state.tokens_ML.shape[1],
            3 + width,
            best_XC.shape[1],
            num_drafts + 1,
            vocab_size,
            RATES=rates_K is not None,
            NO_INDEX=NO_INDEX,
            UNPACK=UNPACK,
            BLOCK_Q=next_power_of_2(width),
            BLOCK_C=next_power_of_2(best_XC.shape[1]),
            num_warps=1,
            **pdl_options(rows_R.device),
        )
    return num_emitted_R, outcome_RO
