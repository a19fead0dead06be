"""Linear layers whose weights are 8-bit floats (e4m3) with scales per output column or per block.

With few tokens only the weights have 8 bits: a kernel reads them once, turns them into the activations' type in
registers, exactly, adds up in fp32 and scales the sums. Above `FEW_TOKENS`, activations are rounded to 8 bits too if
the checkpoint was made for that (`Activations`) and the device multiplies such matrices; else, above `MAX_TOKENS`,
weights are turned into floats first.

e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities ("FP8 Formats for Deep Learning", Micikevicius
et al., 2022).

Shape suffixes: T tokens, N output columns, K input columns, X splits of K, P and Q blocks of weights along N and K.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear import Tiles
from draftloop.kernels.quantised import KernelCall, Measured, QuantisedWeight, stored, token_block
from draftloop.kernels.triton_import import jit, pdl_options, tl

FP8 = torch.float8_e4m3fn
FEW_TOKENS = 64
"""Above this, activations have 8 bits too where the checkpoint asks for that."""
LARGEST = 448.0
"""The largest e4m3 number."""
Activations = Literal["none", "dynamic", "static"]
"""Whether activations were meant to be rounded to 8 bits, by a scale per token or by one that is stored."""

MEASURED: Measured = {
    (4096, 14336, True): Tiles(64, 256, 4, 4, 3),  # 20.5 us, floor 13.7
    (28672, 4096, False): Tiles(128, 256, 1, 4, 3),  # 33.3 us, floor 27.4
    (6144, 4096, False): Tiles(64, 256, 1, 4, 3),  # 12.7 us, floor 5.9
    (4096, 4096, True): Tiles(64, 256, 4, 4, 3),  # 9.1 us, floor 3.9
}


class Fp8Values(NamedTuple):
    """What a file holds of one weight: `weight * scale`, scales repeated over blocks."""

    weight_NK: Tensor
    scale_PQ: Tensor
    """fp32; [1, 1] for the whole weight, [N, 1] per output column, else a number per block."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block; the last ones may be smaller. None: P and Q say it."""
    input_scale: Tensor | None = None
    """fp32, one number."""

    def dequantise(self) -> Tensor:
        """fp32 [N, K]"""
        return self.weight_NK.float() * self._spread()

    def _spread(self) -> Tensor:
        if self.block is None:
            return self.scale_PQ
        rows, columns = self.weight_NK.shape
        return spread(self.scale_PQ, self.block, (1, 1), (rows, columns))


