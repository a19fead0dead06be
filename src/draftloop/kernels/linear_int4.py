"""Linear layers whose weights are 4-bit integers with a scale, and perhaps a zero point, per group along K.

A weight is `(value - zero) * scale`, values 0 to 15. Up to `MAX_TOKENS` tokens, a kernel reads the packed values once,
turns them into the activations' type in registers (exactly: value - zero is a small integer), multiplies, and scales
the fp32 sums of each group. With more tokens, weights are turned into floats first.

Packing: K is cut into blocks of 128, zeros behind its end. Word j of a block, 16 bits, holds the values of k = j,
32 + j, 64 + j and 96 + j, lowest bits first: a 32-bit register of two words gives four pairs of neighbours along K,
each by one shift and one logical operation, which puts the value into the mantissa of 128 (bf16) or 1024 (fp16).
All rows of one block lie side by side, so that a tile is read as one piece.

Shape suffixes: T tokens, N output columns, K input columns, B blocks of 128 along K, J words, G groups.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.linear import Tiles
from draftloop.kernels.quantised import KernelCall, Measured, QuantisedWeight, stored, token_block
from draftloop.kernels.triton_import import jit, pdl_options, tl

BLOCK = 128
PLANES = 4
"""Values in a word."""
WORDS = BLOCK // PLANES
GROUP_SIZES = (32, 64, 128)
"""That the kernel knows; longer groups are several of 128."""
MIDDLE = 8
"""The zero point of values that have none of their own."""

MEASURED: Measured = {
    (4096, 14336, True): Tiles(128, 128, 8, 4, 3),  # 17.8 us, floor 7.1
    (28672, 4096, False): Tiles(128, 128, 1, 4, 3),  # 27.8 us, floor 14.2
    (6144, 4096, False): Tiles(64, 256, 1, 4, 3),  # 14.1 us, floor 3.1; the fastest at 6 tokens loses at 32
    (4096, 4096, True): Tiles(64, 128, 8, 4, 3),  # 8.6 us, floor 2.0
}


class Int4Values(NamedTuple):
    """What a file holds of one weight."""

    values_NK: Tensor
    """uint8, 0 to 15."""
    scale_NG: Tensor
    """Groups are consecutive and of equal size."""
    zero_NG: Tensor | None = None
    """uint8, 0 to 16; None: 8 everywhere."""
    order_K: Tensor | None = None
    """int64: the input column that column k of `values_NK` multiplies; None: k itself."""

    def dequantise(self) -> Tensor:
        """fp32 [N, K], columns in the order of the input."""
        group = self.values_NK.shape[1] // self.scale_NG.shape[1]
        values_NGS = self.values_NK.unflatten(1, (-1, group)).float()
        zero = MIDDLE if self.zero_NG is None else self.zero_NG.unsqueeze(2).float()
        weight_NK = ((values_NGS - zero) * self.scale_NG.unsqueeze(2).float()).flatten(1)
        if self.order_K is None:
            return weight_NK
        return torch.empty_like(weight_NK).index_copy_(1, self.order_K, weight_NK)


def quantise_int4(weight_NK: Tensor, group_size: int) -> Int4Values:
    """Round to nearest, symmetric: the largest number of a group is 7 steps."""
    weight_NGS = weight_NK.float().unflatten(1, (-1, group_size))
    scale_NG = (weight_NGS.abs().amax(2) / (MIDDLE - 1)).bfloat16().float()  # as short as it is stored
    steps_NGS = weight_NGS / scale_NG.where(scale_NG > 0, 1).unsqueeze(2)
    return Int4Values((steps_NGS.round().clamp(-MIDDLE, MIDDLE - 1) + MIDDLE).to(torch.uint8).flatten(1), scale_NG)


def pack(values_NK: Tensor) -> Tensor:
    """uint8 [N, K], K a multiple of 128 -> int16 [B, N, J]"""
    planes_NBPJ = values_NK.to(torch.int32).unflatten(1, (-1, PLANES, WORDS))
    words_NBJ = sum(planes_NBPJ[:, :, plane] << (4 * plane) for plane in range(PLANES))
    assert isinstance(words_NBJ, Tensor)
    return words_NBJ.to(torch.int16).transpose(0, 1).contiguous()


def unpack(words_BNJ: Tensor) -> Tensor:
    """Undo `pack`."""
    words_NBJ = words_BNJ.transpose(0, 1).to(torch.int32)
    return torch.stack([words_NBJ >> (4 * plane) & 15 for plane in range(PLANES)], 2).flatten(1).to(torch.uint8)


class Int4Weight(QuantisedWeight):
    """Packed values; scales are relative to a power of two per row, in fp16 unless that would round them."""

    measured: ClassVar[Measured] = MEASURED

    def __init__(
        self,
        num_columns: int,
        size: int,
        *,
        group_size: int,
        has_zeros: bool = False,
        is_ordered: bool = False,
        device: torch.device,
    ) -> None:
        """`group_size` divides K, or is -1 for whole rows; `is_ordered`: columns may be in another order."""
        super().__init__(num_columns, size)
        self.group_size = kernel_group(group_size, size)
        blocks = -(-size // BLOCK)
        groups = blocks * BLOCK // self.group_size if self.group_size in GROUP_SIZES else size // self.group_size
        self.packed_BNJ = stored(blocks, num_columns, WORDS, dtype=torch.int16, device=device)
        self.scale_GN = stored(groups, num_columns, dtype=torch.float16, device=device)
        self.row_scale_N = stored(num_columns, dtype=torch.float32, device=device)
        self.zero_GN = stored(groups, num_columns, dtype=torch.int16, device=device) if has_zeros else None
        self.order_K = stored(size, dtype=torch.int64, device=device) if is_ordered else None
        self._is_order_known = False

    def fill(self, start: int, values: Int4Values) -> None:
        num_rows, size = values.values_NK.shape
        rows = slice(start, start + num_rows)
        padding = self.packed_BNJ.shape[0] * BLOCK - size
        padded_NK = torch.nn.functional.pad(values.values_NK, (0, padding), value=MIDDLE)
        self.packed_BNJ.data[:, rows] = pack(padded_NK)
        scale_GN = self._groups(values.scale_NG.float(), size)
        exponent_N = torch.frexp(scale_GN.abs().amax(0)).exponent
        self.row_scale_N.data[rows] = torch.ldexp(torch.ones_like(scale_GN[0]), exponent_N)
        ratio_GN = torch.ldexp(scale_GN, -exponent_N)
        if not torch.equal(ratio_GN.to(torch.float16).float(), ratio_GN):
            self.scale_GN.data = self.scale_GN.data.float()
        self.scale_GN.data[:, rows] = ratio_GN.to(self.scale_GN.dtype)
        if self.zero_GN is not None:
            if values.zero_NG is None:
                self.zero_GN.data[:, rows] = MIDDLE
            else:
                self.zero_GN.data[:, rows] = self._groups(values.zero_NG.to(torch.int16), size)
        if self.order_K is not None:
            order_K = torch.arange(size) if values.order_K is None else values.order_K
            order_K = order_K.to(self.order_K.device)
            if self._is_order_known and not torch.equal(self.order_K, order_K):
                raise ValueError("the parts of a fused weight have their columns in different orders")
            self.order_K.data.copy_(order_K)
            self._is_order_known = True

    def _groups(self, per_group_NG: Tensor, size: int) -> Tensor:
        """[G, N] for the kernel's groups; those behind the end of K stand for nothing."""
        repeated = per_group_NG.repeat_interleave(size // per_group_NG.shape[1] // self.group_size, 1)
        missing = self.scale_GN.shape[0] - repeated.shape[1]
        return torch.nn.functional.pad(repeated, (0, missing)).t()

    def quantise(self, weight_NK: Tensor) -> Int4Values:
        return quantise_int4(weight_NK, self.group_size)

    def dequantise_torch(self, dtype: torch.dtype) -> Tensor:
        size = self.shape[1]
        groups = size // self.group_size
        scale_GN = self.scale_GN[:groups].float() * self.row_scale_N
        zero_NG = None if self.zero_GN is None else self.zero_GN[:groups].t()
        values_NK = unpack(self.packed_BNJ)[:, :size]
        return Int4Values(values_NK, scale_GN.t(), zero_NG, self.order_K).dequantise().to(dtype)

    def dequantise_triton(self, dtype: torch.dtype) -> Tensor:
        num_columns, size = self.shape
        out_NK = torch.empty(num_columns, size, dtype=dtype, device=self.packed_BNJ.device)
        _dequantise_int4_kernel[(-(-num_columns // 32), self.packed_BNJ.shape[0])](
            self.packed_BNJ,
            self.scale_GN,
            self.row_scale_N,
            self.scale_GN if self.zero_GN is None else self.zero_GN,
            self.packed_BNJ if self.order_K is None else self.order_K,
            out_NK,
            num_columns,
            SIZE=size,
            GROUP=self.group_size,
            ZERO=self.zero_GN is not None,
            ORDERED=self.order_K is not None,
            BLOCK_N=32,
        )
        return out_NK

    def takes(self) -> bool:
        return self.numel() < 2**31 and not self.shape[1] % 8 and self.group_size in GROUP_SIZES

    def kernel_call(self, x_TK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles) -> KernelCall:
        if self.order_K is not None:
            x_TK = x_TK.index_select(1, self.order_K)
        num_tokens, size = x_TK.shape
        num_columns, blocks = self.shape[0], self.packed_BNJ.shape[0]
        assert blocks * BLOCK % (tiles.block_k * tiles.splits) == 0
        arguments = (
            x_TK,
            self.packed_BNJ,
            self.scale_GN,
            self.row_scale_N,
            self.scale_GN if self.zero_GN is None else self.zero_GN,
            x_TK if bias_N is None else bias_N,
            out,
            num_tokens,
            num_columns,
        )
        options = dict(
            SIZE=size,
            PART=blocks * BLOCK // tiles.splits,
            GROUP=self.group_size,
            ZERO=self.zero_GN is not None,
            BIAS=bias_N is not None,
            BASE=_BASES[x_TK.dtype],
            MIDDLE=float(MIDDLE + (128 if x_TK.dtype is torch.bfloat16 else 1024)),
            PLANES_ASM=_PLANES_ASM[x_TK.dtype] if x_TK.is_cuda else None,
            MINUS_ASM=_MINUS_ASM[x_TK.dtype] if x_TK.is_cuda else None,
            BLOCK_M=token_block(num_tokens),
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **pdl_options(x_TK.device),
        )
        return KernelCall(_linear_int4_kernel, arguments, options)


def kernel_group(group_size: int, size: int) -> int:
    """Columns of K that share a scale in the kernel: the file's own, or a part of them."""
    if group_size == -1:
        group_size = size
    return next((known for known in reversed(GROUP_SIZES) if group_size % known == 0), 0) or group_size


def _planes_asm(base: int) -> str:
    """Two words at a time: shift a plane down, keep 4 bits of each half, and put them into a mantissa."""
    lines = [f"shr.u32 a{plane}, $4, {4 * plane};" for plane in range(PLANES)]
    lines += [f"lop3.b32 ${plane}, a{plane}, 0x000f000f, {base << 16 | base:#x}, 0xea;" for plane in range(PLANES)]
    return f"{{ .reg .b32 a<{PLANES}>; {' '.join(lines)} }}"


_BASES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""Bits of 128 and of 1024, whose last mantissa bits count ones."""
_PLANES_ASM = {dtype: _planes_asm(base) for dtype, base in _BASES.items()}
_MINUS_ASM = {torch.bfloat16: "sub.bf16x2 $0, $1, $2;", torch.float16: "sub.f16x2 $0, $1, $2;"}


@jit()
def _planes(words, HALF: tl.constexpr, BASE: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> their four planes, each value plus 128 (bf16) or 1024 (fp16)."""
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


@jit()
def _dequantise_int4_kernel(
    packed_ptr,
    scale_ptr,
    row_scale_ptr,
    zero_ptr,
    order_ptr,
    out_ptr,
    num_columns,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some rows, 128 columns of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    j = tl.arange(0, 32)
    n_live = n < num_columns
    words = tl.load(packed_ptr + (block * num_columns + n)[:, None] * 32 + j[None, :], mask=n_live[:, None], other=0)
    row_scale = tl.load(row_scale_ptr + n, mask=n_live, other=0.0)
    for plane in tl.static_range(4):
        group = (block * 128 + 32 * plane) // GROUP
        scale = tl.load(scale_ptr + group * num_columns + n, mask=n_live, other=0.0).to(tl.float32) * row_scale
        values = ((words >> (4 * plane)) & 15).to(tl.float32)
        if ZERO:
            values -= tl.load(zero_ptr + group * num_columns + n, mask=n_live, other=0).to(tl.float32)[:, None]
        else:
            values -= 8.0
        k = block * 128 + 32 * plane + j
        live = n_live[:, None] & (k < SIZE)[None, :]
        column = tl.load(order_ptr + k, mask=k < SIZE, other=0) if ORDERED else k
        out = (values * scale[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + n[:, None] * SIZE + column[None, :], out, mask=live)


@jit("num_tokens")
def _linear_int4_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    row_scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    MIDDLE: tl.constexpr,  # the zero point of values without, as a plane has it
    PLANES_ASM: tl.constexpr,  # None in the interpreter
    MINUS_ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens, one block of columns, one split of K."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    j = tl.arange(0, 32)
    m_live = m < num_tokens
    # columns past the end read the last one again and are not stored
    row = tl.minimum(n, num_columns - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    LAST: tl.constexpr = (SIZE + 127) // 128 * 128 - 32
    group = split * PART // GROUP
    scale = tl.load(scale_ptr + group * num_columns + row)
    zero_bits = tl.load(zero_ptr + group * num_columns + row)  # of no use, and left out, where there are none
    for start in range(0, PART, BLOCK_K):
        for inner in tl.static_range(0, BLOCK_K, 128):
            first = split * PART + start + inner
            offset = (first // 128 * num_columns + row)[None, :] * 32 + j[:, None]
            planes = _planes(tl.load(packed_ptr + offset, eviction_policy="evict_first"), HALF, BASE, PLANES_ASM)
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for plane in tl.static_range(4):
                k = first + 32 * plane + j
                live = m_live[:, None] if SIZE % 128 == 0 else m_live[:, None] & (k < SIZE)[None, :]
                x = tl.load(x_ptr + m[:, None] * SIZE + k[None, :], mask=live, other=0.0)
                if ZERO:
                    zero = tl.broadcast_to((zero_bits | BASE).to(HALF, bitcast=True)[None, :], [32, BLOCK_N])
                else:
                    zero = tl.full([32, BLOCK_N], MIDDLE, HALF)
                weight = _minus(planes[plane], zero, MINUS_ASM)
                sums = tl.dot(x, weight, sums)
                if (32 * plane + 32) % GROUP == 0:
                    acc += sums * scale.to(tl.float32)[None, :]
                    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    # for the next group, so that they arrive meanwhile
                    group = tl.minimum(first + 32 * plane + 32, LAST) // GROUP
                    scale = tl.load(scale_ptr + group * num_columns + row)
                    if ZERO:
                        zero_bits = tl.load(zero_ptr + group * num_columns + row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_live = n < num_columns
    acc *= tl.load(row_scale_ptr + row)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[None, :]
    out_offset = (split * num_tokens + m)[:, None] * num_columns + n[None, :]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=m_live[:, None] & n_live[None, :])
