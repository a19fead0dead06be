"""Linear layers whose weights are 4-bit integers with a scale, and perhaps a zero point, per group along K.

A weight is `(value - zero) * scale`, values 0 to 15. For as many tokens as that was measured to be faster,
`linear_planes` multiplies by the packed values; with more, weights are turned into floats first.

Packing as `packed_values` says, in four planes: a 32-bit register of two words gives four pairs of neighbours along K,
each by one shift and one logical operation, which puts the value into the mantissa of 128 (bf16) or 1024 (fp16).

Shape suffixes: T tokens, N output columns, K input columns, B blocks of 128 along K, J words, G groups.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.linear_planes import Planes, PlaneTiles
from draftloop.kernels.packed_values import BLOCK
from draftloop.kernels.quantised import Measured, QuantisedWeight, TilesByTokens, stored
from draftloop.kernels.triton_import import jit, tl

PLANES = 4
"""Values in a word."""
WORDS = BLOCK // PLANES
GROUP_SIZES = (32, 64, 128)
"""That the kernel knows; longer groups are several of 128."""
MIDDLE = 8
"""The zero point of values that have none of their own."""

_QKV_OF_MORE: TilesByTokens = {
    64: PlaneTiles(64, 128, 1, 32, 4, 4),  # 16.7 us at 32 tokens
    128: PlaneTiles(64, 128, 1, 64, 4, 4),  # 25.6 us at 96 tokens; at 192 floats are faster
}
MEASURED: Measured = {
    "NVIDIA H200": {
        (4096, 14336, True): {
            8: PlaneTiles(64, 256, 4, 8, 4, 4),  # 15.3 us at 6 tokens, floor 7.1
            64: PlaneTiles(64, 128, 4, 32, 4, 4),
            256: PlaneTiles(128, 128, 4, 64, 4, 4),  # 67.1 us at 192 tokens; by floats 93.1
        },
        (28672, 4096, False): {
            8: PlaneTiles(64, 256, 1, 8, 2, 4),  # 21.0 us at 6 tokens, floor 14.2
            64: PlaneTiles(128, 128, 1, 32, 4, 4),  # 32.6 us at 32 tokens
            256: PlaneTiles(128, 128, 1, 64, 4, 4),  # 111.2 us at 192 tokens; by floats 172.8
        },
        (6144, 4096, False): {
            8: PlaneTiles(64, 256, 1, 8, 4, 4),  # 13.6 us at 6 tokens with the rotation, floor 3.1
            **_QKV_OF_MORE,
        },
        (6144, 4096, True): {
            8: PlaneTiles(64, 256, 4, 8, 4, 4),  # 9.0 us at 6 tokens with the rotation that adds up
            **_QKV_OF_MORE,
        },
        (4096, 4096, True): {
            8: PlaneTiles(64, 256, 4, 8, 2, 5),  # 7.5 us at 6 tokens, floor 2.0
            64: PlaneTiles(64, 128, 4, 32, 4, 4),  # 8.8 us at 32 tokens
            256: PlaneTiles(128, 128, 4, 64, 4, 4),  # 25.5 us at 192 tokens; by floats 34.8
        },
    },
}
"""From `draftloop.bench.sweep_quantised`."""


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

    def planes(self) -> Planes:
        strides = (1, self.shape[0])
        return Planes(self.packed_BNJ, self.scale_GN, strides, self.group_size, 1, self.row_scale_N, self.zero_GN)

    @property
    def is_arranged(self) -> bool:
        return self.order_K is None

    def arranged(self, x_TK: Tensor) -> Tensor:
        return x_TK if self.order_K is None else x_TK.index_select(1, self.order_K)


def kernel_group(group_size: int, size: int) -> int:
    """Columns of K that share a scale in the kernel: the file's own, or a part of them."""
    if group_size == -1:
        group_size = size
    return next((known for known in reversed(GROUP_SIZES) if group_size % known == 0), 0) or group_size


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
