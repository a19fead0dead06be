"""Shows the tokens of a step one after the other, evenly until the next step comes, for people who read along.

A step gives each of its rows several tokens at once. What is shown late is late by less than one step: when the next
one comes, all that is left of the last is shown, and the last of an answer takes no longer than steps took so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from draftloop.server.messages import Update, merge

MAX_INTERVAL_S = 0.5
"""Nothing is shown later than this, however slow the steps are."""
KEPT = 0.7
"""Share of what is known of an answer's steps that the next one does not change."""


class Smoother:
    """One request's updates; places are those of its answers. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._interval: dict[int, float] = {}
        self._pieces: dict[int, deque[tuple[float, Update]]] = {}
        """By answer: when to show what."""

    def take(self, batch: Iterable[tuple[int, Update]], now: float) -> None:
        """What a step gave."""
        for place, update in batch:
            if place in self._last:
                passed = min(now - self._last[place], MAX_INTERVAL_S)
                known = self._interval.get(place, passed)
                self._interval[place] = KEPT * known + (1 - KEPT) * passed
            self._last[place] = now
            waiting = self._pieces.setdefault(place, deque())
            late = [piece for _, piece in waiting]
            waiting.clear()
            waiting.extend((now, piece) for piece in late)
            pieces = split(update)
            gap = self._interval.get(place, 0.0) / len(pieces)
            waiting.extend((now + index * gap, piece) for index, piece in enumerate(pieces))

    def due(self, now: float) -> list[tuple[int, Update]]:
        """What is to be shown by now: of each answer at most one update."""
        found = []
        for place, waiting in self._pieces.items():
            pieces = []
            while waiting and waiting[0][0] <= now:
                pieces.append(waiting.popleft()[1])
            if pieces:
                found.append((place, merge(pieces)))
        return found

    @property
    def next_due(self) -> float | None:
        """When there will be something to show; None if nothing waits."""
        return min((waiting[0][0] for waiting in self._pieces.values() if waiting), default=None)


def split(update: Update) -> list[Update]:
    """The same in one piece for each token. Text is cut evenly: tokens do not say which text is theirs."""
    count = len(update.token_ids)
    if count < 2:
        return [update]

    def part(values: Any, index: int) -> Any:
        return values and values[len(values) * index // count : len(values) * (index + 1) // count]

    return [
        Update(
            request_id=update.request_id,
            text=part(update.text, index),
            token_ids=part(update.token_ids, index),
            logprobs=part(update.logprobs, index),
            prompt_logprobs=None if index else update.prompt_logprobs,
            ending=update.ending if index == count - 1 else None,
            traced=part(update.traced, index),
        )
        for index in range(count)
    ]
