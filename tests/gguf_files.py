"""GGUF files of Hugging Face's tensors; what llama.cpp calls them the `gguf` package says, not the code under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from helpers import HEADS, HIDDEN, KV_HEADS, LAYERS, MAX_LEN

LAYERS_AT_MOST = 8


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp keeps queries and keys: the halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file of Hugging Face's tensors; `kind` for matrices; `settings` of the architecture and tokenizer."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], LAYERS_AT_MOST)
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "context_length": MAX_LEN,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": 2 * HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    for key, value in (common | (settings or {})).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        add = writer.add_array if isinstance(value, list) else add
        (writer.add_uint32 if isinstance(value, int) else add)(name, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    for name, tensor in tensors.items():
        weight, part = tensor.numpy(), name.split(".")
        key = name if name.startswith("rope") else names.get_name(name, (".weight", ".bias"))
        assert key is not None, name
        if architecture == "llama" and part[-2] in ("q_proj", "k_proj"):
            weight = permuted(weight, HEADS if part[-2] == "q_proj" else KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if kind is not None and weight.ndim == 2:
            writer.add_tensor(key, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
