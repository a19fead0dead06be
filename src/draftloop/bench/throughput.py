"""Requests that come and go: tokens per second, acceptance length, and how long each request waited.

A fixed number of requests is open at any time; whenever one ends, the next comes in. Steady iterations at the same
number of rows are timed too, so that what prompts and endings take shows as the distance between the two.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from draftloop.bench.acceptance import shares_accepted
from draftloop.bench.ask import render
from draftloop.bench.latency import ceiling_rows, engine_ceiling
from draftloop.bench.plots import pyplot
from draftloop.bench.prompts import load_prompts
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.bench.steady import measure_steady
from draftloop.bench.steady_view import iteration_table, phase_table
from draftloop.bench.trace import write_trace
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.observability.progress import progress_bar
from draftloop.request import SamplingParams
from draftloop.scheduler.batch import Sequence as Request

WAVES = 4
"""Requests for each that is open at a time."""
PERCENTILES = (50, 90, 99)
LATENCIES = {"ttft_ms": "to first token", "tpot_ms": "per token after it", "request_ms": "whole request"}


def run_throughput(
    config: EngineConfig,
    *,
    concurrency: Sequence[int],
    num_requests: int | None,
    prompts: str | None,
    prompt_tokens: int,
    params: SamplingParams,
    repeats: int,
    out: Path,
    trace: Path | None = None,
) -> Path:
    """Measure, print tables, write the numbers (and a picture where matplotlib is), return the file.

    `num_requests`: at each concurrency; None are `WAVES` for each that is open. `prompts` names a set, None are
    random ids. Raises ConfigError if prompt and answer do not fit the model.
    """
    assert params.max_tokens is not None
    llm = LLM.from_config(config)
    try:
        most = num_requests or WAVES * max(concurrency)
        all_ids = _prompts(llm, prompts, most, prompt_tokens, params.max_tokens)
        ceiling = engine_ceiling(llm)
        rows = ceiling_rows(ceiling)
        counts = [num_requests or WAVES * rows_at_once for rows_at_once in concurrency]
        warming = sum(map(min, counts, concurrency))
        bar = progress_bar(total=warming + sum(counts), description="Answering", unit="request")
        for rows_at_once, count in zip(concurrency, counts, strict=True):
            ids = all_ids[:count]
            serve(llm, ids[:rows_at_once], params, rows_at_once, bar)  # warms up, compiles what start-up did not
            llm.reset_graph_counts()
            llm.reset_prefix_cache()
            requests, seconds = serve(llm, ids, params, rows_at_once, bar)
            eager = {"eager_runs": sum(llm.get_graph_report().eager_runs.values())}
            rows += [{**row, **eager} for row in throughput_rows(requests, seconds, rows_at_once)]
            rows += measure_steady(
                llm,
                rows_at_once,
                ceiling,
                prompt_tokens=prompt_tokens,
                output_tokens=params.max_tokens,
                repeats=repeats,
            )
        bar.close()
        asked = {"prompts": prompts or "random", "prompt": prompt_tokens if prompts is None else None}
        common = {**engine_facts(llm), **asked, "output": params.max_tokens, "temperature": params.temperature}
        rows = [{**common, **row} for row in rows]
        path = write_numbers(out, rows, name="throughput")
        if trace:
            write_trace(llm, trace, rows=concurrency[0], prompt_tokens=prompt_tokens)
    finally:
        llm.close()
    _print(rows)
    _draw(rows, path.with_suffix(".png"))
    Console().print(f"written to {path}" + (f", trace to {trace}" if trace else ""))
    return path


def _prompts(llm: LLM, name: str | None, count: int, num_tokens: int, max_tokens: int) -> list[list[int]]:
    if name is not None:
        texts = [prompt.turns[0] for prompt in load_prompts(name)]
        return list(islice(cycle(render(llm, texts[:count], max_tokens=max_tokens)), count))
    limit = llm.engine.resolved.max_model_len
    if num_tokens + max_tokens > limit:
        raise ConfigError(
            f"{num_tokens} prompt tokens and {max_tokens} output tokens exceed max_model_len {limit}; lower "
            "--prompt-tokens or --output-tokens"
        )
    source, vocab = random.Random(0), range(llm.engine.core.vocab_size)
    return [source.choices(vocab, k=num_tokens) for _ in range(count)]


def serve(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, concurrency: int, bar: tqdm | None = None
) -> tuple[list[Request], float]:
    """Answer every prompt, `concurrency` at a time: the requests with their times, and the seconds they took."""
    core, waiting, ended = llm.engine.core, deque(enumerate(prompts)), []
    begin = time.perf_counter()
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < concurrency:
            index, prompt = waiting.popleft()
            core.add(llm._next_id(), list(prompt), replace(params, seed=index))
            num_open += 1
        for sequence, _ in core.step():
            if sequence.finish_reason is not None:
                ended.append(sequence)
                num_open -= 1
                if bar is not None:
                    bar.update()
    seconds = time.perf_counter() - begin
    while not core.idle:  # a step launched before the last request was known to end
        core.step()
    return ended, seconds


def throughput_rows(requests: Sequence[Request], seconds: float, concurrency: int) -> list[dict[str, Any]]:
    """The row `tokens_per_s`, then one for each of `LATENCIES` with its percentiles over requests."""
    tokens = sum(len(request.output_ids) for request in requests)
    # as everywhere, a step for which nothing was drafted accepted 0
    histograms = [
        (request.acceptance_histogram[0] + request.num_steps_without_drafts, *request.acceptance_histogram[1:])
        for request in requests
    ]
    common = {"batch": concurrency, "num_requests": len(requests)}
    rows: list[dict[str, Any]] = [
        {
            "metric": "tokens_per_s",
            **common,
            "value": round(tokens / seconds, 2),
            "seconds": round(seconds, 3),
            "acceptance_length": round(1 + sum(shares_accepted(histograms)), 3),
        }
    ]
    spans = {
        "ttft_ms": [request.first_token - request.arrived for request in requests],
        "tpot_ms": [
            (request.finished - request.first_token) / max(len(request.output_ids) - 1, 1) for request in requests
        ],
        "request_ms": [request.finished - request.arrived for request in requests],
    }
    for metric, values in spans.items():
        found = np.percentile(np.array(values) * 1e3, PERCENTILES).round(4).tolist()
        shares = {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
        rows.append({"metric": metric, **common, "value": shares["p50"], **shares})
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("at a time", "tokens/s", "accepted", title="Requests")
    for text in LATENCIES.values():
        table.add_column(f"ms {text}: p{', p'.join(map(str, PERCENTILES))}")
    for speed in (row for row in rows if row["metric"] == "tokens_per_s"):
        mine = {row["metric"]: row for row in rows if row.get("batch") == speed["batch"]}
        table.add_row(
            str(speed["batch"]),
            f"{speed['value']:.1f}",
            f"{speed['acceptance_length']:.2f}",
            *(", ".join(f"{mine[metric][f'p{p}']:.1f}" for p in PERCENTILES) for metric in LATENCIES),
        )
    Console().print(table, iteration_table(rows), phase_table(rows))


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left tokens per second by concurrency, right how long requests waited."""
    if (plt := pyplot()) is None:
        return
    speeds = [row for row in rows if row["metric"] == "tokens_per_s"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot([row["batch"] for row in speeds], [row["value"] for row in speeds], "o-")
    left.set(xlabel="requests at a time", ylabel="tokens per second")
    left.set_ylim(bottom=0)
    for index, (metric, text) in enumerate(LATENCIES.items()):
        mine = [row for row in rows if row["metric"] == metric]
        for percent, line in zip((PERCENTILES[0], PERCENTILES[-1]), ("o-", "o--"), strict=True):
            values = [row[f"p{percent}"] for row in mine]
            right.plot([row["batch"] for row in mine], values, line, color=f"C{index}", label=f"{text}, p{percent}")
    right.set(xlabel="requests at a time", ylabel="ms", yscale="log")
    right.legend(fontsize="small")
    first = speeds[0]
    figure.suptitle(f"{first['model']}, {first['method']}, K={first['k']}, {first['path']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
