"""What replicas would do: throughput and latencies against their number, the load, and how many drafts stand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from draftloop.bench.plots import pyplot
from draftloop.bench.simulation import ROUTES, Costs, Served, Simulation, costs_from_rows, make_jobs
from draftloop.bench.stamp import write_numbers
from draftloop.errors import ConfigError
from draftloop.observability.progress import progress_bar

PERCENTILES = (50, 99)
LATENCIES = ("ttft_ms", "tpot_ms")


def read_costs(path: Path) -> tuple[Costs, dict[str, Any]]:
    """What a file of `draftloop bench latency` or `throughput` measured, and of what. Raises ConfigError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        costs = costs_from_rows(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--costs {path} cannot be read: {error!r}") from error
    if costs is None:
        raise ConfigError(f"--costs {path} has no rows iteration_ms and ttft_ms; `draftloop bench latency` writes them")
    first = next(row for row in rows if row["metric"] == "iteration_ms")
    return costs, {name: first.get(name) for name in ("model", "dtype", "method", "k", "path")}


def run_simulate(
    costs_file: Path,
    *,
    replicas: Sequence[int],
    requests_per_s: Sequence[float],
    acceptance_length: Sequence[float],
    routing: Sequence[str],
    rows: int,
    prompt_tokens: int,
    output_tokens: int,
    turns: float,
    num_requests: int,
    seed: int,
    out: Path,
) -> Path:
    """Simulate every combination, print a table, write the numbers and a picture, return the file.

    `requests_per_s` is what each replica gets. Raises ConfigError for costs that cannot be used.
    """
    costs, facts = read_costs(costs_file)
    for length in acceptance_length:
        if not 1 <= length <= 1 + costs.num_drafts:
            limit = f"[1, {1 + costs.num_drafts}], since {costs.num_drafts} tokens are drafted"
            raise ConfigError(f"--acceptance-length is {length:g}; it must be in {limit}")
    found = []
    combinations = list(product(routing, acceptance_length or (costs.acceptance_length,), replicas, requests_per_s))
    total = num_requests * sum(number for _, _, number, _ in combinations)
    bar = progress_bar(total=total, description="Simulating", unit=" requests", unit_scale=True)
    for route, length, number, rate in combinations:
        jobs = make_jobs(
            num_requests * number,
            requests_per_s=rate * number,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            turns=turns,
            seed=seed,
        )
        cost = dataclasses.replace(costs, acceptance_length=length)
        simulation = Simulation(cost, replicas=number, rows=rows, route=ROUTES[route], seed=seed)
        served = simulation.run(jobs)
        asked = {"replicas": number, "requests_per_s": rate * number, "routing": route, "acceptance_length": length}
        shape = {"rows": rows, "prompt": prompt_tokens, "output": output_tokens, "turns": turns}
        found += [
            {**facts, **asked, **shape, **row}
            for row in served_rows(served, [one.busy_s for one in simulation.replicas])
        ]
        bar.update(len(jobs))
    bar.close()
    path = write_numbers(out, found)
    _print(found)
    _draw(found, path.with_suffix(".png"))
    Console().print(f"written to {path}")
    return path


def served_rows(served: Sequence[Served], busy_s: Sequence[float]) -> list[dict[str, Any]]:
    """Tokens per second from the first arrival to the last end, with how busy replicas were; then latencies."""
    begin, end = min(one.arrived for one in served), max(one.finished for one in served)
    tokens = sum(one.job.output_tokens for one in served)
    spans = {
        "ttft_ms": [one.first_token - one.arrived for one in served],
        "tpot_ms": [(one.finished - one.first_token) / max(one.job.output_tokens - 1, 1) for one in served],
    }
    rows: list[dict[str, Any]] = [
        {
            "metric": "simulated_tokens_per_s",
            "value": round(tokens / (end - begin), 2),
            "requests": len(served),
            "busy": round(sum(busy_s) / len(busy_s) / (end - begin), 4),
        }
    ]
    for metric, values in spans.items():
        shares = np.percentile(np.array(values) * 1e3, PERCENTILES).round(4).tolist()
        named = {f"p{percent}": value for percent, value in zip(PERCENTILES, shares, strict=True)}
        rows.append({"metric": f"simulated_{metric}", "value": named["p50"], **named})
    return rows


def _by_run(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """The rows of each simulation: speed, then the latencies."""
    size = 1 + len(LATENCIES)
    return [tuple(rows[at : at + size]) for at in range(0, len(rows), size)]


def _print(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    title = f"{first['model']}, {first['method']}, K={first['k']}, {first['prompt']} + {first['output']} tokens"
    by_routing = len({row["routing"] for row in rows}) > 1
    if not by_routing:
        title += f", routing {first['routing']}"
    table = Table(*["routing"] * by_routing, "accepted", "replicas", "requests/s", "tokens/s", "busy", title=title)
    for metric in LATENCIES:
        table.add_column(f"{metric}: p50, p99")
    for speed, *latencies in _by_run(rows):
        table.add_row(
            *[speed["routing"]] * by_routing,
            f"{speed['acceptance_length']:.2f}",
            str(speed["replicas"]),
            f"{speed['requests_per_s']:g}",
            f"{speed['value']:.0f}",
            f"{speed['busy']:.0%}",
            *(f"{row['p50']:.1f}, {row['p99']:.1f}" for row in latencies),
        )
    Console().print(table)


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left tokens per second, right the 99th percentile of the time to the first token, by requests per second."""
    if (plt := pyplot()) is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for speed, ttft, _ in _by_run(rows):
        name = f"{speed['replicas']} replicas, {speed['routing']}, {speed['acceptance_length']:.2f} accepted"
        lines.setdefault(name, []).append((speed["requests_per_s"], speed["value"], ttft["p99"]))
    for name, points in lines.items():
        rates, speeds, waits = zip(*sorted(points), strict=True)
        left.plot(rates, speeds, "o-", label=name)
        right.plot(rates, waits, "o-", label=name)
    left.set(xlabel="requests per second", ylabel="tokens per second", xscale="log", yscale="log")
    right.set(xlabel="requests per second", ylabel="ms to first token, p99", xscale="log", yscale="log")
    left.legend(fontsize="x-small")
    figure.suptitle(f"simulated: {rows[0]['model']}, {rows[0]['method']}, K={rows[0]['k']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
