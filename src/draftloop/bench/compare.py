"""Several drafters on one model: how much is accepted, and how fast it makes the engine.

Each drafter has an engine of its own, all of them at once. They take turns batch by batch, so that a machine that
slows down slows all of them alike; ratios count. A batch's time goes from its first prompt to its last token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftloop.bench.acceptance import shares_accepted, step_histogram
from draftloop.bench.ask import NONE, drafter_settings, render
from draftloop.bench.plots import pyplot
from draftloop.bench.prompts import load_prompts
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.config.speculative import SpeculativeConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.models.resolve import LoadFormat
from draftloop.observability.progress import progress_bar
from draftloop.request import RequestOutput, SamplingParams


@dataclass(kw_only=True)
class Contender:
    """A drafter with its engine and what was measured of it."""

    name: str
    llm: LLM
    outputs: list[RequestOutput] = field(default_factory=list)
    """Of the first round; others repeat it."""
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each round."""


def speculation_of(name: str, load_format: LoadFormat) -> SpeculativeConfig | None:
    """From `none` or `NAME:K`. Raises ConfigError."""
    if name == NONE:
        return None
    settings = drafter_settings(name, load_format=load_format)
    if not settings.get("num_speculative_tokens"):
        raise ConfigError(f"drafter {name!r} comes without a number of drafts; say how many, such as '{name}:4'")
    return SpeculativeConfig.from_mapping(settings)


def run_compare(
    config: EngineConfig,
    *,
    drafters: Sequence[str],
    prompts: str,
    num_prompts: int,
    sampling: SamplingParams,
    repeats: int,
    out: Path,
) -> Path:
    """Measure, print a table, write the numbers (and a picture where matplotlib is), return the file.

    `drafters` are `none` or `NAME:K`. Raises ConfigError for names that are wrong or come twice, and CapacityError
    if memory does not suffice for all engines.
    """
    if len(set(drafters)) < len(drafters) or not drafters:
        raise ConfigError(f"--drafters is {','.join(drafters) or 'empty'}; name at least one, and each once")
    speculations = {
        name: speculation_of(name, config.load_format) for name in drafters
    }  # what is wrong is said before anything is loaded
    texts = [prompt.turns[0] for prompt in load_prompts(prompts, num_prompts)]
    contenders: list[Contender] = []
    try:
        for name, speculation in speculations.items():
            llm = LLM.from_config(replace(config, speculative_config=speculation))
            contenders.append(Contender(name=name, llm=llm))
        ids = render(contenders[0].llm, texts, max_tokens=sampling.max_tokens or 1)
        take_turns(contenders, ids, sampling, batch=config.max_num_seqs, repeats=repeats)
        asked = {"prompts": prompts, "num_prompts": len(ids), "max_tokens": sampling.max_tokens}
        common = {**asked, "temperature": sampling.temperature, "batch": config.max_num_seqs}
        rows = [{**row, **common} for row in compare_rows(contenders, greedy=sampling.greedy)]
    finally:
        for contender in contenders:
            contender.llm.close()
    path = write_numbers(out, rows)
    _print(rows)
    _draw(rows, path.with_suffix(".png"))
    Console().print(f"written to {path}")
    return path


def take_turns(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    batch: int,
    repeats: int,
) -> None:
    """Answer every prompt `repeats` times with each drafter, `batch` at a time; fills the contenders."""
    params = [replace(sampling, seed=seed) for seed in range(len(prompts))]
    parts = [slice(start, start + batch) for start in range(0, len(prompts), batch)]
    for contender in contenders:  # first uses record graphs and fault in weights
        contender.llm.generate(prompts[parts[0]], [replace(p, max_tokens=16) for p in params[parts[0]]])
    with progress_bar(total=repeats * len(parts) * len(contenders), description="Taking turns", unit="batch") as bar:
        for turn in range(repeats):
            seconds, tokens = dict.fromkeys(range(len(contenders)), 0.0), dict.fromkeys(range(len(contenders)), 0)
            for index, part in enumerate(parts):
                for place in range(len(contenders)):
                    number = (place + turn + index) % len(contenders)  # nobody always goes first
                    contenders[number].llm.reset_prefix_cache()  # every turn reads its prompts
                    begin = time.perf_counter()
                    outputs = contenders[number].llm.generate(prompts[part], params[part])
                    seconds[number] += time.perf_counter() - begin
                    tokens[number] += sum(len(output.outputs[0].token_ids) for output in outputs)
                    if turn == 0:
                        contenders[number].outputs += outputs
                    bar.update()
            for number, contender in enumerate(contenders):
                contender.speeds.append(tokens[number] / seconds[number])


def compare_rows(contenders: Sequence[Contender], *, greedy: bool) -> list[dict[str, Any]]:
    """One row per drafter. `ratio` and `same_tokens` are against plain decoding, None where that is not among them."""
    plain = next((contender for contender in contenders if contender.name == NONE), None)
    rows = []
    for contender in contenders:
        shares = shares_accepted([step_histogram(output.spec) for output in contender.outputs if output.spec])
        rows.append(
            {
                "metric": "tokens_per_s",
                **engine_facts(contender.llm),
                "name": contender.name,
                "value": round(statistics.median(contender.speeds), 2),
                "min": round(min(contender.speeds), 2),
                "max": round(max(contender.speeds), 2),
                "ratio": plain and round(statistics.median(map(_ratio, contender.speeds, plain.speeds)), 3),
                "acceptance_length": round(1.0 + sum(shares), 4),
                "per_position": [round(share, 4) for share in shares],
                "same_tokens": _tokens(contender) == _tokens(plain) if plain and greedy else None,
            }
        )
    return rows


def _ratio(ours: float, plain: float) -> float:
    return ours / plain


def _tokens(contender: Contender) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in contender.outputs]


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    table.add_column("drafter", no_wrap=True)
    for header in ("per step", "tokens/s", "against none", "same text", "accepted by position"):
        table.add_column(header)
    for row in rows:
        same = {True: "yes", False: "no", None: "-"}[row["same_tokens"]]
        shares = " ".join(f"{share:.2f}" for share in row["per_position"])
        ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
        table.add_row(row["name"], f"{row['acceptance_length']:.2f}", f"{row['value']:.1f}", ratio, same, shares)
    Console().print(table)


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per step and per second of each drafter."""
    if (plt := pyplot()) is None:
        return
    names = [row["name"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.5 * len(rows)), layout="constrained", sharey=True)
    bars = left.barh(names, [row["acceptance_length"] for row in rows], color="C0")
    left.bar_label(bars, fmt="%.2f", padding=3)
    left.set(xlabel="tokens per step")
    speeds = [row["value"] for row in rows]
    spread = list(zip(*((row["value"] - row["min"], row["max"] - row["value"]) for row in rows), strict=True))
    bars = right.barh(names, speeds, xerr=spread, color="C1", ecolor="gray")
    right.bar_label(
        bars, [f"{row['ratio']:.2f}x" if row["ratio"] else f"{row['value']:.0f}" for row in rows], padding=3
    )
    right.set(xlabel="tokens per second (median and spread of rounds)")
    for axes, key in ((left, "acceptance_length"), (right, "max")):
        largest = max(row[key] for row in rows)
        axes.set_xlim(0, largest * 1.2)
    left.invert_yaxis()
    first = rows[0]
    figure.suptitle(f"{first['model']}, {first['prompts']}, {first['batch']} at a time")
    figure.savefig(path, dpi=120)
    plt.close(figure)
