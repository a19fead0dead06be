"""What the engine gives to one request, and what a client is told where there is no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from draftloop.errors import DraftloopError, RequestError
from draftloop.server.messages import Update, merge


class EngineUnavailableError(DraftloopError):
    """The engine is not there: still starting, or dead. The message says which, and why."""


class BusyError(DraftloopError):
    """As many requests as may wait are waiting."""


class Answers:
    """What the engine gives to one request: several prompts, several answers each, in the order of `submit`."""

    def __init__(self, abort: Callable[[Sequence[str]], None], *, arrived: float) -> None:
        """`abort` tells the engine that nobody waits for these request ids."""
        self._abort = abort
        self.arrived = arrived
        self.request_ids: list[str] = []
        self.ranks: list[int] = []
        """By answer: which of the engines gives it."""
        self.num_prompt_tokens: dict[int, int] = {}
        """By answer: tokens of its prompt, once accepted."""
        self._pending: dict[int, list[Update]] = {}
        self._news = asyncio.Event()
        self._refusal: str | None = None
        self._failure: str | None = None

    def accept(self, index: int, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens[index] = num_prompt_tokens
        self._news.set()

    def refuse(self, reason: str) -> None:
        self._refusal = reason
        self._news.set()

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._news.set()

    def deliver(self, index: int, update: Update) -> None:
        self._pending.setdefault(index, []).append(update)
        self._news.set()

    async def wait_until_accepted(self) -> None:
        """Raises RequestError if any answer is refused, EngineUnavailableError if the engine dies."""
        while len(self.num_prompt_tokens) < len(self.request_ids):
            self._check()
            self._news.clear()
            await self._news.wait()
        self._check()
        if self._pending:
            self._news.set()

    async def next(self) -> list[tuple[int, Update]]:
        """What has come since the last call: of each answer at most one update, which holds all that is new.

        Raises EngineUnavailableError if the engine dies before the end.
        """
        while not self._pending:
            self._check()
            self._news.clear()
            await self._news.wait()
        pending, self._pending = self._pending, {}
        return [(index, merge(updates)) for index, updates in pending.items()]

    def _check(self) -> None:
        if self._refusal is not None:
            raise RequestError(self._refusal)
        if self._failure is not None:
            raise EngineUnavailableError(self._failure)

    def close(self) -> None:
        """Abort what has not ended."""
        self._abort(self.request_ids)
