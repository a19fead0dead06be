"""LLM inference with speculative decoding in which every repeated step is a captured graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftloop.config.engine import EngineConfig
    from draftloop.config.speculative import SpeculativeConfig
    from draftloop.engine.llm import LLM
    from draftloop.errors import CapacityError, ConfigError, DraftloopError, GraphError, RequestError
    from draftloop.request import LoRARequest, RequestOutput, SamplingParams

__version__ = "0.1.0"

# Imported on first use: `import draftloop` and `draftloop --help` must not wait for torch.
_HOMES = {
    "LLM": "draftloop.engine.llm",
    "EngineConfig": "draftloop.config.engine",
    "SpeculativeConfig": "draftloop.config.speculative",
    "LoRARequest": "draftloop.request",
    "RequestOutput": "draftloop.request",
    "SamplingParams": "draftloop.request",
    "CapacityError": "draftloop.errors",
    "ConfigError": "draftloop.errors",
    "DraftloopError": "draftloop.errors",
    "GraphError": "draftloop.errors",
    "RequestError": "draftloop.errors",
}

__all__ = [
    "LLM",
    "CapacityError",
    "ConfigError",
    "DraftloopError",
    "EngineConfig",
    "GraphError",
    "LoRARequest",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
