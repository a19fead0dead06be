"""All phases of an engine: the target's passes, acceptance, logprobs, and the drafter's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.config.engine import EngineConfig
from draftloop.drafters.base import Drafter, is_of_fewer
from draftloop.engine.acceptance import Acceptance, accept_phases, compact_phases, outcome_width
from draftloop.engine.iteration import no_drafts_phase
from draftloop.engine.logprobs import logprob_phases
from draftloop.engine.target import PagedTarget, prompt_phases, verify_phases
from draftloop.graphs.phase import Phase
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.sampling.logits_processors import LogitsProcessor


def engine_phases(
    config: EngineConfig,
    target: PagedTarget,
    drafter: Drafter | None,
    acceptance: Acceptance,
    *,
    target_caches: Sequence[tuple[Tensor, Tensor]],
    draft_caches: Sequence[Tensor],
    processors: Sequence[LogitsProcessor],
) -> list[Phase]:
    """Declare everything that steps run, but for the chains of it. `target_caches` come with their page tables."""
    phases = _target_phases(config, target, drafter, acceptance, target_caches, processors)
    if drafter:
        drafter.read_target(target.caches)
        phases += drafter.phases(target.state, draft_caches)
        if len(drafter.counts) > 1:
            phases.append(no_drafts_phase(target.state))
            phases = [replace(phase, sparse=is_of_fewer(phase.name)) for phase in phases]
    if config.deterministic:
        phases = [replace(phase, fn=batch_invariant(phase.fn)) for phase in phases]
    return phases


def _target_phases(
    config: EngineConfig,
    target: PagedTarget,
    drafter: Drafter | None,
    acceptance: Acceptance,
    caches: Sequence[tuple[Tensor, Tensor]],
    processors: Sequence[LogitsProcessor],
) -> list[Phase]:
    state, vocabulary, dtype = target.state, target.model.vocabulary, target.model.dtype
    tree = drafter.tree if drafter else DraftTree.chain(0)
    counts = drafter.counts if drafter else ()
    several = drafter is not None and len(drafter.drafters) > 1
    return [
        *prompt_phases(target, num_top_logprobs=config.max_logprobs),
        *verify_phases(target, tree, counts=counts),
        *accept_phases(
            state,
            tree,
            acceptance,
            counts=counts,
            vocabulary=vocabulary,
            dtype=dtype,
            several_drafters=several,
            processors=processors,
        ),
        *compact_phases(state, tree, caches),
        *logprob_phases(
            state,
            tree=tree,
            counts=counts,
            outcome_width=outcome_width(tree.num_drafts, several),
            vocabulary=vocabulary,
            dtype=dtype,
            num_top=config.max_logprobs,
            mode=config.logprobs_mode,
            processors=processors,
        ),
    ]
