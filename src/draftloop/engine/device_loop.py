"""Decoding steps that the device repeats by itself: which ones, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.distributed.group import ALONE, Group
from draftloop.graphs.loop import Loop, Watched
from draftloop.graphs.phase import Phase
from draftloop.graphs.ring import Ring
from draftloop.graphs.table import GraphTable
from draftloop.kvcache.rows import RowState
from draftloop.observability.log import get_logger
from draftloop.sampling.commit import OUTCOME_COUNTS
from draftloop.scheduler.batch import StepPlan

logger = get_logger(__name__)


class DeviceLoop:
    """Loops over the iteration graphs of a table, all with one ring."""

    def __init__(self, table: GraphTable, ring: Ring, max_iterations: int) -> None:
        self.table, self.ring, self.max_iterations = table, ring, max_iterations

    def covers(self, iteration: str, plan: StepPlan) -> bool:
        """True for a plan that needs no host before one of its rows ends: all of it decodes."""
        return not plan.chunks and self.table.repeats(iteration, len(plan.decodes))

    def launch(self, iteration: str, rows: int, num_steps: int) -> Loop:
        """Repeat the step of `rows` rows up to `num_steps` times; they have the pages for that."""
        self.ring.begin(num_steps)
        return self.table.launch_loop(iteration, rows)


def make_device_loop(
    table: GraphTable,
    iterations: Sequence[Phase],
    state: RowState,
    max_iterations: int,
    *,
    group: Group = ALONE,
) -> DeviceLoop | None:
    """Before the table is captured, make it repeat these phases. None, and one line in the log, where it cannot."""
    if not max_iterations:
        return None
    why = "they cannot be captured whole"
    if iterations:
        outcome_RW = table.buffers["outcome"]
        ring = Ring(*outcome_RW.shape, device=outcome_RW.device)
        watched = Watched(
            rows_R=table.buffers["rows"],
            outcome_RW=outcome_RW,
            first_token=len(OUTCOME_COUNTS),
            num_tokens_M=state.num_tokens_M,
            max_tokens_M=state.max_tokens_M,
            stop_ids_MS=state.stop_ids_MS,
            padding_row=state.padding_row,
            group=group,
        )
        why = table.repeat([phase.name for phase in iterations], watched, ring)
        if not why:
            if group.symmetric is not None:
                group.symmetric.clear_words()  # an earlier engine of these ranks has left its last decision there
            return DeviceLoop(table, ring, max_iterations)
    logger.warning("no device loop, the host launches all decoding steps: %s", why)
    return None
