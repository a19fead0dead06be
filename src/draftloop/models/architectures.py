"""How each architecture differs from Llama, in the words of `ModelConfig`. Imports nothing heavy.

Source: the published checkpoints, their `config.json`, and the defaults that transformers gives to missing keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftloop.errors import ConfigError
from draftloop.models.experts_config import (
    MIXTRAL_DEFAULTS,
    QWEN_DEFAULTS,
    read_mixtral_experts,
    read_qwen_experts,
)
from draftloop.models.rope_config import RopeConfig, read_rope

LayerType = Literal["full_attention", "sliding_attention"]
Activation = Literal["silu", "gelu_tanh"]

SLIDING, FULL = LAYER_TYPES = ("sliding_attention", "full_attention")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's name -> ours."""


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of a layer, by their names in checkpoints; None: there is none in this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GLM_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
OLMO_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Architectures whose `config.json` is read alike."""

    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """The fields of `ModelConfig` that are not read as Llama's are."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers gives to missing keys where it is not what it gives to Llama."""


def _needed(hf: Mapping[str, Any], key: str) -> Any:
    """What has a default where it is missing, but not where it is null."""
    if hf[key] is None:
        raise ConfigError(f"{key} is null in the model's config; give it a value, or leave it out")
    return hf[key]


def _bias(hf: Mapping[str, Any], key: str = "attention_bias") -> bool:
    return bool(hf.get(key, False))


def _biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": _bias(hf), "o_bias": _bias(hf), "mlp_bias": _bias(hf, "mlp_bias")}


