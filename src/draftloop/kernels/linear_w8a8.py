"""Linear layers that multiply 8-bit floats (e4m3) on both sides, for checkpoints whose activations were made for it.

Nothing is decoded: tensor cores take the weights as they lie in shared memory. Activations are rounded to 8 bits,

- of few tokens by the kernel that multiplies them, with a scale per token and 128 columns of K, which is finer than
  the one per token that checkpoints ask for, or with the stored scale;
- of many by a kernel of their own, with a scale per token, or the stored one. The layer is then what `linear_wide`
  makes of 16-bit weights, with half the bytes.

Sums over at most 128 columns of K are made by tensor cores, which keep 14 bits of them or more, and added up in fp32.

Shape suffixes: T tokens, N output columns, K input columns, X splits of K, I = N / 2 columns of a gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_wide import MIN_PART, Kind, WideTiles, _gate, _store, token_parts
from draftloop.kernels.triton_import import TensorDescriptor, constant, jit, next_power_of_2, pdl_options, tl

LARGEST = constant(448.0)
SMALLEST = constant(1e-12)
"""A scale that zeros may have."""
GROUP = 128
"""Columns of K of one scale, and of one sum of tensor cores."""


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
    k = tl.arange(0, BLOCK)
    live = k < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * SIZE + k, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(input_scale_ptr) if STORED else tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, SMALLEST)
    tl.store(out_ptr + token * SIZE + k, _rounded(x, scale), mask=live)
    tl.store(scale_ptr + token, scale)


def quantise_triton(x_TK: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Twin of `linear_fp8.quantise_activations`."""
    assert x_TK.is_contiguous()
    num_tokens, size = x_TK.shape
    out_TK = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TK.device)
    if num_tokens:
        block = next_power_of_2(size)
        _quantise_kernel[(num_tokens,)](
            x_TK,
            scale_T1 if input_scale is None else input_scale,
            out_TK,
            scale_T1,
            SIZE=size,
            BLOCK=block,
            STORED=input_scale is not None,
            num_warps=min(16, max(1, block // 512)),
            **pdl_options(x_TK.device),
        )
    return out_TK, scale_T1


@jit("num_tokens")
def _few_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    input_scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens, one block of columns, one split of K. Weights are the M side of the products."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    t_live = t < num_tokens
    # columns past the end read the last one again and are not stored
    row = tl.minimum(n, num_columns - 1)
    PART: tl.constexpr = SIZE // SPLITS
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    x_scale = tl.full([BLOCK_T], 1.0, tl.float32)
    if STORED:
        x_scale = x_scale * tl.load(input_scale_ptr)
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        for inner in tl.static_range(0, BLOCK_K, 128):
            k = split * PART + start + inner + tl.arange(0, 128)
            weight = tl.load(weight_ptr + row[:, None] * SIZE + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + t[:, None] * SIZE + k[None, :], mask=t_live[:, None], other=0.0).to(tl.float32)
            if not STORED:
                x_scale = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, SMALLEST)
            sums = tl.dot(weight, _rounded(x, x_scale[:, None]).T)
            acc += sums * x_scale[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_live = n < num_columns
    acc *= tl.load(scale_ptr + row)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    out_offset = (split * num_tokens + t)[None, :] * num_columns + n[:, None]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=t_live[None, :] & n_live[:, None])


def few_arguments(
    x_TK: Tensor,
    weight_NK: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None,
    out: Tensor,
    *,
    tiles: PlaneTiles,
    input_scale: Tensor | None = None,
) -> tuple[tuple[Any, ...], tuple[int, int, int], dict[str, Any]]:
    """The few tokens' kernel's arguments, grid and options; `out` is [T, N], or fp32 [X, T, N]."""
    num_tokens, size = x_TK.shape
    num_columns = weight_NK.shape[0]
    assert size % (tiles.block_k * tiles.splits) == 0
    block_t = min(tiles.max_tokens, max(8, next_power_of_2(num_tokens)))
    arguments = (
        x_TK,
        weight_NK,
        scale_N1,
        scale_N1 if input_scale is None else input_scale,
        x_TK if bias_N is None else bias_N,
        out,
        num_tokens,
        num_columns,
    )
    options = dict(
        SIZE=size,
        SPLITS=tiles.splits,
        STORED=input_scale is not None,
        BIAS=bias_N is not None,
        BLOCK_T=block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x_TK.device),
    )
    return arguments, (-(-num_tokens // block_t), -(-num_columns // tiles.block_n), tiles.splits), options


@jit("num_tokens")
def _many_kernel(
    weight_desc,  # [N, K] in tiles of [BLOCK_N, BLOCK_K]
    first_desc,  # [T, K] in tiles of [FIRST, BLOCK_K]
    second_desc,  # the same in tiles of [SECOND, BLOCK_K]
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
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    IMPRECISE: tl.constexpr,  # columns of K that tensor cores may add up by themselves
    PDL: tl.constexpr,
):
    """One block of tokens, one block of columns, one split of K. What a tile reads past an end is 0."""
    token = tl.program_id(0) * (FIRST + SECOND)  # neighbours share weights
    column = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    BLOCKS: tl.constexpr = SIZE // BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.zeros([BLOCK_N, FIRST], tl.float32)
    second, first_up, second_up = first, first, first  # unused where there is no such part
    if SECOND:
        second = tl.zeros([BLOCK_N, SECOND], tl.float32)
    if GATED:
        first_up = tl.zeros([BLOCK_N, FIRST], tl.float32)
    if GATED and SECOND:
        second_up = tl.zeros([BLOCK_N, SECOND], tl.float32)
    for block in tl.range(BLOCKS * split // SPLITS, BLOCKS * (split + 1) // SPLITS):
        k = block * BLOCK_K
        weight = weight_desc.load([column, k])
        x = first_desc.load([token, k])
        first = tl.dot(weight, x.T, first, max_num_imprecise_acc=IMPRECISE)
        x_second = x
        if SECOND:
            x_second = second_desc.load([token + FIRST, k])
            second = tl.dot(weight, x_second.T, second, max_num_imprecise_acc=IMPRECISE)
        if GATED:
            up = weight_desc.load([num_columns + column, k])
            first_up = tl.dot(up, x.T, first_up, max_num_imprecise_acc=IMPRECISE)
            if SECOND:
                second_up = tl.dot(up, x_second.T, second_up, max_num_imprecise_acc=IMPRECISE)
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
        first = _gate(first, first_up, out_ptr.dtype.element_ty)
        if SECOND:
            second_up = _scaled(
                second_up, scale_ptr, x_scale_ptr, bias_ptr, column, token + FIRST, split, num_columns, num_tokens, BIAS
            )
            second = _gate(second, second_up, out_ptr.dtype.element_ty)
    _store(first, out_ptr, token, column, num_tokens, num_columns, EVEN)
    if SECOND:
        _store(second, out_ptr, token + FIRST, column, num_tokens, num_columns, EVEN)


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


def many_arguments(
    x_TK: Tensor,
    scale_T1: Tensor,
    weight_NK: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None,
    out: Tensor,
    *,
    kind: Kind,
    tiles: WideTiles,
) -> tuple[list[Any], tuple[int, int, int], dict[str, Any]]:
    """The many tokens' kernel's arguments, grid and options; for what comes out see `Kind`."""
    num_tokens, size = x_TK.shape
    assert size % tiles.block_k == 0
    assert kind is Kind.SUMS or tiles.splits == 1
    gated = kind is Kind.GATED
    num_columns, block_n = (n // 2 if gated else n for n in (weight_NK.shape[0], tiles.block_n))
    parts = token_parts(num_tokens, tiles.max_tokens)

    def describe(tensor: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, tiles.block_k])

    arguments = [
        describe(weight_NK, block_n),
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
        BLOCK_K=tiles.block_k,
        FIRST=parts.first,
        SECOND=parts.second,
        IMPRECISE=min(GROUP, tiles.block_k),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(out.device),
    )
    return arguments, (parts.blocks, -(-num_columns // block_n), tiles.splits), options


def linear_few_triton(
    x_TK: Tensor,
    weight_NK: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    tiles: PlaneTiles,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Of few tokens in 16 bits, [T, N]; fp32 [X, T, N] to be added up over X where tiles split K."""
    assert x_TK.is_contiguous()
    assert weight_NK.is_contiguous()
    num_tokens, num_columns = x_TK.shape[0], weight_NK.shape[0]
    if tiles.splits > 1:
        out = torch.empty(tiles.splits, num_tokens, num_columns, dtype=torch.float32, device=x_TK.device)
    else:
        out = torch.empty(num_tokens, num_columns, dtype=x_TK.dtype, device=x_TK.device)
    if num_tokens:
        arguments, grid, options = few_arguments(
            x_TK, weight_NK, scale_N1, bias_N, out, tiles=tiles, input_scale=input_scale
        )
        _few_kernel[grid](*arguments, **options)
    return out


def linear_many_triton(
    x_TK: Tensor,
    scale_T1: Tensor,
    weight_NK: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    kind: Kind,
    tiles: WideTiles,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Of tokens that `quantise_triton` has rounded; for what comes out see `Kind`."""
    num_tokens = x_TK.shape[0]
    num_columns = weight_NK.shape[0] // 2 if kind is Kind.GATED else weight_NK.shape[0]
    shape = (tiles.splits, num_tokens, num_columns) if kind is Kind.SUMS else (num_tokens, num_columns)
    out = torch.empty(shape, dtype=torch.float32 if kind is Kind.SUMS else dtype, device=x_TK.device)
    if num_tokens:
        arguments, grid, options = many_arguments(
            x_TK, scale_T1, weight_NK, scale_N1, bias_N, out, kind=kind, tiles=tiles
        )
        _many_kernel[grid](*arguments, **options)
    return out
