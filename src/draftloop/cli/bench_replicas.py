"""`draftloop bench simulate`, `replicas` and `engines`: what several engines do together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App

from draftloop.cli.options import (
    DECIMALS,
    NAMES,
    NUMBERS,
    RESULTS,
    at_least_one,
    at_least_two,
    command,
    config_from,
    engine_options,
    speculation_options,
)
from draftloop.errors import ConfigError, check_known

ROUTES = ("round_robin", "least_loaded", "two_choices", "prefix")


def add_replicas(bench: App) -> None:
    bench.command(simulate)
    command(bench, "engines", [*engine_options(data_parallel_size=2), *speculation_options()])(engines)
    command(bench, "replicas", [*engine_options(max_num_seqs=4), *speculation_options()])(replicas)


def simulate(
    *,
    costs: Path,
    replicas: Annotated[tuple[int, ...], NUMBERS] = (1, 2, 4, 8),
    requests_per_s: Annotated[tuple[float, ...], DECIMALS] = (1.0, 2.0, 4.0),
    acceptance_length: Annotated[tuple[float, ...], DECIMALS] = (),
    routing: Annotated[tuple[str, ...], NAMES] = ("two_choices",),
    rows: int = 32,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    turns: float = 1.0,
    num_requests: int = 200,
    seed: int = 0,
    out: Path = RESULTS,
) -> None:
    """What replicas would do, by a simulation of events: tokens per second, time to first token and per token.

    Parameters
    ----------
    costs:
        File of `draftloop bench latency` or `throughput`: what iterations and prompts of one replica take.
    replicas:
        Numbers of replicas, such as 1,2,4.
    requests_per_s:
        Requests that come for each replica, at random (Poisson).
    acceptance_length:
        Tokens per iteration and row; left out, what was measured.
    routing:
        Where requests go: round_robin, least_loaded, two_choices (the shorter of two queues), prefix.
    rows:
        Rows of a replica.
    prompt_tokens:
        Tokens of each prompt, beyond those of the conversation so far.
    output_tokens:
        Tokens of each answer.
    turns:
        Turns of a conversation, on average; a later turn's prompt holds the earlier ones.
    num_requests:
        Requests for each replica.
    seed:
        Seed of arrivals and acceptance.
    out:
        Folder or file for the results.
    """
    at_least_one(replicas=min(replicas), rows=rows, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    at_least_one(num_requests=num_requests)
    check_known("routing", routing, ROUTES)
    for name, value, least in (("requests-per-s", min(requests_per_s), 0), ("turns", turns, 1)):
        if not value >= least or value == 0:
            raise ConfigError(f"--{name} is {value:g}; it must be {'above 0' if least == 0 else 'at least 1'}")
    from draftloop.bench.simulate import run_simulate

    run_simulate(
        costs,
        replicas=replicas,
        requests_per_s=requests_per_s,
        acceptance_length=acceptance_length,
        routing=routing,
        rows=rows,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        turns=turns,
        num_requests=num_requests,
        seed=seed,
        out=out,
    )


def replicas(
    values: dict[str, Any],
    *,
    replicas: int = 2,
    concurrency: int = 8,
    num_requests: int = 48,
    prompt_tokens: int = 64,
    output_tokens: int = 64,
    tolerance: float = 0.15,
    out: Path = RESULTS,
) -> None:
    """Engines beside each other on this machine, against the simulation of them; fails if that is too far off.

    Parameters
    ----------
    replicas:
        Engines, each in a process of its own with its share of the processors.
    concurrency:
        Requests that are open at the same time, over all replicas.
    num_requests:
        Requests that are answered.
    prompt_tokens:
        Tokens of each prompt.
    output_tokens:
        Tokens of each answer.
    tolerance:
        Share by which the throughputs may differ.
    out:
        Folder or file for the results.
    """
    at_least_one(replicas=replicas, concurrency=concurrency, num_requests=num_requests)
    at_least_one(prompt_tokens=prompt_tokens)
    at_least_two(output_tokens)
    if not 0 < tolerance < 1:
        raise ConfigError(f"--tolerance is {tolerance:g}; it must be in (0, 1)")
    config = config_from(values)
    from draftloop.bench.replicas import run_replicas

    run_replicas(
        config,
        replicas=replicas,
        concurrency=concurrency,
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tolerance=tolerance,
        out=out,
    )


def engines(
    values: dict[str, Any],
    *,
    steady_steps: int = 200,
    mixed_steps: int = 2000,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    compare_with_one: bool = True,
    out: Path = RESULTS,
) -> None:
    """Several engines of one machine that share their experts, or nothing: their speed, and that they never hang.

    Parameters
    ----------
    steady_steps:
        Steps with all rows of every engine busy, whose tokens per second count; 0 leaves that out.
    mixed_steps:
        Steps with requests of every kind, idle and full engines, drafts and none; 0 leaves that out.
    prompt_tokens:
        Tokens of each prompt; in the mixed part, of the longest.
    output_tokens:
        Tokens of each answer, likewise.
    compare_with_one:
        Measure one engine alone too, which holds all experts.
    out:
        Folder or file for the results.
    """
    at_least_one(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    sizes = {"steady": steady_steps, "mixed": mixed_steps}
    for name, steps in sizes.items():
        if steps < 0:
            raise ConfigError(f"--{name}-steps is {steps}; it must be at least 0")
    config = config_from(values)
    if config.data_parallel_size < 2:
        raise ConfigError(f"data_parallel_size is {config.data_parallel_size}; this takes several engines, -dp 2")
    from draftloop.bench.engines import Load, run_engines

    loads = [
        Load(name=name, num_steps=steps, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        for name, steps in sizes.items()
        if steps
    ]
    run_engines(config, loads, with_one=compare_with_one, out=out)
