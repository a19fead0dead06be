"""The page docs/numbers/h200.md, made from the JSON files beside it.

Of several files that hold a row for the same model, drafter, K, path and batch the newest counts: by date, then by
name; one from a clean commit goes before one that is not.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.bench.goals import FLOOR_CONTEXT, GOALS, GPU, GROWTH, PROMPT_TOKENS, SAMPLING_LIMIT, SOURCE, Goal
from draftloop.bench.steady_view import launches, number, per_iteration
from draftloop.errors import ConfigError

PAGE = "h200.md"
NOT_YET = "not measured yet"
SHOWN = ("iteration_ms", "sampled_iteration_ms", "startup_s", "ttft_ms", "tokens_per_s")
OF_THE_MACHINE = ("--out", "--trace")
"""Options whose values are files of whoever measured."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One JSON file."""

    name: str
    stamp: dict[str, Any]
    rows: list[Row]

    @property
    def age(self) -> tuple[bool, str, str]:
        """Grows with how much it counts."""
        return not self.stamp["dirty"], self.stamp["date"], self.name


@dataclass(frozen=True, kw_only=True)
class Found:
    """A row, and the file that it is from."""

    row: Row
    run: Run


def write_page(folder: Path) -> Path:
    """Write the page beside the JSON files and return it. Raises ConfigError for a folder or file without numbers."""
    path = folder / PAGE
    path.write_text(make_page(read_runs(folder)), encoding="utf-8")
    return path


def read_runs(folder: Path) -> list[Run]:
    """Every file of the GPU that the page is about, the one that counts most first."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder} holds no *.json; name the folder that `draftloop bench` wrote to with --out")
    runs = []
    for file in files:
        try:
            stamp = json.loads(file.read_text(encoding="utf-8"))
            run = Run(name=file.name, rows=stamp.pop("rows"), stamp=stamp)
            _ = run.age
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{file} is no file of numbers as `draftloop bench` writes them: {error!r}") from error
        if stamp["gpu"] == GPU:
            runs.append(run)
    return sorted(runs, key=lambda run: run.age, reverse=True)


def make_page(runs: Sequence[Run]) -> str:
    """The whole page; `runs` as `read_runs` orders them."""
    latest = newest_rows(runs)
    goals = {goal: best_row(goal, latest) for goal in GOALS}
    used = {id(found.row) for found in goals.values() if found}
    steps = [found for found in latest if found.row["metric"] == "iteration_ms"]
    others = [found for found in steps if id(found.row) not in used]
    phased = [found for found in steps if _phases(found)]
    speeds = [found for found in latest if found.row["metric"] == "tokens_per_s"]
    sections = [_head(), _goal_table(goals)]
    if growth := _growth_rows(latest):
        sections.append(_GROWTH_HEAD + _table(["", *_GROWTH_COLUMNS], growth))
    if sampled := [found for found in latest if found.row["metric"] == "sampled_iteration_ms"]:
        sections.append(_SAMPLING_HEAD + _sampling_table(sampled))
    if others:
        sections.append("## What else was measured\n\n" + _other_table(others))
    if phased:
        sections.append(_PHASES_HEAD + "\n\n".join(map(_phase_table, phased)))
    if speeds:
        sections.append("## Requests that come and go\n\n" + _speed_table(speeds))
    sections.append("## Where the numbers come from\n\n" + SOURCE + "\n\n" + _sources(latest))
    return "\n\n".join(sections) + "\n"


# ---- which row counts -----------------------------------------------------------------------


def newest_rows(runs: Sequence[Run]) -> list[Found]:
    """Of each measurement that the page shows the row that counts most; phases belong to their file's iterations.

    Greedy iterations that others were held against are no measurement of their own.
    """
    found: dict[tuple, Found] = {}
    for run in runs:
        for row in run.rows:
            if (
                row["metric"] in SHOWN
                and row.get("sampling") != "greedy"
                and (row["metric"] != "tokens_per_s" or "num_requests" in row)
            ):
                found.setdefault(_key(row), Found(row=row, run=run))
    return sorted(found.values(), key=lambda one: _key(one.row))


def _key(row: Row) -> tuple:
    facts = [row.get(name) for name in ("model", "method", "drafter", "k", "metric", "batch", "path")]
    # a start-up with a few sizes, and the latencies of requests that come and go, are other measurements
    facts += [
        row.get("all_sizes", True),
        "num_requests" in row,
        row.get("prompts"),
        row.get("prompt"),
        row.get("sampling"),
        _num_gpus(row),
    ]
    return tuple("" if fact is None else f"{fact:06d}" if type(fact) is int else str(fact) for fact in facts)


def _num_gpus(row: Row) -> int:
    """That one engine is divided among; rows from before that could be do not say."""
    return row.get("tensor_parallel", 1)


def _path(row: Row) -> str:
    """And what else makes it another measurement."""
    gpus = f", {count} GPUs" if (count := _num_gpus(row)) > 1 else ""
    prompt = row.get("prompt")
    return row["path"] + gpus + ("" if prompt in (None, PROMPT_TOKENS) else f", prompts of {prompt}")


def best_row(goal: Goal, latest: Iterable[Found]) -> Found | None:
    """Of the paths that a decoding step can take on one GPU, where nothing changes what it computes, the fastest."""
    mine = [
        found
        for found in latest
        if all(found.row.get(name) == getattr(goal, name) for name in ("model", "method", "k", "metric", "batch"))
        and found.row.get("all_sizes", True)
        and found.row.get("prompt") == PROMPT_TOKENS
        and "num_requests" not in found.row
        and _num_gpus(found.row) == 1
        and "," not in found.row["path"]
    ]
    return min(mine, key=lambda found: found.row["value"], default=None)


def _phases(found: Found) -> list[Row]:
    batch = found.row["batch"]
    return [row for row in found.run.rows if row["metric"] == "phase_ms" and row["batch"] == batch]


# ---- tables ---------------------------------------------------------------------------------


def _head() -> str:
    return f"""\
