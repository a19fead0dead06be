"""The likeliest token of each row, straight from hidden states: the output head without its logits.

Programs walk over blocks of the vocabulary and keep the best token of each row, so what is written is one packed
maximum per row and program, as `argmax.chunk_maxima` would make of the logits. Weights are the M side of the dots,
as in `linear_wide`.

Shape suffixes: T rows, K hidden size, V vocabulary, C programs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.argmax import chunk_maxima, maxima_torch
from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear_wide import DTYPES, MIN_PART, Range, TokenParts, gpu_name, token_parts
from draftloop.kernels.triton_import import TensorDescriptor, jit, pdl_options, tl


class HeadTiles(NamedTuple):
    """Launch parameters."""

    block_n: int
    """Vocabulary of a tile."""
    block_k: int
    programs: int
    num_warps: int
    num_stages: int


MAX_TOKENS = 256
"""Of one program: more than a head's largest tiles hold."""
MEASURED: dict[str, dict[tuple[int, int], dict[Range, HeadTiles]]] = {
    "NVIDIA H200": {
        (32000, 4096): {
            Range(1, 1): HeadTiles(128, 128, 264, 4, 3),  # 62.9 us, without 65.0
            Range(5, 8): HeadTiles(128, 128, 264, 4, 3),  # 62.5 us, without 65.0
            Range(21, 32): HeadTiles(128, 64, 264, 4, 5),  # 64.8 us, without 66.7
        },
        (128256, 4096): {
            Range(32, 48): HeadTiles(64, 128, 264, 4, 4),  # 249.5 us, without 261.7
        },
    },
}
"""GPU -> (V, K) -> numbers of rows -> the fastest tiles, where they beat the logits and their argmax."""


def head_maxima_torch(x_TK: Tensor, weight_VK: Tensor) -> Tensor:
    """Reference of `head_maxima_triton`: one chunk, packed as there."""
    return maxima_torch(torch.nn.functional.linear(x_TK, weight_VK))


@jit("num_tokens")
def _head_kernel(
    weight_desc,  # [V, K] in tiles of [BLOCK_N, BLOCK_K]
    first_desc,  # [T, K] in tiles of [FIRST, BLOCK_K]
    second_desc,
    best_ptr,
    num_tokens,
    num_columns,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of tokens, every so manieth block of the vocabulary."""
    token = tl.program_id(0) * (FIRST + SECOND)
    program = tl.program_id(1)
    num_programs = tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # the lowest key of all: that of -inf is higher
    best_first = tl.full([FIRST], -0x7FFFFFFF, tl.int32)
    index_first = tl.zeros([FIRST], tl.int32)
    best_second, index_second = best_first, index_first  # unused where there is no such part
    if SECOND:
        best_second = tl.full([SECOND], -0x7FFFFFFF, tl.int32)
        index_second = tl.zeros([SECOND], tl.int32)
    for block in tl.range(program, tl.cdiv(num_columns, BLOCK_N), num_programs):
        column = block * BLOCK_N
        first = tl.zeros([BLOCK_N, FIRST], tl.float32)
        second = first
        if SECOND:
            second = tl.zeros([BLOCK_N, SECOND], tl.float32)
        for k in tl.range(0, SIZE, BLOCK_K):
            weight = weight_desc.load([column, k])
            x = first_desc.load([token, k])
            first = tl.dot(weight, x.T, first)
            if SECOND:
                x_second = second_desc.load([token + FIRST, k])
                second = tl.dot(weight, x_second.T, second)
        best_first, index_first = _better(
            first.to(weight_desc.dtype), column, num_columns, best_first, index_first, BLOCK_N
        )
        if SECOND:
            best_second, index_second = _better(
                second.to(weight_desc.dtype), column, num_columns, best_second, index_second, BLOCK_N
            )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = token + tl.arange(0, FIRST)
    packed = (best_first.to(tl.int64) << 32) | (0x7FFFFFFF - index_first).to(tl.int64)
    tl.store(best_ptr + t * num_programs + program, packed, mask=t < num_tokens)
    if SECOND:
        t = token + FIRST + tl.arange(0, SECOND)
        packed = (best_second.to(tl.int64) << 32) | (0x7FFFFFFF - index_second).to(tl.int64)
        tl.store(best_ptr + t * num_programs + program, packed, mask=t < num_tokens)


@jit()
def _better(logits, column, num_columns, best, index, BLOCK_N: tl.constexpr):
    """Columns by tokens, rounded as logits are, against the best of earlier columns; of equal ones the first wins."""
    n = column + tl.arange(0, BLOCK_N)
    x = logits.to(tl.float32)
    # as in `argmax`: -0.0 ties with 0.0, and NaN is above all
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    key = tl.where((n < num_columns)[:, None], key, -0x7FFFFFFF)
    top = tl.max(key, 0)
    first = tl.min(tl.where(key == top[None, :], n[:, None], 0x7FFFFFFF), 0)
    return tl.where(top > best, top, best), tl.where(top > best, first, index)


def head_maxima_triton(x_TK: Tensor, weight_VK: Tensor, *, tiles: HeadTiles) -> Tensor:
    """int64 [T, C], packed as `argmax.chunk_maxima` packs: the largest of a row is its likeliest token."""
    assert x_TK.is_contiguous()
    assert weight_VK.is_contiguous()
    num_tokens, (vocab_size, size) = x_TK.shape[0], weight_VK.shape
    assert size % tiles.block_k == 0
    programs = min(tiles.programs, -(-vocab_size // tiles.block_n))
    best_TC = torch.empty(num_tokens, programs, dtype=torch.int64, device=x_TK.device)
    if not num_tokens:
        return best_TC
    arguments, grid, options = launch_arguments(x_TK, weight_VK, best_TC, tiles)
    _head_kernel[grid](*arguments, **options)
    return best_TC


def launch_arguments(
    x_TK: Tensor, weight_VK: Tensor, best_TC: Tensor, tiles: HeadTiles
) -> tuple[list, tuple[int, int], dict]:
    """The kernel's arguments, grid and options."""
    parts = head_parts(x_TK.shape[0], tiles)

    def describe(tensor: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, tiles.block_k])

    arguments = [
        describe(weight_VK, tiles.block_n),
        describe(x_TK, parts.first),
        describe(x_TK, parts.second or MIN_PART),
        best_TC,
        x_TK.shape[0],
        weight_VK.shape[0],
    ]
    options = {
        "SIZE": weight_VK.shape[1],
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "FIRST": parts.first,
        "SECOND": parts.second,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **pdl_options(x_TK.device),
    }
    return arguments, (parts.blocks, best_TC.shape[1]), options


