"""What chooses the number of drafts of each step, as the configuration says it, and what it needs to know of costs."""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter
from draftloop.engine.iteration import iteration_name, step_phases
from draftloop.graphs.table import GraphTable
from draftloop.sampling.sampler import SamplingKind
from draftloop.scheduler.drafting import AdaptiveDrafts, Drafting, DraftsByRows, FixedDrafts, StepCosts


def make_drafting(
    spec: SpeculativeConfig | None, drafter: Drafter | None, table: GraphTable, sizes: Sequence[int]
) -> Drafting:
    """`sizes`: numbers of rows whose steps are measured, where that is needed. The table is captured."""
    if spec is None or drafter is None:
        return FixedDrafts(0)
    if spec.num_speculative_tokens_per_batch_size is not None:
        return DraftsByRows(drafter.counts, spec.num_speculative_tokens_per_batch_size)
    if spec.adaptive:
        return AdaptiveDrafts(drafter.counts, measure_costs(table, drafter, sizes))
    return FixedDrafts(drafter.num_drafts)


def measure_costs(table: GraphTable, drafter: Drafter, sizes: Sequence[int]) -> StepCosts:
    """Of greedy steps: over padding rows, so without what their contexts take, which all numbers of drafts share."""
    return StepCosts(ms={(rows, k): _step_ms(table, drafter, rows, k) for rows in sizes for k in drafter.counts})


def _step_ms(table: GraphTable, drafter: Drafter, rows: int, num_drafts: int) -> float:
    whole = iteration_name(SamplingKind.GREEDY, num_drafts, drafter.num_drafts)
    if table.covers(whole, rows):
        return table.time_ms(whole, rows)
    return sum(table.time_ms(name, rows) for name in step_phases(drafter, SamplingKind.GREEDY, num_drafts))