def spread(scale_PQ: Tensor, block: tuple[int, int], finer: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Scales of `block`s as those of blocks that divide them, over a weight of `shape`."""
    for dim in (0, 1):
        scale_PQ = scale_PQ.repeat_interleave(block[dim] // finer[dim], dim).narrow(
            dim, 0, -(-shape[dim] // finer[dim])
        )
    return scale_PQ


def quantise_fp8(weight_NK: Tensor) -> Fp8Values:
    """With a scale per output column."""
    weight_NK = weight_NK.float()
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / LARGEST
    return Fp8Values((weight_NK / scale_N1.where(scale_N1 > 0, 1)).clamp(-LARGEST, LARGEST).to(FP8), scale_N1)


class Fp8Weight(QuantisedWeight):
    """8-bit floats as the file has them, row by row; scales per output column, or per block."""

    measured: ClassVar[Measured] = MEASURED

    def __init__(
        self,
        num_columns: int,
        size: int,
        *,
        block: tuple[int, int] | None = None,
        parts: tuple[int, ...] = (),
        activations: Activations = "none",
        device: torch.device,
    ) -> None:
        """`parts`: rows of each part of a fused weight, whose blocks start anew."""
        super().__init__(num_columns, size)
        self.activations: Activations = activations
        if block is not None:
            # blocks that fit between the parts' edges and divide K
            block = (math.gcd(block[0], *(parts or (num_columns,))), math.gcd(block[1], size))
        self.block = block
        self.weight_NK = stored(num_columns, size, dtype=FP8, device=device)
        rows, columns = (num_columns, 1) if block is None else (num_columns // block[0], size // block[1])
        self.scale_PQ = stored(rows, columns, dtype=torch.float32, device=device)
        self.input_scale = stored(1, dtype=torch.float32, device=device) if activations == "static" else None
        if self.input_scale is not None:
            self.input_scale.data.zero_()

    def fill(self, start: int, values: Fp8Values) -> None:
        num_rows, size = values.weight_NK.shape
        self.weight_NK.data.view(torch.uint8)[start : start + num_rows].copy_(values.weight_NK.view(torch.uint8))
        scale_PQ, rows = values.scale_PQ.float(), self.block[0] if self.block else 1
        if self.block is not None:
            assert values.block is not None
            scale_PQ = spread(scale_PQ, values.block, self.block, (num_rows, size))
        part = self.scale_PQ.data[start // rows : (start + num_rows) // rows]
        part.copy_(scale_PQ.expand_as(part))
        if self.input_scale is not None and values.input_scale is not None:
            # the parts read one input: the largest scale clips none of them
            torch.maximum(self.input_scale.data, values.input_scale.to(self.input_scale), out=self.input_scale.data)

    def quantise(self, weight_NK: Tensor) -> Fp8Values:
        values = quantise_fp8(weight_NK)
        if self.block is None:
            return values
        # random weights for benchmarks alone: one scale serves all blocks
        scale = weight_NK.float().abs().amax().clamp(min=1e-12) / LARGEST
        rows, columns = weight_NK.shape[0] // self.block[0], weight_NK.shape[1] // self.block[1]
        return Fp8Values((weight_NK.float() / scale).to(FP8), scale.expand(rows, columns), self.block)

    def dequantise_torch(self, dtype: torch.dtype) -> Tensor:
        return Fp8Values(self.weight_NK, self.scale_PQ, self.block).dequantise().to(dtype)

    def dequantise_triton(self, dtype: torch.dtype) -> Tensor:
        num_columns, size = self.shape
        out_NK = torch.empty(num_columns, size, dtype=dtype, device=self.weight_NK.device)
        _dequantise_fp8_kernel[(-(-num_columns // 32), size // 128)](
            self.weight_NK.view(torch.uint8),
            self.scale_PQ,
            out_NK,
            num_columns,
            SIZE=size,
            BLOCK_ROWS=self.block[0] if self.block else 0,
            ASM=_DECODE_ASM[dtype] if out_NK.is_cuda else None,
            BLOCK_N=32,
        )
        return out_NK

    def takes(self) -> bool:
        num_columns, size = self.shape
        return (
            size % 128 == 0
            and num_columns * size < 2**31  # offsets are 32 bits wide
            and (self.block is None or self.block[1] == 128)
        )

    def kernel_call(self, x_TK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles) -> KernelCall:
        num_tokens, size = x_TK.shape
        num_columns = self.shape[0]
        assert size % (tiles.block_k * tiles.splits) == 0
        arguments = (
            x_TK,
            self.weight_NK.view(torch.uint8),
            self.scale_PQ,
            x_TK if bias_N is None else bias_N,
            out,
            num_tokens,
            num_columns,
        )
        options = dict(
            SIZE=size,
            SPLITS=tiles.splits,
            BLOCK_ROWS=self.block[0] if self.block else 0,
            BIAS=bias_N is not None,
            ASM=_DECODE_ASM[x_TK.dtype] if x_TK.is_cuda else None,
            BLOCK_M=token_block(num_tokens),
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **pdl_options(x_TK.device),
        )
        return KernelCall(_linear_fp8_kernel, arguments, options)

    def max_tokens(self, x_TK: Tensor) -> int:
        # matrices of 8 bits on both sides are faster than blocks of tokens
        return FEW_TOKENS if self._multiplies_in_8_bits(x_TK) else super().max_tokens(x_TK)

    def linear_many(self, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
        if self._multiplies_in_8_bits(x_TK):
            return self.linear_w8a8(x_TK, bias_N)
        return super().linear_many(x_TK, bias_N)

    def _multiplies_in_8_bits(self, x_TK: Tensor) -> bool:
        return (
            self.activations != "none"
            and not is_wanted()
            and self.block is None
            and x_TK.is_cuda
            and x_TK.dtype is torch.bfloat16
            and not (self.shape[0] % 16 or self.shape[1] % 16)
            and _has_rowwise_fp8(x_TK.device)
        )

    def linear_w8a8(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Activations in 8 bits too, by a scale per token or by the stored one."""
        x_TK, scale_T1 = quantise_activations(x_TK, self.input_scale)
        # torch has no public function for this yet
        out_TN = torch._scaled_mm(
            x_TK, self.weight_NK.t(), scale_a=scale_T1, scale_b=self.scale_PQ.t(), out_dtype=torch.bfloat16
        )
        return out_TN if bias_N is None else out_TN + bias_N


def quantise_activations(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 [T, K], and fp32 scales [T, 1]: those of each token's largest number, or the one that is given."""
    if input_scale is None:
        scale_T1 = (x_TK.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    else:
        scale_T1 = input_scale.expand(x_TK.shape[0], 1).contiguous()
    return (x_TK.float() / scale_T1).clamp(-LARGEST, LARGEST).to(FP8), scale_T1


@functools.cache
def _has_rowwise_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _decode_asm(shift: int, mask: int, factor: int, multiply: str) -> str:
    """Four e4m3 numbers at a time: exponent and mantissa moved into place, then corrected for the other bias."""
    return f"""{{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, {shift};
        shr.u32 d, b, {shift};
        and.b32 c, c, {mask << 16 | mask:#x};
        and.b32 d, d, {mask << 16 | mask:#x};
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        mov.b32 c, {factor << 16 | factor:#x};
        {multiply} $0, a, c;
        {multiply} $1, b, c;
        }}"""


_DECODE_ASM = {
    torch.bfloat16: _decode_asm(4, 0x07F0, 0x7B80, "mul.bf16x2"),  # by 2^120
    torch.float16: _decode_asm(1, 0x3F80, 0x5C00, "mul.f16x2"),  # by 2^8
}


@jit()
def _decode(bits, HALF: tl.constexpr, ASM: tl.constexpr):
    """uint8 -> the e4m3 numbers that they stand for, exactly; 480 for NaN, which weights must not have."""
    wide = bits.to(tl.int16)
    # fp16 has all e4m3 numbers, and the interpreter knows it
    moved = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    found = (moved * 256.0).to(HALF)
    if ASM is not None:
        found = tl.inline_asm_elementwise(ASM, "=r,=r,r", [bits], dtype=found.dtype, is_pure=True, pack=4)
    return found


@jit()
def _dequantise_fp8_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_columns,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some rows, 128 columns of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    live = (n < num_columns)[:, None]
    offset = n[:, None] * SIZE + k[None, :]
    weight = _decode(tl.load(weight_ptr + offset, mask=live, other=0), out_ptr.dtype.element_ty, ASM)
    scale_row = scale_ptr + (n // BLOCK_ROWS * (SIZE // 128) + tl.program_id(1) if BLOCK_ROWS else n)
    scale = tl.load(scale_row, mask=n < num_columns, other=0.0)
    tl.store(out_ptr + offset, (weight.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty), mask=live)


@jit("num_tokens")
def _linear_fp8_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows that share a scale along K; 0: one scale per row
    BIAS: tl.constexpr,
    ASM: tl.constexpr,  # None in the interpreter
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens, one block of columns, one split of K."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    m_live = m < num_tokens
    # columns past the end read the last one again and are not stored
    row = tl.minimum(n, num_columns - 1)
    PART: tl.constexpr = SIZE // SPLITS
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    scale_row = scale_ptr + (row // BLOCK_ROWS * (SIZE // 128) + split * PART // 128 if BLOCK_ROWS else row)
    scale = tl.load(scale_row)
    for start in range(0, PART, BLOCK_K):
        for inner in tl.static_range(0, BLOCK_K, 128 if BLOCK_ROWS else BLOCK_K):
            first = split * PART + start + inner
            k = first + tl.arange(0, 128 if BLOCK_ROWS else BLOCK_K)
            bits = tl.load(weight_ptr + row[None, :] * SIZE + k[:, None], eviction_policy="evict_first")
            x = tl.load(x_ptr + m[:, None] * SIZE + k[None, :], mask=m_live[:, None], other=0.0)
            weight = _decode(bits, x_ptr.dtype.element_ty, ASM)
            if BLOCK_ROWS:
                acc += tl.dot(x, weight) * scale[None, :]
                # for the next round, so that it arrives meanwhile
                scale = tl.load(scale_row + tl.minimum(start + inner + 128, PART - 128) // 128)
            else:
                acc = tl.dot(x, weight, acc)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_live = n < num_columns
    if not BLOCK_ROWS:
        acc *= scale[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[None, :]
    out_offset = (split * num_tokens + m)[:, None] * num_columns + n[None, :]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=m_live[:, None] & n_live[None, :])
