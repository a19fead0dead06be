"""A Chrome trace of steady iterations; `chrome://tracing` and ui.perfetto.dev show it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from draftloop.bench.steady import SteadyBatch
from draftloop.engine.llm import LLM

TRACED = 4
"""Iterations."""


def write_trace(llm: LLM, path: Path, *, rows: int, prompt_tokens: int) -> None:
    """Trace a few iterations of `rows` rows as the engine runs them, then once more phase by phase, each by name.

    The host launches every iteration here, also where a device loop would: a profiler does not see into one. The
    file's name ends with .json, or with .json.gz to be compressed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    worker = llm.engine.core.worker
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if worker.device.type == "cuda" else [])]
    loop, worker.loop = worker.loop, None
    try:
        with SteadyBatch(llm, rows, prompt_tokens=prompt_tokens, num_iterations=2 * TRACED) as batch:
            iterations = batch.measure(TRACED)
            with profile(activities=activities, acc_events=True) as profiled:
                for _ in range(TRACED):
                    with record_function("iteration"):
                        batch.core.step()
                batch.run_phases(iterations, record_function)
                if worker.device.type == "cuda":
                    torch.cuda.synchronize()
    finally:
        worker.loop = loop
    profiled.export_chrome_trace(str(path))