# Numbers on one {GPU}

Made by `draftloop bench report` from the JSON files in this folder; a test keeps it up to date. Milliseconds unless
said otherwise: bf16, Llama-3.1-8B shape unless said otherwise, {PROMPT_TOKENS} random prompt tokens, acceptance
forced to 3.5 (EAGLE-3) and 3.0 (draft model). *Floor* is what bytes and operations need at the measured bandwidth and
matrix rate, at {FLOOR_CONTEXT} tokens per row; *own floor* the same at the length that was measured, and *ratio* is to
that. *Path*: the phases one by one, their chain as one graph, or that graph repeated by the device.
[optimisation-log.md](optimisation-log.md) says what was tried, and why a row misses its target."""


def _goal_table(goals: dict[Goal, Found | None]) -> str:
    rows = []
    for goal, found in goals.items():
        asked = [_of(value) for value in (goal.vllm, goal.sglang, goal.floor, goal.target, goal.stretch)]
        batch = "-" if goal.batch is None else str(goal.batch)
        rows.append([goal.what, batch, *asked, *_measured(found, goal.target)])
    head = ["", "B", "vLLM 0.26", "SGLang 0.5.17", "floor", "target", "stretch"]
    return _table([*head, "draftloop", "to target", "own floor", "ratio", "path", "launches", "from"], rows)


def _measured(found: Found | None, target: float | None) -> list[str]:
    if found is None:
        return [NOT_YET, *["-"] * 6]
    row = found.row
    value = row["value"]
    to_target = "-" if target is None else "met" if value <= target else f"+{value - target:.2f}"
    return [f"**{_short(value)}**", to_target, *_floor(row), _path(row), _launches(row), _link(found.run)]


_GROWTH_HEAD = f"""\
## Growth with the batch

What an iteration takes longer at 32 rows than at 1; at most {GROWTH} times what its floor does is the goal.

"""
_GROWTH_COLUMNS = ("path", "growth, ms", "floor's growth", "ratio")


def _growth_rows(latest: Sequence[Found]) -> list[list[str]]:
    """Of each path that was measured at both sizes."""
    steps = [found.row for found in latest if found.row["metric"] == "iteration_ms" and found.row.get("floor")]
    rows = []
    for one in (row for row in steps if row["batch"] == 1):
        alike = [row for row in steps if all(row[name] == one[name] for name in ("model", "method", "k"))]
        same = [row for row in alike if _path(row) == _path(one)]
        for many in (row for row in same if row["batch"] == 32 and row["drafter"] == one["drafter"]):
            growth, floor = many["value"] - one["value"], many["floor"] - one["floor"]
            ratio = f"{growth / floor:.2f}" if floor > 0 else "-"
            rows.append(
                [f"{one['model']}, {one['method']}, K={one['k']}", _path(one), number(growth), number(floor), ratio]
            )
    return rows


_SAMPLING_HEAD = f"""\
## Sampling

