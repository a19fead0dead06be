"""What one engine step is to run. Plain data, no tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from draftloop.request import Logprobs, SamplingParams, TokenSource


class Stage(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


class Grammar(Protocol):
    """What the output of a request obeys; see `sampling.grammar`."""

    @property
    def ready(self) -> bool:
        """False while it is being compiled."""
        ...

    @property
    def error(self) -> str | None: ...

    def wait(self, timeout_s: float | None = None) -> None: ...

    def fill_masks(self, drafts: list[int], masks_QW, /) -> None: ...

    def accept(self, token: int) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter (LoRA) that is loaded."""

    name: str
    slot: int
    """Where its weights are, from 1."""
    number: int
    """Counts what was loaded, from 1: what one left in the prefix cache, no later one of its slot or name finds."""


@dataclass(kw_only=True)
class HeldPages:
    """The pages of one group of layers that a row has."""

    ids: list[int] = field(default_factory=list)
    first: int = 0
    """Where in the row the first of them is. Those before it are behind the window of all tokens to come."""
    num_mapped: int = 0
    """Up to here the device's page table has them."""
    num_stale: int = 0
    """From there up to here it has pages that the row has lost."""
    copied: int | None = None
    """Held until the device has copied it to the row's own page, in which the prompt goes on: the last one found."""

    @property
    def end(self) -> int:
        """Pages that the row has had, so that its tokens may fill as many."""
        return self.first + len(self.ids)

    def map(self, null_page: int) -> tuple[int, list[int]]:
        """From where on the device's table is to be changed, and to what; from now on that counts as done."""
        start, new = self.num_mapped, self.ids[self.num_mapped - self.first :]
        new += [null_page] * (self.num_stale - self.end)
        self.num_mapped, self.num_stale = self.end, 0
        return start, new

    def release(self, count: int) -> list[int]:
        """Take the first ones out."""
        released, self.ids = self.ids[:count], self.ids[count:]
        self.first += count
        return released

    def shorten(self, count: int) -> list[int]:
        """Take the last ones out, of which the device is to be told."""
        lost = self.ids[-count:]
        del self.ids[-count:]
        self.num_stale = max(self.num_stale, self.num_mapped)
        self.num_mapped = min(self.num_mapped, self.end)
        return lost


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request while the engine holds it."""

    request_id: str
    number: int
    """Counts requests of this engine."""
    prompt_ids: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    seed: int = 0
    """Of its noise."""
    speculation: bool = True
    """False: nothing is drafted for this request."""
    max_drafts: int = 0
    """Drafts per step that it allows."""
    traced: bool = False
    """Record where each of its tokens came from."""
    grammar: Grammar | None = None
    is_compiling: bool = False
    """Its grammar was not ready when the engine last looked. It may be by now, or have failed: others do not ask it."""
    bad_words: list[list[int]] = field(default_factory=list)
    """Token ids of `params.bad_words`, in every way that they can begin."""
    priority: int = 0
    """Lower is served first; equal ones in the order in which they came."""
    cache_salt: str | None = None
    """It shares cached prefixes with requests of the same salt only."""
    adapter: Adapter | None = None
    """What changes the target for it."""

    max_total: int = 0
    """Prompt and output together never exceed this many tokens."""
    stage: Stage = Stage.WAITING
    row: int = -1
    held: list[HeldPages] = field(default_factory=list)
    """Its pages, of each group of layers; none while it has no row."""
    page_keys: list[bytes] = field(default_factory=list)
    """What its full pages are registered under, as far as that has been asked."""
    generation: int = 0
    """Of the prefix cache, when it was admitted."""
    num_registered: int = 0
    """Leading pages that need not be registered any more."""
    is_fed: bool = True
    """The drafter's caches have all that the target's have."""
    steps_in_flight: int = 0
    """Decoding steps that were launched for it and whose tokens are not known."""
    num_preemptions: int = 0
    has_drafts: bool = True
    """False if it is known that nothing was drafted for the next step."""
    num_prefilled: int = 0
    """Leading tokens whose state is on the device, or on its way there."""
    num_cached: int | None = None
    """Prompt tokens whose state was found when it was first admitted; None before."""
    num_observed: int = 0
    """Tokens whose states a drafter that observes was given."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    """One for each of `output_ids`, where asked for."""
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    """One for each of `prompt_ids`, where asked for."""
    sources: list[TokenSource] = field(default_factory=list)
    """One for each of `output_ids`, where they are traced."""
    text_ends: list[int] = field(default_factory=list)
    """How long the text was with each of `output_ids`, likewise. A stop text may have cut it since."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    acceptance_histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_steps_without_drafts: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Of prompt and output, as far as known."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def num_to_prefill(self) -> int:
        """Leading tokens that must run before it decodes. Of a preempted request the last token is the bonus token."""
        return self.num_tokens - bool(self.output_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first; the last is preempted first."""
        return self.priority, self.number

    @property
    def reports_prompt(self) -> bool:
        """Logprobs of prompt tokens are still missing, so all of them have to run."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def ending_ids(self) -> list[int]:
        """Tokens that end the request, each once."""
        return list(dict.fromkeys([*self.eos_ids, *self.params.stop_token_ids]))

    @property
    def stepwise(self) -> bool:
        """Every step of it passes something between device and host: a report of logprobs, or masks."""
        return self.grammar is not None or self.params.logprobs is not None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Part of a prompt that runs in one step; of a preempted request what it had said counts as prompt."""

    sequence: Sequence
    start: int
    count: int
    completes_prompt: bool
    """The row decodes from the next step on."""
    emits: bool
    """A token follows from it. None does where a preempted request goes on: that token is known."""

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: prompt chunks, and the rows that verify and draft.

    They are separate passes, so decoding rows never leave their uniform graphs because a prompt
    came in. A row decodes because its request does, not because its token count looks like it.
    """

    chunks: tuple[Chunk, ...]
    decodes: tuple[Sequence, ...]
    num_drafts: int = 0
    """Drafts that its decoding rows verify, and make for the step after it, where any of them may have some."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)