def head_parts(num_tokens: int, tiles: HeadTiles) -> TokenParts:
    """As many tokens per program as the registers hold sums for."""
    return token_parts(num_tokens, min(MAX_TOKENS, 192 * 32 * tiles.num_warps // tiles.block_n))


def compile_ahead(x_TK: Tensor, weight_VK: Tensor, best_TC: Tensor, tiles: HeadTiles) -> None:
    """Compile what `head_maxima_triton` would launch; from any thread."""
    arguments, grid, options = launch_arguments(x_TK, weight_VK, best_TC, tiles)
    _head_kernel.warmup(*arguments, grid=grid, **options)


def takes_head(x: Tensor, weight_VK: Tensor) -> bool:
    """Whether the kernel is known to beat logits and their argmax here."""
    return x.is_cuda and _choose(x, weight_VK) is not None


def _choose(x: Tensor, weight_VK: Tensor) -> HeadTiles | None:
    tiles = _measured(gpu_name(x.device), x.shape[0], *weight_VK.shape)
    if tiles is None or is_wanted() or x.dim() != 2 or x.dtype not in DTYPES or weight_VK.dtype != x.dtype:
        return None
    aligned = x.data_ptr() % 16 == weight_VK.data_ptr() % 16 == 0  # as bulk copies need it
    return tiles if aligned and x.is_contiguous() and weight_VK.is_contiguous() else None


@functools.cache
def _measured(gpu: str, num_tokens: int, vocab_size: int, size: int) -> HeadTiles | None:
    ranges = MEASURED.get(gpu, {}).get((vocab_size, size), {})
    return next((tiles for (first, last), tiles in ranges.items() if first <= num_tokens <= last), None)


def head_maxima(x_TK: Tensor, weight_VK: Tensor) -> Tensor:
    """Packed maxima of `x @ weight.T`, rounded to the dtype of x; int64 [T, C]. See `argmax.best_index`."""
    if x_TK.is_cuda and (tiles := _choose(x_TK, weight_VK)):
        return head_maxima_triton(x_TK, weight_VK, tiles=tiles)
    if x_TK.is_cuda:
        return chunk_maxima(torch.nn.functional.linear(x_TK, weight_VK))
    return head_maxima_torch(x_TK, weight_VK)
