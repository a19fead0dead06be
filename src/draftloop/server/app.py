"""The web application: routes, who may call them, and what they may send."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import draftloop
from draftloop.server.admin import admin_router
from draftloop.server.chat import chat_router
from draftloop.server.client import EngineClient
from draftloop.server.completions import completions_router
from draftloop.server.errors import ApiError, add_error_handlers
from draftloop.server.options import ServerOptions
from draftloop.server.page import FILES, page_router
from draftloop.server.serving import Serving

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/load", "/metrics", *FILES})
"""Served without a key: what load balancers and Prometheus ask for, and the page, which asks for one."""


ERRORS = {
    400: "the request cannot be served as it is; `param` names what is wrong",
    401: "a key is wanted (--api-key)",
    404: "there is no such model, or nothing at this place",
    413: "the body is too large (--max-body-bytes)",
    429: "too many requests wait (--max-waiting)",
    503: "the engine is starting, shutting down or dead",
}
"""Statuses that any route may answer with."""


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorFacts


def make_app(client: EngineClient, options: ServerOptions) -> FastAPI:
    """The application. It starts the engine's process with itself, and ends it with itself."""
    serving = Serving(client, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        client.start()
        try:
            yield
        finally:
            await client.close()
            await serving.close()

    app = FastAPI(
        title="draftloop",
        version=draftloop.__version__,
        lifespan=lifespan,
        root_path=options.root_path,
        responses={status: {"model": ErrorBody, "description": what} for status, what in ERRORS.items()},
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    for router in (completions_router(serving), chat_router(serving), admin_router(serving)):
        app.include_router(router)
    app.include_router(page_router())
    add_error_handlers(app)
    describe = app.openapi
    app.openapi = lambda: _without_422(describe())
    app.add_middleware(Guard, api_keys=options.api_key, max_body_bytes=options.max_body_bytes)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _without_422(schema: dict[str, Any]) -> dict[str, Any]:
    """What the framework says of bodies that do not fit; here they get status 400."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    return schema


class Guard:
    """Refuses requests without a key, and bodies that are too large."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app, self._limit = app, max_body_bytes
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and scope["path"] not in OPEN_PATHS and not self._is_known(headers.get(b"authorization", b"")):
            error = ApiError(
                401, "no valid API key was given; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
            await error.response()(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            await ApiError(413, self._too_large(int(length))).response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise HTTPException(413, self._too_large(num_bytes))
            return message

        await self._app(scope, counted, send)

    def _is_known(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        # all of them are compared, each in constant time: how long it takes tells nothing
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _too_large(self, num_bytes: int) -> str:
        return f"the body has {num_bytes} bytes or more; at most {self._limit} are taken (--max-body-bytes)"
