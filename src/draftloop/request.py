"""What goes in and what comes out: the plain data of one request. Names and meanings are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from draftloop.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Every value is checked here; nothing is clamped.

    Raises RequestError naming the parameter, its value and the allowed range.
    """

    temperature: float = 1.0
    """0 is greedy; above 0 the distribution is sampled without loss under speculation."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 (or -1) keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    seed: int | None = None
    """Same request, same seed, same tokens, whatever else is in the batch."""
    max_tokens: int | None = 16
    """Tokens to produce at most; None: up to the model's length."""
    stop: tuple[str, ...] = ()
    """Texts that end the request; not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request; not part of the output text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token (benchmarks)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Make text of the tokens; without it the text stays empty, and much work is saved."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

        def need(ok: bool, name: str, limit: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {limit}")

        need(_is_number(self.temperature) and self.temperature >= 0, "temperature", "a finite number >= 0")
        need(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer >= 1, or 0 or -1 for all")
        need(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63), "seed", "in [0, 2**63)")
        need(self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1), "max_tokens", ">= 1")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty texts")
        need(self.detokenize or not self.stop, "stop", "left out where detokenize is off: there is no text to stop at")
        need(all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids >= 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """What speculation did for one request. Field names are vLLM's `metrics.speculative_decoding`.

    A step counts as a draft only if at least one token was drafted for the row in it.
    """

    num_spec_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]
    """How many steps accepted 0, 1, .. K drafts; length K+1."""
    num_steps_without_drafts: int = 0
    """Steps that gave one token because nothing was drafted; they are in none of the other numbers."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafted step, the bonus token included."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafted steps in which draft i was accepted, for i = 1 .. K."""
        steps = max(self.num_spec_steps, 1)
        return tuple(sum(self.acceptance_histogram[i:]) / steps for i in range(1, self.num_spec_tokens + 1))


@dataclass(kw_only=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop", "length", "abort" or "error"; None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class RequestOutput:
    """A request and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: dict[str, Any] = field(default_factory=dict)
    """`time_to_first_token_ms`, `generation_time_ms`, `queue_time_ms`, `tokens_per_second`."""
    spec: SpeculationStats | None = None
    """None where the request ran without speculation."""
    error: str | None = None
    """Why the request ended, where `finish_reason` is "error"."""
