"""Tiny models of architectures other than Llama's, made and saved by transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from helpers import VOCAB, _folder

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 8
LONGER_WINDOW = 24
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # a window of more than a page, which is passed soon
    "gemma3 of longer windows": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": LONGER_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": LONGER_WINDOW}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
}


@functools.cache
def tiny_of(name: str, *, noise: float = 0.0) -> str:
    """Folder of a tiny random model; with `noise` one that says nearly the same."""
    config_name, class_name, settings = MODELS[name]
    config = getattr(transformers, config_name)(**SIZES, **settings)
    torch.manual_seed(0)
    made = getattr(transformers, class_name)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.2 if weight.dim() == 2 else 0.1
            weight.add_(torch.randn(weight.shape, generator=generator) * spread)
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * noise)
    folder = _folder() / f"{name}-{noise}"
    made.save_pretrained(folder)
    return str(folder)
