"""Tiny EAGLE heads on disk, in every layout that is published, and a toy target for which a head is always right."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftloop.drafters.eagle_config import EagleConfig
from draftloop.models.config import ModelConfig, RopeConfig
from helpers import HEADS, HIDDEN, KV_HEADS, MAX_LEN, VOCAB, _folder

DRAFT_VOCAB = 64


def head_config(method: str = "eagle3", *, width: int = HIDDEN, max_len: int = MAX_LEN, **changes: Any) -> EagleConfig:
    """A one-layer head for the tiny target; three aux states for EAGLE-3, a reduced vocabulary."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=16,
        max_position_embeddings=max_len,
        rope=RopeConfig(original_max_position_embeddings=max_len),
        dtype="float32",
    )
    eagle3 = {"num_aux": 3, "wide_layers": (True,), "input_norms": (True,), "has_map": True, "layer_ids": (0, 1, 2)}
    eagle1 = {"wide_layers": (False,), "input_norms": (False,), "final_norm": False, "own_head": False}
    base = {
        "layout": "test",
        "model": model,
        "target_hidden_size": HIDDEN,
        "draft_vocab_size": DRAFT_VOCAB if method == "eagle3" else VOCAB,
        **(eagle3 if method == "eagle3" else {**eagle1, "fc_bias": True}),
    }
    return EagleConfig(method=method, **{**base, **changes})  # type: ignore[arg-type]


def head_weights(config: EagleConfig, *, seed: int = 3, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random weights by plain name, large enough that every part of the head changes what is drafted."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        if name == "d2t":
            ids = torch.randperm(vocab, generator=generator)[: shape[0]].sort().values
            weights[name] = ids - torch.arange(shape[0])
        elif len(shape) == 1:
            weights[name] = 1 + 0.3 * torch.randn(shape, generator=generator)
        else:
            std = 1.0 if "embed" in name else 0.6 if "lm_head" in name else 0.2
            weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def config_json(config: EagleConfig, layout: str = "top") -> dict[str, Any]:
    """config.json of a head: "top" and "nested" say where the layer ids stand; "speculators", "deepspec"."""
    model = config.model
    plain = {
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if config.method == "eagle":
        return {"architectures": ["LlamaForCausalLM"], **plain, "bias": config.fc_bias}
    options = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    ids = {"eagle_aux_hidden_state_layer_ids": list(config.layer_ids or ())} if config.layer_ids else {}
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": plain,
            **options,
            **ids,
        }
    if layout == "deepspec":
        ids = {"target_layer_ids": list(config.layer_ids or ()), "ttt_length": 7, "draft_num_hidden_layers": 1}
        return {"architectures": ["Qwen3Eagle3Model"], **plain, "model_type": "qwen3", **ids}
    if layout == "nested":
        ids = {"eagle_config": {**ids, "use_aux_hidden_state": True}}
    return {"architectures": ["LlamaForCausalLMEagle3"], **plain, **options, **ids}


def file_names(weights: dict[str, Tensor], style: str) -> dict[str, Tensor]:
    """Rename from plain names: "midlayer" (EAGLE, SpecForge), "model" (NeMo) or "plain" (speculators)."""
    if style == "midlayer":
        return {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    if style == "model":
        bare = ("lm_head", "d2t")
        return {name if name.startswith(bare) else f"model.{name}": weight for name, weight in weights.items()}
    return weights


@functools.cache
def tiny_head(
    name: str,
    config: EagleConfig | None = None,
    *,
    method: str = "eagle3",
    layout: str = "top",
    style: str = "midlayer",
    seed: int = 3,
    pickled: bool = False,
) -> str:
    """Folder of a head with random weights."""
    config = config or head_config(method)
    weights = head_weights(config, seed=seed)
    if "d2t" in weights:  # training's own, which nobody needs
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    return write_head(name, config_json(config, layout), file_names(weights, style), pickled=pickled)


def write_head(name: str, config: dict[str, Any], weights: dict[str, Tensor], *, pickled: bool = False) -> str:
    folder = _folder() / f"head-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file({k: w.contiguous() for k, w in weights.items()}, folder / "model.safetensors")
    return str(folder)
