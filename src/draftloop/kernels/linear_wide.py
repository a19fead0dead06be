"""Linear layers of some hundred tokens: weights cross to each SM once, whatever the number of tokens.

Between about 64 and 300 tokens a layer needs its bytes as long as its operations, and what limits it is how often
the same bytes are fetched from L2. So the tiles are wide: up to 256 output columns, by all tokens. Output columns
are the M side of the tensor cores' instructions and tokens the N side, which comes in steps of 8, but Triton's
blocks are powers of two: the tokens of a program are cut in two, and both parts share each tile of weights. So 192
tokens are 128 and 64, without padding.

Layers with few columns are split along K, and the kernel that follows adds up the sums, as in `linear`.

`linear_multicast` does the same in CUDA C++, in one wave of tiles whose tokens blocks bring each other.

Where either is faster than cuBLAS is measured, not guessed: `MEASURED` lists it, and is made of what
`draftloop.bench.sweep_wide` prints.

Shape suffixes: T tokens, N output columns, K input columns, X splits of K, I = N / 2 columns of a gate.
"""

from __future__ import annotations

import functools
import itertools
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear_multicast import MulticastTiles, linear_multicast
from draftloop.kernels.silu_mul import gate_times_up, silu_mul_torch
from draftloop.kernels.triton_import import TensorDescriptor, gpu_name, jit, next_power_of_2, pdl_options, tl

DTYPES = (torch.bfloat16, torch.float16)
MIN_PART = 16
"""Tokens of the smallest part; parts are powers of two."""


class Kind(StrEnum):
    """What becomes of a layer's sums."""

    PLAIN = "plain"
    """[T, N], rounded."""
    SUMS = "sums"
    """fp32 [X, T, N]: the kernel that follows adds them up over X."""
    GATED = "gated"
    """[T, I]: `silu(first half) * second half`."""


class WideTiles(NamedTuple):
    """Launch parameters."""

    block_n: int
    """Rows of weights in a tile; of a gated layer, half of them gates."""
    block_k: int
    splits: int
    max_tokens: int
    """Of one program; more are shared out evenly."""
    num_warps: int
    num_stages: int


AnyTiles: TypeAlias = WideTiles | MulticastTiles


class Range(NamedTuple):
    """Numbers of tokens, both included."""

    first: int
    last: int


