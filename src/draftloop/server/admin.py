"""Routes beside answers: models, health, metrics, tokens, and what the server is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

import draftloop
from draftloop.server.chat import template_messages, template_tools
from draftloop.server.client import EngineUnavailableError
from draftloop.server.errors import ApiError
from draftloop.server.metrics import CONTENT_TYPE
from draftloop.server.protocol import DetokenizeRequest, TokenizeRequest
from draftloop.server.serving import Serving

GRAPHS_TIMEOUT_S = 2.0
"""The engine answers between steps; metrics do not wait longer than this for its coverage table."""


def admin_router(serving: Serving) -> APIRouter:
    router = APIRouter()
    client, started = serving.client, int(time.time())

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        names = (*serving.names, *serving.adapters)
        return JSONResponse({"object": "list", "data": [_card(serving, name, started) for name in names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        serving.check_model(name)
        return JSONResponse(_card(serving, name, started))

    @router.get("/health", response_class=Response)
    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def health() -> Response:
        """200 once everything is captured, and only while the engine lives."""
        if client.state != "ready":
            raise EngineUnavailableError(client.reason)
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": draftloop.__version__}

    @router.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": client.num_open}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(serving.metrics.render(await _graphs(serving)), media_type=CONTENT_TYPE)

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """What was decided at the start, and the coverage table: which phase runs as a graph at which sizes."""
        ready = client.ready
        return {
            "version": draftloop.__version__,
            "model": serving.names[0],
            "max_model_len": ready.max_model_len,
            "max_num_seqs": ready.max_num_seqs,
            "num_speculative_tokens": ready.num_spec_tokens,
            "cache": {"pages": ready.num_pages, "page_size": ready.page_size},
            **ready.info,
            "graphs": (await client.ask("graphs"))[0],
        }

    @router.post("/start_profile")
    async def start_profile() -> dict[str, Any]:
        """Record the engine's steps until /stop_profile, for a minute at most."""
        return _together(await client.ask("start_profile", profile_dir=_profile_dir(serving)))

    @router.post("/stop_profile")
    async def stop_profile() -> dict[str, Any]:
        """Write what was recorded, as a Chrome trace; the file's name."""
        _profile_dir(serving)
        return _together(await client.ask("stop_profile"))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        """Forget the prefixes of earlier prompts."""
        return _together(await client.ask("reset_prefix_cache"))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        serving.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        text, special = body.prompt, True
        if body.messages is not None:
            special = False
            text = serving.tokenizer.render(
                template_messages(body.messages),
                tools=template_tools(body.tools),
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
                **serving.template_arguments(body.chat_template_kwargs),
            )
        if body.add_special_tokens is not None:
            special = body.add_special_tokens
        ids = await serving.encode(text or "", add_special_tokens=special)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": client.ready.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [serving.tokenizer.token(token) for token in ids]
        return found

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        serving.check_model(body.model)
        return {"prompt": serving.tokenizer.decode(body.tokens)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        template = serving.chat_template or client.ready.chat_template
        return {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **client.ready.special_tokens}

    return router


def _card(serving: Serving, name: str, created: int) -> dict[str, Any]:
    client, adapter = serving.client, serving.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "draftloop",
        "root": adapter or client.config.model,
        "parent": serving.names[0] if adapter else None,
        "max_model_len": client.ready.max_model_len if client.has_started else None,
        "permission": [],
    }


def _profile_dir(serving: Serving) -> str:
    if serving.options.profile_dir is None:
        raise ApiError(404, "profiling is off; --profile-dir names the folder for traces and turns it on")
    return serving.options.profile_dir


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What one engine says, or what each of several does."""
    return answers[0] if len(answers) == 1 else {"engines": answers}


async def _graphs(serving: Serving) -> list[dict[str, Any]] | None:
    try:
        return await asyncio.wait_for(serving.client.ask("graphs"), GRAPHS_TIMEOUT_S)
    except (EngineUnavailableError, TimeoutError):
        return None
