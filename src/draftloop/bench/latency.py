"""How long decoding takes: per iteration, per phase of it, per token, and to the first token.

`iteration_ms` and `phase_ms` are measured while every row decodes (`steady.py`). `tpot_ms` is measured the way that
peers are: the time for 16 + n tokens less the time for 16, over n, for the whole batch. Prompts are random ids.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftloop.bench.roofline import Ceiling, ceiling_of
from draftloop.bench.sampling_mix import SamplingMix
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.bench.steady import against_greedy, measure_steady, spread
from draftloop.bench.steady_view import draw_steady, iteration_table, phase_table, sampling_table
from draftloop.bench.trace import write_trace
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.observability.progress import progress_bar
from draftloop.request import SamplingParams

WARM_TOKENS = 16


def run_latency(
    config: EngineConfig,
    *,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    out: Path,
    sampling_mix: SamplingMix = SamplingMix.GREEDY,
    trace: Path | None = None,
) -> Path:
    """Measure, print tables, write the numbers (and a picture where matplotlib is), return the file.

    With another `sampling_mix` than greedy every size is measured with both, and nothing but steady iterations.
    `trace` is a file for a Chrome trace of the first batch size. Raises ConfigError if prompt and answer do not fit
    the model, CapacityError if a batch does not fit the memory.
    """
    begin = time.perf_counter()
    llm = LLM.from_config(config)
    startup_s = time.perf_counter() - begin
    try:
        limit = llm.engine.resolved.max_model_len
        if prompt_tokens + output_tokens + WARM_TOKENS > limit:
            raise ConfigError(
                f"{prompt_tokens} prompt tokens and {output_tokens} + {WARM_TOKENS} output tokens exceed max_model_len "
                f"{limit}; lower --prompt-tokens or --output-tokens"
            )
        ceiling = engine_ceiling(llm)
        common = {**engine_facts(llm), "prompt": prompt_tokens}
        rows = [{**common, **row} for row in (*_startup_rows(llm, startup_s), *ceiling_rows(ceiling))]
        path = write_numbers(out, rows, name="latency")
        for batch in progress_bar(batch_sizes, description="Batch sizes"):
            steady = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "repeats": repeats}
            greedy = measure_steady(llm, batch, ceiling, **steady)
            if sampling_mix is SamplingMix.GREEDY:
                found = [*greedy, *_measure_spans(llm, batch, prompt_tokens, output_tokens, repeats)]
            else:
                found = [{**row, "sampling": SamplingMix.GREEDY.value} for row in greedy]
                found += against_greedy(llm, greedy[0], ceiling, sampling_mix, **steady)
            rows += [{**common, **row} for row in found]
            path = write_numbers(path, rows)  # a run that is cut off keeps what it has
        if trace:
            write_trace(llm, trace, rows=batch_sizes[0], prompt_tokens=prompt_tokens)
    finally:
        llm.close()
    _print(rows)
    draw_steady(rows, path.with_suffix(".png"))
    Console().print(f"written to {path}" + (f", trace to {trace}" if trace else ""))
    return path


def engine_ceiling(llm: LLM) -> Ceiling:
    """What the device that the engine runs on can do, with the engine's type."""
    return ceiling_of(llm.engine.core.worker.device, getattr(torch, llm.engine.resolved.dtype))


def ceiling_rows(ceiling: Ceiling) -> list[dict[str, Any]]:
    """What the floors of a file follow from."""
    return [
        {"metric": "ceiling_tb_per_s", "value": round(ceiling.bytes_per_s / 1e12, 4)},
        {"metric": "ceiling_tflop_per_s", "value": round(ceiling.flops_per_s / 1e12, 4)},
    ]


def _startup_rows(llm: LLM, startup_s: float) -> list[dict[str, Any]]:
    report = llm.engine.table.report()
    graphs = {
        "num_graphs": sum(row.captured for row in report.rows),
        "all_sizes": llm.config.cudagraph_capture_sizes is None,
    }
    return [
        {"metric": "startup_s", "value": round(startup_s, 3), **graphs},
        {"metric": "capture_s", "value": round(llm.engine.seconds["capture"], 3), **graphs},
    ]


def _measure_spans(llm: LLM, batch: int, prompt_tokens: int, output_tokens: int, repeats: int) -> list[dict[str, Any]]:
    source = random.Random(0)
    spans, first = [], []
    for _ in range(repeats):
        short, to_first = _span(llm, batch, prompt_tokens, WARM_TOKENS, source)
        long, _ = _span(llm, batch, prompt_tokens, WARM_TOKENS + output_tokens, source)
        spans.append((long - short) / output_tokens * 1e3)
        first.append(to_first * 1e3)
    return [
        {"metric": "tpot_ms", "batch": batch, **spread(spans)},
        {"metric": "ttft_ms", "batch": batch, **spread(first)},
    ]


def _span(llm: LLM, batch: int, prompt_tokens: int, max_tokens: int, source: random.Random) -> tuple[float, float]:
    """Seconds from the first prompt to the last token, and to the first token of the first row."""
    core = llm.engine.core
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    prompts = [source.choices(range(core.vocab_size), k=prompt_tokens) for _ in range(batch)]
    begin = time.perf_counter()
    for prompt in prompts:
        core.add(llm._next_id(), prompt, params)
    first = None
    while not core.idle:
        if core.step() and first is None:
            first = time.perf_counter() - begin
    assert first is not None
    return time.perf_counter() - begin, first


def _print(rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    compared = any("to_greedy" in row for row in rows)
    console.print(iteration_table(rows, spans=not compared), phase_table(rows))
    if compared:
        console.print(phase_table(rows, "sampled_phase_ms"), sampling_table(rows))
    for row in rows:
        if "batch" not in row:
            console.print(f"{row['metric']}: {row['value']:.3g}")
