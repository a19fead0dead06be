"""Which states of a step belong to tokens that stay: what a drafter that observes is given."""

from __future__ import annotations

from torch import Tensor

from draftloop.drafters.base import Observed
from draftloop.engine.flight import Emitted, InFlight
from draftloop.scheduler.batch import Sequence


def observed_chunks(flight: InFlight, emitted: Emitted) -> list[Observed]:
    """Prompt tokens of the step, but for requests that ended while it ran, and what was seen before a preemption."""
    found: list[Observed] = []
    if emitted.prompt_hidden is None:
        return found
    start = 0
    for chunk in flight.plan.chunks:
        sequence, end = chunk.sequence, start + chunk.count
        seen = max(sequence.num_observed - chunk.start, 0)
        if seen < chunk.count and flight.still_runs(sequence):
            ids = sequence.token_ids[chunk.start + seen : chunk.end]
            found.append(_observed(sequence, chunk.start + seen, ids, emitted.prompt_hidden[start + seen : end]))
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
    sequence.num_observed = first + len(ids)
    return Observed(
        number=sequence.number,
        request_id=sequence.request_id,
        first_position=first,
        token_ids=ids,
        hidden=hidden_TC,
    )
