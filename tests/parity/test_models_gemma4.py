"""Gemma 4 text models: logits and hidden states of tiny random ones, through the paged caches, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_models import CPU, NUM_TOKENS, PAGE_SIZE, load, run_chunks

from draftloop.attention.sdpa import SdpaBackend
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import attention_shapes
from draftloop.models.dense import attention_shape
from draftloop.models.gemma4_config import Gemma4Config
from draftloop.models.loader import load_config, load_model, resolve_model

VOCAB = 131
PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
SMALL = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
SHARED = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}

CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "keys_are_values": {**PLAIN, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "own_embeddings": SMALL,
    "shared_caches": {**SMALL, **SHARED},
    "capped": {**PLAIN, "final_logit_softcapping": 3.0},
    "untied_with_biases": {**PLAIN, "tie_word_embeddings": False, "attention_bias": True},
    "full_layers_alone": {**PLAIN, "layer_types": ["full_attention"] * 6},
    "everything_turns": {
        **PLAIN,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        },
    },
}


def make_config(**settings: Any) -> transformers.Gemma4TextConfig:
    return transformers.Gemma4TextConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "max_position_embeddings": 256,
            **settings,
        }
    )


@torch.no_grad()
def make_reference(folder: Path, **settings: Any) -> transformers.PreTrainedModel:
    """A random transformers model, saved to `folder`."""
    torch.manual_seed(0)
    reference = transformers.Gemma4ForCausalLM(make_config(**settings)).eval()
    for parameter in reference.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    for layer in reference.model.layers:
        layer.layer_scalar.fill_(0.5 + torch.rand(1).item())
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """B44: the prompt is longer than the window, and blocks end at both sides of its edge."""
    reference = make_reference(tmp_path, **CASES[name])
    token_ids = torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference(token_ids[None], output_hidden_states=True)
    model = load(tmp_path)
    decode = [1] * 12
    for chunks in ([NUM_TOKENS], [7, 5, NUM_TOKENS - 12 - len(decode), *decode]):
        logits, aux = run_chunks(model, token_ids, chunks, aux_layers=(2, 0, 5, -1))
        torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=0)
        for layer, state in zip((2, 0, 5, -1), aux, strict=True):
            theirs = expected.hidden_states[layer][0]
            torch.testing.assert_close(state, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_shape_is_read_alike_in_both_spellings(name: str, tmp_path: Path) -> None:
    """transformers saves what differs by layer, published checkpoints say it for all full layers."""
    reference = make_reference(tmp_path, **CASES[name])
    saved = json.loads((tmp_path / "config.json").read_text())
    config = Gemma4Config.from_hf(saved)
    per_layer = saved.pop("per_layer_config")["1"]
    published = {"global_head_dim": per_layer["head_dim"]}
    if "num_key_value_heads" in per_layer:
        published["num_global_key_value_heads"] = per_layer["num_key_value_heads"]
    assert Gemma4Config.from_hf({**saved, **published}) == config
    assert config.num_parameters == sum(p.numel() for p in reference.parameters()) + config.num_layers  # the scalars


@torch.no_grad()
def test_the_text_model_of_a_model_for_more(tmp_path: Path) -> None:
    """Its tensors stand under another prefix, beside towers that text does not need."""
    from safetensors.torch import load_file, save_file

    reference = make_reference(tmp_path, **CASES["shared_caches"])
    text = json.loads((tmp_path / "config.json").read_text())
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    weights["model.vision_tower.patch.weight"] = torch.zeros(3, 3)
    weights["model.embed_vision.projection.weight"] = torch.zeros(3, 3)
    weights["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.zeros(3, 3)  # that layer reads another's
    save_file(weights, tmp_path / "model.safetensors")
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "eos_token_id": [1, 106]}))
    token_ids = torch.arange(NUM_TOKENS)
    logits, _ = run_chunks(load(tmp_path), token_ids, [NUM_TOKENS])
    torch.testing.assert_close(logits, reference(token_ids[None]).logits[0], atol=1e-4, rtol=0)
    assert load_config(resolve_model(str(tmp_path))).eos_token_ids == (1, 106)


def test_random_weights_have_norms_of_one_and_layers_at_full_strength(tmp_path: Path) -> None:
    make_reference(tmp_path, **CASES["shared_caches"])
    source = resolve_model(str(tmp_path), load_format="dummy")
    config = load_config(source)
    backend = SdpaBackend(attention_shapes(config, page_size=PAGE_SIZE, dtype=torch.float32)[0], CPU)
    model = load_model(source, config, backend, device=CPU, dtype=torch.float32, load_format="dummy")
    weights = dict(model.named_parameters())
    assert all(w.eq(1).all() for n, w in weights.items() if n.endswith(("norm", "scalar")))
    logits, _ = run_chunks(model, torch.arange(NUM_TOKENS), [NUM_TOKENS])
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"enable_moe_block": True}, "enable_moe_block, a mixture of experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types has 'linear_attention'"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types names 5 layers in the model's config; there are 6"),
        ({"per_layer_config": None, "global_head_dim": 15}, "full layers have heads of 15 numbers"),
        ({"num_kv_shared_layers": 5}, "read keys of full_attention layers before them, of which there is none"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7 in the model's config; it must be in [0, 6]"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type of full_attention layers is 'yarn'",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "the checkpoint is quantised ('awq')"),
        ({"hidden_size": None}, "no 'hidden_size', which Gemma4ForCausalLM needs"),
    ],
)
def test_what_cannot_run_is_named(change: dict[str, Any], said: str) -> None:
    hf = {**make_config(**PLAIN).to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    hf["per_layer_config"] = {str(k): v for k, v in (hf.get("per_layer_config") or {}).items()}
    with pytest.raises(ConfigError) as caught:
        Gemma4Config.from_hf({**hf, **change})
    assert said in str(caught.value)


def test_heads_of_one_shape_are_asked_of_models_that_have_one() -> None:
    """What trains a drafter, and drafters' own layers, know one shape."""
    hf = {**make_config(**PLAIN).to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    hf["per_layer_config"] = {str(k): v for k, v in (hf.get("per_layer_config") or {}).items()}
    config: ModelConfig = Gemma4Config.from_hf(hf)
    with pytest.raises(ConfigError, match="has layers of 2 shapes"):
        attention_shape(config, page_size=PAGE_SIZE, dtype=torch.float32)
