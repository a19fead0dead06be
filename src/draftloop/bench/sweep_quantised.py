"""Which kernel and which tiles are fastest for layers of quantised weights: what their `MEASURED` are made of.

    python -m draftloop.bench.sweep_quantised --formats fp8 --out fp8.json   # on the GPU; keeps what it has if cut off
    python -m draftloop.bench.sweep_quantised --show fp8.json                # anywhere: the tables again
    python -m draftloop.bench.sweep_quantised --entries fp8.json             # anywhere: the entries of `MEASURED`
    python -m draftloop.bench.sweep_quantised --best fp8.json -- latency ...   # `draftloop bench` with its tiles

All layers are timed at few tokens, then at some, then at many, with the candidates of each. Every result is compared
with exact sums first: what is wrong is listed and cannot win. Every time includes the kernel that follows the layer in
a model: the norm or the rotation that adds up the sums of split layers, and the gated activation where a candidate does
not include it. "bf16" is the same layer with plain weights, as the engine runs it, "bf16_split" with K split.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import BYTES_PER_SECOND, COLD_BYTES, DTYPE, OPERATIONS_PER_SECOND, time_us
from draftloop.bench.sweep_report import SweepReport, gpu, run_bench
from draftloop.bench.sweep_view import entries, table, usable, with_best
from draftloop.kernels import linear_planes, linear_w8a8
from draftloop.kernels.gated_linear import gated_linear
from draftloop.kernels.linear import Tiles, linear_split_triton, qkv_linear, residual_linear
from draftloop.kernels.linear_fp8 import Fp8Weight
from draftloop.kernels.linear_int4 import Int4Weight
from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_wide import Kind, WideTiles, token_parts
from draftloop.kernels.packed_values import BLOCK
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.kernels.silu_mul import silu_mul

FORMATS: dict[str, Callable[[int, int, torch.device], QuantisedWeight]] = {
    "int4": lambda columns, size, device: Int4Weight(columns, size, group_size=BLOCK, device=device),
    "fp8": lambda columns, size, device: Fp8Weight(columns, size, activations="dynamic", device=device),
    "int4_zeros": lambda columns, size, device: Int4Weight(
        columns, size, group_size=BLOCK, has_zeros=True, device=device
    ),
    "fp8_block": lambda columns, size, device: Fp8Weight(columns, size, block=(BLOCK, BLOCK), device=device),
}

MEASURED = {"int4": Int4Weight.measured, "fp8": Fp8Weight.measured}


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
HEAD_DIM, NUM_KV_HEADS = 128, 8
SPLIT_QKV = (
    *(Tiles(64, 128, 2, 4, 5), Tiles(64, 128, 4, 4, 3), Tiles(64, 128, 4, 4, 4)),
    *(Tiles(32, 256, 2, 4, 4), Tiles(128, 128, 4, 4, 4)),
)
"""Of plain weights."""
TOKENS = {"few": (6, 1), "some": (48, 32, 64), "many": (192, 96)}
"""All candidates are timed at the first number, the fastest at the others too."""
FINALISTS = 3
PER_NAME = 2
"""Candidates of each name that are finalists whatever the others do."""
NUM_SMS = 132
SHARED_BYTES = 226 << 10
IN_FLIGHT = 26 << 10
"""Bytes on their way to an SM at any time at full bandwidth, if they take 0.8 us."""
MAX_ERROR = {"exact": 5e-3, "rounded": 0.045}
"""Of the norm of the difference to exact sums, with activations in 16 bits and in 8; larger: the kernel is wrong."""

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


class Cell(NamedTuple):
    """One layer in one format at some number of tokens, with its candidates being compiled."""

    form: str
    layer: Layer
    regime: str
    candidates: list[tuple[Candidate, Future[None]]]


def plan(forms: list[str], regimes: list[str], pool: ThreadPoolExecutor, device: torch.device) -> list[Cell]:
    """Has everything compiled."""
    cells = []
    for regime, form, layer in itertools.product(regimes, forms, LAYERS):
        blank = Copy(FORMATS[form](layer.columns, layer.size, device), torch.empty(0, device=device))
        found = []
        for candidate in candidates(form, layer, regime):
            found.append((candidate, pool.submit(compile_ahead, candidate, blank, TOKENS[regime], layer.size)))
        cells.append(Cell(form, layer, regime, found))
    return cells


def compile_ahead(candidate: Candidate, blank: Copy, all_tokens: tuple[int, ...], size: int) -> None:
    """For the first number of tokens: what the others need differs for few candidates."""
    if candidate.launch is not None:
        x = torch.empty(all_tokens[0], size, dtype=DTYPE, device=blank.plain.device)
        (kernel, arguments, grid, options), _ = candidate.launch(blank, x)
        kernel.warmup(*arguments, grid=grid, **options)


@torch.inference_mode()
def copies_of(form: str, layer: Layer, device: torch.device) -> list[Copy]:
    torch.manual_seed(0)
    plain = torch.randn(layer.columns, layer.size, dtype=DTYPE, device=device) * layer.size**-0.5
    copies: list[Copy] = []
    while not copies or len(copies) * copies[0].weight.nbytes < COLD_BYTES:
        weight = FORMATS[form](layer.columns, layer.size, device)
        weight.fill(0, weight.quantise(plain))
        copies.append(Copy(weight, plain.clone()))
    return copies


@torch.inference_mode()
def measure(cell: Cell, copies: list[Copy], device: torch.device) -> dict[str, Any]:
    """The time and error of each candidate, fastest first."""
    layer = cell.layer
    exact_NK = copies[0].weight.dequantise(torch.float32)
    norm = torch.ones(layer.columns, dtype=DTYPE, device=device)
    slots = torch.arange(16, 16 + max(TOKENS[cell.regime]), device=device)
    cos_sin = torch.ones(len(slots) + 16, HEAD_DIM, device=device)
    cache = torch.zeros(2, 2 + len(slots) // 16, 16, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    many = cell.regime == "many"

    def rest(out: Tensor, residual: Tensor) -> Tensor:
        if layer.kind is Kind.SUMS:
            return add_rms_norm(out, residual, norm, 1e-5)[0]
        if layer.kind is Kind.GATED:
            return silu_mul(out) if out.shape[-1] == layer.columns else out
        at = slots[: out.shape[-2]]
        heads = layer.columns // HEAD_DIM - 2 * NUM_KV_HEADS
        kind = {"num_heads": heads, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
        return rope_write(out, at, at, cos_sin, cache, **kind, dtype=DTYPE)

    def error(candidate: Candidate, x: Tensor) -> float:
        out = candidate.run(copies[0], x)
        weight_NK = copies[0].plain.float() if candidate.name.startswith("bf16") else exact_NK
        expected = x.float() @ weight_NK.T
        if out.shape[-1] != layer.columns:
            expected = silu_mul(expected.to(DTYPE)).float()
        out = out.sum(0) if out.dim() == 3 else out.float()
        return ((out - expected).norm() / expected.norm()).item()

    def time_it(candidate: Candidate, tokens: int) -> float:
        x = torch.randn(tokens, layer.size, dtype=DTYPE, device=device)
        residual = torch.randn(tokens, layer.columns, dtype=DTYPE, device=device)
        calls = [lambda copy=copy: rest(candidate.run(copy, x), residual) for copy in copies]
        return time_us(calls, min_calls=24, repeats=7)[0]

    first, *others = TOKENS[cell.regime]
    x = torch.randn(first, layer.size, dtype=DTYPE, device=device)
    results = []
    for candidate, compiled in cell.candidates:
        result: dict[str, Any] = {"name": candidate.name, "tiles": list(candidate.tiles)}
        try:
            compiled.result()
            found = error(candidate, x)
            result |= {"error": found, "limit": MAX_ERROR[candidate.accuracy]}
            if candidate.name == "engine":
                result["limit"] = MAX_ERROR["rounded"]
            result["us"] = time_it(candidate, first)
        except Exception as failure:  # too many resources, most likely: no candidate
            result["failed"] = repr(failure)[:300]
        results.append((result, candidate))
    results.sort(key=lambda pair: pair[0].get("us", float("inf")))
    good = [pair for pair in results if pair[0] in usable([pair[0]])]
    finalists = good[:FINALISTS]
    for name in dict.fromkeys(pair[0]["name"] for pair in good):
        of_name = [pair for pair in good if pair[0]["name"] == name][:PER_NAME]
        finalists += [pair for pair in of_name if pair not in finalists]
    for result, candidate in finalists:
        result["other_us"] = {tokens: time_it(candidate, tokens) for tokens in others}
    num_bytes = copies[0].weight.nbytes + first * (layer.size + layer.columns) * DTYPE.itemsize
    operations = 2 * first * layer.size * layer.columns / (2 if cell.form == "fp8" and many else 1)
    return {
        "format": cell.form,
        "regime": cell.regime,
        "layer": layer.name,
        "columns": layer.columns,
        "size": layer.size,
        "kind": layer.kind,
        "tokens": first,
        "floor_us": max(num_bytes / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND) * 1e6,
        "results": [result for result, _ in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every layer")
    parser.add_argument("--show", type=Path, help="print the tables of such a file, and measure nothing")
    parser.add_argument("--entries", type=Path, help="print what such a file makes of `MEASURED`, and measure nothing")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["int4", "fp8"])
    parser.add_argument("--regimes", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=100, help="start no new measurement after this long")
    parser.add_argument(
        "--best", type=Path, help="such a file, whose best tiles for few tokens the arguments are run with"
    )
    parser.add_argument("arguments", nargs="*", help="of `draftloop bench`")
    args = parser.parse_args()
    if args.best:
        rows = [row for row in json.loads(args.best.read_text())["rows"] if row["regime"] == "few"]
        Int4Weight.measured = with_best(MEASURED["int4"], "int4", rows)
        Fp8Weight.measured = with_best(MEASURED["fp8"], "fp8", rows)
        run_bench(args.arguments)
        return
    if args.show:
        for row in json.loads(args.show.read_text())["rows"]:
            print(*table(row), sep="\n")
        return
    if args.entries:
        print(*entries(json.loads(args.entries.read_text())["rows"], MEASURED), sep="\n")
        return
    report, device = SweepReport(args.out, args.seconds), gpu()
    copies: tuple[Any, list[Copy]] = (None, [])
    with ThreadPoolExecutor(
        16
    ) as pool:  # all is compiled before anything is measured: both want the interpreter's lock
        cells = plan(args.formats, args.regimes, pool, device)
    for cell in cells:
        if report.is_late():
            break
        if copies[0] != (cell.form, cell.layer):
            copies = (None, [])
            copies = ((cell.form, cell.layer), copies_of(cell.form, cell.layer, device))
        row = measure(cell, copies[1], device)
        report.add(row, table(row))


if __name__ == "__main__":
    main()
