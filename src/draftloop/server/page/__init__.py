"""The page at /: files that were built from web/, and the headers that keep it harmless.

They are read once, so no request names a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""By path: file and media type."""

HEADERS = {
    # nothing from elsewhere, nothing inline, no markup made of texts
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and sent again only when changed
}


class Page(NamedTuple):
    """A file as it is served."""

    data: bytes
    media_type: str
    etag: str


def page_router() -> APIRouter:
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        data = Path(__file__).with_name(name).read_bytes()
        page = Page(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
        router.add_api_route(path, _serve(page), methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _serve(page: Page) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def serve(request: Request) -> Response:
        headers = {**HEADERS, "ETag": page.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if page.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(page.data, media_type=page.media_type, headers=headers)

    return serve
