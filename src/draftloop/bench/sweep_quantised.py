"""Which tiles are fastest for layers of quantised weights: what `MEASURED` of the formats' kernels is made of.

    python -m draftloop.bench.sweep_quantised --out sweep.json            # on the GPU; keeps what it has when cut off
    python -m draftloop.bench.sweep_quantised --entries sweep.json        # anywhere: the tables' entries

All tiles are timed at 6 tokens, the fastest few at other numbers too. Sums of layers split along K are added up by
the norm that follows, which is timed with them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import BYTES_PER_SECOND, COLD_BYTES, DTYPE, time_us
from draftloop.bench.stamp import stamp
from draftloop.kernels.linear import Tiles
from draftloop.kernels.linear_fp8 import Fp8Weight
from draftloop.kernels.linear_int4 import Int4Weight
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.kernels.rms_norm import add_rms_norm

LAYERS = [
    # name, columns, size, whether the residual norm follows
    ("down", 4096, 14336, True),
    ("gate_up", 28672, 4096, False),
    ("qkv", 6144, 4096, False),
    ("o", 4096, 4096, True),
]
FORMATS: dict[str, Callable[[int, int, torch.device], QuantisedWeight]] = {
    "int4": lambda columns, size, device: Int4Weight(columns, size, group_size=128, device=device),
    "fp8": lambda columns, size, device: Fp8Weight(columns, size, device=device),
    "int4_zeros": lambda columns, size, device: Int4Weight(
        columns, size, group_size=128, has_zeros=True, device=device
    ),
    "fp8_block": lambda columns, size, device: Fp8Weight(columns, size, block=(128, 128), device=device),
}
TOKENS = 6
OTHER_TOKENS = (1, 32, 64)
FINALISTS = 3
"""Timed at the other numbers of tokens too."""
SHARED_BYTES = 220 << 10
MAX_ERROR = 1e-2
"""Of the norm of the difference to exact sums; larger: the kernel is wrong."""


class Cell(NamedTuple):
    """One layer in one format, with its candidates being compiled."""

    form: str
    layer: tuple[str, int, int, bool]
    weight: QuantisedWeight
    candidates: list[tuple[Tiles, Future[None]]]


def candidates(form: str, columns: int, size: int, *, may_split: bool) -> Iterator[Tiles]:
    """Those that give every SM something to read, and fit shared memory."""
    widths = ((32, 256), (64, 128), (64, 256), (128, 128), (128, 256), (256, 128))
    if form.startswith("int4"):
        widths = ((32, 256), (32, 512), (64, 128), (64, 256), (64, 512), (128, 128), (128, 256), (256, 128))
    for (block_n, block_k), stages, splits in itertools.product(widths, (3, 5), (1, 2, 4, 8) if may_split else (1,)):
        programs = -(-columns // block_n) * splits
        weight_bytes = block_n * block_k // (2 if form.startswith("int4") else 1)
        shared = stages * (weight_bytes + 16 * block_k * DTYPE.itemsize)
        if size % (block_k * splits) == 0 and shared <= SHARED_BYTES and 90 <= programs <= 1200:
            yield Tiles(block_n, block_k, splits, 8 if block_n == 256 else 4, stages)


def plan(forms: list[str], pool: ThreadPoolExecutor, device: torch.device) -> list[Cell]:
    """Has everything compiled, what is measured first first."""
    cells = []
    for form, layer in itertools.product(forms, LAYERS):
        _, columns, size, may_split = layer
        weight, x = FORMATS[form](columns, size, device), torch.empty(TOKENS, size, dtype=DTYPE, device=device)
        found = []
        for tiles in candidates(form, columns, size, may_split=may_split):
            out = output(tiles, TOKENS, columns, device)
            found.append((tiles, pool.submit(weight.compile_ahead, x, None, out, tiles)))
        cells.append(Cell(form, layer, weight, found))
    return cells


def output(tiles: Tiles, tokens: int, columns: int, device: torch.device) -> Tensor:
    shape, dtype = ((tokens, columns), DTYPE) if tiles.splits == 1 else ((tiles.splits, tokens, columns), torch.float32)
    return torch.empty(shape, dtype=dtype, device=device)


@torch.inference_mode()
def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """The time and error of each candidate, fastest first."""
    name, columns, size, followed = cell.layer
    torch.manual_seed(0)
    plain = torch.randn(columns, size, dtype=DTYPE, device=device) * size**-0.5
    values = cell.weight.quantise(plain)
    cell.weight.fill(0, values)
    copies = [cell.weight]
    while len(copies) * cell.weight.nbytes < COLD_BYTES:
        copies.append(FORMATS[cell.form](columns, size, device))
        copies[-1].fill(0, values)
    exact, norm = cell.weight.dequantise(torch.float32), torch.ones(columns, dtype=DTYPE, device=device)
    inputs = {tokens: torch.randn(tokens, size, dtype=DTYPE, device=device) for tokens in (TOKENS, *OTHER_TOKENS)}

    def run(weight: QuantisedWeight, x: Tensor, tiles: Tiles) -> Tensor:
        out = output(tiles, x.shape[0], columns, device)
        weight.launch(x, None, out, tiles)
        return out

    def time_it(tiles: Tiles, tokens: int) -> float:
        x, residual = inputs[tokens], torch.randn(tokens, columns, dtype=DTYPE, device=device)

        def call(weight: QuantisedWeight) -> None:
            out = run(weight, x, tiles)
            if followed:
                add_rms_norm(out, residual, norm, 1e-5)

        calls = [lambda weight=weight: call(weight) for weight in copies]
        return time_us(calls, min_calls=24, repeats=7)[0]

    results = []
    for tiles, compiled in cell.candidates:
        result: dict[str, Any] = {"tiles": list(tiles)}
        try:
            compiled.result()
            out, expected = run(cell.weight, inputs[TOKENS], tiles), inputs[TOKENS].float() @ exact.T
            out = out.sum(0) if tiles.splits > 1 else out.float()
            result["error"] = ((out - expected).norm() / expected.norm()).item()
            result["us"] = time_it(tiles, TOKENS)
        except Exception as failure:  # too many resources, most likely: no candidate
            result["failed"] = repr(failure)[:300]
        results.append(result)
    results.sort(key=lambda result: result.get("us", float("inf")))
    for result in usable(results)[:FINALISTS]:
        result["other_us"] = {tokens: time_it(Tiles(*result["tiles"]), tokens) for tokens in OTHER_TOKENS}
    return {
        "format": cell.form,
        "layer": name,
        "columns": columns,
        "size": size,
        "may_split": followed,
        "tokens": TOKENS,
        "floor_us": (cell.weight.nbytes + TOKENS * (size + columns) * DTYPE.itemsize) / BYTES_PER_SECOND * 1e6,
        "results": results,
    }


def usable(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if "us" in result and result["error"] < MAX_ERROR]


def table(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['format']:10} {row['layer']:8} T={row['tokens']}  floor {row['floor_us']:6.1f} us"
    for result in usable(row["results"])[:FINALISTS]:
        others = ", ".join(f"T={tokens} {us:.1f}" for tokens, us in result.get("other_us", {}).items())
        yield f"    {result['us']:6.1f} us  {tuple(result['tiles'])}  {others}"
    for result in row["results"]:
        if result.get("error", 0.0) >= MAX_ERROR:
            yield f"    WRONG by {result['error']:.2g}: {result['tiles']}"
    if failed := [result for result in row["results"] if "failed" in result]:
        yield f"    {len(failed)} failed, the first with {failed[0]['failed'][:160]}"


def entries(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the tables: the least time at 1 and 6 tokens together."""
    for form, file in (("int4", "linear_int4"), ("fp8", "linear_fp8")):
        yield f"# kernels/{file}.py"
        for row in rows:
            best = [result for result in usable(row["results"]) if "other_us" in result]
            if row["format"] != form or not best:
                continue
            fastest = min(
                best, key=lambda result: result["us"] + result["other_us"].get("1", result["other_us"].get(1))
            )
            key = (row["columns"], row["size"], row["may_split"])
            yield f"    {key}: Tiles{tuple(fastest['tiles'])},  # {fastest['us']:.1f} us, floor {row['floor_us']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every layer")
    parser.add_argument("--entries", type=Path, help="print the tables' entries of such a file, and measure nothing")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["int4", "fp8"])
    parser.add_argument("--seconds", type=float, default=80, help="start no new measurement after this long")
    args = parser.parse_args()
    if args.entries:
        print("\n".join(entries(json.loads(args.entries.read_text())["rows"])))
        return
    begin, device = time.perf_counter(), torch.device("cuda")
    report: dict[str, Any] = {"stamp": stamp(), "rows": []}
    with ThreadPoolExecutor(16) as pool:
        for cell in plan(args.formats, pool, device):
            if time.perf_counter() - begin > args.seconds:
                print(f"stopped after {args.seconds:g} s", flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                break
            row = measure(cell, device)
            report["rows"].append(row)
            if args.out:
                args.out.write_text(json.dumps(report, indent=1))
            print(*table(row), f"    {time.perf_counter() - begin:.0f} s", sep="\n", flush=True)
    print("\n".join(entries(report["rows"])))


if __name__ == "__main__":
    main()
