"""A whole decoding step as one graph: verify, accept and the drafter's next round, chained."""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.drafters.base import Drafter
from draftloop.engine.target import accept_name, after_accept, verify_name
from draftloop.graphs.phase import GraphMode, Phase, chain
from draftloop.sampling.sampler import SamplingKind


def iteration_phases(phases: Sequence[Phase], drafter: Drafter | None) -> list[Phase]:
    """Chains of these very phases, one for each kind of sampling; none where a part cannot be captured whole."""
    if drafter and drafter.observes:
        return []  # the target's states are taken from between its phase and the next
    by_name = {phase.name: phase for phase in phases}
    chains = []
    for kind in SamplingKind:
        num_drafts = drafter.num_drafts if drafter else 0
        next_round = drafter.rounds(sampled=kind is not SamplingKind.GREEDY).next if drafter else ()
        order = after_accept(drafter.tree) if drafter else ()
        names = [verify_name(num_drafts), accept_name("accept", kind, num_drafts), *order, *next_round]
        parts = [by_name[name] for name in names]
        if all(GraphMode.FULL in part.modes for part in parts):
            chains.append(chain(iteration_name(kind), parts))
    return chains


def iteration_name(kind: SamplingKind) -> str:
    return "iteration" if kind is SamplingKind.GREEDY else f"iteration.{kind.value}"
