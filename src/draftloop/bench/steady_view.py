"""How rows of `steady.py` are shown: measured, floor and ratio, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftloop.bench.plots import pyplot

Row = dict[str, Any]


def iteration_table(rows: Sequence[Row], *, spans: bool = False) -> Table:
    """One line per batch size; `spans`: with time per token and to the first token of whole batches."""
    shown = {"tpot_ms": "TPOT ms", "ttft_ms": "TTFT ms"} if spans else {}
    if any(row["metric"] == "exchange_ms" for row in rows):
        shown["exchange_ms"] = "of it between ranks"
    before, after = ("batch", "iteration\nms", "floor", "ratio"), ("accepted", "launches", "eager", "context")
    table = Table(*before, *shown.values(), *after, title="Iterations", box=SIMPLE_HEAD, padding=0)  # fits 80 columns
    for step in (row for row in rows if row["metric"] == "iteration_ms"):
        mine = {row["metric"]: row for row in rows if row.get("batch") == step["batch"]}
        table.add_row(
            str(step["batch"]),
            *_against_floor(step),
            *(f"{mine[metric]['value']:.5g}" for metric in shown),
            f"{step['acceptance_length']:.2f}",
            launches(step["launches"]),
            str(step["eager_runs"]),
            str(step["context"]),
        )
    return table


def phase_table(rows: Sequence[Row], metric: str = "phase_ms") -> Table:
    """One line per batch size and phase: a single run, how many an iteration makes, and their sum."""
    title = "Phases, one by one" + (", sampled" if metric.startswith("sampled") else "")
    table = Table("batch", "phase", "ms", "floor", "ratio", "runs", "ms per iteration", title=title)
    for batch in _batches(rows):
        mine = [row for row in rows if row["metric"] == metric and row["batch"] == batch]
        for index, row in enumerate(mine):
            cells = (row["phase"], *_against_floor(row), f"{row['runs']:g}", number(per_iteration(row)))
            table.add_row(str(batch) if index == 0 else "", *cells, end_section=index == len(mine) - 1)
    return table


def sampling_table(rows: Sequence[Row]) -> Table:
    """One line per batch size: greedy, sampled, and how many times greedy that is."""
    table = Table("batch", "sampling", "greedy ms", "ms", "to greedy", "eager", title="Against greedy")
    for row in (row for row in rows if row["metric"] == "sampled_iteration_ms"):
        times = number(row["greedy"]), number(row["value"]), f"{row['to_greedy']:.3f}"
        table.add_row(str(row["batch"]), row["sampling"], *times, str(row["eager_runs"]))
    return table


def per_iteration(phase: Row) -> float | None:
    """Milliseconds that all runs of a phase take of an iteration; None where it was not timed."""
    return None if phase["value"] is None else phase["runs"] * phase["value"]


def launches(per_iteration: float) -> str:
    """Of a device loop, one per so many iterations."""
    if 0 < per_iteration < 1:
        return f"1 per {1 / per_iteration:.0f}"
    return f"{per_iteration:g}"


def number(value: float | None) -> str:
    """Milliseconds to three digits after the point, and three digits of what is less; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"


def draw_steady(rows: Sequence[Row], path: Path) -> None:
    """Left iterations against their floor, by batch; right what each phase takes of an iteration, beside its floor."""
    if (plt := pyplot()) is None:
        return
    steps = [row for row in rows if row["metric"] == "iteration_ms"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot([row["batch"] for row in steps], [row["value"] for row in steps], "o-", label="measured")
    left.plot([row["batch"] for row in steps], [row["floor"] or 0 for row in steps], "--", label="floor")
    left.set(xlabel="batch (rows)", ylabel="ms per iteration", title="iterations")
    left.set_ylim(bottom=0)
    left.legend()
    phases = [row for row in rows if row["metric"] == "phase_ms" and not row["chain"] and row["value"]]
    names, batches = list(dict.fromkeys(row["phase"] for row in phases)), _batches(rows)
    bottoms = {(batch, key): 0.0 for batch in batches for key in ("value", "floor")}
    for index, name in enumerate(names):
        for row in (row for row in phases if row["phase"] == name):
            for key, shift in (("value", -0.2), ("floor", 0.2)):
                height, place = row["runs"] * (row[key] or 0), (row["batch"], key)
                label = name if (row["batch"], key) == (batches[0], "value") else None
                alpha = 1 if key == "value" else 0.4
                x = batches.index(row["batch"]) + shift
                right.bar(x, height, 0.38, bottom=bottoms[place], color=f"C{index}", alpha=alpha, label=label)
                bottoms[place] += height
    right.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    right.set(xlabel="batch (rows)", ylabel="ms per iteration", title="phases one by one; pale: floor")
    right.legend(fontsize="small")
    first = steps[0]
    figure.suptitle(f"{first['model']}, {first['method']}, K={first['k']}, {first['path']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _batches(rows: Sequence[Row]) -> list[int]:
    return list(dict.fromkeys(row["batch"] for row in rows if row["metric"] == "iteration_ms"))


def _against_floor(row: Row) -> tuple[str, str, str]:
    ratio = row["ratio"]
    return number(row["value"]), number(row["floor"]), "-" if ratio is None else f"{ratio:.2f}"
