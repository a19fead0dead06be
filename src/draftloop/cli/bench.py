"""`draftloop bench`: what is measured, and from which options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App

from draftloop.bench import prompts as prompt_sets
from draftloop.bench.sampling_mix import SamplingMix
from draftloop.cli.bench_replicas import add_replicas
from draftloop.cli.options import (
    DECIMALS,
    NAMES,
    NUMBERS,
    RESULTS,
    at_least_one,
    at_least_two,
    command,
    config_from,
    default_speculation,
    engine_options,
    speculation_from,
    speculation_options,
    target_options,
)
from draftloop.config import EngineConfig, SpeculativeConfig
from draftloop.errors import ConfigError, check_known
from draftloop.request import SamplingParams

bench = App(name="bench", help="Measure; each result is written with the command, machine and versions it came from.")
add_replicas(bench)


@command(bench, "latency", [*engine_options(), *speculation_options()])
def latency(
    values: dict[str, Any],
    *,
    batch_sizes: Annotated[tuple[int, ...], NUMBERS] = (1, 8, 32),
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    repeats: int = 3,
    sampling_mix: SamplingMix = SamplingMix.GREEDY,
    out: Path = RESULTS,
    trace: Path | None = None,
) -> None:
    """Time per iteration of decoding and per phase of it, against the hardware's floor, at fixed batch sizes.

    Parameters
    ----------
    batch_sizes:
        Requests that run at the same time, such as 1,8,32; --max-num-seqs is raised to the largest.
    prompt_tokens:
        Tokens of each prompt.
    output_tokens:
        Tokens of each answer.
    repeats:
        Measurements of each size; the median counts.
    sampling_mix:
        What requests ask for: greedy; sampled (temperature 1); all-parameters-half (every second one for every
        parameter). The last two are measured beside greedy, and compared with it.
    out:
        Folder for the results.
    trace:
        File for a Chrome trace of a few iterations of the first batch size, .json or .json.gz.
    """
    at_least_one(batch_sizes=min(batch_sizes), prompt_tokens=prompt_tokens, repeats=repeats)
    _check_answers(output_tokens, trace)
    config = config_from({**values, "max_num_seqs": max(values["max_num_seqs"], *batch_sizes)})
    from draftloop.bench.latency import run_latency

    run_latency(
        config,
        batch_sizes=batch_sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        out=out,
        sampling_mix=sampling_mix,
        trace=trace,
    )


@command(bench, "throughput", [*engine_options(), *speculation_options()])
def throughput(
    values: dict[str, Any],
    *,
    concurrency: Annotated[tuple[int, ...], NUMBERS] = (1, 8, 32),
    num_requests: int | None = None,
    prompts: str | None = None,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 3,
    out: Path = RESULTS,
    trace: Path | None = None,
) -> None:
    """Tokens per second and latencies of requests that come and go, at fixed numbers of them at a time.

    Parameters
    ----------
    concurrency:
        Requests that are open at the same time, such as 1,8,32; --max-num-seqs is raised to the largest.
    num_requests:
        Requests that are answered at each of them; left out, four for each that is open.
    prompts:
        A set of prompts, again and again: mt_bench, humaneval, gsm8k; left out, random ids.
    prompt_tokens:
        Tokens of each random prompt, and of those whose iterations are timed.
    output_tokens:
        Tokens of each answer.
    temperature:
        0 is greedy.
    repeats:
        Measurements of a steady iteration at each concurrency.
    out:
        Folder or file for the results.
    trace:
        File for a Chrome trace of a few iterations at the first concurrency, .json or .json.gz.
    """
    least = min(concurrency)
    at_least_one(concurrency=least, num_requests=num_requests, prompt_tokens=prompt_tokens, repeats=repeats)
    _check_answers(output_tokens, trace)
    if prompts is not None:
        check_known("prompt set", [prompts], prompt_sets.NAMES)
    params = SamplingParams(temperature=temperature, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    config = config_from({**values, "max_num_seqs": max(values["max_num_seqs"], *concurrency)})
    from draftloop.bench.throughput import run_throughput

    run_throughput(
        config,
        concurrency=concurrency,
        num_requests=num_requests,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        params=params,
        repeats=repeats,
        out=out,
        trace=trace,
    )


@command(bench, "soak", [*engine_options(), *speculation_options()])
def soak(
    values: dict[str, Any],
    *,
    minutes: float = 10.0,
    max_seconds: float | None = None,
    longest_prompt: int = 1024,
    longest_answer: int = 512,
    out: Path = RESULTS,
) -> None:
    """Mixed traffic for minutes: shared beginnings, aborts, full rows. Fails on a stall, or memory that grows.

    Interrupted by SIGINT or SIGTERM, it writes what it has.

    Parameters
    ----------
    minutes:
        How long requests come in.
    max_seconds:
        For all of it, from the start of the engine to the written numbers; ends the traffic early where it must.
    longest_prompt:
        Tokens of the longest prompt.
    longest_answer:
        Tokens of the longest answer.
    out:
        Folder or file for the results.
    """
    if not 0 < minutes <= 24 * 60:
        raise ConfigError(f"--minutes is {minutes:g}; it must be above 0, and at most a day, 1440")
    if max_seconds is not None and max_seconds < 30:
        raise ConfigError(f"--max-seconds is {max_seconds:g}; it must be 30 at least, of which 10 are kept to end")
    at_least_one(longest_prompt=longest_prompt, longest_answer=longest_answer)
    config = config_from(values)
    from draftloop.bench.soak import run_soak

    run_soak(
        config,
        minutes=minutes,
        longest_prompt=longest_prompt,
        longest_answer=longest_answer,
        out=out,
        max_seconds=max_seconds,
    )


@bench.command
def report(folder: Path = RESULTS, /) -> None:
    """Write the page of numbers, h200.md, from the JSON files in a folder.

    Parameters
    ----------
    folder:
        Where the files are, and the page will be.
    """
    from draftloop.bench.report import write_page

    print(write_page(folder))


def _check_answers(output_tokens: int, trace: Path | None) -> None:
    at_least_two(output_tokens)
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--trace is {str(trace)!r}; its name must end with .json or .json.gz")


@command(bench, "acceptance", [*target_options(), *speculation_options(with_model=False)])
def acceptance(
    values: dict[str, Any],
    *,
    target: str = "smollm2-135m",
    drafter: str | None = None,
    prompts: Annotated[tuple[str, ...], NAMES] = prompt_sets.NAMES,
    num_prompts: int | None = None,
    max_tokens: int = 256,
    temperature: Annotated[tuple[float, ...], DECIMALS] = (0.0, 1.0),
    out: Path = RESULTS,
) -> None:
    """How much of what a drafter drafts is accepted: by position and kind of prompt, with and without loops.

    Parameters
    ----------
    target:
        The model that is drafted for: hub id, local folder or alias.
    drafter:
        What drafts: the folder, hub id or name of a drafter, or a method that needs none, such as ngram. NAME:K
        says the number of drafts too.
    prompts:
        Sets of prompts: mt_bench, humaneval, gsm8k.
    num_prompts:
        Prompts of each set, spread over its categories; left out, all 80.
    max_tokens:
        Tokens of each answer, at most.
    temperature:
        Temperatures to measure at, such as 0,1.
    out:
        Folder or file for the results.
    """
    at_least_one(num_prompts=num_prompts, max_tokens=max_tokens)
    for value in temperature:
        SamplingParams(temperature=value)
    check_known("prompt set", prompts, prompt_sets.NAMES)
    spec = speculation_from(values) or {}
    config = EngineConfig.from_mapping(model=target, **values)  # before torch is imported
    from draftloop.bench.acceptance import run_acceptance
    from draftloop.bench.ask import drafter_settings

    load_format = spec.get("load_format") or config.load_format
    named = drafter_settings(drafter, method=spec.get("method"), load_format=load_format) if drafter else {}
    if twice := [key for key in sorted(named.keys() & spec.keys()) if named[key] != spec[key]]:
        raise ConfigError(f"--drafter {drafter} says {twice[0]} {named[twice[0]]!r}, another option {spec[twice[0]]!r}")
    run_acceptance(
        dataclasses.replace(config, speculative_config=SpeculativeConfig.from_mapping(named | spec or None)),
        prompts=prompts,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        temperatures=temperature,
        out=out,
    )


@command(bench, "structured", [*target_options(), *speculation_options()])
def structured(
    values: dict[str, Any],
    *,
    target: str = "smollm2-135m",
    num_prompts: int = 200,
    max_tokens: int = 256,
    temperature: Annotated[tuple[float, ...], DECIMALS] = (0.0, 1.0),
    out: Path = RESULTS,
) -> None:
    """How many answers that a JSON schema constrains are valid, over assorted schemas, as jsonschema judges them.

    Parameters
    ----------
    target:
        The model that answers: hub id, local folder or alias.
    num_prompts:
        Prompts, each with a schema of its own.
    max_tokens:
        Tokens of each answer, at most; what that cuts is counted apart.
    temperature:
        Temperatures to measure at, such as 0,1.
    out:
        Folder or file for the results.
    """
    at_least_one(num_prompts=num_prompts, max_tokens=max_tokens)
    for value in temperature:
        SamplingParams(temperature=value)
    values = {**values, "model": target}
    config = config_from(values, default_speculation(values))
    from draftloop.bench.structured import run_structured

    run_structured(config, num_prompts=num_prompts, max_tokens=max_tokens, temperatures=temperature, out=out)


@command(bench, "transformers", [*engine_options(max_num_seqs=1), *speculation_options()])
def against_transformers(
    values: dict[str, Any],
    *,
    output_tokens: int = 128,
    repeats: int = 3,
    out: Path = RESULTS,
) -> None:
    """Tokens per second of one request, against transformers.generate in the same process.

    Parameters
    ----------
    output_tokens:
        Tokens of each answer.
    repeats:
        Measurements of each; the median counts.
    out:
        Folder or file for the results.
    """
    at_least_one(output_tokens=output_tokens, repeats=repeats)
    config = config_from(values, default_speculation(values))
    from draftloop.bench.against_transformers import run_against_transformers

    run_against_transformers(config, output_tokens=output_tokens, repeats=repeats, out=out)


@bench.command
def server(
    *,
    streams: int = 16,
    tokens_per_step: Annotated[tuple[int, ...], NUMBERS] = (1, 3),
    tokens_per_s: float = 1000.0,
    seconds: float = 10.0,
    out: Path = RESULTS,
) -> None:
    """Processor time that the API process takes for each token it streams, with no model behind it.

    Parameters
    ----------
    streams:
        Requests that are open at the same time.
    tokens_per_step:
        Tokens that a request gets at a time: 1 as without speculation, more as with it.
    tokens_per_s:
        Tokens that all streams get together.
    seconds:
        Length of each measurement.
    out:
        Folder or file for the results.
    """
    at_least_one(streams=streams, tokens_per_step=min(tokens_per_step))
    for name, value in (("tokens-per-s", tokens_per_s), ("seconds", seconds)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value}; it must be above 0")
    from draftloop.bench.server_overhead import run_server_overhead

    run_server_overhead(
        streams=streams, tokens_per_step=tokens_per_step, tokens_per_s=tokens_per_s, seconds=seconds, out=out
    )
