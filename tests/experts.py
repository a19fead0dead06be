"""Tiny mixtures of experts, on disk: the tiny model's layers, with a router and experts in the place of its MLPs.

Made without transformers, which takes seconds to import in each process of a test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from helpers import HEADS, HIDDEN, LAYERS, tiny_model

Family = Literal["qwen3_moe", "mixtral"]
NUM_EXPERTS, PER_TOKEN, INNER, HEAD_DIM = 6, 2, 64, HIDDEN // HEADS
CONFIGS: dict[Family, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": NUM_EXPERTS, "moe_intermediate_size": INNER,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": HEAD_DIM,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": NUM_EXPERTS, "intermediate_size": INNER,
    },
}  # fmt: skip
NAMES: dict[Family, tuple[str, str, str, str]] = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def tiny_experts(family: Family = "qwen3_moe", *, fused: bool = False) -> str:
    """Folder of a model of two layers in fp32; `fused`: all experts of a layer in one tensor, as transformers 5 does.

    The same weights either way.
    """
    source = Path(tiny_model())
    folder = source.with_name(f"{family}{'-fused' * fused}")
    if folder.exists():
        return str(folder)
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    changes = {**CONFIGS[family], "model_type": family, "num_experts_per_tok": PER_TOKEN}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    block, gate, up, down = NAMES[family]
    weights = {name: w for name, w in load_file(source / "model.safetensors").items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, std: float = 0.2) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        if family == "qwen3_moe":
            for norm in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(HEAD_DIM)
        router, gate_up = draw(NUM_EXPERTS, HIDDEN), draw(NUM_EXPERTS, 2 * INNER, HIDDEN)
        downs = draw(NUM_EXPERTS, HIDDEN, INNER)
        if fused:
            weights[f"{prefix}.mlp.gate.weight"] = router
            weights[f"{prefix}.mlp.experts.gate_up_proj"] = gate_up
            weights[f"{prefix}.mlp.experts.down_proj"] = downs
            continue
        weights[f"{prefix}.{block}.gate.weight"] = router
        for expert in range(NUM_EXPERTS):
            before = f"{prefix}.{block}.experts.{expert}"
            parts = {gate: gate_up[expert, :INNER], up: gate_up[expert, INNER:], down: downs[expert]}
            weights |= {f"{before}.{name}.weight": part.clone() for name, part in parts.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
