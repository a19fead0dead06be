"""Attention backends by name. A backend's module is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module

from draftloop.attention.base import AttentionBackend
from draftloop.errors import check_known

BACKENDS = {
    "sdpa": "draftloop.attention.sdpa:SdpaBackend",
    "triton": "draftloop.attention.triton:TritonBackend",
    "flashinfer": "draftloop.attention.flashinfer:FlashinferBackend",
}
"""name -> "module:class"."""


def resolve_attention_name(name: str, device_type: str) -> str:
    """Settle "auto": triton on CUDA, sdpa elsewhere. Raises ConfigError for an unknown name."""
    check_known("attention backend", [name], ["auto", *BACKENDS])
    if name != "auto":
        return name
    return "triton" if device_type == "cuda" else "sdpa"


def attention_backend(name: str, device_type: str) -> type[AttentionBackend]:
    """The backend class for a name or "auto". Raises ConfigError for an unknown name."""
    module, _, attribute = BACKENDS[resolve_attention_name(name, device_type)].partition(":")
    return getattr(import_module(module), attribute)
