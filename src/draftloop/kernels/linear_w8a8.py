"""Linear layers that multiply 8-bit floats (e4m3) on both sides, for checkpoints whose activations were made for it.

Nothing is decoded: tensor cores take the weights as they lie in shared memory. Activations are rounded to 8 bits by a
kernel of their own, with a scale per token or the stored one, and their columns put into the order in which
`packed_values.pack_fp8` keeps the weights'. The layer is then what `linear_wide` makes of 16-bit weights, with half
the bytes; above `MAX_TOKENS` it is cuBLAS's, for which the weights' blocks are copied into rows.

Sums over at most 128 columns of K are made by tensor cores, which keep 14 bits of them or more, and added up in fp32.

Shape suffixes: T tokens, N output columns, K input columns, X splits of K, I = N / 2 columns of a gate, B blocks of
128 along K, S = 128 columns of one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from draftloop.kernels.linear_wide import MIN_PART, Kind, WideTiles, no_sums, store_sums, token_parts
from draftloop.kernels.packed_values import BLOCK
from draftloop.kernels.silu_mul import gate_times_up, silu_mul
from draftloop.kernels.triton_import import TensorDescriptor, constant, jit, next_power_of_2, pdl_options, tl

MAX_TOKENS = 512
"""By estimate: above this, copying the weights is less than what cuBLAS's larger tiles gain."""
LARGEST = constant(448.0)
SMALLEST = constant(1e-12)
"""A scale that zeros may have."""

MEASURED: dict[tuple[int, int, Kind], WideTiles] = {
    (28672, 4096, Kind.GATED): WideTiles(256, 128, 1, 96, 8, 5),  # 70.2 us at 192 tokens, 39.9 at 96
    (4096, 14336, Kind.SUMS): WideTiles(128, 128, 4, 192, 8, 5),  # 35.9 us, 27.0
    (6144, 4096, Kind.PLAIN): WideTiles(64, 128, 1, 96, 4, 5),  # 19.2 us, 15.8
    (4096, 4096, Kind.SUMS): WideTiles(64, 128, 2, 96, 4, 5),  # 15.6 us, 12.8
}
"""(N, K, kind) -> the fastest tiles on an H200, from `draftloop.bench.sweep_quantised`."""


@functools.cache
def choose(num_columns: int, size: int, kind: Kind) -> WideTiles:
    """Tiles of a layer: as measured, or like the most similar one that was."""
    if found := MEASURED.get((num_columns, size, kind)):
        return found
    splits = (4 if size >= 8192 else 2) if kind is Kind.SUMS else 1
    if num_columns >= 16384:
        return WideTiles(256, BLOCK, splits, 96, 8, 5)
    return WideTiles(64, BLOCK, splits, 96, 4, 5)


@jit()
def _rounded(x, scale):
    """fp32 numbers, in steps of their scale, as e4m3."""
    return tl.clamp(x / scale, -LARGEST, LARGEST).to(tl.float8e4nv)


