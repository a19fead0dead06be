"""Linear layers of few tokens whose weights lie in planes: words of 16 bits with two 8-bit floats or four integers.

The words of a tile have the shape and the width of a tile of 16-bit weights, so that they go to the tensor cores'
registers as such a tile would, and each plane is taken out of them there, two words at a time. Weights are the M side
of the products: with few tokens that takes half as many instructions, and no padding beyond 8 tokens.

Values are exact; sums are fp32, and scaled group by group. A zero point that all weights share is taken off each of
them, exactly. Zero points per group are taken off the group's sum, by a product with ones: the sum is one of values up
to 31 before, which costs no more than fp32 sums lose anyway.

`packed_values` says how they are packed. All rows of one block of K lie side by side, so that a tile is read as one
piece.

Shape suffixes: T tokens, N output columns, K input columns, B blocks of 128 along K, J words, G groups, X splits of K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.gated_linear import Activation
from draftloop.kernels.packed_values import BLOCK, FP8_ASM, HIGHEST, LOWEST, MINUS_ASM, four, int4_asm, minus, pair
from draftloop.kernels.silu_mul import gate_times_up
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

MIN_TOKENS = 8
"""Of a product of tensor cores."""


class PlaneTiles(NamedTuple):
    """Launch parameters."""

    block_n: int
    block_k: int
    splits: int
    max_tokens: int
    """Of one program."""
    num_warps: int
    num_stages: int


@jit()
def _scale_and_zero(scale_ptr, zero_ptr, row, scale_row, group, num_columns, scale_stride_g, ZERO: tl.constexpr):
    """One group's, of each row."""
    scale = tl.load(scale_ptr + scale_row + group * scale_stride_g)
    zero = tl.load(zero_ptr + group * num_columns + row) if ZERO else scale  # not used
    return scale, zero


