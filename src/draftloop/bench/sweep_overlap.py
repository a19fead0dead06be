"""How far kernels should reach into the ones before them: what `kernels.overlap.MEASURED` is made of.

    python -m draftloop.bench.sweep_overlap --out sweep.json           # on the GPU, about a minute
    python -m draftloop.bench.sweep_overlap --best sweep.json -- latency ...    # `draftloop bench`, overlapping so

Overlapping pays between kernels, so that no kernel alone shows it: what is measured is a captured pass through layers
of a model, which must give the same bits however kernels overlap.

Shape suffixes: R rows, T tokens, Q tokens per row, N pages per row.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.registry import attention_backend
from draftloop.bench.kernels import BYTES_PER_SECOND, DTYPE, time_us
from draftloop.bench.sweep_report import SweepReport
from draftloop.kernels.overlap import Overlap, trying
from draftloop.models.config import PRESETS
from draftloop.models.dense import DenseDecoder, attention_shape, cache_spec

NUM_KEYS, PAGE_SIZE = 640, 16
MIB = 1 << 20
CANDIDATES = [Overlap(), Overlap(early=True), *(Overlap(early=True, bytes_ahead=n * MIB) for n in (4, 8, 12, 16, 24))]
CANDIDATES.append(Overlap(bytes_ahead=8 * MIB))


class Case(NamedTuple):
    """Passes of one shape."""

    model: str
    num_layers: int
    rows: int
    query_len: int
    decides: bool = True
    """Of several choices the best is the one with the shortest times here, as shares of those without overlapping."""


CASES = [
    Case("llama-3.1-8b", 6, 1, 6),
    Case("llama-3.2-1b", 16, 1, 1),
    Case("llama-3.1-8b", 6, 1, 1),
    Case("llama-3.1-8b", 6, 8, 6),
    Case("smollm2-135m-shape", 30, 1, 6),
    Case("llama-3.1-8b", 6, 32, 1, decides=False),
    Case("llama-3.1-8b", 6, 32, 6, decides=False),
]


def make_pass(case: Case, device: torch.device) -> tuple[Callable[[], Tensor], float]:
    """A pass without its logits, and the us that memory needs for its weights."""
    config = replace(PRESETS[case.model], num_layers=case.num_layers)
    shape = attention_shape(config, page_size=PAGE_SIZE, dtype=DTYPE)
    backend = attention_backend("triton", device.type)(shape, device)
    model = DenseDecoder(config, backend, device=device, dtype=DTYPE, max_positions=4 * NUM_KEYS)
    for weight in model.parameters():
        weight.data.normal_(std=0.02)
    spec, num_tokens = cache_spec(config, DTYPE), case.rows * case.query_len
    pages = -(-NUM_KEYS // PAGE_SIZE)
    cache = torch.randn(
        spec.num_layers, 2, 1 + case.rows * pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim,
        dtype=DTYPE, device=device,
    )  # fmt: skip
    # as wide as serving's tables: the width bounds how often a row may be split
    table_RN = torch.zeros(case.rows, 8192 // PAGE_SIZE, dtype=torch.int32, device=device)
    table_RN[:, :pages] = (torch.randperm(case.rows * pages, device=device) + 1).view(case.rows, pages)
    position_Q = torch.arange(NUM_KEYS - case.query_len, NUM_KEYS, device=device)
    slots_RQ = table_RN[:, position_Q // PAGE_SIZE].long() * PAGE_SIZE + position_Q % PAGE_SIZE
    batch = AttentionBatch(
        rows_R=torch.arange(case.rows, dtype=torch.int32, device=device),
        query_starts_R1=torch.arange(0, num_tokens + 1, case.query_len, dtype=torch.int32, device=device),
        kv_lens_R=torch.full((case.rows,), NUM_KEYS, dtype=torch.int32, device=device),
        positions_T=position_Q.repeat(case.rows),
        slots_T=slots_RQ.flatten(),
        page_table_MN=table_RN,
        max_query_len=case.query_len,
        uniform=True,
    )
    token_ids_T = torch.randint(0, config.vocab_size, (num_tokens,), device=device)
    caches = model.layer_caches((cache,))
    layer_bytes = sum(p.nbytes for p in model.layers.parameters())
    return lambda: model.forward(token_ids_T, caches, batch)[0], layer_bytes / BYTES_PER_SECOND * 1e6


def replayed(run: Callable[[], Tensor], *, times: int) -> list[Tensor]:
    """What comes out of a captured pass, each time."""
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(times):
        graph.replay()
        found.append(out.clone())
    return found


@torch.inference_mode()
def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """us per layer for each candidate. Candidates whose bits differ from the first one's are none."""
    run, floor = make_pass(case, device)
    results, expected = [], None
    for overlap in CANDIDATES:
        with trying(overlap):
            us = time_us([run], min_calls=2, repeats=15)[0]
            found = replayed(run, times=5)
        expected = found[0] if expected is None else expected
        same = all(torch.equal(out, expected) for out in found)
        results.append({"overlap": list(overlap), "us": us / case.num_layers, "same": same})
    return {"case": case._asdict(), "floor_us": floor / case.num_layers, "results": results}


def best(rows: list[dict[str, Any]]) -> Overlap:
    """The candidate with the shortest times over what decides."""
    shares: dict[Overlap, list[float]] = {}
    for row in rows:
        for result in row["results"]:
            if row["case"]["decides"]:
                share = result["us"] / row["results"][0]["us"] if result["same"] else float("inf")
                shares.setdefault(Overlap(*result["overlap"]), []).append(share)
    return min(shares, key=lambda overlap: statistics.mean(shares[overlap]))


def table(case: Case, row: dict[str, Any]) -> Iterator[str]:
    yield f"{case.model} {case.rows} x {case.query_len}: floor {row['floor_us']:.1f} us a layer"
    for result in row["results"]:
        early, ahead = result["overlap"]
        wrong = "" if result["same"] else "  OTHER BITS"
        yield f"    {result['us']:7.1f} us  early {early!s:5} {ahead / MIB:4.0f} MiB ahead{wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every case")
    parser.add_argument("--best", type=Path, help="such a file, whose best choice holds while the arguments are run")
    parser.add_argument("--seconds", type=float, default=90, help="start no new case after this long")
    parser.add_argument("arguments", nargs="*", help="of `draftloop bench`")
    args = parser.parse_args()
    if args.best:
        sys.argv = ["draftloop", "bench", *args.arguments]
        with trying(best(json.loads(args.best.read_text())["rows"])):
            runpy.run_module("draftloop", run_name="__main__")
        return
    report, device = SweepReport(args.out, args.seconds), torch.device("cuda")
    for case in CASES:
        if report.is_late():
            break
        row = measure(case, device)
        report.add(row, table(case, row))
    print(f"best: {best(report.rows)}")


if __name__ == "__main__":
    main()
