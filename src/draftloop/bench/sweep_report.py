"""What all sweeps over tiles do with a result: keep it in a file at once, print it, and stop in time."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from draftloop.bench.stamp import stamp


def gpu() -> torch.device:
    """Where kernels are timed. Ends the program where there is none, in one line."""
    if not torch.cuda.is_available():
        raise SystemExit("kernels are timed on an NVIDIA GPU; there is no usable one (draftloop collect-env says why)")
    return torch.device("cuda")


def run_bench(arguments: Sequence[str]) -> None:
    """`draftloop bench`, in this process, with what a sweep has set."""
    sys.argv = ["draftloop", "bench", *arguments]
    runpy.run_module("draftloop", run_name="__main__")


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
