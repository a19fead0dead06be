"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from draftloop.request import SamplingParams, StructuredOutputsParams
from draftloop.server.errors import ApiError, unsupported
from draftloop.server.messages import Update
from draftloop.server.parsers import (
    END_THINK,
    THINK,
    ForcedCallParser,
    Parser,
    Parts,
    PlainParser,
    ReasoningThen,
    TagParser,
    forced_calls_schema,
)
from draftloop.server.protocol import ChatMessage, ChatRequest, NamedTool, Tool
from draftloop.server.reply import Reply, TokenNames, chat_logprobs, event, prompt_logprobs_dict, token_sources
from draftloop.server.serving import ANSWER, EventStream, Serving, response_id, unless_gone


def chat_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=ANSWER)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        serving.check(body)
        _check(body, serving)
        text = render(serving, body)
        params, ids = (
            body.sampling_params(serving.sampling_defaults),
            await serving.encode(text, add_special_tokens=body.add_special_tokens),
        )
        plan = _ParserPlan(serving, body, text)
        params = plan.constrain(params)
        id = response_id("chatcmpl", body, http)
        reply = await serving.start(body, [ids], params, id, http)
        chat = _Chat(serving, body, reply, ids, plan)
        if body.stream:
            return EventStream(reply, chat.stream())
        return await unless_gone(http, reply, chat.whole())

    return router


def _check(body: ChatRequest, serving: Serving) -> None:
    if body.echo:
        raise unsupported("echo", "is for completions")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "has no place in a streamed chat; leave stream out")
    if body.chat_template is not None and not serving.options.trust_request_chat_template:
        raise unsupported("chat_template", "is taken from requests only with --trust-request-chat-template")
    if isinstance(body.tool_choice, NamedTool) or body.tool_choice in ("auto", "required"):
        names = [tool.function.name for tool in body.tools or []]
        if not names:
            raise ApiError(400, "tool_choice needs tools; give some, or leave it out", param="tool_choice")
        if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
            name = body.tool_choice.function.name
            raise ApiError(400, f"tool_choice names {name!r}; tools has {', '.join(names)}", param="tool_choice")


