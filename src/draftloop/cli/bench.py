"""`draftloop bench`: what is measured, and from which options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App

from draftloop.cli.options import (
    FLAG,
    NUMBERS,
    command,
    config_from,
    default_speculation,
    engine_options,
    speculation_options,
)
from draftloop.errors import ConfigError

bench = App(name="bench", help="Measure; each result is written with the command, machine and versions it came from.")


@command(bench, "latency", [*engine_options(), *speculation_options()])
def latency(
    values: dict[str, Any],
    *,
    batch_sizes: Annotated[tuple[int, ...], NUMBERS] = (1, 8, 32),
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    repeats: int = 3,
    out: Path = Path("docs/numbers"),
    trace: FLAG = False,
) -> None:
    """Time per token and per iteration of decoding, at fixed batch sizes.

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
    out:
        Folder for the results.
    trace:
        Write a profiler trace beside the results too.
    """
    for name, value in (("batch-sizes", min(batch_sizes, default=0)), ("prompt-tokens", prompt_tokens)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    for name, value, least in (("output-tokens", output_tokens, 2), ("repeats", repeats, 1)):
        if value < least:
            raise ConfigError(f"--{name} is {value}; it must be at least {least}")
    config = config_from({**values, "max_num_seqs": max(values["max_num_seqs"], *batch_sizes)})
    from draftloop.bench.latency import run_latency

    run_latency(
        config,
        batch_sizes=batch_sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        out=out,
        trace=trace,
    )


@command(bench, "transformers", [*engine_options(max_num_seqs=1), *speculation_options()])
def against_transformers(
    values: dict[str, Any],
    *,
    output_tokens: int = 128,
    repeats: int = 3,
    out: Path = Path("docs/numbers"),
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
    config = config_from(values, default_speculation(values))
    from draftloop.bench.against_transformers import run_against_transformers

    run_against_transformers(config, output_tokens=output_tokens, repeats=repeats, out=out)
