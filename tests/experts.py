"""A tiny mixture of experts, on disk: the tiny model's layers, with a router and experts in the place of its MLPs."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from helpers import HIDDEN, LAYERS, tiny_model

NUM_EXPERTS, PER_TOKEN, INNER = 6, 2, 64


@functools.cache
def tiny_experts() -> str:
    """Folder of a two-layer Qwen3-MoE in fp32."""
    source = Path(tiny_model())
    folder = source.with_name("experts")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    changes = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": INNER, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": HIDDEN // config["num_attention_heads"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    weights = {name: w for name, w in load_file(source / "model.safetensors").items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, std: float = 0.2) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(changes["head_dim"])
        weights[f"{prefix}.mlp.gate.weight"] = draw(NUM_EXPERTS, HIDDEN)
        for expert in range(NUM_EXPERTS):
            block = f"{prefix}.mlp.experts.{expert}"
            weights[f"{block}.gate_proj.weight"] = draw(INNER, HIDDEN)
            weights[f"{block}.up_proj.weight"] = draw(INNER, HIDDEN)
            weights[f"{block}.down_proj.weight"] = draw(HIDDEN, INNER)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
