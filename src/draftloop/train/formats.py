"""What the config.json of an exported drafter says: the `speculators` layout, and Hugging Face's for layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from draftloop.models.config import ModelConfig, RopeConfig
from draftloop.train.method import Subject

SPECULATORS_VERSION = "0.3.0"
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def layer_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A decoder's shape under Hugging Face's names; `ModelConfig.from_hf` reads the same back."""
    return {
        "architectures": [config.architecture],
        "model_type": MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": dtype,
        **_rope(config.rope),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    unset = RopeConfig()
    settings = {
        field.name: value
        for field in dataclasses.fields(rope)
        if field.name not in ("kind", "theta") and (value := getattr(rope, field.name)) != getattr(unset, field.name)
    }
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.kind, **settings}}


def speculators_config(subject: Subject, algorithm: str, architecture: str, num_drafts: int) -> dict[str, Any]:
    """The keys that every drafter in this layout has; a method adds its own and `transformer_layer_config`."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": subject.name, "architectures": [subject.config.architecture]},
        },
        "torch_dtype": str(subject.dtype).removeprefix("torch."),
    }
