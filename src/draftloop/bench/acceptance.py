"""How much of what a drafter drafts is accepted: by position, by kind of prompt, and without text that goes in circles.

A small model that is greedy repeats itself, and what repeats is easy to draft. So every number comes twice: over all
answers, and over those in which no 8-gram comes three times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftloop.bench.ask import render
from draftloop.bench.plots import pyplot
from draftloop.bench.prompts import Prompt, load_prompts
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.request import RequestOutput, SamplingParams, SpeculationStats
from draftloop.train.recording import repetition_starts

ALL = "all"
LOOP_FREE = "loop-free"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one answer says about the drafter."""

    prompts: str
    """The set its prompt is from."""
    category: str
    temperature: float
    histogram: tuple[int, ...]
    """See `step_histogram`."""
    num_tokens: int
    loops: bool
    """An 8-gram comes three times in it."""


def step_histogram(stats: SpeculationStats) -> tuple[int, ...]:
    """Verify steps of a request that accepted 0, 1, .. K drafts; a step without drafts accepted 0."""
    none, *some = stats.acceptance_histogram
    return (none + stats.num_steps_without_drafts, *some)


def shares_accepted(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Share of all steps that accepted draft i, for i = 1 .. K; with 1, the bonus token, they add up to the mean."""
    steps = max(sum(map(sum, histograms)), 1)
    most = max(map(len, histograms), default=1)
    return [sum(sum(histogram[i:]) for histogram in histograms) / steps for i in range(1, most)]


def measure_acceptance(
    llm: LLM,
    sets: Mapping[str, Sequence[Prompt]],
    *,
    max_tokens: int,
    temperature: float,
    show_progress: bool | None = None,
) -> list[Answer]:
    """Answer the first turn of every prompt, in batches of the engine's rows. Seeds are the prompts' numbers."""
    asked = [(name, prompt) for name, prompts in sets.items() for prompt in prompts]
    ids = render(llm, [prompt.turns[0] for _, prompt in asked], max_tokens=max_tokens)
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed) for seed in range(len(ids))]
    outputs = llm.generate(ids, params, use_tqdm=show_progress)
    return [
        _answer(output, name, prompt.category, temperature)
        for (name, prompt), output in zip(asked, outputs, strict=True)
    ]


def _answer(output: RequestOutput, prompts: str, category: str, temperature: float) -> Answer:
    token_ids = output.outputs[0].token_ids
    assert output.spec is not None
    return Answer(
        prompts=prompts,
        category=category,
        temperature=temperature,
        histogram=step_histogram(output.spec),
        num_tokens=len(token_ids),
        loops=repetition_starts(token_ids) < len(token_ids),
    )


def acceptance_rows(answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """One row per temperature, set of prompts, category (and all of them), and with or without loops."""
    for temperature in dict.fromkeys(answer.temperature for answer in answers):
        for prompts in dict.fromkeys(answer.prompts for answer in answers):
            mine = [a for a in answers if (a.temperature, a.prompts) == (temperature, prompts)]
            categories = list(dict.fromkeys(answer.category for answer in mine))
            for category in (ALL, *(categories if len(categories) > 1 else ())):
                group = [answer for answer in mine if category in (ALL, answer.category)]
                free = [answer for answer in group if not answer.loops]
                for text, chosen in ((ALL, group), (LOOP_FREE, free)):
                    histograms = [answer.histogram for answer in chosen]
                    shares, steps = shares_accepted(histograms), sum(map(sum, histograms))
                    yield {
                        "temperature": temperature,
                        "prompts": prompts,
                        "category": category,
                        "text": text,
                        "loop_free_share": round(len(free) / len(group), 4),
                        "num_prompts": len(chosen),
                        "num_tokens": sum(answer.num_tokens for answer in chosen),
                        "num_steps": steps,
                        "value": round(1 + sum(shares), 4) if steps else None,
                        "per_position": [round(share, 4) for share in shares],
                    }


def run_acceptance(
    config: EngineConfig,
    *,
    prompts: Sequence[str],
    num_prompts: int | None,
    max_tokens: int,
    temperatures: Sequence[float],
    out: Path,
) -> Path:
    """Measure, print a table, write the numbers (and a picture where matplotlib is), return the file.

    `num_prompts` of each set, None for all. Raises ConfigError where prompt and answer do not fit the model.
    """
    if config.speculation is None:
        raise ConfigError("there is no acceptance without speculation; name a --drafter and 1 or more --spec-tokens")
    sets = {name: load_prompts(name, num_prompts) for name in prompts}
    llm = LLM.from_config(config)
    try:
        answers = [
            answer
            for temperature in temperatures
            for answer in measure_acceptance(llm, sets, max_tokens=max_tokens, temperature=temperature)
        ]
        common = {"metric": "acceptance_length", **engine_facts(llm), "batch": config.max_num_seqs}
    finally:
        llm.close()
    rows = [{**common, "max_tokens": max_tokens, **row} for row in acceptance_rows(answers)]
    path = write_numbers(out, rows)
    _print(rows)
    _draw(rows, path.with_suffix(".png"))
    Console().print(f"written to {path}")
    return path


def _pairs(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of all text, each with that of the text without loops."""
    return zip(rows[::2], rows[1::2], strict=True)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("T", "prompts", "all", "loop-free", title="Tokens per step", title_justify="left")
    table.add_column("accepted by position", no_wrap=True)
    for row, free in _pairs(rows):
        first = row["category"] == ALL
        if first and table.row_count:
            table.add_section()
        table.add_row(
            f"{row['temperature']:g}" if first else "",
            row["prompts"] if first else f"  {row['category']}",
            f"{row['value']:.2f}" if row["value"] else "-",
            f"{free['value']:.2f} ({row['loop_free_share']:.0%})" if free["value"] else "-",
            " ".join(f"{share:.2f}" for share in row["per_position"]),
        )
    Console().print(table)


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left the share of steps that accept each draft, right the mean length by category."""
    if (plt := pyplot()) is None:
        return
    first = rows[0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    for row, _ in _pairs(rows):
        if row["category"] == ALL:
            label = f"{row['prompts']}, temperature {row['temperature']:g}"
            line = "o-" if row["temperature"] == temperatures[0] else "o--"
            color = f"C{sets.index(row['prompts'])}"
            left.plot(range(1, first["k"] + 1), row["per_position"], line, color=color, label=label)
    left.set(xlabel="draft", ylabel="share of steps that accept it", title="accepted by position", ylim=(0, 1))
    left.set_xticks(range(1, first["k"] + 1))
    left.legend(fontsize="small")
    names = list(dict.fromkeys(_kind(row) for row in rows))
    width = 0.8 / (2 * len(temperatures))
    for column, temperature in enumerate(temperatures):
        mine = [(row, free) for row, free in _pairs(rows) if row["temperature"] == temperature]
        for part, text in enumerate((ALL, LOOP_FREE)):
            places = [names.index(_kind(pair[0])) + (2 * column + part) * width for pair in mine]
            lengths = [pair[part]["value"] or 0 for pair in mine]
            right.bar(places, lengths, width, label=f"temperature {temperature:g}, {text}", alpha=1 - 0.4 * part)
    right.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names, rotation=45, ha="right")
    top = 1.3 * max(row["value"] or 0 for row in rows)  # room for the legend
    right.set(ylabel="tokens per step", title="mean acceptance length", ylim=(1, top))
    right.legend(fontsize="small", ncols=2, loc="upper right")
    figure.suptitle(f"{first['drafter'] or first['method']} on {first['model']}, K={first['k']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _kind(row: Mapping[str, Any]) -> str:
    return row["prompts"] if row["category"] == ALL else row["category"]
