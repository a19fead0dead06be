"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from draftloop.request import Logprobs, SamplingParams
from draftloop.server.errors import ApiError
from draftloop.server.messages import Update
from draftloop.server.protocol import CompletionRequest
from draftloop.server.reply import (
    Reply,
    TokenNames,
    completion_logprobs,
    event,
    prompt_logprobs_dict,
    token_sources,
)
from draftloop.server.serving import ANSWER, EventStream, Serving, response_id, unless_gone


def completions_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", responses=ANSWER)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        texts, given_ids = _prompts(body.prompt)
        serving.check(body, len(texts) or len(given_ids))
        params = body.sampling_params(serving.sampling_defaults)
        if body.echo and body.logprobs is not None and params.n > 1:
            raise ApiError(400, f"n is {params.n}; with echo and logprobs it must be 1", param="n")
        ids = given_ids or [await serving.encode(text, add_special_tokens=body.add_special_tokens) for text in texts]
        if body.echo and not texts:
            texts = [serving.tokenizer.decode(one) for one in ids]
        id = response_id("cmpl", body, http)
        reply = await serving.start(body, ids, params, id, http)
        completion = _Completion(serving, body, params, reply, texts, ids)
        if body.stream:
            return EventStream(reply, completion.stream())
        return await unless_gone(http, reply, completion.whole())

    return router


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Texts or token ids; one of the two is empty."""
    if isinstance(prompt, str):
        return [prompt], []
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give at least one", param="prompt")
    match prompt[0]:
        case str():
            return prompt, []  # pyrefly: ignore[bad-return]
        case int():
            return [], [prompt]  # pyrefly: ignore[bad-return]
    return [], prompt  # pyrefly: ignore[bad-return]


class _Completion:
    """A reply in the shape of completions."""

    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        params: SamplingParams,
        reply: Reply,
        texts: Sequence[str],
        prompt_ids: Sequence[list[int]],
    ) -> None:
        self._serving, self._body, self._params, self._reply = serving, body, params, reply
        self._texts, self._prompt_ids = texts, prompt_ids
        self._names = TokenNames(as_ids=body.return_tokens_as_token_ids)
        self._head = {
            "id": reply.id,
            "object": "text_completion",
            "created": reply.created,
            "model": serving.model_name(body),
        }
        self._offsets = [0] * len(reply.answers)
        """Where the text of an answer's next token begins."""

    async def stream(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        every = options is not None and options.continuous_usage_stats
        started: set[int] = set()
        async for batch in self._reply.updates(smooth=self._serving.options.smooth_stream):
            events = []
            for index, update in batch:
                is_first = index not in started
                started.add(index)
                choice = self._choice(index, [update], is_first=is_first)
                shown = choice["text"] or choice["logprobs"] or update.traced or self._body.return_token_ids
                if not (shown or is_first or update.ending):
                    continue
                chunk: dict[str, Any] = {**self._head, "choices": [choice]}
                if usage or every:
                    chunk["usage"] = self._reply.usage() if every else None
                events.append(event(chunk))
            if events:
                yield b"".join(events)
        if usage:
            yield event(self._last({**self._head, "choices": [], "usage": self._reply.usage()}))

    async def whole(self) -> dict[str, Any]:
        updates: list[list[Update]] = [[] for _ in self._reply.answers]
        async for batch in self._reply.updates():
            for index, update in batch:
                updates[index].append(update)
        choices = [self._choice(index, mine, is_first=True) for index, mine in enumerate(updates)]
        return self._last({**self._head, "choices": choices, "usage": self._reply.usage()})

    def _last(self, body: dict[str, Any]) -> dict[str, Any]:
        if (metrics := self._reply.metrics()) is not None:
            body["metrics"] = metrics
        return body

    def _choice(self, index: int, updates: Sequence[Update], *, is_first: bool) -> dict[str, Any]:
        """What these updates add to an answer. `is_first`: they start it, and the prompt is echoed if asked for."""
        body, at = self._body, index // self._reply.n
        ending = updates[-1].ending
        token_ids = [token for update in updates for token in update.token_ids]
        text = "".join(update.text for update in updates)
        prompt_logprobs = next((u.prompt_logprobs for u in updates if u.prompt_logprobs is not None), None)
        shown: list[Logprobs | None] = [one for update in updates for one in update.logprobs or []]
        shown_ids = token_ids
        if body.echo and is_first:
            text = self._texts[at] + text
            if prompt_logprobs is not None:
                shown = [*prompt_logprobs, *shown]
                shown_ids = [*self._prompt_ids[at][-len(prompt_logprobs) :], *token_ids]
        logprobs = None
        if body.logprobs is not None:
            logprobs = completion_logprobs(shown_ids, shown, body.logprobs, self._names, offset=self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": ending.finish_reason if ending else None,
            "stop_reason": ending.stop_reason if ending else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompt_ids[at]
        if body.return_token_sources:
            choice["token_sources"] = token_sources(updates, self._serving.tokenizer.token)
        if body.prompt_logprobs is not None and prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_dict(prompt_logprobs, body.prompt_logprobs)
        return choice
