"""Driving a scheduler without a device."""

from __future__ import annotations

from draftloop.scheduler.batch import Sequence, StepPlan
from draftloop.scheduler.scheduler import Scheduler


def shape(plan: StepPlan) -> tuple[list[tuple[str, int, int]], list[str]]:
    return [(c.sequence.request_id, c.start, c.count) for c in plan.chunks], [s.request_id for s in plan.decodes]


def step(scheduler: Scheduler) -> tuple[list[tuple[str, int, int]], list[str]]:
    plan = scheduler.plan()
    scheduler.launched(plan)
    return shape(plan)


def add(scheduler: Scheduler, *requests: Sequence) -> list[Sequence]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


def emit(sequence: Sequence, count: int = 1) -> None:
    """As if a step in flight had landed."""
    sequence.output_ids += [7] * count
    sequence.steps_in_flight -= 1


def decode(scheduler: Scheduler, sequence: Sequence, count: int) -> None:
    """Let it emit so many tokens, one by one."""
    for _ in range(count):
        emit(sequence)
        step(scheduler)
