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
import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import BYTES_PER_SECOND, COLD_BYTES, DTYPE, OPERATIONS_PER_SECOND, time_us
from draftloop.bench.quantised_candidates import (
    FORMATS,
    LAYERS,
    TOKENS,
    Candidate,
    Copy,
    Layer,
    candidates,
)
from draftloop.bench.sweep_report import SweepReport, attempting, gpu, relative_error, run_bench
from draftloop.bench.sweep_view import entries, table, usable, with_best
from draftloop.kernels.linear_fp8 import Fp8Weight
from draftloop.kernels.linear_int4 import Int4Weight
from draftloop.kernels.linear_wide import Kind
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.kernels.silu_mul import silu_mul

MEASURED = {"int4": Int4Weight.measured, "fp8": Fp8Weight.measured}
HEAD_DIM, NUM_KV_HEADS = 128, 8
FINALISTS = 3
PER_NAME = 2
"""Candidates of each name that are finalists whatever the others do."""
MAX_ERROR = {"exact": 5e-3, "rounded": 0.045}
"""Of the norm of the difference to exact sums, with activations in 16 bits and in 8; larger: the kernel is wrong."""


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


def kernel_behind(layer: Layer, num_tokens: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """What follows the layer in a model, of its output and a residual."""
    norm = torch.ones(layer.columns, dtype=DTYPE, device=device)
    slots = torch.arange(16, 16 + num_tokens, device=device)
    cos_sin = torch.ones(num_tokens + 16, HEAD_DIM, device=device)
    cache = torch.zeros(2, 2 + num_tokens // 16, 16, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    heads = layer.columns // HEAD_DIM - 2 * NUM_KV_HEADS

    def finish(out: Tensor, residual: Tensor) -> Tensor:
        if layer.kind is Kind.SUMS:
            return add_rms_norm(out, residual, norm, 1e-5)[0]
        if layer.kind is Kind.GATED:
            return silu_mul(out) if out.shape[-1] == layer.columns else out
        at = slots[: out.shape[-2]]
        kind = {"num_heads": heads, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
        return rope_write(out, at, at, cos_sin, cache, **kind, dtype=DTYPE)

    return finish


@torch.inference_mode()
def measure(cell: Cell, copies: list[Copy], device: torch.device) -> dict[str, Any]:
    """The time and error of each candidate, fastest first."""
    layer = cell.layer
    exact_NK = copies[0].weight.dequantise(torch.float32)
    finish = kernel_behind(layer, max(TOKENS[cell.regime]), device)

    def error(candidate: Candidate, x: Tensor) -> float:
        out = candidate.run(copies[0], x)
        weight_NK = copies[0].plain.float() if candidate.name.startswith("bf16") else exact_NK
        expected = x.float() @ weight_NK.T
        if out.shape[-1] != layer.columns:
            expected = silu_mul(expected.to(DTYPE)).float()
        return relative_error(out.sum(0) if out.dim() == 3 else out, expected)

    def time_it(candidate: Candidate, tokens: int) -> float:
        x = torch.randn(tokens, layer.size, dtype=DTYPE, device=device)
        residual = torch.randn(tokens, layer.columns, dtype=DTYPE, device=device)
        calls = [lambda copy=copy: finish(candidate.run(copy, x), residual) for copy in copies]
        return time_us(calls, min_calls=24, repeats=7)[0]

    first, *others = TOKENS[cell.regime]
    x = torch.randn(first, layer.size, dtype=DTYPE, device=device)
    results = []
    for candidate, compiled in cell.candidates:
        result: dict[str, Any] = {"name": candidate.name, "tiles": list(candidate.tiles)}
        with attempting(result):
            compiled.result()
            found = error(candidate, x)
            result |= {"error": found, "limit": MAX_ERROR[candidate.accuracy]}
            if candidate.name == "engine":
                result["limit"] = MAX_ERROR["rounded"]
            result["us"] = time_it(candidate, first)
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
    operations = 2 * first * layer.size * layer.columns / (2 if cell.form == "fp8" and cell.regime == "many" else 1)
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
    # all is compiled before anything is measured: both want the interpreter's lock
    with ThreadPoolExecutor(16) as pool:
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
