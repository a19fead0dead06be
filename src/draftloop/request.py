"""What goes in and what comes out: the plain data of one request. Names and meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from draftloop.errors import RequestError, nearest

GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Ways to say what the output must look like."""

LARGEST = 2**31 - 1
"""Of what a request counts; the device counts in 32 bits."""


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request is answered with. Raises RequestError for one without a name."""

    lora_name: str
    lora_int_id: int = 0
    """vLLM tells adapters apart by it; here their names do."""
    lora_path: str = ""
    """Folder in PEFT's format; empty for one of the engine's `lora_modules`."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be a text")
        if not self.lora_name:
            raise RequestError("lora_name is ''; it must be a text that is not empty")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must look like: exactly one of the first six. Raises RequestError otherwise."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a dict."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in EBNF whose first rule is `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Parts between tags have grammars, the rest is free; xgrammar's format."""
    disable_any_whitespace: bool = False
    """JSON in its compact form only."""
    after_token_id: int | None = None
    """The output is free up to this token (the end of a reasoning section) and obeys from the next one on."""

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [name for name in GRAMMAR_KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            has = "none" if not given else " and ".join(given)
            raise RequestError(f"structured_outputs has {has}; give exactly one of {', '.join(GRAMMAR_KINDS)}")

        def need(ok: bool, name: str, limit: str) -> None:
            if not ok:
                raise RequestError(f"structured_outputs.{name} is {getattr(self, name)!r}; it must be {limit}")

        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            need(value is None or (isinstance(value, (str, Mapping)) and bool(value)), name, "a JSON text or a dict")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            need(value is None or (isinstance(value, str) and bool(value)), name, "a text that is not empty")
        need(self.json_object in (None, True, False), "json_object", "true or false")
        choice = self.choice
        texts = choice is None or (isinstance(choice, tuple) and all(isinstance(t, str) and t for t in choice))
        need(texts, "choice", "a list of texts that are not empty")
        need(self.after_token_id is None or _is_id(self.after_token_id), "after_token_id", "a token id >= 0")

    @property
    def kind(self) -> str:
        """Which of the six was given."""
        return next(name for name in GRAMMAR_KINDS if getattr(self, name) not in (None, False))


@dataclass(frozen=True, kw_only=True)
class SpeculativeParams:
    """How a request is drafted for, within what its engine does. Raises RequestError for what cannot be meant."""

    num_tokens: int | None = None
    """Drafts per step, at most; 0: none. Left out, the engine's K."""
    drafters: tuple[str, ...] | None = None
    """Of several drafters, which may draft for this request, and whom to ask first. Left out, all in their order."""

    def __post_init__(self) -> None:
        num, names = self.num_tokens, self.drafters
        if isinstance(names, list):
            object.__setattr__(self, "drafters", tuple(names))
        if num is not None and not (_is_int(num) and 0 <= num <= LARGEST):
            raise RequestError(f"speculative.num_tokens is {num!r}; it must be an integer >= 0")
        if names is None:
            return
        named = isinstance(names, (list, tuple)) and bool(names) and all(isinstance(one, str) for one in names)
        if not (named and len(set(names)) == len(names)):
            raise RequestError(
                f"speculative.drafters is {names!r}; it must be a list of names, each once, at least one"
            )


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
    presence_penalty: float = 0.0
    """Taken once from the logit of every token of the output so far."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the output so far."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by this if positive, else multiplied; 1 changes nothing."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is ever produced."""
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens are never produced in this order."""
    min_tokens: int = 0
    """The request does not end by a token or a stop text before it has this many."""
    seed: int | None = None
    """Same request, same seed, same tokens, whatever else is in the batch."""
    n: int = 1
    """Answers to give; answer i has the seed `seed + i`."""
    max_tokens: int | None = 16
    """Tokens to produce at most; None: up to the model's length."""
    logprobs: int | None = None
    """Report the logarithm of each produced token's probability, and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, but for the first."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens of the prompt, the last ones; -1: as many as leave room for the answer."""
    structured_outputs: StructuredOutputsParams | None = None
    """A grammar that the output obeys; a dict is taken too."""
    speculative: SpeculativeParams | None = None
    """How this request is drafted for; a dict is taken too. At temperature 0 it changes no token."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments of custom logits processors, by name."""
    stop: tuple[str, ...] = ()
    """Texts that end the request; not part of the output, unless asked for."""
    include_stop_str_in_output: bool = False
    """Leave the stop text that ended the request in the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request; not part of the output text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token (benchmarks)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Make text of the tokens; without it the text stays empty, and much work is saved."""

    def __post_init__(self) -> None:
        self._accept_kin()

        def need(ok: bool, name: str, limit: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {limit}")

        def need_count(name: str, least: int = 0) -> None:
            value = getattr(self, name)
            need(value is None or (_is_int(value) and value >= least), name, f"an integer >= {least}")
            need(value is None or value <= LARGEST, name, f"at most {LARGEST}")

        need(_is_number(self.temperature) and self.temperature >= 0, "temperature", "a finite number >= 0")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            need(isinstance(getattr(self, name), bool), name, "true or false")
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            need(not _is_number(value) or value <= LARGEST, name, f"at most {LARGEST}")
        need(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer >= 1, or 0 or -1 for all")
        need(self.top_k <= LARGEST, "top_k", f"at most {LARGEST}")
        need(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            need(_is_number(value) and -2 <= value <= 2, name, "in [-2, 2]")
        need(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "a number above 0",
        )
        bias = self.logit_bias or {}
        need(all(map(_is_id, bias)), "logit_bias", "a mapping from token ids >= 0")
        need(all(_is_number(x) and -100 <= x <= 100 for x in bias.values()), "logit_bias", "numbers in [-100, 100]")
        allowed = self.allowed_token_ids
        need(allowed is None or (bool(allowed) and all(map(_is_id, allowed))), "allowed_token_ids", "token ids >= 0")
        need(all(isinstance(s, str) and s.strip() for s in self.bad_words), "bad_words", "non-empty texts")
        need(self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63), "seed", "in [0, 2**63)")
        need(_is_int(self.n), "n", "an integer >= 1")
        need_count("n", 1)
        need(self.n == 1 or self.temperature > 0, "n", "1 at temperature 0, where all answers are the same")
        need_count("max_tokens", 1)
        need(_is_int(self.min_tokens), "min_tokens", "an integer >= 0")
        need_count("min_tokens")
        limit = self.max_tokens
        need(limit is None or self.min_tokens <= limit, "min_tokens", f"at most max_tokens, {limit}")
        need_count("logprobs")
        need_count("prompt_logprobs")
        keep = self.truncate_prompt_tokens
        need(keep is None or (_is_int(keep) and (keep >= 1 or keep == -1)), "truncate_prompt_tokens", ">= 1, or -1")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty texts")
        need(self.detokenize or not self.stop, "stop", "left out where detokenize is off: there is no text to stop at")
        need(all(map(_is_id, self.stop_token_ids)), "stop_token_ids", "token ids >= 0")
        grammar = isinstance(self.structured_outputs, StructuredOutputsParams | None)
        need(grammar, "structured_outputs", "StructuredOutputsParams or a dict")
        ends = self.structured_outputs is None or not self.ignore_eos
        need(ends, "ignore_eos", "false with structured_outputs: what is complete has to end")
        need(isinstance(self.speculative, SpeculativeParams | None), "speculative", "SpeculativeParams or a dict")
        need(self.extra_args is None or isinstance(self.extra_args, Mapping), "extra_args", "a mapping")

    def _accept_kin(self) -> None:
        """Take what Python and JSON callers naturally pass: one text, lists, None, dicts, ids that are texts."""
        put = object.__setattr__
        for name in ("stop", "bad_words"):
            if isinstance(value := getattr(self, name), str):
                put(self, name, (value,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple | set | frozenset | None):
                limit = "a text or a list of texts" if name in ("stop", "bad_words") else "a list of token ids"
                raise RequestError(f"{name} is {value!r}; it must be {limit}")
            if value is not None or name != "allowed_token_ids":
                put(self, name, tuple(value or ()))
        if isinstance(self.logit_bias, Mapping):
            digits = {k: int(k) if isinstance(k, str) and k.isdecimal() else k for k in self.logit_bias}
            put(self, "logit_bias", {digits[k]: value for k, value in self.logit_bias.items()} or None)
        elif self.logit_bias is not None:
            raise RequestError(f"logit_bias is {self.logit_bias!r}; it must be a mapping from token ids to numbers")
        for name, cls in (("structured_outputs", StructuredOutputsParams), ("speculative", SpeculativeParams)):
            if isinstance(value := getattr(self, name), Mapping):
                known = [f.name for f in fields(cls)]
                for key in value:
                    if key not in known:
                        raise RequestError(f"{name} has no key {key!r}{nearest(str(key), known)}")
                put(self, name, cls(**value))

    def answer(self, index: int) -> SamplingParams:
        """The parameters of one answer of `n`: it has a seed of its own, and only the first reports the prompt."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**63
        return replace(self, n=1, seed=seed, prompt_logprobs=None if index else self.prompt_logprobs)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def constrained(self) -> bool:
        """Logits are changed before a token is chosen from them."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        lists = (self.logit_bias, self.allowed_token_ids, self.bad_words, self.extra_args)
        return any(penalties) or any(lists) or self.min_tokens > 0 or self.structured_outputs is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return _is_int(value) and 0 <= value <= LARGEST  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """A token that was produced, or could have been, at some place."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 for the likeliest token."""
    decoded_token: str | None = None
    """Its text; None without a tokenizer."""


Logprobs = dict[int, Logprob]
"""By token id: the token that is there, then the likeliest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSource:
    """Where a produced token came from."""

    position: int = 0
    """Its place among the drafts of its step, from 1; 0: the target chose it."""
    num_drafted: int = 0
    """Drafts that its step verified."""
    rejected: tuple[int, ...] = ()
    """The draft that it replaces, and those behind, which were lost with that one."""


@dataclass(kw_only=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop", "length", "abort" or "error"; None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over `token_ids`, where `logprobs` are asked for."""
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`."""
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
    prompt_logprobs: list[Logprobs | None] | None = None
    """One for each of `prompt_token_ids`, where asked for; None for the first, which nothing precedes."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """`time_to_first_token_ms`, `generation_time_ms`, `queue_time_ms`, `tokens_per_second`."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose state was found in the prefix cache; None before the request has started."""
    spec: SpeculationStats | None = None
    """None where the request ran without speculation."""
    error: str | None = None
    """Why the request ended, where `finish_reason` is "error"."""
