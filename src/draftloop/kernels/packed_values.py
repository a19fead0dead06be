"""How 8-bit floats and 4-bit integers lie in words of 16 bits, and how kernels take them out.

K is cut into blocks of 128, zeros behind its end. Word j of a block holds the values of k = j, J + j, 2J + j, ..,
lowest bits first: planes of J columns, where J is 128 by the number of planes. Two 8-bit floats of a word are two whole
bytes: `linear_w8a8` multiplies them as they lie. A kernel takes a plane out of two words at a time, in a register,
which the tensor cores then multiply as it is.

Shape suffixes: N output columns, K input columns, B blocks of 128 along K, J words, P planes, S = 128 columns of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.triton_import import jit, tl

BLOCK = 128


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


def int4_asm(base: int, place: int) -> str:
    """Shift a plane to where its 4 bits of each half are to be, and put them into a mantissa."""
    shifts = [4 * plane - place for plane in range(4)]
    lines = [f"{'shr' if shift >= 0 else 'shl'}.b32 a{i}, $4, {abs(shift)};" for i, shift in enumerate(shifts)]
    mask, both = (15 << place) * 0x10001, base * 0x10001
    lines += [f"lop3.b32 ${plane}, a{plane}, {mask:#x}, {both:#x}, 0xea;" for plane in range(4)]
    return f"{{ .reg .b32 a<4>; {' '.join(lines)} }}"


FP8_ASM = {torch.bfloat16: _FP8_BF16, torch.float16: _FP8_FP16}
MINUS_ASM = {torch.bfloat16: "sub.bf16x2 $0, $1, $2;", torch.float16: "sub.f16x2 $0, $1, $2;"}


class Mantissa(NamedTuple):
    """Where a 4-bit value is put to make a float of it."""

    surplus: int
    """By which the float is too large: a power of two with an empty mantissa."""
    place: int
    """The bit that counts ones."""

    def base(self, dtype: torch.dtype) -> int:
        return int(torch.tensor(self.surplus, dtype=dtype).view(torch.int16).item())


LOWEST = {torch.bfloat16: Mantissa(128, 0), torch.float16: Mantissa(1024, 0)}
"""One shift less."""
HIGHEST = {torch.bfloat16: Mantissa(16, 3), torch.float16: Mantissa(16, 6)}
"""The least surplus, for sums that are rid of it."""


@jit()
def pair(words, HALF: tl.constexpr, ASM: tl.constexpr):
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
def four(words, HALF: tl.constexpr, BASE: tl.constexpr, PLACE: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> the values of their four planes, each with its mantissa's surplus."""
    first = (((words & 15) << PLACE) | BASE).to(HALF, bitcast=True)
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
            ((((words >> 4) & 15) << PLACE) | BASE).to(HALF, bitcast=True),
            ((((words >> 8) & 15) << PLACE) | BASE).to(HALF, bitcast=True),
            ((((words >> 12) & 15) << PLACE) | BASE).to(HALF, bitcast=True),
        )
    return planes


@jit()
def minus(plane, zero, ASM: tl.constexpr):
    """Exact: both are small integers."""
    if ASM is not None:
        found = tl.inline_asm_elementwise(ASM, "=r,r,r", [plane, zero], dtype=plane.dtype, is_pure=True, pack=2)
    else:
        found = (plane.to(tl.float32) - zero.to(tl.float32)).to(plane.dtype)
    return found