MEASURED: dict[str, dict[tuple[int, int, Kind], dict[Range, AnyTiles]]] = {
    "NVIDIA H200": {
        (4096, 4096, Kind.SUMS): {
            Range(65, 96): WideTiles(128, 128, 3, 96, 4, 4),  # 14.7 us, without 17.5
            Range(97, 128): WideTiles(128, 64, 3, 128, 4, 6),  # 15.9 us, without 16.6
            Range(129, 192): MulticastTiles(128, 4, 2, True, 5),  # 18.0 us, by Triton 19.9
            Range(193, 256): WideTiles(128, 64, 2, 128, 4, 6),  # 19.0 us, without 21.5
        },
        (4096, 14336, Kind.SUMS): {
            Range(33, 48): MulticastTiles(128, 4, 2, False, 6, 256, 192),  # 32.0 us, without 33.1
            Range(65, 96): MulticastTiles(128, 4, 2, True, 5),  # 34.9 us, without 39.6
            Range(97, 128): MulticastTiles(128, 4, 2, True, 5),  # 36.3 us, by Triton 38.2
            Range(129, 192): MulticastTiles(128, 4, 2, True, 5),  # 38.9 us, by Triton 43.6
            Range(193, 256): MulticastTiles(256, 4, 2, False, 4, 128),  # 49.1 us, without 51.0
        },
        (4096, 14336, Kind.PLAIN): {
            Range(577, 768): MulticastTiles(128, 1, 2, True, 5, 192),  # 126.7 us, without 132.4
        },
        (4096, 4096, Kind.PLAIN): {
            Range(577, 768): MulticastTiles(128, 1, 2, True, 5, 192),  # 44.4 us, without 48.3
        },
        (6144, 4096, Kind.SUMS): {
            Range(21, 32): MulticastTiles(192, 4, 1, True, 6, 256, 192),  # 17.0 us, without 20.3
            Range(97, 128): MulticastTiles(96, 2, 2, False, 5),  # 20.2 us, without 21.0
            Range(161, 192): MulticastTiles(96, 2, 2, False, 6),  # 22.5 us, without 25.8
        },
        (6144, 4096, Kind.PLAIN): {
            Range(65, 96): WideTiles(64, 128, 1, 96, 4, 5),  # 19.2 us, without 20.1
        },
        (28672, 4096, Kind.PLAIN): {
            Range(97, 128): WideTiles(128, 64, 1, 128, 4, 3),  # 68.4 us, without 73.9
        },
        (28672, 4096, Kind.GATED): {
            Range(21, 48): MulticastTiles(224, 1, 2, False, 6),  # 57.1 us, without 64.5; of 32 57.5, 59.8
            Range(65, 96): MulticastTiles(224, 1, 2, False, 4),  # 59.9 us, by Triton 63.1
            Range(97, 128): MulticastTiles(224, 1, 2, False, 5),  # 60.0 us, by Triton 62.8
            Range(129, 192): MulticastTiles(224, 1, 2, False, 3),  # 67.7 us, by Triton 75.2
            Range(193, 256): MulticastTiles(224, 1, 2, False, 4, 128),  # 88.5 us, without 96.3
            Range(577, 768): MulticastTiles(224, 1, 2, False, 3, 192),  # 266.4 us, without 279.4
        },
        # an EAGLE-3 head
        (6144, 8192, Kind.SUMS): {
            Range(21, 32): MulticastTiles(192, 4, 2, True, 6, 256, 192),  # 28.4 us, without 35.2
            Range(33, 48): MulticastTiles(192, 4, 2, False, 6),  # 29.1 us, without 29.9
        },
        # a model of 1B
        (3072, 2048, Kind.SUMS): {
            Range(21, 32): MulticastTiles(128, 4, 1, True, 6),  # 7.3 us, without 9.6
        },
        (16384, 2048, Kind.GATED): {
            Range(10, 64): MulticastTiles(128, 1, 2, True, 6, 256, 192),  # 18.2 us, without 22.1; of 16 18.4, 19.2
        },
    },
}
"""GPU -> (N, K, kind) -> numbers of tokens -> the fastest tiles, where they are faster than cuBLAS."""


class TokenParts(NamedTuple):
    """How tokens are shared out between programs, and within one."""

    blocks: int
    first: int
    second: int
    """0: there is one part."""


