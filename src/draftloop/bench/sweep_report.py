"""What all sweeps over tiles do with a result: keep it in a file at once, print it, and stop in time."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.bench.stamp import stamp

MAX_ERROR = 1e-2
"""Of `relative_error`; larger: the kernel is wrong."""
GAIN = 0.98
"""Tiles enter a table if they take less than this share of the time without them."""


def gpu() -> torch.device:
    """Where kernels are timed. Ends the program where there is none, in one line."""
    if not torch.cuda.is_available():
        raise SystemExit("kernels are timed on an NVIDIA GPU; there is no usable one (draftloop collect-env says why)")
    return torch.device("cuda")


def run_bench(arguments: Sequence[str]) -> None:
    """`draftloop bench`, in this process, with what a sweep has set."""
    sys.argv = ["draftloop", "bench", *arguments]
    runpy.run_module("draftloop", run_name="__main__")


@contextlib.contextmanager
def attempting(result: dict[str, Any]) -> Generator[None]:
    """What fails here makes it no candidate, and is kept in the result: too many resources, most likely."""
    try:
        yield
    except Exception as failure:
        result["failed"] = repr(failure)[:300]


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


def usable(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were timed and are right."""
    return [result for result in results if "us" in result and result["error"] < MAX_ERROR]


def complaints(results: Sequence[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """Lines about results that are wrong, by name, and about those that failed."""
    for result in results:
        if result.get("error", 0.0) >= MAX_ERROR:
            yield f"    WRONG by {result['error']:.2g}: {name(result)}"
    if failed := [result for result in results if "failed" in result]:
        yield f"    {len(failed)} failed, the first with {failed[0]['failed'][:160]}"


class SweepReport:
    """Rows measured so far; `out` is written anew after each, so that a sweep that is cut off keeps what it has."""

    def __init__(self, out: Path | None, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self._out, self._seconds = out, seconds
        self._begin, self._stamp = time.perf_counter(), stamp()

    def is_late(self) -> bool:
        """Whether nothing more may be begun; says so."""
        late = time.perf_counter() - self._begin > self._seconds
        if late:
            print(f"stopped after {self._seconds:g} s", flush=True)
        return late

    def add(self, row: dict[str, Any], lines: Iterable[str]) -> None:
        """Keep a row, and print what is to be said of it."""
        self.rows.append(row)
        if self._out:
            self._out.write_text(json.dumps({"stamp": self._stamp, "rows": self.rows}, indent=1))
        print(*lines, f"    {time.perf_counter() - self._begin:.0f} s", sep="\n", flush=True)
