"""Reading config.json: what is understood, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from draftloop.errors import ConfigError
from draftloop.models.config import ARCHITECTURES, ModelConfig
from draftloop.models.experts_config import ExpertsConfig
from draftloop.models.presets import PRESETS
from draftloop.models.rope import cos_sin_table

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def of(architecture: str, **settings: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, "architectures": [architecture], **settings})


def test_defaults_are_those_of_transformers() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope.kind == "default"
    assert config.rope.theta == 10_000
    assert config.dtype == "float32"
    assert not config.tie_word_embeddings
    assert of("Qwen3ForCausalLM").head_dim == 128
    assert ModelConfig.from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


def test_biases_and_norms_follow_the_architecture() -> None:
    llama = of("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = of("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert of("Qwen3ForCausalLM").qk_norm


def test_sliding_windows_follow_the_architecture() -> None:
    def windows(config: ModelConfig) -> list[int | None]:
        return [config.window(layer) for layer in range(config.num_layers)]

    assert windows(of("LlamaForCausalLM", sliding_window=8)) == [None] * 3
    assert windows(of("MistralForCausalLM", sliding_window=8)) == [8] * 3
    assert windows(of("MistralForCausalLM", sliding_window=None)) == [None] * 3
    assert windows(of("Qwen2ForCausalLM", sliding_window=8)) == [None] * 3
    assert windows(of("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=2)) == [
        None,
        None,
        8,
    ]
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(of("Qwen3ForCausalLM", sliding_window=8, use_sliding_window=True, layer_types=types)) == [
        8,
        None,
        None,
    ]


def test_layers_with_experts_follow_the_architecture() -> None:
    def layers(config: ModelConfig) -> list[bool]:
        return [config.has_experts(layer) for layer in range(config.num_layers)]

    qwen3 = of("Qwen3MoeForCausalLM")
    assert layers(qwen3) == [True] * 3
    assert qwen3.experts == ExpertsConfig(num_experts=128, num_per_token=8, inner_size=768)
    assert layers(of("Qwen3MoeForCausalLM", decoder_sparse_step=2)) == [False, True, False]
    assert layers(of("Qwen3MoeForCausalLM", mlp_only_layers=[0])) == [False, True, True]
    assert of("Qwen3MoeForCausalLM", mlp_only_layers=[0, 1, 2]).experts is None
    mixtral = of("MixtralForCausalLM")
    assert layers(mixtral) == [True] * 3
    assert mixtral.experts is not None
    assert (mixtral.experts.num_experts, mixtral.experts.num_per_token, mixtral.experts.normalise) == (8, 2, True)
    assert mixtral.experts.inner_size == LLAMA["intermediate_size"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_experts_per_tok": 9, "num_experts": 4}, "num_experts_per_tok is 9 in the model's config; there are 4"),
        ({"moe_intermediate_size": 0}, "inner_size of the experts is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "experts have 'silu' alone"),
        ({"quantization_config": {"quant_method": "fp8"}}, "experts of 8 or 4 bits are not supported"),
    ],
)
def test_experts_that_cannot_be_run_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of("Qwen3MoeForCausalLM", **settings)


def test_eos_may_be_one_id_or_several() -> None:
    assert of("LlamaForCausalLM", eos_token_id=2).eos_token_ids == (2,)
    assert of("LlamaForCausalLM", eos_token_id=[2, 3]).eos_token_ids == (2, 3)
    assert of("LlamaForCausalLM", eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_in_both_spellings(key: str) -> None:
    assert of("LlamaForCausalLM", **{key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["'GemmaForCausalLM'", *ARCHITECTURES]),
        ({"architectures": None, "model_type": "bert"}, ["model_type 'bert'", *ARCHITECTURES]),
        ({"hidden_size": None}, ["'hidden_size'", "LlamaForCausalLM"]),
        ({"num_hidden_layers": 0}, ["num_layers is 0", ">= 1"]),
        ({"vocab_size": "many"}, ["vocab_size is 'many'", "integer"]),
        ({"num_key_value_heads": 3}, ["num_heads is 4", "multiple of num_kv_heads, 3"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window is 0", ">= 1 or null"]),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            ["use_bidirectional_attention is set", "supported: causal models"],
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantised ('gptq')", "bfloat16"]),
        ({"dtype": "float8_e4m3fn"}, ["'float8_e4m3fn'", "float32, bfloat16, float16"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "default, linear, llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope' without 'short_factor'"]),
        ({"rope_scaling": {"type": "linear"}}, ["'linear' without 'factor'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["'llama3' without 'low_freq_factor'"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "1.0"]),
    ],
)
def test_refusals_name_value_and_limit(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_hf({**LLAMA, **settings})
    for word in words:
        assert word in str(raised.value)


def test_layer_types_must_fit() -> None:
    for types, word in ((["sliding_attention"], "names 1 layers"), (["chunked"] * 3, "'chunked'")):
        with pytest.raises(ConfigError, match=word):
            of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=types)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-1b", 1.236),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.53),
        ("smollm2-135m-shape", 0.1345),
        ("tiny", 0.0001),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005 if billions > 0.1 else 0.5)


def test_importing_the_config_is_cheap() -> None:
    code = (
        "import sys, draftloop.models.loader; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_factors_for_heads_of_another_size_are_refused() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}
    config = of("LlamaForCausalLM", rope_parameters={**rope, "original_max_position_embeddings": 64})
    with pytest.raises(ConfigError, match="longrope has 3 factors in the model's config; heads have 8 frequencies"):
        cos_sin_table(config.rope, head_dim=config.head_dim, max_positions=32, device=torch.device("cpu"))
