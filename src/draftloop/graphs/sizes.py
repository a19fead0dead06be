"""The sizes that graphs are captured at, and which of them serves a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from draftloop.graphs.phase import GraphMode, Key, Phase


@dataclass(frozen=True, kw_only=True)
class Ladders:
    """The sizes that graphs are captured at, ascending."""

    rows: Sequence[int]
    """Row counts of uniform phases. Rows are the unit: nobody divides a token count by 1+K."""
    tokens: Sequence[int]
    """Token counts of ragged phases."""
    sparse_rows: Sequence[int] = ()
    """Those of phases that are `sparse`; none: the same."""
    prefill_rows: int
    """Every ragged graph is padded to this many rows."""

    def key(self, phase: Phase, mode: GraphMode, rows: int, tokens: int | None = None) -> Key | None:
        """The smallest size for so many live rows (and tokens, if ragged); None where none is large enough."""
        if phase.tokens_per_row is None:
            bucket = _at_least(self.tokens, rows if tokens is None else tokens)
            padded_rows = self.largest_rows(phase)
            if bucket is None or rows > padded_rows:
                return None
            return Key(phase=phase.name, mode=mode, rows=padded_rows, tokens=bucket)
        bucket = _at_least(self._row_sizes(phase), rows)
        if bucket is None:
            return None
        return Key(phase=phase.name, mode=mode, rows=bucket, tokens=bucket * phase.tokens_per_row)

    def largest_rows(self, phase: Phase) -> int:
        """Most rows of a graph of this phase; 0 if there is none."""
        if phase.ragged:
            return min(self.prefill_rows, phase.max_rows or self.prefill_rows)
        return max(self._row_sizes(phase), default=0)

    def why_none(self, phase: Phase, rows: int, tokens: int | None) -> str:
        """Why no size serves so many rows and tokens."""
        if tokens is not None and tokens > max(self.tokens, default=0):
            return f"{tokens} tokens exceed the largest captured size {max(self.tokens, default=0)}"
        return f"{rows} rows exceed the largest captured size {self.largest_rows(phase)}"

    def _row_sizes(self, phase: Phase) -> list[int]:
        sizes = self.sparse_rows if phase.sparse and self.sparse_rows else self.rows
        return [rows for rows in sizes if phase.max_rows is None or rows <= phase.max_rows]


def _at_least(ladder: Sequence[int], size: int) -> int | None:
    index = bisect_left(ladder, size)
    return ladder[index] if index < len(ladder) else None
