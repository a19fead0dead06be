"""Which tiles make layers of plain weights fastest: what `kernels.linear_wide.MEASURED` and, of up to 64 tokens,
`kernels.linear.MEASURED` are made of.

    python -m draftloop.bench.sweep_wide --out sweep.json            # on the GPU; keeps what it has when cut off
    python -m draftloop.bench.sweep_wide --out sweep.json --cells 48:gate_up,down 32:1b.gate_up   # these, in this order
    python -m draftloop.bench.sweep_wide --entries sweep.json        # anywhere: the tables' entries
    python -m draftloop.bench.best_tiles --linears sweep.json -- latency ...   # `draftloop bench` with its tiles

Every time includes the kernel that follows the layer in a model (norm, gate, argmax), since splits shift work to
it, a fused gate spares it, and cuBLAS starts no kernel before the last one has drained.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import BYTES_PER_SECOND, DTYPE, OPERATIONS_PER_SECOND, cold_weights, time_us
from draftloop.bench.sweep_report import SweepReport, attempting, gpu, relative_error
from draftloop.bench.wide_candidates import LAYERS, Found, Layer, candidates
from draftloop.bench.wide_view import entries, table
from draftloop.kernels import linear as few
from draftloop.kernels.argmax import argmax
from draftloop.kernels.linear import MAX_TOKENS, Tiles, linear, linear_torch, qkv_linear, residual_linear
from draftloop.kernels.linear_multicast import multicast_kernel
from draftloop.kernels.linear_wide import Kind, WideTiles, compile_ahead, linear_wide, make_out
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kernels.silu_mul import silu_mul

TOKENS = (192, 768, 96, 128, 256)


def followed(kind: str, role: str, tokens: int, columns: int, device: torch.device) -> Callable[[Tensor], Any]:
    """What runs behind the layer in a model."""
    if role == "lm_head":
        return argmax
    if role == "gate_up":
        return (lambda out: out) if kind == Kind.GATED else silu_mul
    # after qkv, which no norm follows, it stands for a kernel that adds up as this one does
    residual = torch.randn(tokens, columns, dtype=DTYPE, device=device)
    weight = torch.ones(columns, dtype=DTYPE, device=device)
    return lambda out: add_rms_norm(out, residual, weight, 1e-5)


class Candidate(NamedTuple):
    """One way to run a layer."""

    kind: str
    tiles: Found
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
            for tiles in candidates(layer, tokens, kind, limit):
                compiled = pool.submit(_compile, x, weight, kind, tiles)
                found.append(Candidate(kind.value, tiles, compiled, functools.partial(run, kind=kind, tiles=tiles)))
        planned.append(Cell(layer, tokens, found))
    return planned


def _compile(x: Tensor, weight: Tensor, kind: Kind, tiles: Found) -> None:
    if isinstance(tiles, Tiles):
        few.compile_ahead(x, weight, make_out(x, weight, kind, tiles.splits), tiles)
    elif isinstance(tiles, WideTiles):
        compile_ahead(x, weight, None, make_out(x, weight, kind, tiles.splits), kind=kind, tiles=tiles)
    else:
        torch.cuda.set_device(x.device)  # in this thread nothing has
        multicast_kernel(tiles, x.shape[0], kind, x.device)


def run(x: Tensor, weight: Tensor, *, kind: Kind, tiles: Found) -> Tensor:
    """The layer by these tiles; for what comes out see `Kind`."""
    if not isinstance(tiles, Tiles):
        return linear_wide(x, weight, kind=kind, tiles=tiles)
    by_tiles = few.linear_split_triton if kind is Kind.SUMS else few.linear_triton
    return by_tiles(x, weight, tiles=tiles)


def served_today(layer: Layer, tokens: int) -> Callable[[Tensor, Tensor], Tensor]:
    """What runs without a table's entry; of few tokens, by the entries that there are."""
    if tokens > MAX_TOKENS:
        return linear_torch
    return {"qkv": qkv_linear, "o": residual_linear, "down": residual_linear}.get(layer.role, linear)


@torch.inference_mode()
def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """The time of cuBLAS (up to 64 tokens: of today's way) and that of each candidate, fastest first."""
    layer, tokens, _ = cell
    x = torch.randn(tokens, layer.size, dtype=DTYPE, device=device)
    weights = cold_weights(layer.columns, layer.size, device)
    min_calls = 8 if layer.columns * layer.size > 2**28 else 24

    def time_it(run: Callable[[Tensor], Any]) -> float:
        return time_us([lambda weight=weight: run(weight) for weight in weights], min_calls=min_calls, repeats=7)[0]

    today = served_today(layer, tokens)
    follow = followed(Kind.PLAIN, layer.role, tokens, layer.columns, device)
    before = time_it(lambda weight: follow(today(x, weight)))
    expected, results = linear_torch(x, weights[0]), []
    for kind, tiles, compiled, by_tiles in cell.candidates:
        follow = followed(kind, layer.role, tokens, layer.columns, device)
        result: dict[str, Any] = {"kind": kind, "kernel": type(tiles).__name__, "tiles": list(tiles)}
        with attempting(result):
            compiled.result()
            result["error"] = error_of(by_tiles(x, weights[0]), expected, kind)
            result["us"] = time_it(lambda weight, by=by_tiles, follow=follow: follow(by(x, weight)))
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


def error_of(out: Tensor, expected: Tensor, kind: str) -> float:
    """Of a candidate's output, against the layer's plain one."""
    return relative_error(
        out.sum(0) if kind == Kind.SUMS else out, silu_mul(expected) if kind == Kind.GATED else expected
    )


def parse_cells(texts: Iterable[str]) -> list[tuple[Layer, int]]:
    """Of TOKENS:LAYER,LAYER. Raises ValueError for what is no number, or no layer."""
    layers = {layer.name: layer for layer in LAYERS}
    cells = []
    for text in texts:
        tokens, _, names = text.partition(":")
        for name in names.split(","):
            if name not in layers:
                raise ValueError(f"{text!r} names no layer {name!r}; known: {', '.join(layers)}")
            cells.append((layers[name], int(tokens)))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every layer")
    parser.add_argument("--entries", type=Path, help="print the tables' entries of such a file, and measure nothing")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", nargs="+", default=[layer.name for layer in LAYERS if layer.name == layer.role])
    parser.add_argument(
        "--cells", nargs="+", metavar="TOKENS:LAYER,...", help="instead of all tokens by all layers, in this order"
    )
    parser.add_argument("--candidates", type=int, default=8, help="tiles tried per layer, tokens, kind and kernel")
    parser.add_argument("--seconds", type=float, default=110, help="start no new measurement after this long")
    args = parser.parse_args()
    if args.entries:
        print("\n".join(entries(json.loads(args.entries.read_text())["rows"])))
        return
    cells = parse_cells(args.cells or [f"{tokens}:{','.join(args.layers)}" for tokens in args.tokens])
    report, device = SweepReport(args.out, args.seconds), gpu()
    with ThreadPoolExecutor(16) as pool:
        for cell in plan(cells, pool, args.candidates, device):
            if report.is_late():
                pool.shutdown(wait=False, cancel_futures=True)
                break
            row = measure(cell, device)
            report.add(row, table(row))


if __name__ == "__main__":
    main()
