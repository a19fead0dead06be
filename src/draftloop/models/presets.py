"""Shapes of models by name, for benchmarks and tests: `--load-format dummy` fills them with random weights."""

from __future__ import annotations

from dataclasses import replace

from draftloop.models.config import ModelConfig
from draftloop.models.experts_config import ExpertsConfig
from draftloop.models.rope_config import RopeConfig

_LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(kind="llama3", theta=500_000.0, factor=8.0, original_max_position_embeddings=8192),
    bos_token_id=128_000,
    eos_token_ids=(128_001, 128_008, 128_009),
)
_QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rope=RopeConfig(theta=1_000_000.0),
    qk_norm=True,
    bos_token_id=151_643,
    eos_token_ids=(151_645, 151_643),
)
PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": replace(_LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64),
    "llama-3.2-1b": replace(
        _LLAMA_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        rope=replace(_LLAMA_8B.rope, factor=32.0),
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-30b-a3b": replace(
        _QWEN3_8B,
        architecture="Qwen3MoeForCausalLM",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_kv_heads=4,
        experts=ExpertsConfig(num_experts=128, num_per_token=8, inner_size=768, normalise=True),
    ),
    "smollm2-135m-shape": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "tiny": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
        dtype="float32",
    ),
}
"""Shapes without weights, for benchmarks and tests with `load_format="dummy"`."""
