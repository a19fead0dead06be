"""The likeliest token of each row of logits.

Two launches: every row is cut into chunks, so that one row too is read by many SMs.

Shape suffixes: N rows, V vocabulary, C chunks of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

CHUNK = 4096
NO_INDEX = -0x7FFFFFFFFFFFFFFF
"""A packed maximum lower than any element's."""
UNPACK = 0x7FFFFFFF
"""The index of a packed maximum is `UNPACK - (packed & UNPACK)`."""


def argmax_torch(x_NV: Tensor) -> Tensor:
    """Reference of `argmax`."""
    return x_NV.argmax(-1)


def maxima_torch(x_NV: Tensor, *, first: int = 0, num_live: int | None = None) -> Tensor:
    """Reference of `chunk_maxima`, of one chunk: int64 [N, 1]."""
    x_NV = x_NV[:, :num_live]
    if not x_NV.shape[1]:
        return torch.full((x_NV.shape[0], 1), NO_INDEX, device=x_NV.device)
    index_N1 = x_NV.argmax(-1, keepdim=True)
    best_N1 = x_NV.gather(1, index_N1).float()
    bits_N1 = torch.where(best_N1 == 0.0, 0.0, best_N1).view(torch.int32)
    key_N1 = torch.where(bits_N1 < 0, bits_N1 ^ UNPACK, bits_N1).masked_fill(best_N1.isnan(), UNPACK)
    return (key_N1.long() << 32) | (UNPACK - first - index_N1)


@jit("first")
def _chunk_kernel(x_ptr, best_ptr, x_stride, size, first, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One row, one chunk: value and index of the best element in one integer that compares as they do."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    live = index < size
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + index, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Integers in the order of the floats: -0.0 ties with 0.0, and NaN is above all, as for torch.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    # of equal values the lowest index wins
    packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - first - index).to(tl.int64)
    # lower than any: the key of -inf is higher
    packed = tl.where(live, packed, -0x7FFFFFFFFFFFFFFF)
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, tl.max(packed, 0))


@jit()
def _combine_kernel(best_ptr, out_ptr, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row: the index of the best chunk's best element."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    best = tl.load(best_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=-0x7FFFFFFFFFFFFFFF)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))


def chunk_maxima(x_NV: Tensor, *, first: int = 0, num_live: int | None = None) -> Tensor:
    """int64 [N, C]: each chunk's largest element and its index, packed so that the largest of a row is its argmax.

    For kernels that go on from there; `argmax_triton` is the smallest. Rows may be strided. Indices count from `first`;
    elements from `num_live` on are padding, which no index leads to.
    """
    num_rows, size = x_NV.shape
    assert x_NV.stride(1) == 1
    assert 0 < size < 2**31 - first
    num_chunks = -(-size // CHUNK)
    best_NC = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=x_NV.device)
    if num_rows:
        _chunk_kernel[(num_rows, num_chunks)](
            x_NV,
            best_NC,
            x_NV.stride(0),
            size if num_live is None else num_live,
            first,
            CHUNK=CHUNK,
            num_warps=4,
            **pdl_options(x_NV.device),
        )
    return best_NC


def best_index(best_NC: Tensor) -> Tensor:
    """int64 [N]: the index of each row's largest element, from its chunks' packed ones."""
    num_rows, num_chunks = best_NC.shape
    out_N = torch.empty(num_rows, dtype=torch.int64, device=best_NC.device)
    if num_rows:
        block = next_power_of_2(num_chunks)
        _combine_kernel[(num_rows,)](
            best_NC, out_N, num_chunks, BLOCK=block, num_warps=1, **pdl_options(best_NC.device)
        )
    return out_N


def unpack_maxima(best_NC: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [N], the index of each row's largest element, and whether that is finite; for code without a kernel."""
    best_N = best_NC.amax(-1)
    order_N = best_N >> 32
    return UNPACK - (best_N & UNPACK), (order_N < 0x7F800000) & (order_N > -0x7F800001)


def argmax_triton(x_NV: Tensor) -> Tensor:
    """Twin of `argmax_torch`. Rows may be strided."""
    return best_index(chunk_maxima(x_NV))


def takes_argmax(x: Tensor) -> bool:
    """Whether the kernel takes x."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.stride(-1) == 1


def argmax(x: Tensor) -> Tensor:
    """int64: index of the largest element along the last dimension, the lowest one on ties; NaN is the largest."""
    if takes_argmax(x):
        return argmax_triton(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])
    return x.argmax(-1)
