"""The layers of quantised weights that `sweep_quantised` times, and all the ways to run each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import DTYPE
from draftloop.kernels import linear_planes, linear_w8a8
from draftloop.kernels.gated_linear import gated_linear
from draftloop.kernels.linear import Tiles, linear_split_triton, qkv_linear, residual_linear
from draftloop.kernels.linear_fp8 import Fp8Weight
from draftloop.kernels.linear_int4 import Int4Weight
from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_wide import Kind, WideTiles, token_parts
from draftloop.kernels.packed_values import BLOCK
from draftloop.kernels.quantised import QuantisedWeight

FORMATS: dict[str, Callable[[int, int, torch.device], QuantisedWeight]] = {
    "int4": lambda columns, size, device: Int4Weight(columns, size, group_size=BLOCK, device=device),
    "fp8": lambda columns, size, device: Fp8Weight(columns, size, activations="dynamic", device=device),
    "int4_zeros": lambda columns, size, device: Int4Weight(
        columns, size, group_size=BLOCK, has_zeros=True, device=device
    ),
    "fp8_block": lambda columns, size, device: Fp8Weight(columns, size, block=(BLOCK, BLOCK), device=device),
}


class Layer(NamedTuple):
    name: str
    columns: int
    size: int
    kind: Kind


LAYERS = [
    Layer("gate_up", 28672, 4096, Kind.GATED),
    Layer("down", 4096, 14336, Kind.SUMS),
    Layer("qkv", 6144, 4096, Kind.PLAIN),
    Layer("o", 4096, 4096, Kind.SUMS),
]
SPLIT_QKV = (
    *(Tiles(64, 128, 2, 4, 5), Tiles(64, 128, 4, 4, 3), Tiles(64, 128, 4, 4, 4)),
    *(Tiles(32, 256, 2, 4, 4), Tiles(128, 128, 4, 4, 4)),
)
"""Of plain weights."""
TOKENS = {"few": (6, 1), "some": (48, 32, 64), "many": (192, 96)}
"""All candidates are timed at the first number, the fastest at the others too."""
NUM_SMS = 132
SHARED_BYTES = 226 << 10
IN_FLIGHT = 26 << 10
"""Bytes on their way to an SM at any time at full bandwidth, if they take 0.8 us."""
Launch = tuple[Any, Any, Any, dict[str, Any]]
"""A Triton kernel, its arguments, grid and options."""


class Copy(NamedTuple):
    """One copy of a layer's weights, quantised and not."""

    weight: QuantisedWeight
    plain: Tensor


class Candidate(NamedTuple):
    """One way to run a layer."""

    name: str
    tiles: tuple
    launch: Callable[[Copy, Tensor], tuple[Launch, Tensor]] | None
    """What to launch, and where its result will be; None: `run` alone, of nothing that wants compiling."""
    run: Callable[[Copy, Tensor], Tensor]
    accuracy: str = "exact"


def launched(
    name: str, tiles: tuple, launch: Callable[[Copy, Tensor], tuple[Launch, Tensor]], accuracy: str = "exact"
) -> Candidate:
    def run(copy: Copy, x: Tensor) -> Tensor:
        (kernel, arguments, grid, options), out = launch(copy, x)
        kernel[grid](*arguments, **options)
        return out

    return Candidate(name, tiles, launch, run, accuracy)


def output(layer: Layer, splits: int, x: Tensor, *, gated: bool = False) -> Tensor:
    columns = layer.columns // 2 if gated else layer.columns
    shape = (x.shape[0], columns) if splits == 1 else (splits, x.shape[0], columns)
    return torch.empty(shape, dtype=DTYPE if splits == 1 else torch.float32, device=x.device)


def planes(layer: Layer, tiles: PlaneTiles) -> Candidate:
    gated = layer.kind is Kind.GATED

    def launch(copy: Copy, x: Tensor) -> tuple[Launch, Tensor]:
        out, activation = output(layer, tiles.splits, x, gated=gated), "silu" if gated else None
        call = linear_planes.launch_arguments(x, copy.weight.planes(), None, out, tiles=tiles, activation=activation)
        return (linear_planes._linear_planes_kernel, *call), out

    return launched("planes", tiles, launch)


def w8a8(layer: Layer, tiles: WideTiles, *, gated: bool) -> Candidate:
    kind = Kind.GATED if gated else Kind.SUMS if tiles.splits > 1 else Kind.PLAIN

    def launch_of(copy: Copy, x_TK: Tensor, scale_T1: Tensor, out: Tensor) -> Launch:
        assert isinstance(copy.weight, Fp8Weight)
        call = linear_w8a8.launch_arguments(
            x_TK, scale_T1, copy.weight.packed_BNS, copy.weight.scale_PQ, None, out, kind=kind, tiles=tiles
        )
        return (linear_w8a8._w8a8_kernel, *call)

    def launch(copy: Copy, x: Tensor) -> tuple[Launch, Tensor]:
        out = output(layer, tiles.splits, x, gated=gated)
        scale_T1 = torch.empty(x.shape[0], 1, device=x.device)
        return launch_of(copy, torch.empty_like(x, dtype=torch.float8_e4m3fn), scale_T1, out), out

    def run(copy: Copy, x: Tensor) -> Tensor:
        out = output(layer, tiles.splits, x, gated=gated)
        kernel, arguments, grid, options = launch_of(copy, *linear_w8a8.quantise_triton(x), out)
        kernel[grid](*arguments, **options)
        return out

    return Candidate("w8a8" + "_gated" * gated, tiles, launch, run, "rounded")


