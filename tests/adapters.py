"""Random adapters (LoRA) for tests, and the models that they make of another."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import _folder

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """A folder in PEFT's format; `settings` override what a plain adapter's config says."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "target_modules": list(MODULES),
        "modules_to_save": None,
        "rank_pattern": {},
        "base_model_name_or_path": "somewhere/else",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def random_pairs(
    model: str, *, rank: int = 4, seed: int = 1, modules: tuple[str, ...] = MODULES, std: float = 0.05
) -> dict[str, Tensor]:
    """Matrices for each of a model's modules of these names, by PEFT's names; strong enough to change the text."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(Path(model) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            rows, size = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, size, generator=generator) * (std / rank) ** 0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * (std / rank) ** 0.5
    return tensors


@functools.cache
def random_adapter(
    model: str, name: str, *, rank: int = 4, seed: int = 1, modules: tuple[str, ...] = MODULES, rslora: bool = False
) -> str:
    """Folder of an adapter for a model of one file."""
    pairs = random_pairs(model, rank=rank, seed=seed, modules=modules)
    settings = {"r": rank, "lora_alpha": 6, "use_rslora": rslora, "target_modules": list(modules)}
    return str(write_adapter(_folder() / f"adapter-{name}", pairs, **settings))


@functools.cache
def merged(model: str, adapter: str) -> str:
    """Folder of the model that an adapter makes of another: `W + scale * B @ A`."""
    source, folder = Path(model), _folder() / f"{Path(model).name}-with-{Path(adapter).name}"
    shutil.copytree(source, folder)
    weights, pairs = load_file(source / "model.safetensors"), load_file(Path(adapter) / "adapter_model.safetensors")
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
    for name, a_JK in pairs.items():
        if ".lora_A." in name:
            key = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[key] += scale * pairs[name.replace("lora_A", "lora_B")] @ a_JK
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
