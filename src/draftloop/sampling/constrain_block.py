"""`constraints.constrain` in kernels: one pass over the logits of the rows that ask for it, none over the others'.

What a row's rules say about single tokens is laid out over the vocabulary first: how often it said each, what is
added to each, and, for each position, which are allowed. The pass then reads those beside the logits.

Shape suffixes: R rows, K drafts, Q = 1 + K positions, X = R * Q, V vocabulary, W words of a mask, C chunks of V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.ordered import order_of, pack
from draftloop.kernels.softmax_statistics import Changed
from draftloop.kernels.triton_import import constant, jit, next_power_of_2, pdl_options, tl
from draftloop.kvcache.constraint_rows import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_IDS, NO_ID
from draftloop.kvcache.rows import RowState

CHUNK = 2048
"""Logits that one program reads."""
TOKENS_BLOCK, WORDS_BLOCK = 1024, 1024
IN_PROMPT = -0x80000000
"""Is set in a token's count if the prompt has it; the other bits say how often the output has."""

_IN_PROMPT_C, _NO_ID_C = constant(IN_PROMPT), constant(NO_ID)


@jit("tokens_width")
def _lay_out_kernel(
    counts_ptr, bias_ptr, rows_ptr, is_active_ptr, tokens_ptr, num_tokens_ptr, num_prompt_ptr, presence_ptr,
    frequency_ptr, repetition_ptr, bias_ids_ptr, biases_ptr, tokens_width, size,
    NUM_BIASES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, one block of its tokens: counts of those, and with the first block its biases."""
    entry = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    if tl.load(is_active_ptr + row) != 0:
        if start == 0:
            place = row * NUM_BIASES + tl.arange(0, NUM_BIASES)
            biased = tl.load(bias_ids_ptr + place)
            tl.store(bias_ptr + entry * size + biased, tl.load(biases_ptr + place), mask=biased != _NO_ID_C)
        neutral = (tl.load(presence_ptr + row) == 0) & (tl.load(frequency_ptr + row) == 0)
        num_tokens = tl.where(neutral & (tl.load(repetition_ptr + row) == 1), 0, tl.load(num_tokens_ptr + row))
        if start < num_tokens:
            index = start + tl.arange(0, BLOCK)
            token = tl.load(tokens_ptr + row * tokens_width + index, mask=index < num_tokens, other=-1)
            known = (token >= 0) & (token < size)
            num_prompt = tl.load(num_prompt_ptr + row)
            count_ptr = counts_ptr + entry * size + token
            tl.atomic_or(count_ptr, _IN_PROMPT_C, mask=known & (index < num_prompt), sem="relaxed")
            tl.atomic_add(count_ptr, 1, mask=known & (index >= num_prompt), sem="relaxed")


@jit("tokens_width", "num_positions", "max_positions", "drafts_width")
def _mask_kernel(
    mask_ptr, rows_ptr, is_active_ptr, tokens_ptr, num_tokens_ptr, num_prompt_ptr, min_length_ptr, drafts_ptr,
    allowed_ptr, early_ptr, grammar_ptr, bad_words_ptr, tokens_width, num_positions, max_positions, drafts_width,
    num_words, NUM_BAD: tl.constexpr, BAD_TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One position: the tokens that are allowed there, bad words taken out."""
    place = tl.program_id(0).to(tl.int64)
    position = tl.program_id(0) % num_positions
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + tl.program_id(0) // num_positions).to(tl.int64)
    if tl.load(is_active_ptr + row) != 0:
        num_tokens = tl.load(num_tokens_ptr + row)
        is_early = num_tokens + position < tl.load(min_length_ptr + row)
        mask_ptr += place * num_words
        grammar_ptr += (row * max_positions + position) * num_words
        for start in range(0, num_words, BLOCK):
            word = start + tl.arange(0, BLOCK)
            allowed = tl.load(allowed_ptr + row * num_words + word, mask=word < num_words, other=0)
            early = tl.load(early_ptr + row * num_words + word, mask=word < num_words, other=0)
            grammar = tl.load(grammar_ptr + word, mask=word < num_words, other=0)
            tl.store(mask_ptr + word, tl.where(is_early, early, allowed) & grammar, mask=word < num_words)
        # the words of this position are written by other threads than those that clear bits in them
        tl.debug_barrier()
        bad = tl.arange(0, NUM_BAD)
        behind = tl.arange(0, BAD_TOKENS)
        words_ptr = bad_words_ptr + (row * NUM_BAD + bad) * BAD_TOKENS
        ids = tl.load(words_ptr[:, None] + behind[None, :])
        last = tl.load(words_ptr + BAD_TOKENS - 1)
        # the last column is the token to come
        where = num_tokens + position + behind - (BAD_TOKENS - 1)
        is_output = (where >= tl.load(num_prompt_ptr + row)) & (behind < BAD_TOKENS - 1)
        said = tl.load(tokens_ptr + row * tokens_width + where, mask=is_output & (where < num_tokens), other=-2)
        ahead = where - num_tokens
        drafts_ptr += row * drafts_width
        said = tl.where(ahead >= 0, tl.load(drafts_ptr + ahead, mask=is_output & (ahead >= 0), other=-2), said)
        same = (ids == _NO_ID_C) | (ids == said[None, :]) | (behind[None, :] == BAD_TOKENS - 1)
        is_next = (tl.min(same.to(tl.int32), 1) > 0) & (last >= 0)
        cleared = (tl.full([NUM_BAD], 1, tl.int32) << (last & 31)) ^ -1
        tl.atomic_and(mask_ptr + last // 32, cleared, mask=is_next, sem="relaxed")


@jit("num_positions", "drafts_width")
def _constrain_kernel(
    changed_ptr, best_ptr, logits_ptr, mask_ptr, counts_ptr, bias_ptr, rows_ptr, is_active_ptr, presence_ptr,
    frequency_ptr, repetition_ptr, drafts_ptr, logits_stride, size, num_words, num_positions, drafts_width,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One position, one chunk: `constraints.constrain`, and the chunk's maximum whether the row asked or not."""
    place = tl.program_id(0).to(tl.int64)
    entry = place // num_positions
    position = tl.program_id(0) % num_positions
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    x = tl.load(logits_ptr + place * logits_stride + index, mask=index < size, other=0.0).to(tl.float32)
    if tl.load(is_active_ptr + row) != 0:
        x += tl.load(bias_ptr + entry * size + index, mask=index < size, other=0.0)
        count = tl.load(counts_ptr + entry * size + index, mask=index < size, other=0)
        outputs = count & 0x7FFFFFFF
        drafts_ptr += row * drafts_width
        for before in range(0, position):
            outputs += (index == tl.load(drafts_ptr + before)).to(tl.int32)
        is_known = (count != 0) | (outputs != 0)
        repetition = tl.load(repetition_ptr + row)
        x = tl.where(is_known, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x -= tl.load(frequency_ptr + row) * outputs.to(tl.float32)
        x -= tl.where(outputs != 0, tl.load(presence_ptr + row), 0.0)
        words = tl.load(mask_ptr + place * num_words + index // 32, mask=index < size, other=0)
        x = tl.where((words >> (index & 31)) & 1 != 0, x, float("-inf"))
        tl.store(changed_ptr + place * size + index, x, mask=index < size)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    order = tl.where(x != x, 0x7FFFFFFF, order_of(x))
    tl.store(best_ptr + place * tl.num_programs(1) + tl.program_id(1), tl.max(pack(order, index, index < size), 0))


def constrain_triton(state: RowState, rows_R: Tensor, logits_XV: Tensor) -> tuple[Changed, Tensor]:
    """Twin of `constraints.constrain` without processors, for rows that have not been accepted yet.

    Returns the logits of the rows that ask for it, and the `chunk_maxima` int64 [X, C] of all rows as they are then, in
    chunks of `CHUNK`.
    """
    rules, device = state.constraints, rows_R.device
    assert rules is not None
    num_rows, num_places, size = rows_R.shape[0], *logits_XV.shape
    num_positions = num_places // max(num_rows, 1)
    num_chunks, num_words, width = -(-size // CHUNK), rules.allowed_MW.shape[1], state.tokens_ML.shape[1]
    best_XC = torch.empty(num_places, num_chunks, dtype=torch.int64, device=device)
    changed = Changed(torch.empty(num_places, size, dtype=torch.float32, device=device), rules.is_active_M)
    if not num_rows:
        return changed, best_XC
    counts_RV = torch.zeros(num_rows, size, dtype=torch.int32, device=device)
    bias_RV = torch.zeros(num_rows, size, dtype=torch.float32, device=device)
    mask_XW = torch.empty(num_places, num_words, dtype=torch.int32, device=device)
    penalties = rules.presence_M, rules.frequency_M, rules.repetition_M
    options = pdl_options(device)
    _lay_out_kernel[(num_rows, -(-width // TOKENS_BLOCK))](
        counts_RV, bias_RV, rows_R, rules.is_active_M, state.tokens_ML, state.num_tokens_M, rules.num_prompt_M,
        *penalties, rules.bias_ids_MB, rules.bias_MB, width, size, NUM_BIASES=MAX_BIASED_IDS, BLOCK=TOKENS_BLOCK,
        num_warps=4, **options,
    )  # fmt: skip
    _mask_kernel[(num_places,)](
        mask_XW, rows_R, rules.is_active_M, state.tokens_ML, state.num_tokens_M, rules.num_prompt_M,
        rules.min_length_M, state.drafts_MK, rules.allowed_MW, rules.early_MW, rules.grammar_MQW, rules.bad_words_MSN,
        width, num_positions, rules.grammar_MQW.shape[1], state.drafts_MK.shape[1], num_words,
        NUM_BAD=MAX_BAD_WORDS, BAD_TOKENS=MAX_BAD_WORD_TOKENS, BLOCK=min(WORDS_BLOCK, next_power_of_2(num_words)),
        num_warps=4, **options,
    )  # fmt: skip
    _constrain_kernel[(num_places, num_chunks)](
        changed.logits_XV, best_XC, logits_XV, mask_XW, counts_RV, bias_RV, rows_R, rules.is_active_M, *penalties,
        state.drafts_MK, logits_XV.stride(0), size, num_words, num_positions, state.drafts_MK.shape[1], CHUNK=CHUNK,
        num_warps=8, **options,
    )  # fmt: skip
    return changed, best_XC