def token_parts(num_tokens: int, max_tokens: int) -> TokenParts:
    """The fewest tokens, padding included, that two powers of two make, with at most `max_tokens` per program."""
    blocks = -(-num_tokens // max_tokens)
    tokens = -(-num_tokens // blocks)
    whole = max(MIN_PART, next_power_of_2(tokens))
    first = whole // 2
    if first < MIN_PART:
        return TokenParts(blocks, whole, 0)
    second = max(MIN_PART, next_power_of_2(tokens - first))
    return TokenParts(blocks, whole, 0) if first + second >= whole else TokenParts(blocks, first, second)


def linear_wide_torch(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, kind: Kind, splits: int = 1, block_k: int = 1
) -> Tensor:
    """Reference of `linear_wide_triton`. Splits are of whole blocks of K."""
    if kind is not Kind.SUMS:
        out_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
        return silu_mul_torch(out_TN) if kind is Kind.GATED else out_TN
    edges = [x_TK.shape[1] // block_k * split // splits * block_k for split in range(splits + 1)]
    sums_XTN = torch.stack([x_TK[:, a:b].float() @ weight_NK[:, a:b].float().T for a, b in itertools.pairwise(edges)])
    if bias_N is not None:
        sums_XTN[0] += bias_N
    return sums_XTN


@jit()
def no_sums(BLOCK_N: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GATED: tl.constexpr):
    """Columns by tokens, zero: of both parts of the tokens, and of both halves of a gated layer."""
    first = tl.zeros([BLOCK_N, FIRST], tl.float32)
    second, first_up, second_up = first, first, first  # unused where there is no such part
    if SECOND:
        second = tl.zeros([BLOCK_N, SECOND], tl.float32)
    if GATED:
        first_up = tl.zeros([BLOCK_N, FIRST], tl.float32)
    if GATED and SECOND:
        second_up = tl.zeros([BLOCK_N, SECOND], tl.float32)
    return first, second, first_up, second_up


@jit("num_tokens")
def _wide_kernel(
    weight_desc,  # [N, K] in tiles of [BLOCK_N, BLOCK_K]
    first_desc,  # [T, K] in tiles of [FIRST, BLOCK_K]
    second_desc,  # the same in tiles of [SECOND, BLOCK_K]
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
    PDL: tl.constexpr,
):
    """One block of tokens, one block of columns, one split of K. What a tile reads past an end is 0."""
    token = tl.program_id(0) * (FIRST + SECOND)  # neighbours share weights
    column = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    BLOCKS: tl.constexpr = SIZE // BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_wait()
    first, second, first_up, second_up = no_sums(BLOCK_N, FIRST, SECOND, GATED)
    for block in tl.range(BLOCKS * split // SPLITS, BLOCKS * (split + 1) // SPLITS):
        k = block * BLOCK_K
        weight = weight_desc.load([column, k])
        x = first_desc.load([token, k])
        first = tl.dot(weight, x.T, first)
        x_second = x
        if SECOND:
            x_second = second_desc.load([token + FIRST, k])
            second = tl.dot(weight, x_second.T, second)
        if GATED:
            up = weight_desc.load([num_columns + column, k])
            first_up = tl.dot(up, x.T, first_up)
            if SECOND:
                second_up = tl.dot(up, x_second.T, second_up)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    out_ptr += split * num_tokens * num_columns
    if BIAS:
        n = column + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + n, mask=n < num_columns, other=0.0).to(tl.float32)
        bias = tl.where(split == 0, bias, 0.0)[:, None]
        first += bias
        if SECOND:
            second += bias
        if GATED:
            bias = tl.load(bias_ptr + num_columns + n, mask=n < num_columns, other=0.0).to(tl.float32)[:, None]
            first_up += bias
            if SECOND:
                second_up += bias
    if GATED:
        first = gate_times_up(first, first_up, out_ptr.dtype.element_ty, False)
        if SECOND:
            second = gate_times_up(second, second_up, out_ptr.dtype.element_ty, False)
    store_sums(first, out_ptr, token, column, num_tokens, num_columns, EVEN)
    if SECOND:
        store_sums(second, out_ptr, token + FIRST, column, num_tokens, num_columns, EVEN)


@jit()
def store_sums(acc, out_ptr, token, column, num_tokens, num_columns, EVEN: tl.constexpr):
    """Columns by tokens, to [T, N]."""
    n = column + tl.arange(0, acc.shape[0])
    t = token + tl.arange(0, acc.shape[1])
    live = (t < num_tokens)[:, None]
    if not EVEN:
        live = live & (n < num_columns)[None, :]
    out = acc.to(out_ptr.dtype.element_ty).T
    tl.store(out_ptr + t[:, None] * num_columns + n[None, :], out, mask=live)


def linear_wide(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    kind: Kind,
    tiles: AnyTiles,
    out: Tensor | None = None,
) -> Tensor:
    """A layer on a CUDA device by the tiles that `choose` found; for what comes out see `Kind`."""
    if isinstance(tiles, WideTiles):
        return linear_wide_triton(x_TK, weight_NK, bias_N, kind=kind, tiles=tiles, out=out)
    out = make_out(x_TK, weight_NK, kind, tiles.splits) if out is None else out
    return linear_multicast(x_TK, weight_NK, bias_N, out, kind=kind, tiles=tiles)


def make_out(x_TK: Tensor, weight_NK: Tensor, kind: Kind, splits: int) -> Tensor:
    num_tokens, num_columns = x_TK.shape[0], weight_NK.shape[0] // (2 if kind is Kind.GATED else 1)
    shape = (splits, num_tokens, num_columns) if kind is Kind.SUMS else (num_tokens, num_columns)
    return torch.empty(shape, dtype=torch.float32 if kind is Kind.SUMS else x_TK.dtype, device=x_TK.device)


def linear_wide_triton(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    kind: Kind,
    tiles: WideTiles,
    out: Tensor | None = None,
) -> Tensor:
    """Twin of `linear_wide_torch`, with the tiles' splits and blocks of K; for what comes out see `Kind`."""
    assert x_TK.is_contiguous()
    assert weight_NK.is_contiguous()
    assert kind is Kind.SUMS or tiles.splits == 1
    out = make_out(x_TK, weight_NK, kind, tiles.splits) if out is None else out
    assert out.is_contiguous()
    if x_TK.shape[0]:
        arguments, grid, options = launch_arguments(x_TK, weight_NK, bias_N, out, kind=kind, tiles=tiles)
        _wide_kernel[grid](*arguments, **options)
    return out


def launch_arguments(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor, *, kind: Kind, tiles: WideTiles
) -> tuple[list, tuple[int, int, int], dict]:
    """The kernel's arguments, grid and options."""
    num_tokens, size = x_TK.shape
    assert size % tiles.block_k == 0
    gated = kind is Kind.GATED
    num_columns, block_n = (n // 2 if gated else n for n in (weight_NK.shape[0], tiles.block_n))
    parts = token_parts(num_tokens, tiles.max_tokens)

    def describe(tensor: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, tiles.block_k])

    arguments = [
        describe(weight_NK, block_n),
        describe(x_TK, parts.first),
        describe(x_TK, parts.second or MIN_PART),
        x_TK if bias_N is None else bias_N,
        out,
        num_tokens,
        num_columns,
    ]
    options = {
        "SIZE": size,
        "SPLITS": tiles.splits,
        "BIAS": bias_N is not None,
        "GATED": gated,
        "EVEN": num_columns % block_n == 0,
        "BLOCK_N": block_n,
        "BLOCK_K": tiles.block_k,
        "FIRST": parts.first,
        "SECOND": parts.second,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **pdl_options(x_TK.device),
    }
    return arguments, (parts.blocks, -(-num_columns // block_n), tiles.splits), options


def compile_ahead(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor, *, kind: Kind, tiles: WideTiles
) -> None:
    """Compile what `linear_wide_triton` would launch; from any thread."""
    arguments, grid, options = launch_arguments(x_TK, weight_NK, bias_N, out, kind=kind, tiles=tiles)
    _wide_kernel.warmup(*arguments, grid=grid, **options)


def choose(x: Tensor, weight_NK: Tensor, kind: Kind) -> AnyTiles | None:
    """Tiles for a layer on a CUDA device; None: cuBLAS is faster, nobody has measured, or sums must not depend
    on the number of tokens."""
    tiles = _measured(gpu_name(x.device), x.shape[0], *weight_NK.shape, kind)
    if tiles is None or is_wanted() or x.dim() != 2 or x.dtype not in DTYPES or weight_NK.dtype != x.dtype:
        return None
    if isinstance(tiles, MulticastTiles) and x.dtype is not torch.bfloat16:
        return None
    aligned = x.data_ptr() % 16 == weight_NK.data_ptr() % 16 == 0  # as bulk copies need it
    return tiles if aligned and x.is_contiguous() and weight_NK.is_contiguous() else None


@functools.cache
def _measured(gpu: str, num_tokens: int, columns: int, size: int, kind: Kind) -> AnyTiles | None:
    ranges = MEASURED.get(gpu, {}).get((columns, size, kind), {})
    return next((tiles for (first, last), tiles in ranges.items() if first <= num_tokens <= last), None)
