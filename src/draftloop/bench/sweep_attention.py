"""How clusters attend fastest: what `kernels.cluster_attention.choose_clusters` follows.

    python -m draftloop.bench.sweep_attention --out sweep.json  # on the GPU; keeps what it has when cut off

Calls of one kernel follow each other, so that each begins to read while the one before it ends. In a model other
kernels do: few splits and stages, which leave room for the next linear's programs, are better there by 1 or 2 us.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.bench import kernels
from draftloop.bench.kernels import BYTES_PER_SECOND, attention_batches, kv_bytes, make_backend, time_us
from draftloop.bench.sweep_report import SweepReport, attempting, complaints, gpu, relative_error, usable
from draftloop.kernels.cluster_attention import Clusters, Shape, cluster_attention

CASES = ("8x6x768", "32x6x768", "8x6x8192", "32x1x768", "2x6x768", "4x6x768", "16x6x768", "64x6x768", "128x6x768")
"""Rows, tokens of each and its keys."""
PAGE_SIZE = 16
MAX_BLOCKS = 1200
"""More than a few for each multiprocessor were never faster."""


class Case(NamedTuple):
    num_rows: int
    query_len: int
    num_keys: int

    @property
    def shape(self) -> Shape:
        return Shape(self.query_len, kernels.HEADS // kernels.KV_HEADS, kernels.HEAD_DIM, PAGE_SIZE)


def parse_case(text: str) -> Case:
    """Of ROWSxTOKENSxKEYS. Raises ValueError for anything else."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{text!r} is no case of attention; one is ROWSxTOKENSxKEYS, as in {CASES[0]}")
    return Case(*map(int, numbers))


def candidates(case: Case) -> list[Clusters]:
    """With room for their stages, and warps that have queries and keys of their own."""
    found = []
    for splits, stages, warps in itertools.product((1, 2, 3, 4, 6, 8), (2, 3, 4, 6), (4, 8)):
        clusters, blocks = Clusters(splits, stages, warps), case.num_rows * kernels.KV_HEADS * splits
        if case.shape.fits(clusters) and (splits == 1 or blocks <= MAX_BLOCKS):
            found.append(clusters)
    return found


def attention(backend: AttentionBackend, case: Case) -> Callable[[Clusters | None], list[Callable[[], Tensor]]]:
    """Clusters, or None for today's -> calls over pages that no recent one has read. Each returns what it wrote."""
    q, kv, batches = attention_batches(backend, case.num_rows, case.query_len, case.num_keys, uniform=True)

    def calls(clusters: Clusters | None) -> list[Callable[[], Tensor]]:
        out = torch.empty_like(q)

        def attend(batch: AttentionBatch) -> Tensor:
            if clusters is None:
                backend.attend(q, kv, batch, out, sliding_window=None)
            else:
                tensors = q, kv, batch.rows_R, batch.kv_lens_R, batch.page_table_MN, out
                cluster_attention(*tensors, scale=backend.shape.scale, clusters=clusters)
            return out

        return [functools.partial(attend, batch) for batch in batches]

    return calls


class Sweep:
    """One case, all of whose candidates compile from the beginning."""

    def __init__(self, case: Case, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self.case, self._device = case, device
        self.calls = attention(make_backend("triton", PAGE_SIZE, device), case)
        self.compiled = {clusters: pool.submit(self._compile, clusters) for clusters in candidates(case)}

    def _compile(self, clusters: Clusters) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # makes this device's context the thread's
        self.calls(clusters)[0]()

    @torch.inference_mode()
    def measure(self) -> dict[str, Any]:
        wait(self.compiled.values())  # compiling launches too, which would be measured
        today = self.calls(None)
        expected, today_us = today[0]().clone(), time_us(today, repeats=7)[0]
        results = sorted((self._result(clusters, expected) for clusters in self.compiled), key=_us)
        num_bytes = kv_bytes(self.case.num_rows, self.case.num_keys) + 2 * expected.nbytes
        floor_us = num_bytes / BYTES_PER_SECOND * 1e6
        return {"case": list(self.case), "floor_us": floor_us, "today_us": today_us, "results": results}

    def _result(self, clusters: Clusters, expected: Tensor) -> dict[str, Any]:
        result: dict[str, Any] = {"clusters": list(clusters)}
        with attempting(result):
            self.compiled[clusters].result()
            calls = self.calls(clusters)
            result["error"] = relative_error(calls[0](), expected)
            result["us"] = time_us(calls, repeats=7)[0]
        return result


def _us(result: dict[str, Any]) -> float:
    return result.get("us", float("inf"))


def table(row: dict[str, Any]) -> Iterator[str]:
    """The fastest, and the fastest of each number of splits."""
    case, today = Case(*row["case"]), row["today_us"]
    yield f"{case.num_rows} x {case.query_len}, {case.num_keys} keys: floor {row['floor_us']:.1f}, today {today:.2f} us"
    found = usable(row["results"])
    of_splits = {result["clusters"][0]: result for result in reversed(found)}
    for result in (one for one in found if one in found[:3] or one in of_splits.values()):
        yield f"    {result['us']:6.2f} us {result['us'] / today:5.2f}  {Clusters(*result['clusters'])}"
    yield from complaints(row["results"], lambda result: str(Clusters(*result["clusters"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every case")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ROWSxTOKENSxKEYS")
    parser.add_argument("--seconds", type=float, default=60, help="start no new case after this long")
    args = parser.parse_args()
    report, device = SweepReport(args.out, args.seconds), gpu()
    cases = [parse_case(text) for text in args.cases]
    with ThreadPoolExecutor(16) as pool:
        sweeps = [Sweep(case, pool, device) for case in cases]
        for sweep in sweeps:
            wait([compiled for other in sweeps for compiled in other.compiled.values()])
            if report.is_late():
                break
            row = sweep.measure()
            report.add(row, table(row))


if __name__ == "__main__":
    main()
