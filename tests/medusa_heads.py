"""Tiny Medusa heads on disk, in both layouts that are published."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.drafters.medusa_config import TOKEN_MAP, MedusaConfig
from heads import write_head
from helpers import HIDDEN, VOCAB


def medusa_config(**changes: Any) -> MedusaConfig:
    """Four heads for the tiny target, two residual blocks each."""
    base = {
        "layout": "test",
        "hidden_size": HIDDEN,
        "num_heads": 4,
        "num_layers": 2,
        "output_heads": "each",
        "output_size": VOCAB,
    }
    return MedusaConfig(**{**base, **changes})  # type: ignore[arg-type]


def medusa_weights(config: MedusaConfig, *, seed: int = 11) -> dict[str, Tensor]:
    """Random weights by plain name, large enough that every part changes what is drafted."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        if name == TOKEN_MAP:
            weights[name] = torch.randperm(VOCAB, generator=generator)[: shape[0]].sort().values
        else:
            weights[name] = torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 0.3)
    return weights


def medusa_json(config: MedusaConfig, layout: str = "vllm") -> dict[str, Any]:
    if layout == "original":
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": VOCAB,
        "truncated_vocab_size": config.map_size or VOCAB,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.output_heads != "each",
    }


def medusa_names(config: MedusaConfig, weights: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Rename from plain names: "original", "prefixed" as vLLM accepts it, or "vllm"."""
    if layout == "prefixed":
        return {f"medusa_heads.{name}": weight for name, weight in weights.items()}
    if layout == "vllm":
        return weights
    found = {}
    for name, weight in weights.items():
        part = name.split(".")
        linear = f"{part[1]}.{part[3] if part[0] == 'blocks' else config.num_layers}"
        found[f"{linear}.{'linear.' if part[0] == 'blocks' else ''}{part[-1]}"] = weight
    return found


@functools.cache
def tiny_medusa(name: str, config: MedusaConfig | None = None, *, layout: str = "vllm", pickled: bool = False) -> str:
    """Folder of heads with random weights; `pickled` names the file as the original does."""
    config = config or medusa_config()
    weights = medusa_names(config, medusa_weights(config), layout)
    folder = write_head(f"medusa-{name}", medusa_json(config, layout), weights, pickled=pickled)
    if pickled:
        (Path(folder) / "pytorch_model.bin").rename(Path(folder) / "medusa_lm_head.pt")
    return folder
