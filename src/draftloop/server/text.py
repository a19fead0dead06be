"""Which part of a growing text may be shown already."""

from __future__ import annotations

from collections.abc import Sequence


class TextCursor:
    """Hands out a text that grows, piece by piece, and never what may turn out to belong to an ending.

    The pieces joined are the final text, however it was cut.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = stop
        self.num_shown = 0
        """Characters handed out so far."""

    def advance(self, text: str, *, is_last: bool = False) -> str:
        """`text` is all there is so far. Returns what is new and will stay."""
        end = len(text) if is_last else len(text) - possible_start(text, self._stop)
        piece = text[self.num_shown : end]
        self.num_shown += len(piece)
        return piece


def possible_start(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of the marks."""
    longest = max(map(len, marks), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[-count:]
        if any(len(mark) > count and mark.startswith(tail) for mark in marks):
            return count
    return 0
