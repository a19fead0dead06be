"""A captured decoding step that repeats on the device, with no host in between, until something stops it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.distributed.group import ALONE, Group
from draftloop.errors import GraphError
from draftloop.graphs.program import Program
from draftloop.graphs.ring import Ring, Stop


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a loop looks at after each iteration: what was emitted, and whether a row has ended.

    Shape suffixes: R rows of the batch, M engine rows, W = counts and Q tokens, S stop ids.
    """

    rows_R: Tensor
    """int32: the engine row of each row of the batch."""
    outcome_RW: Tensor
    """int32: what the iteration emitted. Column 0 counts the tokens, which begin at `first_token`."""
    first_token: int
    num_tokens_M: Tensor
    max_tokens_M: Tensor
    stop_ids_MS: Tensor
    """int32; -1 is none."""
    padding_row: int
    group: Group = ALONE
    """Ranks that repeat the same iterations. The first of them decides when all stop: it alone has a host to hear."""

    def row_ended(self, num_rows: int) -> bool:
        """Has one of the first `num_rows` rows emitted a stop id, or come to its length limit?"""
        rows_R = self.rows_R[:num_rows].long()
        outcome_RW = self.outcome_RW[:num_rows]
        tokens_RQ = outcome_RW[:, self.first_token :]
        emitted_RQ = torch.arange(tokens_RQ.shape[1]) < outcome_RW[:, :1]
        stops_RQ = (tokens_RQ[:, :, None] == self.stop_ids_MS[rows_R][:, None]).any(-1) & emitted_RQ
        ended_R = (self.num_tokens_M[rows_R] >= self.max_tokens_M[rows_R]) | stops_RQ.any(-1)
        return bool((ended_R & (rows_R != self.padding_row)).any())


class Loop(ABC):
    """Repeats one program. What it does between iterations is the same on every device."""

    def __init__(self, program: Program, num_rows: int, watched: Watched, ring: Ring) -> None:
        self.program, self.num_rows, self.watched, self.ring = program, num_rows, watched, ring
        self.launches = 0
        self.iterations = 0
        """Iterations that the host has read."""

    @abstractmethod
    def launch(self) -> None:
        """Start, and return at once. The ring says for how long (`Ring.begin`)."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """Why nothing more comes through the ring; None while it runs."""


class TapeLoop(Loop):
    """The CPU's stand-in: a thread is the device. Whoever launches anything else waits for it first."""

    def __init__(self, *args, thread: ThreadPoolExecutor) -> None:
        super().__init__(*args)
        self._thread = thread
        self._running: Future[None] | None = None

    def launch(self) -> None:
        self._running = self._thread.submit(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        group, outcome_RW = self.watched.group, self.watched.outcome_RW[: self.num_rows].numpy()
        stop = Stop.NONE
        while stop is Stop.NONE:
            self.program.replay()
            if group.is_first:
                stop = self.ring.publish(outcome_RW, row_ended=self.watched.row_ended(self.num_rows))
            stop = Stop(group.max([stop if group.is_first else Stop.NONE])[0])

    def failure(self) -> BaseException | None:
        if self._running is None or not self._running.done():
            return None
        return self._running.exception() or ended_early()


def ended_early() -> GraphError:
    return GraphError("the device loop ended without a last record in its ring")
