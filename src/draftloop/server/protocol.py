"""Requests as clients send them. Names are OpenAI's and vLLM's; a null counts as not given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftloop.errors import nearest
from draftloop.request import SamplingParams
from draftloop.server.errors import ApiError, unsupported

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""OpenAI's bookkeeping, which changes no answer."""

# fmt: off
NOT_SUPPORTED = frozenset({
    "audio", "best_of", "documents", "function_call", "functions", "kv_transfer_params",
    "length_penalty", "logprob_token_ids", "modalities", "prediction", "spaces_between_special_tokens",
    "suffix", "use_beam_search", "verbosity", "web_search_options",
})
# fmt: on
"""Known elsewhere; refused by name unless their value asks for nothing."""

ELSEWHERE = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
"""What each route has that the other has not."""

ASK_FOR_NOTHING: Mapping[str, Any] = {
    "best_of": 1,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "suffix": "",
}


MAX_TEXTS, MAX_CHARACTERS = 32, 256
"""Of `stop` and `bad_words`, and of each text of theirs: the engine looks for them in every step."""
MAX_IDS = 1024
"""Of `stop_token_ids`, likewise."""


class Body(BaseModel):
    """Knows its fields: another one is refused, naming it and its nearest neighbour."""

    model_config = ConfigDict(extra="ignore", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None and name not in IGNORED}
        for name in [name for name in kept if name not in cls.model_fields]:
            if name in NOT_SUPPORTED:
                if kept[name] != ASK_FOR_NOTHING.get(name, kept):
                    raise unsupported(name)
            else:
                route = ELSEWHERE.get(name)
                hint = f"; it belongs to {route}" if route else nearest(name, cls.model_fields)
                raise ApiError(400, f"unknown parameter {name!r}{hint}", param=name, code="unknown_parameter")
        return kept


class StreamOptions(Body):
    include_usage: bool = False
    """A last chunk says how many tokens there were."""
    continuous_usage_stats: bool = False
    """Every chunk does."""


class Speculative(Body):
    enabled: bool = True
    """False: nothing is drafted for this request."""
    num_tokens: int | None = None
    """Drafts per step, at most."""
    drafters: list[str] | None = None
    """Of several drafters, which may draft, and whom to ask first."""

    @model_validator(mode="after")
    def _wishes_need_speculation(self) -> Speculative:
        for name in ("num_tokens", "drafters"):
            if not self.enabled and getattr(self, name):
                raise ApiError(
                    400, f"speculative.{name} is for requests with speculation; leave it out", param="speculative"
                )
        return self


class Sampling(Body):
    """What both routes share: the sampling parameters, by the names of `SamplingParams`."""

    # fmt: off
    PLAIN: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "seed", "n", "max_tokens", "prompt_logprobs",
        "truncate_prompt_tokens", "structured_outputs", "stop", "include_stop_str_in_output", "stop_token_ids",
        "ignore_eos", "skip_special_tokens",
    )
    # fmt: on
    """Handed on as they are."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_sources: bool = False
    """Say of each token whether it was drafted, at which position, and which drafts it replaces."""
    speculative: Speculative = Field(default_factory=Speculative)
    priority: int = 0
    """Lower is served first."""
    cache_salt: str | None = None
    """Cached prefixes are shared among requests of the same salt only."""

    @model_validator(mode="after")
    def _lists_are_short(self) -> Sampling:
        for name in ("stop", "bad_words"):
            value = getattr(self, name) or []
            texts = [value] if isinstance(value, str) else value
            if len(texts) > MAX_TEXTS:
                raise ApiError(400, f"{name} has {len(texts)} texts; at most {MAX_TEXTS} are taken", param=name)
            longest = max(map(len, texts), default=0)
            if longest > MAX_CHARACTERS:
                raise ApiError(
                    400, f"{name} has a text of {longest} characters; at most {MAX_CHARACTERS} are taken", param=name
                )
        count = len(self.stop_token_ids or ())
        if count > MAX_IDS:
            raise ApiError(400, f"stop_token_ids has {count} ids; at most {MAX_IDS} are taken", param="stop_token_ids")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for requests with stream; leave it out", param="stream_options")
        return self

    def given(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters that were given, or else are among the model's `defaults`, for `SamplingParams`."""
        values = {name: getattr(self, name) for name in self.PLAIN}
        found = {**defaults, **{name: value for name, value in values.items() if value is not None}}
        if wishes := self.speculative.model_dump(exclude={"enabled"}, exclude_none=True):
            found["speculative"] = wishes
        if (grammar := _grammar(self.response_format)) is not None:
            if "structured_outputs" in found:
                raise ApiError(
                    400,
                    "response_format and structured_outputs exclude each other; leave one out",
                    param="response_format",
                )
            found["structured_outputs"] = grammar
        return found


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises RequestError for values outside of their range."""
        given = self.given(defaults)
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            asked = self.prompt_logprobs
            if self.echo and (asked is None or 0 <= asked <= self.logprobs):
                given["prompt_logprobs"] = self.logprobs
        return SamplingParams(**given)


class ChatMessage(BaseModel):
    """More keys may stand here, for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(Sampling):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises RequestError for values outside of their range."""
        given = self.given(defaults)
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        given.setdefault("max_tokens", None)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs; set it to true", param="top_logprobs")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**given)


class TokenizeRequest(Body):
    """A text, or messages that are put into the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def _grammar(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`structured_outputs` that stand for a `response_format`."""
    if response_format is None:
        return None
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise ApiError(
                400,
                "response_format.type is 'json_schema', but there is no json_schema.schema; give the schema there",
                param="response_format",
            )
    kind = response_format.get("type")
    raise ApiError(
        400, f"response_format.type is {kind!r}; known: text, json_object, json_schema", param="response_format"
    )
