"""What stands before the replicas, in each of Ray's HTTP proxies: a second chance for requests whose replica is lost.

An answer of which the client has nothing yet is asked for again: another replica gives it. One that was being
streamed ends with an error event, since its tokens cannot be taken back. Ray calls `middlewares` where a cluster is
started with `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=draftloop.server.ray_proxy.middlewares`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftloop.server.errors import ApiError
from draftloop.server.reply import DONE, event

LAST_WORDS_S = 1.0
"""For which a replica whose engine has died goes on, to tell its clients. It draws new requests meanwhile, since its
queue is the shortest."""
TRIES = 6
FIRST_PAUSE_S = 0.1
"""Between two tries; doubled each time. Three seconds in all."""
MAX_KEPT_BYTES = 32 * 2**20
"""Bodies that are larger are passed on as they come, and so cannot be sent again."""
PROMPT_START = 256
"""Characters, or token ids, of a prompt without messages that stand for its conversation."""
SESSION_HEADER = b"x-session-id"
"""Requests of one session are routed alike; clients may name their own."""

LOST = "the replica that worked on this request was lost"


def middlewares() -> list[Middleware]:
    return [Middleware(SecondChance)]


class SecondChance:
    """Sends requests again whose replica is lost or does not serve, and names the conversation each belongs to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await _Body.read(receive)
        if session := _session_of(scope, body.data):
            scope = {**scope, "headers": [*scope["headers"], (SESSION_HEADER, session)]}
        pause_s, tries = FIRST_PAUSE_S, TRIES if body.complete else 1
        for remaining in reversed(range(tries)):
            answer = _Answer(send, may_refuse=remaining == 0)
            await self._app(dict(scope), body.replay(), answer.send)
            if answer.has_ended or body.client_is_gone:
                return
            if answer.has_started:
                await answer.end_with_error()
                return
            if remaining:
                await asyncio.sleep(pause_s)
                pause_s *= 2
        await ApiError(503, f"{LOST} before it answered; ask again", code="replica_lost").response()(
            scope, receive, send
        )


class _Body:
    """A request's body, which can be read more than once."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self.complete = self.client_is_gone = False

    @classmethod
    async def read(cls, receive: Receive) -> _Body:
        body, num_bytes = cls(receive), 0
        while not body.complete and not body.client_is_gone and num_bytes <= MAX_KEPT_BYTES:
            message = await body._next()
            body._messages.append(message)
            num_bytes += len(message.get("body", b""))
            body.complete = message["type"] == "http.request" and not message.get("more_body", False)
        return body

    @property
    def data(self) -> bytes:
        """All of it, or nothing if it is too large."""
        return b"".join(message.get("body", b"") for message in self._messages) if self.complete else b""

    def replay(self) -> Receive:
        """Gives the body from its beginning, and then what else the client says."""
        messages = deque(self._messages)

        async def receive() -> Message:
            return messages.popleft() if messages else await self._next()

        return receive

    async def _next(self) -> Message:
        message = await self._receive()
        self.client_is_gone |= message["type"] == "http.disconnect"
        return message


class _Answer:
    """What one try has given. A 503 is kept back where another replica may do better."""

    def __init__(self, send: Send, *, may_refuse: bool) -> None:
        self._send, self._may_refuse = send, may_refuse
        self._is_kept_back = self._is_stream = False
        self.has_started = self.has_ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_kept_back = message["status"] == 503 and not self._may_refuse
            self._is_stream = (b"content-type", b"text/event-stream") in [
                (name.lower(), value.split(b";")[0].strip()) for name, value in message.get("headers", ())
            ]
            self.has_started = not self._is_kept_back
        if self._is_kept_back:
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.has_ended = True
        await self._send(message)

    async def end_with_error(self) -> None:
        """Say why there will be no more, where the format has a place for it; elsewhere the connection breaks."""
        if self._is_stream:
            error = ApiError(503, f"{LOST} in the middle of its answer", code="replica_lost")
            await self._send({"type": "http.response.body", "body": event(error.body) + DONE, "more_body": False})


def _session_of(scope: Scope, data: bytes) -> bytes | None:
    """A name for the conversation that a request continues, unless it brings one: prompts that share it share a cache.

    It is made of the messages up to the user's first one, which no later turn changes, or of a prompt's beginning.
    """
    if not data or not scope["path"].startswith("/v1/") or any(name == SESSION_HEADER for name, _ in scope["headers"]):
        return None
    try:
        request = json.loads(data)
        start = _start_of(request)
        if start is None:
            return None
        conversation = json.dumps([request.get("cache_salt"), start])
    except (ValueError, RecursionError):
        return None  # the server says what is wrong
    return hashlib.sha256(conversation.encode()).hexdigest().encode()


def _start_of(request: Any) -> Any | None:
    match request:
        case {"messages": [*messages]}:
            roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
            return messages[: roles.index("user") + 1] if "user" in roles else messages
        case {"prompt": str() | list() as prompt}:
            return prompt[:PROMPT_START]
    return None
