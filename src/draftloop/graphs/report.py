"""What is captured, what it costs, and what ran eager and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftloop.graphs.entries import Entry
    from draftloop.graphs.phase import Key


@dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """One captured size of a phase, or the sizes of it that have no graph."""

    phase: str
    asked: str
    """The mode that the user's setting names for this kind of batch."""
    mode: str
    """The mode that these sizes run in."""
    rows: int
    tokens: int
    ragged: bool
    """Sizes are numbers of tokens, in up to so many rows; else of rows that have equally many."""
    captured: bool
    reason: str
    """Why there is no graph, or why it is not the one that was asked for."""
    ms: float | None
    """One replay at start-up; None where a size is recorded on first use."""
    mib: float | None
    """Graph memory that this capture added to the shared pool."""
    replays: int
    eager_runs: int


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """One captured size that repeats on the device."""

    phase: str
    rows: int
    ms_to_make: float | None
    """None where it is made on first use."""
    launches: int
    iterations: int
    """Counted as replays of the phase too."""


def captured_row(key: Key, entry: Entry, *, asked: str, ragged: bool, reason: str) -> CoverageRow:
    """What is known of a size that has a graph."""
    return CoverageRow(
        phase=key.phase, asked=asked, mode=key.mode.value, rows=key.rows, tokens=key.tokens, ragged=ragged,
        captured=True, reason=reason, ms=entry.ms, mib=entry.mib,
        replays=entry.replays + (entry.loop.iterations if entry.loop else 0), eager_runs=0,
    )  # fmt: skip


def loop_row(key: Key, entry: Entry) -> LoopRow:
    """What is known of a size that is to repeat."""
    return LoopRow(
        phase=key.phase, rows=key.rows, ms_to_make=entry.loop_ms,
        launches=entry.loop.launches if entry.loop else 0, iterations=entry.loop.iterations if entry.loop else 0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """The coverage table: phase x size."""

    setting: str
    rows: tuple[CoverageRow, ...]
    loops: tuple[LoopRow, ...] = ()

    @property
    def replays(self) -> dict[str, int]:
        """Graph replays per phase."""
        return self._sum("replays")

    @property
    def eager_runs(self) -> dict[str, int]:
        """Eager runs per phase."""
        return self._sum("eager_runs")

    def _sum(self, field: str) -> dict[str, int]:
        totals: dict[str, int] = {}
        for row in self.rows:
            totals[row.phase] = totals.get(row.phase, 0) + getattr(row, field)
        return totals

    @property
    def phases(self) -> dict[str, dict[str, str]]:
        """Per phase: the mode that was asked for, the one it runs in, and the reason where they differ."""
        found: dict[str, dict[str, str]] = {}
        for row in self.rows:  # captured sizes come first; others only add why they are not
            one = found.setdefault(row.phase, {"asked": row.asked, "mode": row.mode, "reason": row.reason})
            one["reason"] = one["reason"] or row.reason
        return found

    def to_dict(self) -> dict[str, Any]:
        rows, loops = ([asdict(row) for row in part] for part in (self.rows, self.loops))
        return {"cudagraph_mode": self.setting, "phases": self.phases, "rows": rows, "loops": loops}

    def at_start(self) -> str:
        """The table, or one line where nothing has been captured yet, since tapes are recorded on first use."""
        if self.loops or any(row.ms is not None for row in self.rows):
            return "\n" + self.format()
        later = [row for row in self.rows if row.captured]
        parts = []
        if later:
            names, sizes = dict.fromkeys(row.phase for row in later), sorted({row.rows for row in later})
            parts.append(f"{_phases(list(names))}, on first use at {_sizes(sizes)} rows")
        eager: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.captured:
                eager.setdefault(row.reason, []).append(row.phase)
        parts += [f"{_phases(names)} eager: {reason}" for reason, names in eager.items()]
        return "; ".join(parts)

    def format(self) -> str:
        """A table of one line per phase: captured row (or token) sizes, time of the smallest and largest."""
        lines: list[Sequence[str]] = [("phase", "mode", "captured sizes", "ms", "MiB", "not captured")]
        for phase in dict.fromkeys(row.phase for row in self.rows):
            mine = [row for row in self.rows if row.phase == phase]
            graphs = [row for row in mine if row.captured]
            why = "; ".join(row.reason for row in mine if not row.captured)
            if graphs and graphs[0].reason:
                why = "; ".join(filter(None, [f"not {graphs[0].asked}: {graphs[0].reason}", why]))
            if graphs:
                unit = "tokens" if graphs[0].ragged else "rows"
                sizes = [getattr(row, unit) for row in graphs]
                span = f"{unit} {_sizes(sizes)}"
                times = [f"{row.ms:.2f}" for row in (graphs[0], graphs[-1])[: len(graphs)] if row.ms is not None]
                ms = "..".join(times) or "first use"
                mib = f"{sum(row.mib or 0 for row in graphs):.0f}"
            else:
                span = ms = mib = "-"
            lines.append((phase, graphs[0].mode if graphs else "NONE", span, ms, mib, why))
        for phase in dict.fromkeys(row.phase for row in self.loops):
            mine = [row for row in self.loops if row.phase == phase]
            times = [row.ms_to_make for row in mine if row.ms_to_make is not None]
            made = f"{sum(times):.0f} to make" if times else "first use"
            lines.append((phase, "loop", f"rows {_sizes([row.rows for row in mine])}", made, "", ""))
        return _align(lines)


def _phases(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} phases"


def _align(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them; numbers, the fourth and fifth, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<<<>><"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )


def _sizes(sizes: list[int]) -> str:
    return ",".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]}..{sizes[-1]} ({len(sizes)} sizes)"
