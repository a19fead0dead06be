"""What the engine counts. Global numbers are the sums of the requests' own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from draftloop.request import SpeculationStats
from draftloop.scheduler.batch import Sequence


@dataclass(kw_only=True)
class PartStats:
    """The part of one of several drafters, or of one adapter."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafted step, the bonus token included."""
        return 1 + self.num_accepted_tokens / max(self.num_spec_steps, 1)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted


@dataclass(kw_only=True)
class EngineStats:
    """Counters since the start. A step counts as a draft only if something was drafted for the row."""

    num_drafts: int
    """K."""
    drafters: tuple[str, ...] = ()
    """By name, in their order."""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    """Those of `prompt_tokens` whose state was found in the prefix cache."""
    num_spec_steps: int = 0
    num_steps_without_drafts: int = 0
    """Steps of speculating rows for which nothing was drafted."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    """Drafted steps that accepted 0, 1, .. K drafts."""
    by_drafter: list[PartStats] = field(default_factory=list)
    """In the order of `drafters`, where there are several."""
    by_adapter: dict[str, PartStats] = field(default_factory=dict)
    """By name, of adapters whose requests were drafted for."""

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.num_drafts + 1)
        self.by_drafter = [PartStats() for _ in self.drafters] if len(self.drafters) > 1 else []

    def count_prompt(self, sequence: Sequence) -> None:
        """Count a request that starts."""
        self.prompt_tokens += sequence.num_prompt
        self.num_cached_prompt_tokens += sequence.num_cached or 0

    def count_step(self, sequence: Sequence, *, num_drafted: int, num_accepted: int, drafted_by: int = 0) -> None:
        """Count one verified row. `num_accepted` drafts were delivered."""
        if num_drafted == 0:
            sequence.num_steps_without_drafts += 1
            self.num_steps_without_drafts += 1
            return
        sequence.acceptance_histogram[num_accepted] += 1
        sequence.num_draft_tokens += num_drafted
        self.histogram[num_accepted] += 1
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        if self.by_drafter:
            self.by_drafter[drafted_by].count(num_drafted, num_accepted)
        if sequence.adapter is not None:
            self.by_adapter.setdefault(sequence.adapter.name, PartStats()).count(num_drafted, num_accepted)


def speculation_stats(sequences: Iterable[Sequence]) -> SpeculationStats | None:
    """Numbers of the sequences that answer one request, together; None where they ran without speculation."""
    drafted = [sequence for sequence in sequences if sequence.speculation]
    if not drafted:
        return None
    histogram = [sum(counts) for counts in zip(*(s.acceptance_histogram for s in drafted), strict=True)]
    return SpeculationStats(
        num_spec_tokens=len(histogram) - 1,
        num_spec_steps=sum(histogram),
        num_draft_tokens=sum(s.num_draft_tokens for s in drafted),
        num_accepted_draft_tokens=sum(count * steps for count, steps in enumerate(histogram)),
        acceptance_histogram=tuple(histogram),
        num_steps_without_drafts=sum(s.num_steps_without_drafts for s in drafted),
    )
