"""Tiny drafters that fill masks, on disk: P-EAGLE heads and PARD models."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftloop.drafters.eagle_config import MASK_HIDDEN, EagleConfig
from heads import config_json, head_config, head_weights, wide_config, write_head
from helpers import near_draft

MASK = 151


def peagle_config(base: EagleConfig | None = None, *, layers: int = 2, **changes: Any) -> EagleConfig:
    """A head for the tiny target: the first layer reads the embedding; its own embeddings, a reduced vocabulary."""
    base = base or head_config("eagle3")
    return replace(
        base,
        **{
            "method": "peagle",
            "model": replace(base.model, num_layers=layers),
            "wide_layers": (True, *[False] * (layers - 1)),
            "input_norms": (True,) * layers,
            "own_embeddings": True,
            "mask_token_id": MASK,
            **changes,
        },
    )


def peagle_json(config: EagleConfig, layout: str = "speculators", key: str = "mask_token_id") -> dict[str, Any]:
    made = {**config_json(config, layout), key: config.mask_token_id}
    if layout == "speculators":
        made |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
        if not config.norm_before_residual:  # what its absence means
            del made["norm_before_residual"]
    return made


def peagle_weights(config: EagleConfig) -> dict[str, Tensor]:
    weights = head_weights(config)
    return {**weights, MASK_HIDDEN: weights[MASK_HIDDEN].view(1, 1, -1)}


@functools.cache
def tiny_peagle(
    name: str, config: EagleConfig | None = None, *, layout: str = "speculators", key: str = "mask_token_id"
) -> str:
    """Folder of a head with random weights."""
    config = config or peagle_config()
    return write_head(f"peagle-{name}", peagle_json(config, layout, key), peagle_weights(config))


def wide_peagle() -> str:
    return tiny_peagle("wide", peagle_config(wide_config("eagle3")))


@functools.cache
def tiny_pard(model: str | None = None, *, mask: int | None = MASK) -> str:
    """Folder of a draft model that says which token is its mask, as PARD's do."""
    source = Path(model or near_draft())
    folder = Path(f"{source}-pard-{mask}")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **({} if mask is None else {"pard_token": mask})}))
    return str(folder)
