"""Where a drafter's shape and weights come from: a checkpoint, or with load_format "dummy" a shape by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Target
from draftloop.drafters.files import find_checkpoint
from draftloop.drafters.kinds import KINDS
from draftloop.errors import ConfigError, nearest


class Shaped(Protocol):
    @property
    def method(self) -> str: ...


ShapedT = TypeVar("ShapedT", bound=Shaped)


def locate(
    spec: SpeculativeConfig, target: Target, presets: Mapping[str, ShapedT], *, method: str
) -> tuple[ShapedT | None, Path | None]:
    """The shape that the configuration names, or the folder of the checkpoint. Reads no weights. Raises ConfigError."""
    if spec.model is None:
        raise ConfigError(f"speculative method {method!r} needs 'model', the folder or hub id of a drafter")
    model = spec.model
    load_format = spec.load_format or target.load_format
    dummy = load_format == "dummy"
    if model in presets:
        preset = presets[model]
        if not dummy:
            raise ConfigError(f"{model!r} is a shape without weights; use load_format 'dummy', or name a drafter")
        if preset.method != method:
            raise ConfigError(f"{model!r} is the shape of {KINDS[preset.method]}; use method {preset.method!r}")
        return preset, None
    if dummy:
        raise ConfigError(
            f"load_format 'dummy' makes random weights for a shape, but {model!r} is none{nearest(model, presets)} "
            f"Known: {', '.join(presets)}; for a drafter with weights say load_format 'auto' in the speculative "
            "configuration"
        )
    return None, find_checkpoint(model, spec.revision, load_format=load_format)
