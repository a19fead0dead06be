"""Ranks that take every step together, since their layers exchange tokens: each has requests of its own."""

from __future__ import annotations

import time
from collections import deque

from draftloop.distributed.group import Group
from draftloop.errors import RankError
from draftloop.scheduler.step_shape import StepShape


class Lockstep:
    """Agrees on each step with the other ranks, by one small collective between hosts.

    With two steps in flight it is made while the device runs the step before, so that nobody waits for it.

    Ranks that have nothing to do rest, but only together: a resting rank answers nobody. So whoever hands out
    requests numbers its calls and lets all ranks hear each of them, whichever it is for. Ranks rest when none has
    anything to do, and all have heard the same last call; the next call ends the rest of every one of them.
    """

    def __init__(self, group: Group) -> None:
        """`group` is between hosts, with the longest that a step may keep others waiting as its timeout."""
        self.group = group
        self.last_call = 0
        """The number of the last call heard."""
        self.at_rest = True
        """All ranks are idle, and step again only after another call."""
        self.num_steps = 0
        self.spent: deque[float] = deque(maxlen=10_000)
        """Seconds that the last agreements took, waiting for later ranks included."""

    def hear(self, call: int) -> None:
        """Take a call, which ends the rest."""
        self.last_call, self.at_rest = call, False

    def agree(self, shape: StepShape, *, is_idle: bool) -> StepShape:
        """The step that all ranks take: the smallest that covers what each of them needs.

        Raises RankError if another rank has ended, or does not come to this step in time.
        """
        begin = time.perf_counter()
        mine = [*shape.to_ints(), not is_idle, self.last_call, -self.last_call]
        try:
            *sizes, is_busy, latest, earliest = self.group.max(mine)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RankError(
                f"rank {self.group.rank} of {self.group.size} waited in vain for the others before step "
                f"{self.num_steps}: one has ended, or is stuck ({reason})"
            ) from error
        self.spent.append(time.perf_counter() - begin)
        self.at_rest = not is_busy and latest == -earliest
        self.num_steps += 1
        return StepShape.from_ints(sizes)
