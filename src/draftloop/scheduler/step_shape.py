"""The shape of a step: which passes run, and how large. Plain data, no tensors.

Ranks whose layers exchange tokens must run the same passes at the same sizes, whatever each of them has to do: one
that ran another graph, or one pass fewer, would leave the others waiting for ever. So each says what it needs, and
all of them run the smallest step that covers every need. That is a maximum, place by place: one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step runs. Sizes are of live rows and tokens; a graph's padding follows from them.

    A prompt pass (the target's and the drafter's), the first drafts of rows whose prompt has ended, then a decoding
    pass (verify, accept, the drafter's next round), each where its size is not 0. What happens on one rank alone is
    no part of it: which kind of sampling rows want, what they report, their grammars.
    """

    prompt_tokens: int = 0
    prompt_reports: bool = False
    """The prompt pass is the one that reports the prompts' logprobs."""
    first_rows: int = 0
    """Rows that get their first drafts."""
    decode_rows: int = 0
    num_drafts: int = 0
    """Drafts that are verified for each row: K or 0."""
    redrafts: bool = False
    """The drafter's next round runs."""
    is_stepwise: bool = False
    """Something passes between device and host inside of the decoding pass: no iteration graph."""

    def __bool__(self) -> bool:
        return bool(self.prompt_tokens or self.decode_rows)

    def to_ints(self) -> list[int]:
        """For a collective that takes the largest of each."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> StepShape:
        values_by_name: dict[str, Any] = {
            field.name: type(field.default)(value) for field, value in zip(fields(cls), values, strict=True)
        }
        return cls(**values_by_name)


NO_STEP = StepShape()