def render(serving: Serving, body: ChatRequest) -> str:
    """The conversation as the model's template writes it."""
    more = serving.template_arguments(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        more.setdefault("reasoning_effort", body.reasoning_effort)
    tools = body.tools if body.tool_choice != "none" else None
    return serving.tokenizer.render(
        template_messages(body.messages),
        chat_template=body.chat_template,
        tools=template_tools(tools),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        **more,
    )


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As templates expect them: texts instead of lists of parts, arguments of calls as objects."""
    made = []
    for place, message in enumerate(messages):
        one = message.model_dump(exclude_none=True)
        one["content"] = _text(message.content, place)
        for call in one.get("tool_calls", []):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"] or "{}")
                except (ValueError, RecursionError) as error:
                    raise ApiError(
                        400, f"messages.{place}.tool_calls: arguments are not JSON ({error})", param="messages"
                    ) from error
        made.append(one)
    return made


def _text(content: str | list[dict[str, Any]] | None, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise ApiError(400, f"messages.{place}.content: {kind!r} is not supported, only text", param="messages")
    return "\n".join(part["text"] for part in content)


class _ParserPlan:
    """How to read the answers to one request, and what they must look like for that."""

    def __init__(self, serving: Serving, body: ChatRequest, prompt: str) -> None:
        self._thinks = serving.options.reasoning_parser == "think"
        self._in_reasoning = self._thinks and prompt.rstrip().endswith(THINK)
        offered = bool(body.tools) and body.tool_choice != "none"
        choice = body.tool_choice
        self._forced_name = choice.function.name if isinstance(choice, NamedTool) else None
        self._forced = offered and (choice == "required" or self._forced_name is not None)
        self._reads_calls = offered and not self._forced and serving.options.tool_call_parser == "hermes"
        self._tools, self._parallel = body.tools or [], body.parallel_tool_calls
        self._serving = serving

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """The grammar of forced calls; any grammar begins after the reasoning."""
        grammar = params.structured_outputs
        if self._forced:
            if grammar is not None:
                raise ApiError(400, "tool_choice forces a call; leave response_format out", param="tool_choice")
            tools = [tool.function.model_dump(exclude_none=True) for tool in self._tools]
            try:
                schema = forced_calls_schema(tools, self._forced_name, parallel=self._parallel)
            except ValueError as error:
                raise ApiError(400, f"tools cannot be used: {error}", param="tools") from error
            # compact: a weak model could go on with white space for ever
            grammar = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        if grammar is None:
            return params
        if self._in_reasoning and grammar.after_token_id is None:
            end = self._serving.tokenizer.backend.token_to_id(END_THINK)
            self._in_reasoning = end is not None  # else the grammar begins at once, and all is content
            grammar = replace(grammar, after_token_id=end)
        return replace(params, structured_outputs=grammar)

    def parser(self) -> Parser:
        """A new one, for one answer."""
        if self._forced:
            forced = ForcedCallParser(self._forced_name)
            return ReasoningThen(forced, in_reasoning=self._in_reasoning) if self._thinks else forced
        if not self._thinks and not self._reads_calls:
            return PlainParser()
        return TagParser(reasoning=self._thinks, tools=self._reads_calls, in_reasoning=self._in_reasoning)


class _Chat:
    """A reply in the shape of chats."""

    def __init__(
        self, serving: Serving, body: ChatRequest, reply: Reply, prompt_ids: list[int], plan: _ParserPlan
    ) -> None:
        self._serving, self._body, self._reply, self._prompt_ids = serving, body, reply, prompt_ids
        self._parsers = [plan.parser() for _ in reply.answers]
        self._num_calls = [0] * len(reply.answers)
        self._names = TokenNames(as_ids=body.return_tokens_as_token_ids)
        self._head = {"id": reply.id, "created": reply.created, "model": serving.model_name(body)}

    # ---- streamed ---------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        every = options is not None and options.continuous_usage_stats
        head = {**self._head, "object": "chat.completion.chunk"}

        def chunk(choices: list[dict[str, Any]]) -> bytes:
            made: dict[str, Any] = {**head, "choices": choices}
            if usage or every:
                made["usage"] = self._reply.usage() if every else None
            return event(made)

        for index in range(len(self._reply.answers)):
            choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
            choice |= {"logprobs": None, "finish_reason": None}
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._prompt_ids
            yield chunk([choice])
        async for batch in self._reply.updates(smooth=self._serving.options.smooth_stream):
            choices = [choice for index, update in batch if (choice := self._delta(index, update)) is not None]
            if choices:
                yield b"".join(chunk([choice]) for choice in choices)
        if usage:
            yield event(self._last({**head, "choices": [], "usage": self._reply.usage()}))

    def _delta(self, index: int, update: Update) -> dict[str, Any] | None:
        """What an update adds to an answer; None for nothing to show."""
        ending = update.ending
        parts = self._parsers[index].feed(update.text, is_last=ending is not None)
        if not (parts or ending or update.traced or self._body.logprobs or self._body.return_token_ids):
            return None
        delta: dict[str, Any] = {}
        if parts.content:
            delta["content"] = parts.content
        if parts.reasoning and self._body.include_reasoning:
            delta["reasoning"] = parts.reasoning
        if parts.tool_calls:
            first = self._num_calls[index]
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(_calls(parts), first)]
            self._num_calls[index] += len(parts.tool_calls)
        return {"index": index, "delta": delta, **self._facts(index, [update])}

    # ---- at once ----------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        updates: list[list[Update]] = [[] for _ in self._reply.answers]
        async for batch in self._reply.updates():
            for index, update in batch:
                updates[index].append(update)
        choices = [self._choice(index, mine) for index, mine in enumerate(updates)]
        body: dict[str, Any] = {**self._head, "object": "chat.completion", "choices": choices}
        body["usage"] = self._reply.usage()
        if self._body.prompt_logprobs is not None:
            found = updates[0][0].prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs_dict(found, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids
        return self._last(body)

    def _choice(self, index: int, updates: Sequence[Update]) -> dict[str, Any]:
        parts = self._parsers[index].feed("".join(update.text for update in updates), is_last=True)
        self._num_calls[index] = len(parts.tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.tool_calls:
            message["content"] = parts.content or None
            message["tool_calls"] = _calls(parts)
        if parts.reasoning and self._body.include_reasoning:
            message["reasoning"] = parts.reasoning
        return {"index": index, "message": message, **self._facts(index, updates)}

    def _facts(self, index: int, updates: Sequence[Update]) -> dict[str, Any]:
        """Of a choice: why it ended, its logprobs, its token ids."""
        ending = updates[-1].ending
        token_ids = [token for update in updates for token in update.token_ids]
        found = [one for update in updates for one in update.logprobs or []]
        num_top = self._body.top_logprobs or 0
        reason = ending.finish_reason if ending else None
        if reason == "stop" and self._num_calls[index]:
            reason = "tool_calls"
        facts: dict[str, Any] = {
            "logprobs": chat_logprobs(token_ids, found, num_top, self._names) if self._body.logprobs else None,
            "finish_reason": reason,
            "stop_reason": ending.stop_reason if ending else None,
        }
        if self._body.return_token_ids:
            facts["token_ids"] = token_ids
        if self._body.return_token_sources:
            facts["token_sources"] = token_sources(updates, self._serving.tokenizer.token)
        return facts

    def _last(self, body: Mapping[str, Any]) -> dict[str, Any]:
        metrics = self._reply.metrics()
        return {**body, "metrics": metrics} if metrics is not None else dict(body)


def _calls(parts: Parts) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parts.tool_calls
    ]