@jit("num_tokens")
def _linear_planes_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    row_scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,  # of the weights: twice those of a gated output
    scale_stride_n,
    scale_stride_g,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,  # columns of K that share a scale; 0: all
    SCALE_ROWS: tl.constexpr,  # rows that share a scale
    ROW_SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    SURPLUS: tl.constexpr,
    PLACE: tl.constexpr,
    BASE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ASM: tl.constexpr,  # None in the interpreter
    MINUS_ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens, one block of rows of weights, one split of K."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = 128 // PLANES
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    num_outputs = num_columns // 2 if GATED else num_columns
    split = tl.program_id(2)
    j = tl.arange(0, WORDS)
    t_live = t < num_tokens
    # columns past the end read the last one again and are not stored
    row = tl.minimum(n, num_outputs - 1)
    if GATED:  # 8 gates, then what they multiply: a thread gets both sums
        i = tl.arange(0, BLOCK_N)
        row = tl.minimum(tl.program_id(1) * OUTPUTS + i // 16 * 8 + i % 8, num_outputs - 1) + i // 8 % 2 * num_outputs
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    scale_row = row // SCALE_ROWS * scale_stride_n
    # of scales the loop reads those of later groups: by itself only what a product takes is read ahead. Where one group
    # is a whole iteration it is the next one, since no pipelined loop may reach past that
    STEP: tl.constexpr = GROUP if GROUP else PART
    AHEAD: tl.constexpr = 2 if BLOCK_K > STEP else 1
    group = split * (PART // STEP)
    last = group + PART // STEP - 1
    scale, zero = _scale_and_zero(scale_ptr, zero_ptr, row, scale_row, group, num_columns, scale_stride_g, ZERO)
    group = tl.minimum(group + 1, last)
    next_scale, next_zero = _scale_and_zero(
        scale_ptr, zero_ptr, row, scale_row, group, num_columns, scale_stride_g, ZERO
    )
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        for inner in tl.static_range(0, BLOCK_K, 128):
            first = split * PART + start + inner
            words = tl.load(
                packed_ptr + (first // 128 * num_columns + row)[:, None] * WORDS + j[None, :],
                eviction_policy="evict_first",
            )
            planes = pair(words, HALF, ASM) if PLANES == 2 else four(words, HALF, BASE, PLACE, ASM)
            sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32) if GROUP else acc
            totals = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for plane in tl.static_range(PLANES):
                k = first + WORDS * plane + j
                live = t_live[None, :] if SIZE % 128 == 0 else t_live[None, :] & (k < SIZE)[:, None]
                x = tl.load(x_ptr + t[None, :] * SIZE + k[:, None], mask=live, other=0.0)
                weight = planes[plane]
                if ZERO:
                    totals = tl.dot(tl.full([BLOCK_N, WORDS], 1.0, HALF), x, totals)
                elif PLANES == 4:
                    weight = minus(weight, tl.full([BLOCK_N, WORDS], 8.0 + SURPLUS, HALF), MINUS_ASM)
                sums = tl.dot(weight, x, sums)
                if GROUP and (WORDS * plane + WORDS) % GROUP == 0:
                    if ZERO:
                        sums -= totals * (zero.to(tl.float32) + SURPLUS)[:, None]
                    acc += sums * scale.to(tl.float32)[:, None]
                    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
                    totals = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
                    group = tl.minimum((first + WORDS * plane) // GROUP + AHEAD, last)
                    later_scale, later_zero = _scale_and_zero(
                        scale_ptr, zero_ptr, row, scale_row, group, num_columns, scale_stride_g, ZERO
                    )
                    if AHEAD == 2:
                        scale, zero, next_scale, next_zero = next_scale, next_zero, later_scale, later_zero
                    else:
                        scale, zero = later_scale, later_zero
            if not GROUP:
                acc = sums
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if ROW_SCALE:
        acc *= tl.load(row_scale_ptr + row)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, [BLOCK_N // 16, 2, 8, BLOCK_T]), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(pairs, [OUTPUTS, BLOCK_T, 2]))
        acc = gate_times_up(gate, up, out_ptr.dtype.element_ty, GELU)
    out_offset = (split * num_tokens + t)[None, :] * num_outputs + n[:, None]
    live = t_live[None, :] & (n < num_outputs)[:, None]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=live)


class Planes(NamedTuple):
    """What a layer's weights are for the kernel."""

    packed_BNJ: Tensor
    scale: Tensor
    """Of each group along K and of `scale_rows` rows; unused without groups."""
    scale_strides: tuple[int, int]
    """From one block of rows to the next, and from one group to the next."""
    group: int = 0
    """Columns of K that share a scale, 32, 64 or 128; 0: all."""
    scale_rows: int = 1
    row_scale_N: Tensor | None = None
    zero_GN: Tensor | None = None
    """int16; None: 8 everywhere."""

    @property
    def num_planes(self) -> int:
        return BLOCK // self.packed_BNJ.shape[2]


def launch_arguments(
    x_TK: Tensor,
    weight: Planes,
    bias_N: Tensor | None,
    out: Tensor,
    *,
    tiles: PlaneTiles,
    activation: Activation | None = None,
) -> tuple[tuple[Any, ...], tuple[int, int, int], dict[str, Any]]:
    """The kernel's arguments, grid and options; for `out` see `linear_planes_triton`."""
    (num_tokens, size), dtype = x_TK.shape, x_TK.dtype
    blocks, num_columns, _ = weight.packed_BNJ.shape
    assert blocks * BLOCK % (tiles.block_k * tiles.splits) == 0
    assert tiles.splits == 1 or activation is None
    block_t = tiles.max_tokens if is_wanted() else min(tiles.max_tokens, max(MIN_TOKENS, next_power_of_2(num_tokens)))
    integer = weight.num_planes == 4
    mantissa = (LOWEST if weight.zero_GN is None else HIGHEST)[dtype]
    asm = int4_asm(mantissa.base(dtype), mantissa.place) if integer else FP8_ASM[dtype]
    arguments = (
        x_TK,
        weight.packed_BNJ,
        weight.scale,
        weight.scale if weight.row_scale_N is None else weight.row_scale_N,
        weight.scale if weight.zero_GN is None else weight.zero_GN,
        x_TK if bias_N is None else bias_N,
        out,
        num_tokens,
        num_columns,
        *weight.scale_strides,
    )
    options = dict(
        SIZE=size,
        PART=blocks * BLOCK // tiles.splits,
        PLANES=weight.num_planes,
        GROUP=weight.group,
        SCALE_ROWS=weight.scale_rows,
        ROW_SCALE=weight.row_scale_N is not None,
        ZERO=weight.zero_GN is not None,
        SURPLUS=mantissa.surplus,
        PLACE=mantissa.place,
        BASE=mantissa.base(dtype),
        BIAS=bias_N is not None,
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
        ASM=asm if x_TK.is_cuda else None,
        MINUS_ASM=MINUS_ASM[dtype] if x_TK.is_cuda else None,
        BLOCK_T=block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x_TK.device),
    )
    num_blocks = -(-num_columns // tiles.block_n)
    return arguments, (-(-num_tokens // block_t), num_blocks, tiles.splits), options


def linear_planes_triton(
    x_TK: Tensor,
    weight: Planes,
    bias_N: Tensor | None = None,
    *,
    tiles: PlaneTiles,
    out: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """`x @ weight.T + bias` for few tokens, [T, N]; fp32 [X, T, N] to be added up over X where `out` is that.

    With an `activation`, [T, N / 2]: `gated_linear.gated` of that, rounded where it rounds.
    """
    num_tokens, num_columns = x_TK.shape[0], weight.packed_BNJ.shape[1]
    if out is None:
        columns = num_columns // 2 if activation else num_columns
        out = torch.empty(num_tokens, columns, dtype=x_TK.dtype, device=x_TK.device)
    assert x_TK.is_contiguous()
    assert out.is_contiguous()
    assert tiles.splits == (out.shape[0] if out.dim() == 3 else 1)
    if num_tokens:
        arguments, grid, options = launch_arguments(x_TK, weight, bias_N, out, tiles=tiles, activation=activation)
        _linear_planes_kernel[grid](*arguments, **options)
    return out
