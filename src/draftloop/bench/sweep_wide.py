"""Which tiles make layers of many tokens faster than cuBLAS: what `kernels.linear_wide.MEASURED` is made of.

    python -m draftloop.bench.sweep_wide --out sweep.json            # on the GPU; keeps what it has when cut off
    python -m draftloop.bench.sweep_wide --entries sweep.json        # anywhere: the table's entries

Every time includes the kernel that follows the layer in a model (norm, gate, argmax), since splits shift work to
it, a fused gate spares it, and cuBLAS starts no kernel before the last one has drained.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import BYTES_PER_SECOND, DTYPE, OPERATIONS_PER_SECOND, cold_weights, time_us
from draftloop.bench.sweep_report import SweepReport, gpu
from draftloop.kernels.argmax import argmax
from draftloop.kernels.linear import MAX_TOKENS, linear, linear_torch, residual_linear
from draftloop.kernels.linear_multicast import MulticastTiles, find_kernel
from draftloop.kernels.linear_wide import AnyTiles, Kind, WideTiles, compile_ahead, linear_wide, make_out, token_parts
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kernels.silu_mul import silu_mul

NUM_SMS = 132
SHARED_BYTES = 227 << 10
L2_BYTES_PER_SECOND = 6.5e12
SM_BYTES_PER_SECOND = 90e9
"""From L2. Both are guesses, which only rank candidates."""
MAX_ERROR = 1e-2
"""Of the norm of the difference to cuBLAS; larger: the kernel is wrong."""
GAIN = 0.98
"""Tiles enter the table if they take less than this share of the time without them."""


class Layer(NamedTuple):
    name: str
    columns: int
    size: int
    kinds: tuple[Kind, ...]


LAYERS = [
    Layer("gate_up", 28672, 4096, (Kind.GATED, Kind.PLAIN)),
    Layer("down", 4096, 14336, (Kind.SUMS, Kind.PLAIN)),
    Layer("qkv", 6144, 4096, (Kind.SUMS, Kind.PLAIN)),
    Layer("o", 4096, 4096, (Kind.SUMS, Kind.PLAIN)),
    Layer("lm_head", 128256, 4096, (Kind.PLAIN,)),
]
TOKENS = (192, 768, 96, 128, 256)


def estimate_us(layer: Layer, tokens: int, kind: Kind, tiles: WideTiles, per_sm: int) -> float:
    """Roughly how long a layer takes with so many programs on an SM at once."""
    blocks, first, second = token_parts(tokens, tiles.max_tokens)
    part = first + second
    programs = blocks * -(-layer.columns // tiles.block_n) * tiles.splits
    waves, active = -(-programs // (NUM_SMS * per_sm)), min(programs, NUM_SMS * per_sm)
    depth = layer.size / tiles.splits
    operations, num_bytes = (2 * tiles.block_n * part * depth, (tiles.block_n + part) * depth * DTYPE.itemsize)
    rate = min(L2_BYTES_PER_SECOND / active, SM_BYTES_PER_SECOND / per_sm)
    seconds = waves * max(operations * NUM_SMS * per_sm / OPERATIONS_PER_SECOND, num_bytes / rate)
    if kind is Kind.SUMS:
        seconds += 2 * 4 * tiles.splits * tokens * layer.columns / L2_BYTES_PER_SECOND
    return max(seconds, layer.columns * layer.size * DTYPE.itemsize / BYTES_PER_SECOND) * 1e6


def num_stages(block_n: int, block_k: int, part: int, warps: int, per_sm: int) -> int:
    """The deepest pipeline that so many programs on an SM have room for; 0: they do not fit."""
    registers = (block_n * part // (32 * warps) + 48) * 32 * warps
    if registers * per_sm > 65536 or registers > 255 * 32 * warps:
        return 0
    return min(6, (SHARED_BYTES // per_sm - 1024) // ((block_n + part) * block_k * DTYPE.itemsize))


def candidates(layer: Layer, tokens: int, kind: Kind, limit: int) -> list[WideTiles]:
    """The `limit` tiles that should be fastest."""
    found: dict[tuple, tuple[float, WideTiles]] = {}
    shapes = ((64, 4, 1), (64, 4, 2), (128, 8, 1), (128, 4, 1), (128, 4, 2), (256, 8, 1))
    grid = itertools.product(shapes, (64, 128), (64, 96, 128, 160, 192, 256), range(1, 9))
    for (block_n, warps, per_sm), block_k, max_tokens, splits in grid:
        if (splits > 1 and kind is not Kind.SUMS) or (kind is Kind.GATED and block_n < 128):
            continue
        parts = token_parts(tokens, max_tokens)
        stages = num_stages(block_n, block_k, parts.first + parts.second, warps, per_sm)
        if stages >= (2 if block_k == 64 and per_sm == 2 else 3):
            tiles = WideTiles(block_n, block_k, splits, max_tokens, warps, stages)
            key = (*tiles._replace(max_tokens=0), parts)  # several limits come to the same launch
            # long blocks have half the loop's overhead, and a tail twice as long
            slower = 1.03 if block_k == 128 or (block_n, warps, per_sm) == (128, 4, 1) else 1.0
            found.setdefault(key, (slower * estimate_us(layer, tokens, kind, tiles, per_sm), tiles))
    return [tiles for _, tiles in sorted(found.values())[:limit]]


def multicast_candidates(layer: Layer, tokens: int, kind: Kind, limit: int) -> list[MulticastTiles]:
    """The `limit` tiles that should be fastest."""
    found: dict[tuple, tuple[float, int, MulticastTiles]] = {}
    shapes = itertools.product((96, 128, 192, 224, 256), range(1, 9), (False, True), (3, 4, 5, 6), (128, 192, 256))
    for rows, splits, weights_first, token_slots, max_tokens in shapes:
        tiles = MulticastTiles(rows, splits, 2, weights_first, token_slots, max_tokens)
        if (weights_first and rows != 128) or not tiles.fits(tokens, layer.columns, layer.size, kind):
            continue
        blocks, padded = tiles.blocks(tokens), tiles.padded(tokens)
        key = (*tiles._replace(max_tokens=0), blocks)  # several limits come to the same launch
        depth = min(token_slots, tiles.weight_slots(tokens))
        found.setdefault(key, (multicast_us(layer, tokens, tiles, blocks, padded), -depth, tiles))
    return [tiles for *_, tiles in sorted(found.values())[:limit]]


def multicast_us(layer: Layer, tokens: int, tiles: MulticastTiles, blocks: int, padded: int) -> float:
    """Roughly how long a layer takes: its operations in waves, or its bytes through L2; and its sums."""
    programs = layer.columns // tiles.rows * tiles.splits * blocks
    depth = layer.size / tiles.splits
    rows, columns = (tiles.rows, padded / 2) if blocks == 1 else (tiles.rows / 2, padded)
    operations = -(-programs // NUM_SMS) * NUM_SMS * 2 * tiles.rows * padded * depth
    moved = programs * (rows + columns) * depth * DTYPE.itemsize
    seconds = max(operations / OPERATIONS_PER_SECOND, moved / L2_BYTES_PER_SECOND)
    if tiles.splits > 1:
        seconds += 2 * 4 * tiles.splits * tokens * layer.columns / L2_BYTES_PER_SECOND
    return seconds * 1e6


def followed(kind: str, name: str, tokens: int, columns: int, device: torch.device) -> Callable[[Tensor], Any]:
    """What runs behind the layer in a model."""
    if name == "lm_head":
        return argmax
    if name == "gate_up":
        return (lambda out: out) if kind == Kind.GATED else silu_mul
    # after qkv, which no norm follows, it stands for a kernel that adds up as this one does
    residual = torch.randn(tokens, columns, dtype=DTYPE, device=device)
    weight = torch.ones(columns, dtype=DTYPE, device=device)
    return lambda out: add_rms_norm(out, residual, weight, 1e-5)


class Candidate(NamedTuple):
    """One way to run a layer."""

    kind: str
    tiles: AnyTiles
    compiled: Future[None]
    run: Callable[[Tensor, Tensor], Tensor]
    """x and weights -> what comes out before what follows."""


class Cell(NamedTuple):
    """One layer at one number of tokens, with the candidates being compiled."""

    layer: Layer
    tokens: int
    candidates: list[Candidate]


def plan(cells: Iterable[tuple[Layer, int]], pool: ThreadPoolExecutor, limit: int, device: torch.device) -> list[Cell]:
    """Has everything compiled, what is measured first first."""
    planned, weights = [], {}
    for layer, tokens in cells:
        # compiling reads shapes and alignment alone
        x = torch.empty(tokens, layer.size, dtype=DTYPE, device=device)
        if layer not in weights:
            weights[layer] = torch.empty(layer.columns, layer.size, dtype=DTYPE, device=device)
        weight, found = weights[layer], []
        for kind in layer.kinds:
            ours = candidates(layer, tokens, kind, limit)
            for t in (*ours, *multicast_candidates(layer, tokens, kind, limit)):
                compiled = pool.submit(_compile, x, weight, kind, t)
                found.append(Candidate(kind.value, t, compiled, functools.partial(linear_wide, kind=kind, tiles=t)))
        planned.append(Cell(layer, tokens, found))
    return planned


def _compile(x: Tensor, weight: Tensor, kind: Kind, tiles: AnyTiles) -> None:
    if isinstance(tiles, WideTiles):
        compile_ahead(x, weight, None, make_out(x, weight, kind, tiles.splits), kind=kind, tiles=tiles)
    else:
        torch.cuda.set_device(x.device)  # in this thread nothing has
        find_kernel(tiles, x.shape[0], kind, x.device)


@torch.inference_mode()
def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """The time of cuBLAS (up to 64 tokens: of today's way) and that of each candidate, fastest first."""
    layer, tokens, _ = cell
    x = torch.randn(tokens, layer.size, dtype=DTYPE, device=device)
    weights = cold_weights(layer.columns, layer.size, device)
    min_calls = 8 if layer.columns * layer.size > 2**28 else 24

    def time_it(run: Callable[[Tensor], Any]) -> float:
        return time_us([lambda weight=weight: run(weight) for weight in weights], min_calls=min_calls, repeats=7)[0]

    today = linear_torch if tokens > MAX_TOKENS else residual_linear if Kind.SUMS in layer.kinds else linear
    follow = followed(Kind.PLAIN, layer.name, tokens, layer.columns, device)
    before = time_it(lambda weight: follow(today(x, weight)))
    expected, results = linear_torch(x, weights[0]), []
    for kind, tiles, compiled, run in cell.candidates:
        follow = followed(kind, layer.name, tokens, layer.columns, device)
        result: dict[str, Any] = {"kind": kind, "kernel": type(tiles).__name__, "tiles": list(tiles)}
        try:
            compiled.result()
            result["error"] = relative_error(run(x, weights[0]), expected, kind)
            result["us"] = time_it(lambda weight, run=run, follow=follow: follow(run(x, weight)))
        except Exception as failure:  # too many resources, most likely: no candidate
            result["failed"] = repr(failure)[:300]
        results.append(result)
    results.sort(key=lambda result: result.get("us", float("inf")))
    num_bytes = (layer.columns * layer.size + tokens * (layer.size + layer.columns)) * DTYPE.itemsize
    operations = 2 * tokens * layer.columns * layer.size
    return {
        "layer": layer.name,
        "columns": layer.columns,
        "size": layer.size,
        "tokens": tokens,
        "floor_us": max(num_bytes / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND) * 1e6,
        "today_us": before,
        "results": results,
    }


def relative_error(out: Tensor, expected: Tensor, kind: str) -> float:
    """Norm of the difference to today's output over the norm of that."""
    out = out.sum(0) if kind == Kind.SUMS else out.float()
    expected = (silu_mul(expected) if kind == Kind.GATED else expected).float()
    return ((out - expected).norm() / expected.norm()).item()


def usable(row: dict[str, Any], *, kinds: Iterable[str] = tuple(Kind)) -> list[dict[str, Any]]:
    return [r for r in row["results"] if r["kind"] in kinds and r.get("error", 1.0) < MAX_ERROR]


def table(row: dict[str, Any]) -> Iterator[str]:
    floor, today = row["floor_us"], row["today_us"]
    yield f"{row['layer']:10} T={row['tokens']:<4} floor {floor:7.1f}  today {today:7.1f} us"
    for r in usable(row)[:3]:
        yield f"    {r['us']:7.1f} us {r['us'] / today:5.2f}  {r['kind']:6} {r['kernel']}{tuple(r['tiles'])}"
    for r in row["results"]:
        if r.get("error", 0.0) >= MAX_ERROR:
            yield f"    WRONG by {r['error']:.2g}: {r['kind']} {r['kernel']}{r['tiles']}"
    if failed := [r for r in row["results"] if "failed" in r]:
        yield f"    {len(failed)} failed, the first with {failed[0]['failed'][:160]}"


def entries(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the tables: each holds from two thirds of the tokens measured, or the next smaller measurement."""
    layers = sorted({(row["columns"], row["size"]) for row in rows})
    yield "# kernels/linear_wide.py"
    for (columns, size), kind in itertools.product(layers, Kind):
        if lines := list(_lines(rows, columns, size, kind)):
            yield from (f"({columns}, {size}, Kind.{kind.name}): {{", *lines, "},")


def _lines(rows: list[dict[str, Any]], columns: int, size: int, kind: str) -> Iterator[str]:
    before = 0
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if (row["columns"], row["size"]) != (columns, size) or all(r["kind"] != kind for r in row["results"]):
            continue
        first, before = max(before + 1, row["tokens"] * 2 // 3), row["tokens"]
        found = usable(row, kinds=[kind])
        if found and found[0]["us"] < GAIN * row["today_us"]:
            times = f"{found[0]['us']:.1f} us, without {row['today_us']:.1f}"
            yield f"    Range({first}, {row['tokens']}): {found[0]['kernel']}{tuple(found[0]['tiles'])},  # {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every layer")
    parser.add_argument("--entries", type=Path, help="print the table's entries of such a file, and measure nothing")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", nargs="+", default=[layer.name for layer in LAYERS])
    parser.add_argument("--candidates", type=int, default=8, help="tiles tried per layer, tokens and kind")
    parser.add_argument("--seconds", type=float, default=110, help="start no new measurement after this long")
    args = parser.parse_args()
    if args.entries:
        print("\n".join(entries(json.loads(args.entries.read_text())["rows"])))
        return
    report, device = SweepReport(args.out, args.seconds), gpu()
    cells = [(layer, tokens) for tokens in args.tokens for layer in LAYERS]
    cells = [cell for cell in cells if cell[0].name in args.layers]
    with ThreadPoolExecutor(16) as pool:
        for cell in plan(cells, pool, args.candidates, device):
            if report.is_late():
                pool.shutdown(wait=False, cancel_futures=True)
                break
            row = measure(cell, device)
            report.add(row, table(row))


if __name__ == "__main__":
    main()
