"""Speculation is lossless on targets that are not Llama: Gemma 3, and a model by transformers' own code."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from draftloop.errors import ConfigError
from helpers import (
    MODES,
    VOCAB,
    _folder,
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    tiny_model,
)

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
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
}


@functools.cache
def model(name: str, *, noise: float = 0.0) -> str:
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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_changes_no_text(name: str, mode: str, device: str) -> None:
    """Through windows that slide on, whatever is captured."""
    target, draft = model(name), model(name, noise=0.01)
    spec = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    settings = {"cudagraph_mode": mode, "cudagraph_capture_sizes": (2, 8), "device": device, "dtype": "float32"}
    llm = engine(target, speculative_config=spec, **settings)
    asked = prompts(4)
    expected = [oracle(prompt, 24, model=target, device=device) for prompt in asked]
    assert answers(llm.generate(asked, greedy())) == expected
    assert llm.engine.core.stats.num_accepted_tokens > 0
    assert_all_free(llm)


@pytest.mark.parametrize("name", MODELS)
def test_lookup_changes_no_text(name: str) -> None:
    target = model(name)
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    llm = engine(target, speculative_config=spec, cudagraph_capture_sizes=(2, 8))
    asked = prompts(4)
    assert answers(llm.generate(asked, greedy())) == [oracle(prompt, 24, model=target) for prompt in asked]


def test_a_llama_drafts_for_a_model_of_transformers() -> None:
    """Of another size of vocabulary: only tokens that both know are drafted."""
    target = model("starcoder2")
    for vocab in (VOCAB - 6, VOCAB + 8):
        spec = {
            "method": "draft_model",
            "model": tiny_model(f"of-{vocab}-tokens", vocab=vocab),
            "num_speculative_tokens": 3,
        }
        llm = engine(target, speculative_config=spec, cudagraph_capture_sizes=(2, 8))
        asked = prompts(3)
        assert answers(llm.generate(asked, greedy())) == [oracle(prompt, 24, model=target) for prompt in asked]


def test_the_start_says_that_the_fallback_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="draftloop"):
        make_engine(model("starcoder2")).close()
    assert "Starcoder2ForCausalLM runs by transformers' own code" in caplog.text


def test_results_that_depend_on_the_batch_are_not_promised() -> None:
    with pytest.raises(ConfigError, match="deterministic is set, but Starcoder2ForCausalLM"):
        make_engine(model("starcoder2"), deterministic=True)
