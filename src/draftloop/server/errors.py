"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftloop.errors import RequestError
from draftloop.request import SamplingParams
from draftloop.server.client import BusyError, EngineUnavailableError

RETRY_AFTER_S = 1
"""What a client that came at a busy time is told to wait."""

_PARAMETERS = {field.name for field in fields(SamplingParams)} | {"prompt", "messages", "tokens"}


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, type: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str] | None:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None

    def response(self) -> Response:
        # escaped, since a message may hold whatever the client has sent
        text = json.dumps(self.body)
        return Response(text, status_code=self.status, headers=self.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of the engine's or of its side here."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return ApiError(429, f"{error}; try again later", type="rate_limit_error", code="too_many_requests")
        case EngineUnavailableError():
            return ApiError(503, str(error), type="service_unavailable_error", code="engine_unavailable")
        case RequestError():
            return ApiError(400, str(error), param=parameter_of(str(error)))
    return ApiError(500, "internal error; the server's log says more")


def parameter_of(message: str) -> str | None:
    """The parameter that a RequestError is about: its messages start with it."""
    first = re.match(r"(?:the )?(\w+)", message)
    return first[1] if first and first[1] in _PARAMETERS else None


def unsupported(name: str, why: str = "is not supported by this server") -> ApiError:
    return ApiError(400, f"{name} {why}", param=name, code="unsupported_parameter")


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Exception)
    @app.exception_handler(ApiError)
    @app.exception_handler(BusyError)
    @app.exception_handler(EngineUnavailableError)
    @app.exception_handler(RequestError)
    async def failed(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _validation_error(error.errors()[0]).response()


def _validation_error(first: Mapping[str, Any]) -> ApiError:
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    name = str(place[0]) if place else None
    path = ".".join(map(str, place)) or "the body"
    value = "" if first["type"] == "missing" else f" is {reprlib.repr(first['input'])}"
    return ApiError(400, f"{path}{value}: {first['msg']}", param=name)