def scaled_mm(copy: Copy, x: Tensor) -> Tensor:
    """What many more tokens get: cuBLAS, and a copy of the weights before."""
    assert isinstance(copy.weight, Fp8Weight)
    x_TK, scale_T1 = linear_w8a8.quantise_triton(x)
    return linear_w8a8.scaled_mm(x_TK, scale_T1, copy.weight.packed_BNS, copy.weight.scale_PQ)


def plain(layer: Layer, copy: Copy, x: Tensor) -> Tensor:
    if layer.kind is Kind.GATED and x.shape[0] > 64:
        return gated_linear(x, copy.plain)
    return (residual_linear if layer.kind is Kind.SUMS else qkv_linear)(x, copy.plain)


def plain_split(tiles: Tiles, copy: Copy, x: Tensor) -> Tensor:
    return linear_split_triton(x, copy.plain, tiles=tiles)


def candidates(form: str, layer: Layer, regime: str) -> Iterator[Candidate]:
    tokens = TOKENS[regime][0]
    yield Candidate("bf16", (), None, functools.partial(plain, layer))
    yield Candidate("engine", (), None, functools.partial(engine, layer))
    if layer.kind is Kind.PLAIN and regime == "few" and form == "fp8":
        for split in SPLIT_QKV:
            yield Candidate("bf16_split", split, None, functools.partial(plain_split, split))
    if regime == "many" and form == "fp8":
        yield Candidate("scaled_mm", (), None, scaled_mm, "rounded")
        for tiles in wide_tiles(layer, tokens):
            yield w8a8(layer, tiles, gated=layer.kind is Kind.GATED)
        return
    for tiles in plane_tiles(layer, regime, integer=form.startswith("int4")):
        yield planes(layer, tiles)


def engine(layer: Layer, copy: Copy, x: Tensor) -> Tensor:
    """What the engine does now."""
    if layer.kind is Kind.GATED:
        return gated_linear(x, copy.weight)
    return (residual_linear if layer.kind is Kind.SUMS else qkv_linear)(x, copy.weight)


def plane_tiles(layer: Layer, regime: str, *, integer: bool) -> Iterator[PlaneTiles]:
    """Those that give every SM something to read, and fit shared memory with enough on its way.

    Compiled for sm_90 none of them spills, and all read ahead; 8 warps do not with integers and 8 tokens, of which
    each thread would copy 2 bytes.
    """
    shapes = ((64, 128, 4), (128, 128, 4), (128, 128, 8))  # rows, columns, warps
    if regime == "few":
        shapes = ((64, 256, 4), (64, 256, 2)) if integer else ((64, 128, 4), (128, 128, 4))
    limits = {"few": (8,), "some": (32, 64), "many": (64, 128, 256)}[regime]
    all_splits = (1, 2, 4, 8) if layer.kind is Kind.SUMS or (layer.kind is Kind.PLAIN and regime == "few") else (1,)
    for (block_n, block_k, warps), limit, splits in itertools.product(shapes, limits, all_splits):
        programs = -(-layer.columns // block_n) * splits
        weight_bytes = block_n * block_k // (2 if integer else 1)
        room = SHARED_BYTES // (weight_bytes + limit * block_k * DTYPE.itemsize)
        length = layer.size // (block_k * splits)
        if layer.size % (block_k * splits) or length < 4 or not (60 if regime == "many" else 90) <= programs <= 600:
            continue
        # integers have a group's sums beside all sums
        if room < 3 or limit * block_n > (2048 if integer else 4096) * warps:
            continue
        depths = (1.5, 3) if regime == "few" else (3,)
        wanted = IN_FLIGHT / max(1, programs / NUM_SMS) / weight_bytes
        for stages in sorted({max(3, min(2 + math.ceil(wanted * depth), length + 1, room, 12)) for depth in depths}):
            yield PlaneTiles(block_n, block_k, splits, limit, warps, stages)


def wide_tiles(layer: Layer, tokens: int) -> Iterator[WideTiles]:
    gated = layer.kind is Kind.GATED
    shapes = ((128, 8, 1), (128, 4, 1), (64, 4, 2), (256, 8, 1))
    all_splits = (1, 2, 3, 4) if layer.kind is Kind.SUMS else (1,)
    for (block_n, warps, per_sm), limit, splits in itertools.product(shapes, (96, 192), all_splits):
        parts = token_parts(tokens, limit)
        part = parts.first + parts.second
        programs = parts.blocks * -(-layer.columns // block_n) * splits
        registers = block_n * part // (32 * warps)
        stages = min(6, (SHARED_BYTES // per_sm - 1024) // ((block_n + part) * BLOCK))
        if registers > 160 or stages < 3 or (gated and block_n == 64) or not 60 <= programs <= 700:
            continue
        yield WideTiles(block_n, BLOCK, splits, limit, warps, stages)
