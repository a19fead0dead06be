"""What the routes share: the engine, the model's names and tokenizer, and how a request becomes a reply."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftloop.errors import ConfigError, RequestError
from draftloop.observability import log
from draftloop.request import SamplingParams
from draftloop.server.chat_template import ChatTemplate
from draftloop.server.client import EngineClient, EngineUnavailableError
from draftloop.server.errors import ApiError, as_api_error
from draftloop.server.metrics import Metrics
from draftloop.server.options import ServerOptions
from draftloop.server.protocol import Sampling
from draftloop.server.reply import DONE, Reply, event, json_bytes
from draftloop.server.tokenizer import ServerTokenizer
from draftloop.server.tracing import make_tracer

logger = log.get_logger(__name__)

QUICK_TEXT = 4096
"""Characters that are made tokens at once; longer texts must not hold up other requests."""

ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""How answers come: whole, or streamed."""

RESERVED_ARGUMENTS = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
)
"""Arguments of chat templates that requests may not set by name."""


class Serving:
    """One model behind HTTP."""

    def __init__(self, client: EngineClient, options: ServerOptions) -> None:
        self.client, self.options = client, options
        self.names = options.served_model_name or (client.config.model,)
        self.adapters = client.config.adapters
        if taken := self.adapters.keys() & set(self.names):
            raise ConfigError(f"lora_modules names {min(taken)!r}, as the model is called; rename the adapter")
        self.metrics = Metrics(client, self.names[0])
        self.chat_template = read_template(options.chat_template)
        if self.chat_template is not None:
            ChatTemplate(self.chat_template, {})  # a wrong one is refused now, not with every request
        self._tokenizer: ServerTokenizer | None = None
        endpoint = options.otlp_traces_endpoint
        self._tracer = make_tracer(endpoint, self.names[0]) if endpoint is not None else None

    async def close(self) -> None:
        """Send what is still to be sent."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    @property
    def tokenizer(self) -> ServerTokenizer:
        """Raises EngineUnavailableError until the engine is ready."""
        if self._tokenizer is None:
            self._tokenizer = ServerTokenizer(self.client.ready, chat_template=self.chat_template)
        return self._tokenizer

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """What stands for values that requests leave out. Raises EngineUnavailableError until the engine is ready."""
        if self.options.generation_config == "vllm":
            return {}
        usable = {}
        for name, value in self.client.ready.sampling_defaults.items():
            try:
                SamplingParams(**{name: value})
                usable[name] = value
            except RequestError as error:
                logger.warning("left out of the model's generation_config.json: %s", error)
        return usable

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.adapters:
            known = ", ".join((*self.names, *self.adapters))
            raise ApiError(404, f"there is no model {name!r}; known: {known}", param="model", code="model_not_found")

    def adapter(self, request: Sampling) -> str | None:
        """The adapter that a request names as its model."""
        return request.model if request.model in self.adapters else None

    def model_name(self, request: Sampling) -> str:
        """What answers to a request say of the model."""
        return self.adapter(request) or self.names[0]

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""
        if len(text) <= QUICK_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def template_arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The request's `chat_template_kwargs`."""
        arguments = dict(given or {})
        if taken := RESERVED_ARGUMENTS & arguments.keys():
            raise ApiError(400, f"chat_template_kwargs may not hold {min(taken)!r}", param="chat_template_kwargs")
        return arguments

    def check(self, request: Sampling, num_prompts: int = 1) -> None:
        """Refuse early what cannot be served, whatever it says."""
        self.check_model(request.model)
        if self.client.state != "ready":
            raise EngineUnavailableError(self.client.reason)
        if request.return_token_sources and self.client.ready.tokenizer is None:
            raise ApiError(
                400,
                "return_token_sources needs a tokenizer, and this model has none; leave it out",
                param="return_token_sources",
            )
        self.client.check_room(num_prompts * max(request.n or 1, 1))

    async def start(
        self, request: Sampling, prompts: Sequence[list[int]], params: SamplingParams, id: str, http: Request
    ) -> Reply:
        """Queue a request; all of its answers or none. `id` is what the response says."""
        answers = await self.client.submit(
            uuid.uuid4().hex,
            prompts,
            params,
            speculation=request.speculative.enabled,
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora_request=self.adapter(request),
            traced=request.return_token_sources,
        )
        return Reply(id, answers, params, self.metrics, self._observer(http))

    def _observer(self, http: Request) -> Callable[[Reply], None] | None:
        """Whom to tell of the request when it has ended."""
        tracer, logs, headers = self._tracer, self.options.log_requests, http.headers
        if tracer is None and not logs:
            return None

        def observe(reply: Reply) -> None:
            if logs:
                facts = reply.facts()
                logger.info(
                    "%s: %d prompt tokens, %d tokens, %s, %.3f s",
                    reply.id,
                    facts["prompt_tokens"],
                    facts["completion_tokens"],
                    ", ".join(facts["finish_reasons"]),
                    facts["seconds"],
                    extra=facts,
                )
            if tracer is not None:
                tracer.record(reply, headers)

        return observe


def read_template(given: str | None) -> str | None:
    """A template, or what a file of that name holds. Raises ConfigError for a file that cannot be read."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {given!r}, which cannot be read: {error}") from error


def response_id(prefix: str, request: Sampling, http: Request) -> str:
    """The request's own id where it brings one."""
    given = request.request_id or http.headers.get("x-request-id")
    if given is not None and not (len(given) <= 256 and given.isascii() and given.isprintable()):
        raise ApiError(400, "request_id must be printable ASCII of at most 256 characters", param="request_id")
    return f"{prefix}-{given or uuid.uuid4().hex}"


class Gone(Response):
    """Nobody reads this."""

    def __init__(self) -> None:
        super().__init__(status_code=499)


async def unless_gone(http: Request, reply: Reply, work: Coroutine[Any, Any, Mapping[str, Any]]) -> Response:
    """The result as JSON. If the client goes away before, the work is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Gone()
        return Response(json_bytes(task.result()), media_type="application/json")
    finally:
        reply.close()
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. An error ends the stream as an event, since the status is sent already."""

    def __init__(self, reply: Reply, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(_events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client went away before the first event
            self._reply.close()


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except (ApiError, RequestError, EngineUnavailableError) as error:
        yield event(as_api_error(error).body)
    yield DONE
