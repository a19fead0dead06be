"""Models straight from the loader, without an engine, and folders whose weights are changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.attention.sdpa import SdpaBackend
from draftloop.models.config import ModelConfig
from draftloop.models.dense import DenseDecoder, attention_shape
from draftloop.models.loader import ModelSource, load_config, load_model, resolve_model

CPU = torch.device("cpu")


def load(
    source: ModelSource | Path | str,
    config: ModelConfig | None = None,
    *,
    quantization: str | None = None,
    dtype: torch.dtype = torch.float32,
    load_format: Any = "auto",
    **settings: Any,
) -> DenseDecoder:
    """On the CPU. `config` is the folder's own if it is left out."""
    if not isinstance(source, ModelSource):
        source = resolve_model(str(source), load_format=load_format)
    config = config or load_config(source, quantization=quantization)
    backend = SdpaBackend(attention_shape(config, page_size=16, dtype=dtype), CPU)
    model = load_model(
        source, config, backend, device=CPU, dtype=dtype, max_positions=64, load_format=load_format, **settings
    )
    assert isinstance(model, DenseDecoder)
    return model


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) drop tensors of a model folder."""
    found = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / "model.safetensors")