Iterations whose requests sample against greedy ones of the same run; *all-parameters-half* is every second request
with every parameter, and at most {SAMPLING_LIMIT} times greedy at 32 rows is the goal.

"""


def _sampling_table(sampled: Sequence[Found]) -> str:
    rows = []
    for found in sampled:
        row = found.row
        facts = [row["model"], row["method"], str(row["k"]), str(row["batch"]), _path(row), row["sampling"]]
        times = [_short(row["greedy"]), _short(row["value"]), f"{row['to_greedy']:.3f}"]
        rows.append([*facts, *times, _launches(row), _link(found.run)])
    head = ["model", "method", "K", "B", "path", "sampling", "greedy", "iteration", "to greedy", "launches", "from"]
    return _table(head, rows)


def _other_table(others: Sequence[Found]) -> str:
    rows = []
    for found in others:
        row = found.row
        facts = [row["model"], row["method"], str(row["k"]), str(row["batch"]), _path(row)]
        rows.append([*facts, _short(row["value"]), *_floor(row), _launches(row), _link(found.run)])
    head = ["model", "method", "K", "B", "path", "iteration", "own floor", "ratio", "launches", "from"]
    return _table(head, rows)


_PHASES_HEAD = """\
## Phase by phase

Each phase by itself, over the same rows at their real length; the gaps between launches are in it.

"""


def _phase_table(found: Found) -> str:
    row = found.row
    title = f"### {row['model']}, {row['method']}, K={row['k']}, B={row['batch']}, {_path(row)}: {_short(row['value'])}"
    rows = [
        [phase["phase"], f"{phase['runs']:g}", number(phase["value"]), *_floor(phase), number(per_iteration(phase))]
        for phase in _phases(found)
    ]
    return f"{title}\n\n" + _table(["phase", "runs", "ms", "floor", "ratio", "ms per iteration"], rows)


def _speed_table(speeds: Sequence[Found]) -> str:
    rows = []
    for found in speeds:
        row = found.row
        mine = {
            other["metric"]: other
            for other in found.run.rows
            if other.get("batch") == row["batch"] and "num_requests" in other
        }
        waits = [f"{number(mine[name]['p50'])} / {number(mine[name]['p99'])}" for name in ("ttft_ms", "tpot_ms")]
        facts = [row["model"], row["method"], str(row["k"]), str(row["batch"]), _path(row)]
        rows.append([*facts, f"{row['value']:.0f}", f"{row['acceptance_length']:.2f}", *waits, _link(found.run)])
    head = ["model", "method", "K", "at a time", "path", "tokens/s", "accepted"]
    return _table([*head, "to first token, p50 / p99", "per token, p50 / p99", "from"], rows)


def _sources(latest: Iterable[Found]) -> str:
    runs = {found.run.name: found.run for found in latest}
    lines = []
    for name, run in sorted(runs.items()):
        stamp, versions = run.stamp, run.stamp["versions"]
        commit = (stamp["git"] or "unknown")[:12] + (" with changes" if stamp["dirty"] else "")
        software = ", ".join(f"{package} {versions[package]}" for package in ("torch", "triton", "driver"))
        lines.append(
            f"- [{name}]({name}): {stamp['date']}, commit {commit}, {stamp['gpu']}, {software}\n"
            f"  `{plain_command(stamp['command'])}`"
        )
    return "\n".join(lines)


def plain_command(command: str) -> str:
    """As somebody else would type it: without the folders of the machine that it ran on."""
    kept, words = [], iter(shlex.split(command))
    for word in words:
        option, joined, _ = word.partition("=")
        if option in OF_THE_MACHINE:
            if not joined:
                next(words, None)
        else:
            kept.append(Path(word).name if word.startswith("/") else word)
    return shlex.join(["draftloop" if word == "__main__.py" else word for word in kept])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"\s*\n\s*", " ", cell) for cell in line) + " |" for line in lines)


def _of(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:g}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _floor(row: Row) -> list[str]:
    """Own floor and ratio; older files have no ratio."""
    floor = row.get("floor")
    return [number(floor), f"{row['value'] / floor:.2f}" if floor and row["value"] is not None else "-"]


def _launches(row: Row) -> str:
    if "launches" not in row:
        return "-"
    return launches(row["launches"]) + (f", {row['eager_runs']} eager" if row["eager_runs"] else "")


def _link(run: Run) -> str:
    return f"[json]({run.name})" + (" (uncommitted)" if run.stamp["dirty"] else "")