def _mistral(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": hf.get("sliding_window", 4096)}


def _qwen2(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, **_late_windows(hf)}


def _qwen3(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": _bias(hf), "o_bias": _bias(hf), "qk_norm": True, **_late_windows(hf)}


def _qwen3_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    slides = hf.get("use_sliding_window", False)
    return {
        "qkv_bias": _bias(hf),
        "o_bias": _bias(hf),
        "qk_norm": True,
        "sliding_window": hf.get("sliding_window", 4096) if slides else None,
        "experts": read_qwen_experts(hf),
    }


def _mixtral(hf: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope(hf, theta=1e6)
    return {"sliding_window": hf.get("sliding_window"), "rope": rope, "experts": read_mixtral_experts(hf)}


def _gemma2(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is set in the model's config; supported: causal models")
    return {
        "qkv_bias": _bias(hf),
        "o_bias": _bias(hf),
        "norms": GEMMA_NORMS,
        "norm_offset": True,
        "scale": _needed(hf, "query_pre_attn_scalar") ** -0.5,
        "attention_cap": hf.get("attn_logit_softcapping") or 0.0,
        "logit_cap": hf.get("final_logit_softcapping"),
        "embedding_scale": hf["hidden_size"] ** 0.5,
        **_windows(hf, _every(hf, 2)),
    }


def _gemma3(hf: Mapping[str, Any]) -> dict[str, Any]:
    found = _gemma2(hf) | {"qk_norm": True} | _windows(hf, _every(hf, hf.get("sliding_window_pattern") or 6))
    return found | _ropes(hf, found["layer_types"], theta=1e6, local_theta=_needed(hf, "rope_local_base_freq"))


def _phi3(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "fused_qkv": True,
        "fused_gate_up": True,
        "sliding_window": hf.get("sliding_window"),
        "rope": read_rope(hf, share=1.0),
    }


def _olmo2(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": _bias(hf),
        "o_bias": _bias(hf),
        "norms": OLMO_NORMS,
        "qk_norm": True,
        "whole_qk_norm": True,
    }


def _olmo3(hf: Mapping[str, Any]) -> dict[str, Any]:
    found = _olmo2(hf) | _windows(hf, _every(hf, 4))
    theta = hf.get("rope_theta") or 500_000.0
    return found | _ropes(hf, found["layer_types"], theta=theta, local_theta=theta)


def _smollm3(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, rope = range(hf["num_hidden_layers"]), read_rope(hf, theta=2e6)
    period = hf.get("no_rope_layer_interval") or 4
    turns = hf.get("no_rope_layers") or [(layer + 1) % period != 0 for layer in layers]
    slides = hf.get("use_sliding_window") and hf.get("sliding_window") is not None
    types = [SLIDING if slides and not turn else FULL for turn in turns]
    return {
        **_biases(hf),
        "rope": rope,
        "ropes": tuple(rope if turn else RopeConfig(kind="none") for turn in turns),
        **(_windows(hf, types) if slides else {}),
    }


def _glm4(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": _bias(hf),
        "norms": GLM_NORMS,
        "fused_gate_up": True,
        "rope": read_rope(hf, share=0.5),
        "interleaved_rope": True,
    }


def _granite(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_biases(hf),
        "scale": hf.get("attention_multiplier", 1.0),
        "embedding_scale": hf.get("embedding_multiplier", 1.0),
        "residual_multiplier": hf.get("residual_multiplier", 1.0),
        "logit_divisor": hf.get("logits_scaling", 1.0),
    }


def _ropes(hf: Mapping[str, Any], types: Sequence[str], *, theta: float, local_theta: float) -> dict[str, Any]:
    """Full layers turn as the config says, sliding ones plainly unless there are settings by type of layer."""
    full = read_rope(hf, layer_type=FULL, theta=theta)
    by_type = hf if SLIDING in (hf.get("rope_parameters") or {}) else {**hf, "rope_scaling": None, "rope_theta": None}
    local = read_rope(by_type, layer_type=SLIDING, theta=local_theta)
    return {"rope": full, "ropes": tuple(full if kind == FULL else local for kind in types)}


def _every(hf: Mapping[str, Any], period: int) -> list[str]:
    """Each last of so many layers sees everything."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(hf["num_hidden_layers"])]


def _windows(hf: Mapping[str, Any], default: Sequence[str]) -> dict[str, Any]:
    """The window, and which layers have it. Raises ConfigError for another type of layer."""
    types = tuple(hf.get("layer_types") or default)
    for kind in types:
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"layer_types has {kind!r} in the model's config; supported: 'full_attention', 'sliding_attention'"
            )
    return {"sliding_window": hf.get("sliding_window"), "layer_types": types}


def _late_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's: none unless asked for, and then from some layer on."""
    if not hf.get("use_sliding_window", False) or hf.get("sliding_window", 4096) is None:
        return {}
    first = hf.get("max_window_layers", 28)
    types = [FULL if layer < first else SLIDING for layer in range(hf["num_hidden_layers"])]
    return _windows({"sliding_window": 4096, **hf}, types)


GEMMA_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2 = Family(
    read=_gemma2, defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
)
GEMMA3 = Family(
    read=_gemma3,
    defaults={
        **GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_local_base_freq": 10_000.0,
    },
)
QWEN2 = Family(read=_qwen2)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(read=_biases),
    "MistralForCausalLM": Family(read=_mistral),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": Family(read=_qwen3, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(read=_qwen3_moe, defaults=QWEN_DEFAULTS),
    "MixtralForCausalLM": Family(read=_mixtral, defaults=MIXTRAL_DEFAULTS),
    "MiMoForCausalLM": QWEN2,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Phi3ForCausalLM": Family(read=_phi3, defaults={"rms_norm_eps": 1e-5}),
    "Olmo2ForCausalLM": Family(read=_olmo2, defaults={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(read=_olmo3, defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "SmolLM3ForCausalLM": Family(read=_smollm3, defaults={"tie_word_embeddings": True}),
    "Glm4ForCausalLM": Family(
        read=_glm4, defaults={"rms_norm_eps": 1.5625e-7, "attention_bias": True, "head_dim": 128}
    ),
    "GraniteForCausalLM": Family(read=_granite),
}
"""What `DenseDecoder` can run, by Hugging Face's class. MiMo is Qwen2 with multi-token-prediction heads."""
