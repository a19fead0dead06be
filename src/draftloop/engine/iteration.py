"""A whole decoding step as one graph: verify, accept and the drafter's next round, chained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from draftloop.drafters.base import Drafter, count_name
from draftloop.engine.acceptance import accept_name, after_accept
from draftloop.engine.target import verify_name
from draftloop.graphs.phase import GraphMode, Launch, Phase, chain, rows_slot
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.sampler import SamplingKind

NO_DRAFTS = "draft.none"
"""The phase that drops a row's drafts, where the next round may make fewer."""


def no_drafts_phase(state: RowState) -> Phase:
    """Declare `draft.none`."""

    def drop(launch: Launch, rows: Tensor) -> Mapping[str, Tensor]:
        state.drafts_MK.index_fill_(0, rows.long(), NO_DRAFT)
        return {}

    slot = rows_slot(state.padding_row)
    return Phase(name=NO_DRAFTS, fn=drop, slots={"rows": slot})


def next_round(drafter: Drafter, kind: SamplingKind, num_drafts: int) -> tuple[str, ...]:
    """What the drafter runs after a step that verified so many drafts, as many as were to be."""
    sampled = kind is not SamplingKind.GREEDY
    if num_drafts == drafter.num_drafts:
        return drafter.rounds(sampled=sampled).next
    return (NO_DRAFTS, *drafter.rounds_after(num_drafts, sampled=sampled))


def first_round(drafter: Drafter, kind: SamplingKind, num_drafts: int) -> tuple[str, ...]:
    """What the drafter runs for rows whose prompts have ended, where steps verify so many drafts."""
    sampled = kind is not SamplingKind.GREEDY
    if num_drafts == drafter.num_drafts:
        return drafter.rounds(sampled=sampled).first
    return drafter.first_rounds(num_drafts, sampled=sampled)


def step_phases(drafter: Drafter | None, kind: SamplingKind, num_drafts: int) -> list[str]:
    """The phases of a decoding step, in order."""
    most = drafter.num_drafts if drafter else 0
    names = [verify_name(num_drafts, most), accept_name("accept", kind, num_drafts, most)]
    if drafter:
        names += [*after_accept(drafter.tree), *next_round(drafter, kind, num_drafts)]
    return names


def iteration_phases(phases: Sequence[Phase], drafter: Drafter | None) -> list[Phase]:
    """Chains of these very phases, one for each number of drafts and kind of sampling; none where a part cannot be
    captured whole."""
    if drafter and drafter.observes:
        return []  # the target's states are taken from between its phase and the next
    by_name = {phase.name: phase for phase in phases}
    most = drafter.num_drafts if drafter else 0
    chains = []
    for num_drafts in drafter.counts if drafter else (0,):
        for kind in SamplingKind:
            parts = [by_name[name] for name in step_phases(drafter, kind, num_drafts)]
            if all(GraphMode.FULL in part.modes for part in parts):
                chains.append(chain(iteration_name(kind, num_drafts, most), parts))
    return chains


def iteration_name(kind: SamplingKind, num_drafts: int = 0, most: int = 0) -> str:
    name = count_name("iteration", num_drafts, most)
    return name if kind is SamplingKind.GREEDY else f"{name}.{kind.value}"
