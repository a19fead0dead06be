"""What has been launched, and what comes back of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftloop.graphs.loop import Loop
from draftloop.graphs.ring import Stop
from draftloop.sampling.commit import OUTCOME_COUNTS
from draftloop.scheduler.batch import Sequence, Stage, StepPlan

Failure = Callable[[], BaseException | None]
SLEEP_S = 20e-6
"""Between looks at a device that other ranks' devices may keep waiting."""


def no_failure() -> None:
    """Of a device that waits for nobody."""


Report = tuple[Tensor, Tensor]
"""Ranks and ids, and logprobs; see `sampling.logprobs.token_logprobs`."""


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """What one step emitted, on the host."""

    first_tokens: list[int]
    """One per chunk that emits, in order."""
    tokens: list[list[int]]
    """Per decoding row."""
    num_accepted: list[int]
    """Per decoding row: how many of its tokens are accepted drafts."""
    num_drafted: list[int]
    """Per decoding row: drafts that were verified."""
    drafted_by: list[int]
    """Per decoding row: which of several drafters made them; without meaning where there is one."""
    has_drafts: list[bool] | None
    """Per engine row, whether something was drafted for the next step; None where nobody waits for it."""
    logprobs: Report | None = None
    """Per decoding row and position, where some row asks for them."""
    first_logprobs: Report | None = None
    """Per chunk."""
    prompt_logprobs: Report | None = None
    """Per prompt token of all chunks: of the token after it."""
    drafts: list[list[int]] | None = None
    """Per decoding row, what was verified; NO_DRAFT where there was nothing. None where no row is traced."""
    prompt_hidden: Tensor | None = None
    """[tokens of all chunks, layers * hidden size], for a drafter that observes."""
    hidden: Tensor | None = None
    """[decoding rows, tokens per row, layers * hidden size], likewise."""


class InFlight(ABC):
    """Something that has been launched; its results are on their way to the host."""

    repeats: ClassVar[bool] = False
    """It makes step after step by itself until something ends it."""

    def __init__(self, plan: StepPlan, num_steps: int = 1) -> None:
        self.plan = plan
        self.ended = False
        """Nothing more will come of it."""
        self.steps_left = num_steps
        """Steps that it may still make."""
        self.feeds_drafter = True
        """The drafter's caches get what the target's get."""
        self.is_as_planned = True
        """Its decoding rows verify as many drafts as the plan says: what it takes is what such steps take."""
        self._preemptions = {s: s.num_preemptions for s in (*(c.sequence for c in plan.chunks), *plan.decodes)}

    def still_runs(self, sequence: Sequence) -> bool:
        """Its results count: since it was launched the request has neither ended nor lost its row."""
        return sequence.stage is not Stage.FINISHED and sequence.num_preemptions == self._preemptions[sequence]

    def land(self) -> tuple[list[Sequence], int]:
        """Who still waited for the step that has just come back, and how many steps it settles: at the end all."""
        num_steps = self.steps_left if self.ended else 1
        self.steps_left -= num_steps
        waited = [*(chunk.sequence for chunk in self.plan.chunks if chunk.emits), *self.plan.decodes]
        return [sequence for sequence in waited if self.still_runs(sequence)], num_steps

    @abstractmethod
    def wait(self) -> Emitted:
        """Block until the results of its next step are here. Raises what went wrong on the device."""

    def interrupt(self) -> None:
        """End it after the step that it is in, if it repeats."""

    def drop(self) -> None:
        """End it, and wait until the device has; nobody wants its results."""
        self.interrupt()
        while not self.ended:
            self.wait()


class StepInFlight(InFlight):
    """One step, prompts and decoding rows. Results are copied before the next step overwrites them."""

    def __init__(self, plan: StepPlan, device: torch.device, failure: Failure = no_failure) -> None:
        """`failure` says why the device will never be done, None while it may; it is raised."""
        super().__init__(plan)
        self._failure = failure
        self._copies: dict[str, Tensor] = {}
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def copy(self, name: str, value: Tensor) -> None:
        """Start copying a result."""
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=self._arrived is not None)
        self._copies[name] = host.copy_(value, non_blocking=True)

    def launched(self) -> None:
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> Emitted:
        self.ended = True
        if self._arrived is not None:
            self._wait_for(self._arrived)
        prompt_hidden, hidden = (self._copies.pop(name, None) for name in ("prompt_hidden", "hidden"))
        logprobs, first, prompt = (self._report(name) for name in ("", "first_", "prompt_"))
        lists = {name: value.tolist() for name, value in self._copies.items()}
        ending = [i for i, chunk in enumerate(self.plan.chunks) if chunk.emits]
        return _emitted(
            lists.get("outcome", []),
            first_tokens=[lists["first_token"][i][0] for i in ending],
            has_drafts=lists.get("has_drafts"),
            drafts=lists.get("drafts"),
            prompt_hidden=prompt_hidden,
            hidden=hidden,
            logprobs=logprobs,
            first_logprobs=first,
            prompt_logprobs=prompt,
        )

    def _wait_for(self, event: torch.cuda.Event) -> None:
        if self._failure is no_failure:
            event.synchronize()
        while not event.query():
            if error := self._failure():
                raise error
            time.sleep(SLEEP_S)

    def _report(self, prefix: str) -> Report | None:
        ids, values = (self._copies.pop(f"{prefix}{name}", None) for name in ("logprob_ids", "logprobs"))
        return None if ids is None or values is None else (ids, values)


class LoopInFlight(InFlight):
    """Decoding steps that the device repeats; each is in the ring as soon as it is done."""

    repeats = True

    def __init__(self, plan: StepPlan, loop: Loop, num_steps: int, failure: Failure = no_failure) -> None:
        super().__init__(plan, num_steps)
        self._loop, self._failure = loop, failure

    def wait(self) -> Emitted:
        try:
            stop, outcome_RW = self._loop.ring.take(lambda: self._failure() or self._loop.failure())
        except Exception:
            self.ended = True
            raise
        self._loop.iterations += 1
        self.ended = stop is not Stop.NONE
        return _emitted(outcome_RW[: len(self.plan.decodes)].tolist(), first_tokens=[], has_drafts=None)

    def interrupt(self) -> None:
        if not self.ended:
            self._loop.ring.interrupt()


def _emitted(outcomes: list[list[int]], **others: Any) -> Emitted:
    """Take the buffer `outcome` apart."""
    first = len(OUTCOME_COUNTS)
    return Emitted(
        tokens=[outcome[first : first + outcome[0]] for outcome in outcomes],
        num_accepted=[outcome[1] for outcome in outcomes],
        num_drafted=[outcome[2] for outcome in outcomes],
        drafted_by=[outcome[-1] for outcome in outcomes],
        **others,
    )
