"""Linear layers of few tokens whose weights lie in planes: words of 16 bits with two 8-bit floats or four integers.

The words of a tile have the shape and the width of a tile of 16-bit weights, so that they go to the tensor cores'
registers as such a tile would, and each plane is taken out of them there, two words at a time. Weights are the M side
of the products: with few tokens that takes half as many instructions, and no padding beyond 8 tokens.

Values are exact, integers less their zero point too; sums are fp32, and scaled group by group.

Packing: K is cut into blocks of 128, zeros behind its end. Word j of a block holds the values of k = j, J + j,
2J + j, .., lowest bits first, where J is 128 by the number of planes. All rows of one block lie side by side, so that
a tile is read as one piece. Two 8-bit floats of a word are two whole bytes: `linear_w8a8` multiplies them as they lie.

Shape suffixes: T tokens, N output columns, K input columns, B blocks of 128 along K, J words, G groups, X splits of K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

BLOCK = 128
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


def pack_fp8(weight_NK: Tensor) -> Tensor:
    """e4m3 [N, K] -> e4m3 [B, N, 128], each block's columns 0, 64, 1, 65, ..; [1, N, K] as is unless 128 divides K"""
    if weight_NK.shape[1] % BLOCK:
        return weight_NK.unsqueeze(0)
    bytes_NBPJ = weight_NK.view(torch.uint8).unflatten(1, (-1, 2, BLOCK // 2))
    return bytes_NBPJ.permute(1, 0, 3, 2).flatten(2).contiguous().view(weight_NK.dtype)


def unpack_fp8(packed_BNS: Tensor) -> Tensor:
    """Undo `pack_fp8`."""
    if packed_BNS.shape[2] != BLOCK:
        return packed_BNS[0]
    bytes_BNJP = packed_BNS.view(torch.uint8).unflatten(2, (BLOCK // 2, 2))
    return bytes_BNJP.permute(1, 0, 3, 2).flatten(1).view(packed_BNS.dtype)


def _fp8_asm(low: str, high: str, mask: int, factor: int, multiply: str) -> str:
    """Of each half's low byte and of its high one: exponent and mantissa moved to where the type has them, the sign
    beside them, then corrected for the other bias."""
    return f"""{{
    .reg .b32 a, b, c, d;
    shl.b32 a, $2, 8;
    {low};
    {high};
    and.b32 b, b, {mask << 16 | mask:#x};
    and.b32 c, c, {mask << 16 | mask:#x};
    lop3.b32 a, a, 0x80008000, b, 0xea;
    lop3.b32 b, $2, 0x80008000, c, 0xea;
    mov.b32 d, {factor << 16 | factor:#x};
    {multiply} $0, a, d;
    {multiply} $1, b, d;
    }}"""


_FP8_BF16 = _fp8_asm("shl.b32 b, $2, 4", "shr.u32 c, $2, 4", 0x07F0, 0x7B80, "mul.bf16x2")  # by 2^120
_FP8_FP16 = _fp8_asm("shl.b32 b, $2, 7", "shr.u32 c, $2, 1", 0x3F80, 0x5C00, "mul.f16x2")  # by 2^8


def _int4_asm(base: int) -> str:
    """Shift a plane down, keep 4 bits of each half, and put them into a mantissa."""
    lines = [f"shr.u32 a{plane}, $4, {4 * plane};" for plane in range(4)]
    lines += [f"lop3.b32 ${plane}, a{plane}, 0x000f000f, {base << 16 | base:#x}, 0xea;" for plane in range(4)]
    return f"{{ .reg .b32 a<4>; {' '.join(lines)} }}"


_ASM = {
    (2, torch.bfloat16): _FP8_BF16,
    (2, torch.float16): _FP8_FP16,
    (4, torch.bfloat16): _int4_asm(0x4300),
    (4, torch.float16): _int4_asm(0x6400),
}
_MINUS_ASM = {torch.bfloat16: "sub.bf16x2 $0, $1, $2;", torch.float16: "sub.f16x2 $0, $1, $2;"}
SURPLUS = {torch.bfloat16: 128, torch.float16: 1024}
"""By which a 4-bit value is too large: numbers whose last mantissa bits count ones."""


@jit()
def _pair(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> the e4m3 numbers of their two planes, exactly; 480 for NaN, which weights must not have."""
    # fp16 has all e4m3 numbers, and the interpreter knows it
    first = ((((words & 0x80) << 8) | ((words & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0).to(HALF)
    second = (((words & -0x8000) | ((words >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0).to(HALF)
    if ASM is not None:
        first, second = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(first.dtype, first.dtype), is_pure=True, pack=2
        )
    return first, second


@jit()
def _four(words, HALF: tl.constexpr, BASE: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> the values of their four planes, each plus 128 (bf16) or 1024 (fp16)."""
    first = ((words & 15) | BASE).to(HALF, bitcast=True)
    if ASM is not None:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(first.dtype, first.dtype, first.dtype, first.dtype),
            is_pure=True,
            pack=2,
        )
    else:
        planes = (
            first,
            (((words >> 4) & 15) | BASE).to(HALF, bitcast=True),
            (((words >> 8) & 15) | BASE).to(HALF, bitcast=True),
            (((words >> 12) & 15) | BASE).to(HALF, bitcast=True),
        )
    return planes


@jit()
def _minus(plane, zero, ASM: tl.constexpr):
    """Exact: both are small integers."""
    if ASM is not None:
        found = tl.inline_asm_elementwise(ASM, "=r,r,r", [plane, zero], dtype=plane.dtype, is_pure=True, pack=2)
    else:
        found = (plane.to(tl.float32) - zero.to(tl.float32)).to(plane.dtype)
    return found


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
    num_columns,
    scale_stride_n,
    scale_stride_g,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,  # columns of K that share a scale; 0: all
    SCALE_ROWS: tl.constexpr,  # rows that share a scale
    ROW_SCALE: tl.constexpr,
    MIDDLE: tl.constexpr,  # zero point of integers without their own, as a plane has it
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    ASM: tl.constexpr,  # None in the interpreter
    MINUS_ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens, one block of columns, one split of K."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = 128 // PLANES
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    j = tl.arange(0, WORDS)
    t_live = t < num_tokens
    # columns past the end read the last one again and are not stored
    row = tl.minimum(n, num_columns - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    scale_row = row // SCALE_ROWS * scale_stride_n
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        for inner in tl.static_range(0, BLOCK_K, 128):
            first = split * PART + start + inner
            words = tl.load(
                packed_ptr + (first // 128 * num_columns + row)[:, None] * WORDS + j[None, :],
                eviction_policy="evict_first",
            )
            planes = _pair(words, HALF, ASM) if PLANES == 2 else _four(words, HALF, BASE, ASM)
            sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32) if GROUP else acc
            for plane in tl.static_range(PLANES):
                k = first + WORDS * plane + j
                live = t_live[None, :] if SIZE % 128 == 0 else t_live[None, :] & (k < SIZE)[:, None]
                x = tl.load(x_ptr + t[None, :] * SIZE + k[:, None], mask=live, other=0.0)
                weight = planes[plane]
                if ZERO:
                    bits = tl.load(zero_ptr + (first + WORDS * plane) // GROUP * num_columns + row) | BASE
                    zero = tl.broadcast_to(bits.to(HALF, bitcast=True)[:, None], [BLOCK_N, WORDS])
                    weight = _minus(weight, zero, MINUS_ASM)
                elif PLANES == 4:
                    weight = _minus(weight, tl.full([BLOCK_N, WORDS], MIDDLE, HALF), MINUS_ASM)
                sums = tl.dot(weight, x, sums)
                if GROUP and (WORDS * plane + WORDS) % GROUP == 0:
                    group = (first + WORDS * plane) // GROUP
                    scale = tl.load(scale_ptr + scale_row + group * scale_stride_g).to(tl.float32)
                    acc += sums * scale[:, None]
                    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            if not GROUP:
                acc = sums
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_live = n < num_columns
    if ROW_SCALE:
        acc *= tl.load(row_scale_ptr + row)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    out_offset = (split * num_tokens + t)[None, :] * num_columns + n[:, None]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=t_live[None, :] & n_live[:, None])


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
    x_TK: Tensor, weight: Planes, bias_N: Tensor | None, out: Tensor, *, tiles: PlaneTiles
) -> tuple[tuple[Any, ...], tuple[int, int, int], dict[str, Any]]:
    """The kernel's arguments, grid and options; `out` is [T, N], or fp32 [X, T, N]."""
    num_tokens, size = x_TK.shape
    blocks, num_columns, _ = weight.packed_BNJ.shape
    assert blocks * BLOCK % (tiles.block_k * tiles.splits) == 0
    block_t = tiles.max_tokens if is_wanted() else min(tiles.max_tokens, max(MIN_TOKENS, next_power_of_2(num_tokens)))
    surplus = SURPLUS[x_TK.dtype]
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
        MIDDLE=8.0 + surplus,
        ZERO=weight.zero_GN is not None,
        BIAS=bias_N is not None,
        BASE=torch.tensor(surplus, dtype=x_TK.dtype).view(torch.int16).item(),
        ASM=_ASM[weight.num_planes, x_TK.dtype] if x_TK.is_cuda else None,
        MINUS_ASM=_MINUS_ASM[x_TK.dtype] if x_TK.is_cuda else None,
        BLOCK_T=block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x_TK.device),
    )
    return arguments, (-(-num_tokens // block_t), -(-num_columns // tiles.block_n), tiles.splits), options


def linear_planes_triton(
    x_TK: Tensor, weight: Planes, bias_N: Tensor | None = None, *, tiles: PlaneTiles, out: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias` for few tokens, [T, N]; fp32 [X, T, N] to be added up over X where `out` is that."""
    num_tokens, num_columns = x_TK.shape[0], weight.packed_BNJ.shape[1]
    if out is None:
        out = torch.empty(num_tokens, num_columns, dtype=x_TK.dtype, device=x_TK.device)
    assert x_TK.is_contiguous()
    assert out.is_contiguous()
    assert tiles.splits == (out.shape[0] if out.dim() == 3 else 1)
    if num_tokens:
        arguments, grid, options = launch_arguments(x_TK, weight, bias_N, out, tiles=tiles)
        _linear_planes_kernel[grid](*arguments, **options)
    return out