@jit()
def _quantise_kernel(
    x_ptr, input_scale_ptr, out_ptr, scale_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    k = i // 64 * 128 + i % 64  # of a block's first half
    live = k < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.load(x_ptr + token * SIZE + k, mask=live, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + token * SIZE + k + 64, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 0)
    scale = tl.load(input_scale_ptr) if STORED else tl.maximum(largest / LARGEST, SMALLEST)
    # word i of a row has both: its bytes are as `pack_fp8` puts those of the weights
    place = tl.arange(0, 2 * BLOCK)
    out = _rounded(tl.interleave(first, second), scale)
    tl.store(out_ptr + token * SIZE + place, out, mask=place < SIZE)
    tl.store(scale_ptr + token, scale)


def quantise_triton(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Twin of `linear_fp8.quantise_activations`, the columns of each block of 128 in the order of `pack_fp8`."""
    assert x_TK.is_contiguous()
    num_tokens, size = x_TK.shape
    assert size % BLOCK == 0
    out_TK = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TK.device)
    if num_tokens:
        block = next_power_of_2(size) // 2
        _quantise_kernel[(num_tokens,)](
            x_TK,
            scale_T1 if input_scale is None else input_scale,
            out_TK,
            scale_T1,
            SIZE=size,
            BLOCK=block,
            STORED=input_scale is not None,
            num_warps=min(16, max(1, block // 256)),
            **pdl_options(x_TK.device),
        )
    return out_TK, scale_T1


@jit("num_tokens")
def _w8a8_kernel(
    weight_desc,  # [B * N, S] in tiles of [BLOCK_N, S]
    first_desc,  # [T, K] in tiles of [FIRST, S]
    second_desc,  # the same in tiles of [SECOND, S]
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,  # of the output
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,  # whether the blocks divide the columns
    BLOCK_N: tl.constexpr,  # columns of the output
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of tokens, one block of columns, one split of K. What a tile reads past an end is not stored."""
    token = tl.program_id(0) * (FIRST + SECOND)  # neighbours share weights
    column = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    BLOCKS: tl.constexpr = SIZE // 128
    rows = num_columns * 2 if GATED else num_columns
    if PDL:
        tl.extra.cuda.gdc_wait()
    first, second, first_up, second_up = no_sums(BLOCK_N, FIRST, SECOND, GATED)
    for block in tl.range(BLOCKS * split // SPLITS, BLOCKS * (split + 1) // SPLITS):
        k = block * 128
        row = block * rows + column
        weight = weight_desc.load([row, 0])
        x = first_desc.load([token, k])
        first = tl.dot(weight, x.T, first, max_num_imprecise_acc=128)
        x_second = x
        if SECOND:
            x_second = second_desc.load([token + FIRST, k])
            second = tl.dot(weight, x_second.T, second, max_num_imprecise_acc=128)
        if GATED:
            up = weight_desc.load([row + num_columns, 0])
            first_up = tl.dot(up, x.T, first_up, max_num_imprecise_acc=128)
            if SECOND:
                second_up = tl.dot(up, x_second.T, second_up, max_num_imprecise_acc=128)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    out_ptr += split * num_tokens * num_columns
    first = _scaled(first, scale_ptr, x_scale_ptr, bias_ptr, column, token, split, num_columns, num_tokens, BIAS)
    if SECOND:
        second = _scaled(
            second, scale_ptr, x_scale_ptr, bias_ptr, column, token + FIRST, split, num_columns, num_tokens, BIAS
        )
    if GATED:
        scale_ptr += num_columns
        bias_ptr += num_columns
        first_up = _scaled(
            first_up, scale_ptr, x_scale_ptr, bias_ptr, column, token, split, num_columns, num_tokens, BIAS
        )
        first = gate_times_up(first, first_up, out_ptr.dtype.element_ty, False)
        if SECOND:
            second_up = _scaled(
                second_up, scale_ptr, x_scale_ptr, bias_ptr, column, token + FIRST, split, num_columns, num_tokens, BIAS
            )
            second = gate_times_up(second, second_up, out_ptr.dtype.element_ty, False)
    store_sums(first, out_ptr, token, column, num_tokens, num_columns, EVEN)
    if SECOND:
        store_sums(second, out_ptr, token + FIRST, column, num_tokens, num_columns, EVEN)


@jit()
def _scaled(
    acc, scale_ptr, x_scale_ptr, bias_ptr, column, token, split, num_columns, num_tokens, BIAS: tl.constexpr
):  # fmt: skip
    """Columns by tokens, with both sides' scales and the bias."""
    n = column + tl.arange(0, acc.shape[0])
    t = token + tl.arange(0, acc.shape[1])
    n_live = n < num_columns
    scale = tl.load(scale_ptr + n, mask=n_live, other=0.0)
    x_scale = tl.load(x_scale_ptr + t, mask=t < num_tokens, other=0.0)
    acc = acc * scale[:, None] * x_scale[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    return acc


def launch_arguments(
    x_TK: Tensor,
    scale_T1: Tensor,
    packed_BNS: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None,
    out: Tensor,
    *,
    kind: Kind,
    tiles: WideTiles,
) -> tuple[list[Any], tuple[int, int, int], dict[str, Any]]:
    """The kernel's arguments, grid and options; for what comes out see `Kind`."""
    num_tokens, size = x_TK.shape
    assert tiles.block_k == BLOCK
    assert kind is Kind.SUMS or tiles.splits == 1
    gated = kind is Kind.GATED
    num_columns, block_n = (n // 2 if gated else n for n in (packed_BNS.shape[1], tiles.block_n))
    parts = token_parts(num_tokens, tiles.max_tokens)

    def describe(tensor: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, BLOCK])

    arguments = [
        describe(packed_BNS.flatten(0, 1), block_n),
        describe(x_TK, parts.first),
        describe(x_TK, parts.second or MIN_PART),
        scale_N1,
        scale_T1,
        scale_T1 if bias_N is None else bias_N,
        out,
        num_tokens,
        num_columns,
    ]
    options = dict(
        SIZE=size,
        SPLITS=tiles.splits,
        BIAS=bias_N is not None,
        GATED=gated,
        EVEN=num_columns % block_n == 0,
        BLOCK_N=block_n,
        FIRST=parts.first,
        SECOND=parts.second,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(out.device),
    )
    return arguments, (parts.blocks, -(-num_columns // block_n), tiles.splits), options


def linear_w8a8_triton(
    x_TK: Tensor,
    scale_T1: Tensor,
    packed_BNS: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    kind: Kind,
    tiles: WideTiles,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Of tokens that `quantise_triton` has rounded; for what comes out see `Kind`."""
    num_tokens, num_columns = x_TK.shape[0], packed_BNS.shape[1] // (2 if kind is Kind.GATED else 1)
    shape = (tiles.splits, num_tokens, num_columns) if kind is Kind.SUMS else (num_tokens, num_columns)
    out = torch.empty(shape, dtype=torch.float32 if kind is Kind.SUMS else dtype, device=x_TK.device)
    if num_tokens:
        arguments, grid, options = launch_arguments(
            x_TK, scale_T1, packed_BNS, scale_N1, bias_N, out, kind=kind, tiles=tiles
        )
        _w8a8_kernel[grid](*arguments, **options)
    return out


def linear(
    x_TK: Tensor,
    packed_BNS: Tensor,
    scale_N1: Tensor,
    input_scale: Tensor | None,
    bias_N: Tensor | None,
    *,
    kind: Kind,
) -> Tensor:
    """bf16, of tokens in bf16; for what comes out see `Kind`, and of many tokens [T, N] where sums are asked for."""
    size = x_TK.shape[1]
    x_TK, scale_T1 = quantise_triton(x_TK, input_scale)
    if x_TK.shape[0] <= MAX_TOKENS:
        tiles = choose(packed_BNS.shape[1], size, kind)
        return linear_w8a8_triton(x_TK, scale_T1, packed_BNS, scale_N1, bias_N, kind=kind, tiles=tiles)
    out_TN = scaled_mm(x_TK, scale_T1, packed_BNS, scale_N1)
    out_TN = out_TN if bias_N is None else out_TN + bias_N
    return silu_mul(out_TN) if kind is Kind.GATED else out_TN


def scaled_mm(x_TK: Tensor, scale_T1: Tensor, packed_BNS: Tensor, scale_N1: Tensor) -> Tensor:
    """cuBLAS, bf16 [T, N], of tokens that `quantise_triton` has rounded."""
    weight_NK = packed_BNS.transpose(0, 1).flatten(1)
    # torch has no public function for this yet
    return torch._scaled_mm(x_TK, weight_NK.t(), scale_a=scale_T1, scale_b=scale_N1.t(), out_dtype=torch.bfloat16)
