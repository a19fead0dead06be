"""Which states of a step belong to tokens that stay: what a drafter that observes is given."""

from __future__ import annotations

from torch import Tensor

from draftloop.drafters.base import Observed
from draftloop.engine.flight import Emitted
from draftloop.scheduler.batch import Sequence, Stage, StepPlan


def observed_chunks(plan: StepPlan, emitted: Emitted) -> list[Observed]:
    """Prompt tokens of the step, but for requests that ended while it ran."""
    found: list[Observed] = []
    if emitted.prompt_hidden is None:
        return found
    start = 0
    for chunk in plan.chunks:
        sequence, end = chunk.sequence, start + chunk.count
        if sequence.stage is not Stage.FINISHED:
            ids = sequence.prompt_ids[chunk.start : chunk.end]
            found.append(_observed(sequence, chunk.start, ids, emitted.prompt_hidden[start:end]))
        start = end
    return found


def observed_block(sequence: Sequence, num_known: int, hidden_QC: Tensor) -> Observed:
    """Tokens that a decoding row fed to the target and kept; `num_known` outputs were there before the step.

    The first is the last token known by then. As many follow as drafts were accepted and delivered,
    so there are as many as the step has added.
    """
    count = len(sequence.output_ids) - num_known
    first = sequence.num_prompt + num_known - 1
    ids = [*sequence.prompt_ids[-1:], *sequence.output_ids][num_known : num_known + count]
    return _observed(sequence, first, ids, hidden_QC[:count])


def _observed(sequence: Sequence, first: int, ids: list[int], hidden_TC: Tensor) -> Observed:
    return Observed(
        number=sequence.number,
        request_id=sequence.request_id,
        first_position=first,
        token_ids=ids,
        hidden=hidden_TC,
    )
