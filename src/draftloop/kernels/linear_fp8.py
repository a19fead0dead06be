"""Linear layers whose weights are 8-bit floats (e4m3) with scales per output column or per block.

With few tokens only the weights have 8 bits: `linear_planes` reads them once, turns them into the activations' type in
registers, exactly, adds up in fp32 and scales the sums. Above `FEW_TOKENS`, activations are rounded to 8 bits too if
the checkpoint was made for that (`Activations`) and the device multiplies such matrices (`linear_w8a8`); else, above
`MAX_TOKENS`, weights are turned into floats first.

e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities ("FP8 Formats for Deep Learning", Micikevicius
et al., 2022).

Shape suffixes: T tokens, N output columns, K input columns, P and Q blocks of weights along N
and K, B blocks of 128 along K, S = 128 columns of one.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels import linear_w8a8
from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear_planes import Planes, PlaneTiles
from draftloop.kernels.linear_wide import Kind
from draftloop.kernels.packed_values import BLOCK, FP8_ASM, pack_fp8, pair, unpack_fp8
from draftloop.kernels.quantised import MAX_TOKENS, Measured, QuantisedWeight, TilesByTokens, stored
from draftloop.kernels.triton_import import jit, tl

FP8 = torch.float8_e4m3fn
FEW_TOKENS = 64
"""Above this, activations have 8 bits too where the checkpoint asks for that."""
LARGEST = 448.0
"""The largest e4m3 number."""
Activations = Literal["none", "dynamic", "static"]
"""Whether activations were meant to be rounded to 8 bits, by a scale per token or by one that is stored."""

_QKV_OF_MORE: TilesByTokens = {
    32: PlaneTiles(64, 128, 1, 32, 4, 4),  # 13.4 us at 32 tokens
    MAX_TOKENS: PlaneTiles(64, 128, 1, 64, 4, 9),  # 15.7 us at 48 tokens
}
MEASURED: Measured = {
    "NVIDIA H200": {
        (4096, 14336, True): {
            8: PlaneTiles(64, 128, 4, 8, 4, 5),  # 17.8 us at 6 tokens, floor 13.7
            32: PlaneTiles(64, 128, 4, 32, 4, 4),  # 20.3 us at 32 tokens
            MAX_TOKENS: PlaneTiles(128, 128, 4, 64, 8, 7),  # 22.9 us at 48 tokens
        },
        (28672, 4096, False): {
            8: PlaneTiles(128, 128, 1, 8, 4, 4),  # 29.7 us at 6 tokens, floor 27.4
            32: PlaneTiles(128, 128, 1, 32, 4, 4),  # 31.5 us at 32 tokens
            MAX_TOKENS: PlaneTiles(64, 128, 1, 64, 4, 5),  # 43.8 us at 48 tokens
        },
        (6144, 4096, False): {
            8: PlaneTiles(64, 128, 1, 8, 4, 5),  # 13.6 us at 6 tokens with the rotation, floor 5.9
            **_QKV_OF_MORE,
        },
        (6144, 4096, True): {
            8: PlaneTiles(64, 128, 4, 8, 4, 4),  # 10.0 us at 6 tokens with the rotation that adds up
            **_QKV_OF_MORE,
        },
        (4096, 4096, True): {
            8: PlaneTiles(128, 128, 4, 8, 4, 5),  # 8.0 us at 6 tokens, floor 3.9
            32: PlaneTiles(64, 128, 4, 32, 4, 4),  # 8.9 us at 32 tokens
            MAX_TOKENS: PlaneTiles(128, 128, 4, 64, 8, 7),  # 11.2 us at 48 tokens
        },
    },
}
"""From `draftloop.bench.sweep_quantised`."""


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
    """8-bit floats as the file has them, in the order of `pack_fp8`; scales per output column, or per block."""

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
        width = size if size % BLOCK else BLOCK
        self.packed_BNS = stored(size // width, num_columns, width, dtype=FP8, device=device)
        rows, columns = (num_columns, 1) if block is None else (num_columns // block[0], size // block[1])
        self.scale_PQ = stored(rows, columns, dtype=torch.float32, device=device)
        self.input_scale = stored(1, dtype=torch.float32, device=device) if activations == "static" else None
        if self.input_scale is not None:
            self.input_scale.data.zero_()

    def fill(self, start: int, values: Fp8Values) -> None:
        num_rows, size = values.weight_NK.shape
        packed_BNS = pack_fp8(values.weight_NK.view(torch.uint8))
        self.packed_BNS.data.view(torch.uint8)[:, start : start + num_rows] = packed_BNS
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
        return Fp8Values(unpack_fp8(self.packed_BNS), self.scale_PQ, self.block).dequantise().to(dtype)

    def dequantise_triton(self, dtype: torch.dtype) -> Tensor:
        num_columns, size = self.shape
        out_NK = torch.empty(num_columns, size, dtype=dtype, device=self.packed_BNS.device)
        _dequantise_fp8_kernel[(-(-num_columns // 32), size // 128)](
            self.packed_BNS.view(torch.int16),
            self.scale_PQ,
            out_NK,
            num_columns,
            SIZE=size,
            BLOCK_ROWS=self.block[0] if self.block else 0,
            ASM=FP8_ASM[dtype] if out_NK.is_cuda else None,
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

    def planes(self) -> Planes:
        words_BNJ = self.packed_BNS.view(torch.int16)
        if self.block is None:
            return Planes(words_BNJ, self.scale_PQ, (0, 0), row_scale_N=self.scale_PQ)
        rows, columns = self.block
        return Planes(words_BNJ, self.scale_PQ, (self.scale_PQ.shape[1], 1), columns, rows)

    def max_tokens(self, x_TK: Tensor) -> float:
        return FEW_TOKENS if self._multiplies_in_8_bits(x_TK) else super().max_tokens(x_TK)

    def linear_many(self, x_TK: Tensor, bias_N: Tensor | None, kind: Kind) -> Tensor:
        if self._multiplies_in_8_bits(x_TK):
            scales = self.scale_PQ, self.input_scale
            return linear_w8a8.linear(x_TK.contiguous(), self.packed_BNS, *scales, bias_N, kind=kind)
        return super().linear_many(x_TK, bias_N, kind)

    def _multiplies_in_8_bits(self, x_TK: Tensor) -> bool:
        return (
            self.activations != "none"
            and not is_wanted()
            and self.block is None
            and x_TK.is_cuda
            and x_TK.dtype is torch.bfloat16
            and x_TK.dim() == 2
            and not self.shape[0] % 16
            and self.takes()
            and _multiplies_fp8(x_TK.device)
        )


def quantise_activations(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 [T, K], and fp32 scales [T, 1]: those of each token's largest number, or the one that is given."""
    if input_scale is None:
        scale_T1 = (x_TK.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    else:
        scale_T1 = input_scale.expand(x_TK.shape[0], 1).contiguous()
    return (x_TK.float() / scale_T1).clamp(-LARGEST, LARGEST).to(FP8), scale_T1


@functools.cache
def _multiplies_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@jit()
def _dequantise_fp8_kernel(
    words_ptr,
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
    block = tl.program_id(1)
    j = tl.arange(0, 64)
    live = n < num_columns
    words = tl.load(words_ptr + (block * num_columns + n)[:, None] * 64 + j[None, :], mask=live[:, None], other=0)
    planes = pair(words, out_ptr.dtype.element_ty, ASM)
    scale_row = scale_ptr + (n // BLOCK_ROWS * (SIZE // 128) + block if BLOCK_ROWS else n)
    scale = tl.load(scale_row, mask=live, other=0.0)
    for plane in tl.static_range(2):
        offset = n[:, None] * SIZE + (block * 128 + 64 * plane + j)[None, :]
        out = (planes[plane].to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset, out, mask=live[:, None])
