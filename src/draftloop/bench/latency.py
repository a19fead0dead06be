"""How long decoding takes: per iteration, per token, and to the first token.

`iteration_ms` is measured over steady iterations (every row decodes, none ends) and `tpot_ms`
the way that peers are measured: the time for 16 + n tokens less the time for 16, over n, for
the whole batch. Prompts are random ids; every result says how much ran eager.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from draftloop.bench.plots import pyplot
from draftloop.bench.roofline import CEILINGS, floor_ms
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
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
    trace: bool = False,
) -> Path:
    """Measure, print a table, write the numbers (and a picture where matplotlib is), return the file.

    Raises ConfigError if prompt and answer do not fit the model.
    """
    begin = time.perf_counter()
    llm = LLM.from_config(config)
    startup_s = time.perf_counter() - begin
    limit = llm.engine.resolved.max_model_len
    if prompt_tokens + output_tokens + WARM_TOKENS > limit:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {output_tokens} + {WARM_TOKENS} output tokens exceed max_model_len "
            f"{limit}; lower --prompt-tokens or --output-tokens"
        )
    common = {**engine_facts(llm), "prompt": prompt_tokens}
    seconds = llm.engine.seconds
    rows = [
        {**common, "metric": "startup_s", "value": round(startup_s, 3)},
        {**common, "metric": "capture_s", "value": round(seconds["capture"], 3)},
    ]
    for batch in tqdm(batch_sizes, desc="Batch sizes"):
        rows += _measure(llm, common, batch, prompt_tokens, output_tokens, repeats)
    if trace:
        _trace(llm, batch_sizes[0], prompt_tokens, output_tokens, out)
    path = write_numbers(out, rows)
    _print(rows, path)
    _draw(rows, path.with_suffix(".png"))
    return path


def _measure(
    llm: LLM, common: dict[str, Any], batch: int, prompt_tokens: int, output_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    run = _Run(llm, batch, prompt_tokens)
    run.steady(output_tokens)  # warms up, compiles what start-up did not
    iterations, spans, first = [], [], []
    llm.engine.table.reset_counts()
    eager = 0
    length = 1.0
    for _ in range(repeats):
        result = run.steady(output_tokens)
        iterations.append(result["iteration_ms"])
        eager, length = eager + result["eager_runs"], result["acceptance_length"]
        short, to_first = run.span(WARM_TOKENS)
        long, _ = run.span(WARM_TOKENS + output_tokens)
        spans.append((long - short) / output_tokens * 1e3)
        first.append(to_first * 1e3)
    table, ceiling = llm.engine.table, CEILINGS.get(_device_name())
    launches = run.launches
    floor = None
    if ceiling:
        phases = [table.phases[name] for name in launches]
        floor = round(floor_ms(phases, ceiling, rows=batch, context=prompt_tokens + output_tokens // 2), 3)
    shared = {**common, "batch": batch, "acceptance_length": round(length, 3)}
    return [
        {
            **shared,
            "metric": "iteration_ms",
            **_spread(iterations),
            "floor": floor,
            "eager_runs": eager,
            "launches": len(launches) if run.loop_launches is None else run.loop_launches,
        },
        {**shared, "metric": "tpot_ms", **_spread(spans)},
        {**shared, "metric": "ttft_ms", **_spread(first)},
    ]


class _Run:
    """Batches of random prompts through the engine, step by step."""

    def __init__(self, llm: LLM, batch: int, prompt_tokens: int) -> None:
        self.llm, self.batch, self.prompt_tokens = llm, batch, prompt_tokens
        self.core = llm.engine.core
        self.random = random.Random(0)
        self.launches: list[str] = []
        """Phases of a steady iteration."""
        self.loop_launches: float | None = None
        """Per iteration, where a device loop repeats it."""

    def _add(self, max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        ids = []
        for _ in range(self.batch):
            prompt = [self.random.randrange(self.core.vocab_size) for _ in range(self.prompt_tokens)]
            ids.append(self.llm._next_id())
            self.core.add(ids[-1], prompt, params)
        return ids

    def span(self, max_tokens: int) -> tuple[float, float]:
        """Seconds from the first prompt to the last token, and to the first token of the first row."""
        _synchronize()
        begin = time.perf_counter()
        self._add(max_tokens)
        first = None
        while not self.core.idle:
            if self.core.step() and first is None:
                first = time.perf_counter() - begin
        _synchronize()
        assert first is not None
        return time.perf_counter() - begin, first

    def steady(self, output_tokens: int) -> dict[str, float]:
        """Milliseconds per iteration once every row decodes, for as long as none ends."""
        stats, table = self.core.stats, self.llm.engine.table
        k = self.core.worker.num_drafts
        ids = self._add(self.core.scheduler.max_model_len - self.prompt_tokens)
        while any(s.stage.name != "DECODE" for s in self.core.scheduler.running) or self.core.scheduler.waiting:
            self.core.step()
        num_steps = max(output_tokens // (1 + k), 4)
        for _ in range(3):
            self.core.step()
        replays_before, eager_before = table.report().replays, sum(table.report().eager_runs.values())
        loops_before = sum(loop.launches for loop in table.report().loops)
        tokens, drafts = stats.num_accepted_tokens, stats.num_spec_steps
        # each step waits for the results of one iteration, whoever launches it; a loop must not run ahead of the clock
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.core.step()
        elapsed = time.perf_counter() - begin
        accepted, steps = stats.num_accepted_tokens - tokens, stats.num_spec_steps - drafts
        report = table.report()
        self.launches = [
            phase
            for phase, count in report.replays.items()
            for _ in range(round((count - replays_before[phase]) / num_steps))
        ]
        if report.loops:
            self.loop_launches = round((sum(loop.launches for loop in report.loops) - loops_before) / num_steps, 3)
        for request_id in ids:
            self.core.abort(request_id)
        while not self.core.idle:
            self.core.step()
        return {
            "iteration_ms": elapsed / num_steps * 1e3,
            "eager_runs": sum(report.eager_runs.values()) - eager_before,
            "acceptance_length": 1 + accepted / steps if steps else 1.0,
        }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "value": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _trace(llm: LLM, batch: int, prompt_tokens: int, output_tokens: int, out: Path) -> None:
    """One steady stretch as a chrome trace."""
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(llm, batch, prompt_tokens)
    with torch.profiler.profile() as profile:
        run.steady(min(output_tokens, 32))
    profile.export_chrome_trace(str(out / "trace.json.gz"))


def _print(rows: list[dict[str, Any]], path: Path) -> None:
    table = Table("batch", "iteration ms", "floor", "ratio", "TPOT ms", "TTFT ms", "accepted", "launches", "eager")
    for batch in dict.fromkeys(row["batch"] for row in rows if "batch" in row):
        mine = {row["metric"]: row for row in rows if row.get("batch") == batch}
        step, floor = mine["iteration_ms"], mine["iteration_ms"]["floor"]
        table.add_row(
            str(batch),
            f"{step['value']:.3f}",
            f"{floor:.2f}" if floor else "-",
            f"{step['value'] / floor:.2f}" if floor else "-",
            f"{mine['tpot_ms']['value']:.3f}",
            f"{mine['ttft_ms']['value']:.1f}",
            f"{step['acceptance_length']:.2f}",
            str(step["launches"]),
            str(step["eager_runs"]),
        )
    console = Console()
    console.print(table)
    for row in rows:
        if "batch" not in row:
            console.print(f"{row['metric']}: {row['value']:.1f}")
    console.print(f"written to {path}")


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Iteration time against its floor, by batch."""
    if (plt := pyplot()) is None:
        return
    steps = [row for row in rows if row["metric"] == "iteration_ms"]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot([r["batch"] for r in steps], [r["value"] for r in steps], "o-", label="measured")
    if all(row["floor"] for row in steps):
        axes.plot([r["batch"] for r in steps], [r["floor"] for r in steps], "--", label="floor")
    first = steps[0]
    axes.set(
        xlabel="batch (rows)", ylabel="ms per iteration", title=f"{first['model']}, {first['method']}, K={first['k']}"
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
