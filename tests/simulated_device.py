"""An engine whose device is a clock: the real core, scheduler and choice of drafts over steps that cost what they did.

Costs and speeds are those of one H200 with the shape of an 8B model and an EAGLE-3 head, prompts of 128 tokens and
answers of 128, at the rates of acceptance below (docs/numbers/2026-11-30-h200-load-*.json). What prompts and the host
take was not measured by itself: it is chosen so that tokens per second come out as measured.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from draftloop.engine import core as core_module
from draftloop.engine.core import EngineCore
from draftloop.engine.flight import Emitted, InFlight
from draftloop.kvcache.pages import PageAllocator
from draftloop.request import SamplingParams
from draftloop.scheduler.batch import StepPlan
from draftloop.scheduler.drafting import AdaptiveDrafts, Drafting, FixedDrafts, StepCosts
from draftloop.scheduler.scheduler import Scheduler
from draftloop.scheduler.step_shape import StepShape

LOADS = (1, 8, 32, 128, 256)
"""Requests at a time, and the sizes of the graphs."""
_STEP_MS = {
    0: (4.160, 4.313, 4.731, 5.989, 9.289),
    1: (4.427, 4.635, 5.086, 8.689, 15.345),
    2: (4.640, 4.980, 5.570, 11.419, 23.600),
    3: (4.862, 5.329, 6.062, 15.052, 28.790),
    5: (5.307, 5.826, 7.835, 22.219, 42.957),
}
"""In service, by drafts; of two measured with 128 rows, and else put between their neighbours as they were at start."""
_SHARE_AT_START = {
    0: (0.998, 0.985, 0.985, 0.800, 0.730),
    1: (0.983, 0.985, 0.985, 0.730, 0.743),
    2: (0.985, 0.985, 0.985, 0.737, 0.750),
    3: (0.985, 0.985, 0.985, 0.743, 0.751),
    5: (0.984, 0.985, 0.985, 0.750, 0.821),
}
"""What start-up measured, on a cool device, of that: with 1 and 256 rows. With 128 it is supposed to be that of as many
tokens, with 8 and 32 that of one row."""
MEASURED = {
    0: (239.5, 1793.6, 5811.2, 14144.4, 16634.5),
    1: (382.9, 2626.9, 7802.7, 14367.0, 16157.9),
    3: (507.4, 3169.0, 9026.3, 13075.8, 13756.8),
    5: (543.7, 3334.6, 8221.2, 11008.9, 10513.0),
}
"""Tokens per second by number of drafts, the same in every step, and load."""
RATES = (0.709, 0.709, 0.709, 0.709, 0.709)
"""The chance of each draft, given that those before it stand."""
_PROMPT_MS = {16: 4.3, 32: 4.3, 64: 4.4, 128: 5.0, 256: 8.0, 384: 10.4, 512: 13.0, 768: 18.7, 1024: 24.5}
_PROMPT_MS |= {1536: 36.0, 2048: 47.5}
"""Of the target, by the tokens that a graph takes."""
PROMPT_SIZES = tuple(_PROMPT_MS)
_DRAFT_PROMPT_SHARE, _DRAFT_PROMPT_MS, _FIRST_MS, _DECODE_MS = 0.015, 0.15, 0.15, 0.205
_HOST_STEP_MS, _HOST_PROMPT_MS, _HOST_ADMIT_MS, _HOST_ROW_MS, _HOST_ADD_MS = 0.3, 1.2, 0.06, 0.002, 0.05


def step_costs() -> StepCosts:
    """In service."""
    return StepCosts(ms={(rows, count): row[at] for count, row in _STEP_MS.items() for at, rows in enumerate(LOADS)})


def costs_at_start() -> StepCosts:
    shares = {(rows, count): row[at] for count, row in _SHARE_AT_START.items() for at, rows in enumerate(LOADS)}
    return StepCosts(ms={key: ms * shares[key] for key, ms in step_costs().ms.items()})


class Clock:
    """Milliseconds: where the host is, and when the device will have done what it was given."""

    host = device = 0.0

    def perf_counter(self) -> float:
        return self.host / 1e3


class SimulatedFlight(InFlight):
    """A step, or a loop of them until a row ends."""

    def __init__(self, plan: StepPlan, worker: SimulatedWorker, num_steps: int) -> None:
        super().__init__(plan, num_steps)
        self.repeats = num_steps > 1  # pyrefly: ignore
        self._worker, self._begun, self._interrupted = worker, False, float("inf")
        worker.clock.host += _HOST_STEP_MS
        self._launched = worker.clock.host
        self._count = plan.num_drafts
        self._ms = worker.costs.of(len(plan.decodes), self._count) if plan.decodes else 0.0
        if plan.chunks:
            self._ms += worker.prompt_ms(plan)
            worker.clock.host += _HOST_PROMPT_MS + _HOST_ADMIT_MS * len(plan.chunks)
            self._launched = worker.clock.host - _HOST_PROMPT_MS / 2  # the rest is enqueued while it runs

    def wait(self) -> Emitted:
        clock, worker, decodes = self._worker.clock, self._worker, self.plan.decodes
        if not self._begun:
            clock.device, self._begun = max(clock.device, self._launched), True
        clock.device += self._ms
        clock.host = max(clock.host, clock.device) + _HOST_ROW_MS * len(decodes)
        drafted = [min(self._count, worker.num_left[sequence.row]) for sequence in decodes]
        accepted = [worker.accept(count) for count in drafted]
        for sequence in decodes:
            worker.num_left[sequence.row] = self._count
        rows = zip(decodes, accepted, strict=True)
        ends = any(self.still_runs(row) and row.num_tokens + 1 + count >= row.max_total for row, count in rows)
        self.ended = not self.repeats or ends or self.steps_left == 1 or clock.device >= self._interrupted
        return Emitted(
            first_tokens=[7 for chunk in self.plan.chunks if chunk.emits],
            tokens=[[7] * (1 + count) for count in accepted],
            num_accepted=accepted,
            num_drafted=drafted,
            drafted_by=[0] * len(decodes),
            has_drafts=None,
        )

    def interrupt(self) -> None:
        self._interrupted = min(self._interrupted, self._worker.clock.host)


class SimulatedWorker:
    """What `EngineCore` asks of a worker."""

    drafter, processors, observes = None, (), False

    def __init__(self, clock: Clock, num_drafts: int, seed: int) -> None:
        self.clock, self.num_drafts, self.costs = clock, num_drafts, step_costs()
        self.num_left = Counter[int]()
        """Drafts that each row has for its next step."""
        self._coin = random.Random(seed)

    def shape(self, plan: StepPlan) -> StepShape:
        prompt_tokens = sum(chunk.count for chunk in plan.chunks)
        return StepShape(prompt_tokens=prompt_tokens, decode_rows=len(plan.decodes), num_drafts=plan.num_drafts)

    def steps_at_once(self, plan: StepPlan, shape: StepShape) -> int:
        return 1 if plan.chunks else 64

    def launch(self, plan: StepPlan, shape: StepShape, num_steps: int) -> InFlight:
        return SimulatedFlight(plan, self, num_steps)

    def prompt_ms(self, plan: StepPlan) -> float:
        tokens = sum(chunk.count for chunk in plan.chunks)
        ms = _PROMPT_MS[PROMPT_SIZES[bisect_left(PROMPT_SIZES, tokens)]]
        if self.num_drafts:
            ms += ms * _DRAFT_PROMPT_SHARE + _DRAFT_PROMPT_MS
        ending = [chunk.sequence for chunk in plan.chunks if chunk.completes_prompt]
        for sequence in ending:
            self.num_left[sequence.row] = plan.num_drafts
        return ms + (_FIRST_MS + (plan.num_drafts - 1) * _DECODE_MS if ending and plan.num_drafts else 0.0)

    def accept(self, num_drafted: int) -> int:
        count = 0
        while count < num_drafted and self._coin.random() < RATES[count]:
            count += 1
        return count

    def explain(self) -> None:
        pass


class SimulatedEngine:
    """Serves requests, and says how long that took by its clock."""

    def __init__(self, drafting: Drafting, clock: Clock, *, seed: int = 0) -> None:
        self.clock, self.worker = clock, SimulatedWorker(clock, drafting.most, seed)
        scheduler = Scheduler(
            [PageAllocator(40_000, 16)],
            max_num_seqs=LOADS[-1],
            max_num_batched_tokens=PROMPT_SIZES[-1],
            max_prefill_rows=16,
            max_model_len=2048,
            num_drafts=drafting.most,
            drafting=drafting,
            prompt_sizes=PROMPT_SIZES,
        )
        worker: Any = self.worker
        self.core = EngineCore(scheduler, worker, vocab_size=1000, eos_ids=frozenset(), pipeline_depth=2, seed=0)

    def serve(self, load: int, num_requests: int, *, num_prompt: int = 128, num_output: int = 128) -> float:
        """Tokens per second with `load` requests at a time, as `draftloop bench throughput` counts."""
        core, clock, begin = self.core, self.clock, self.clock.host
        waiting, num_open = num_requests, 0
        params = SamplingParams(temperature=0, max_tokens=num_output)
        while waiting or num_open:
            while waiting and num_open < load:
                core.add(f"{clock.host}", [1] * num_prompt, params)
                waiting, num_open, clock.host = waiting - 1, num_open + 1, clock.host + _HOST_ADD_MS
            num_open -= sum(sequence.finish_reason is not None for sequence, _ in core.step())
        seconds = (clock.host - begin) / 1e3
        while not core.idle:
            core.step()
        return num_requests * num_output / seconds


@contextmanager
def simulated_time() -> Iterator[Clock]:
    """The engine's core reads this clock meanwhile."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        yield clock


def speeds(drafting: Drafting, **options: Any) -> list[float]:
    """Tokens per second at each of `LOADS`, one after the other; a choice settles in a wave that does not count."""
    found = []
    with simulated_time() as clock:
        engine = SimulatedEngine(drafting, clock, **options)
        for load in LOADS:
            if len(drafting.counts) > 1:
                engine.serve(load, load)
            found.append(engine.serve(load, max(4 * load, 128)))  # so many that chance does not count
    return found


def fixed(count: int) -> Drafting:
    return FixedDrafts(count)


def adaptive() -> Drafting:
    return AdaptiveDrafts(tuple(_STEP_MS), costs_at_start())
