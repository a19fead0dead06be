"""Speculation is lossless on targets that are not Llama: Gemma 3, and a model by transformers' own code."""

from __future__ import annotations

import pytest

from draftloop.errors import ConfigError
from helpers import (
    MODES,
    VOCAB,
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    tiny_model,
)
from transformers_models import tiny_of

MODELS = ("gemma3", "starcoder2")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_changes_no_text(name: str, mode: str, device: str) -> None:
    """Through windows that slide on, whatever is captured."""
    target, draft = tiny_of(name), tiny_of(name, noise=0.01)
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
    target = tiny_of(name)
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    llm = engine(target, speculative_config=spec, cudagraph_capture_sizes=(2, 8))
    asked = prompts(4)
    assert answers(llm.generate(asked, greedy())) == [oracle(prompt, 24, model=target) for prompt in asked]


def test_a_llama_drafts_for_a_model_of_transformers() -> None:
    """Of another size of vocabulary: only tokens that both know are drafted."""
    target = tiny_of("starcoder2")
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
        make_engine(tiny_of("starcoder2")).close()
    assert "Starcoder2ForCausalLM runs by transformers' own code" in caplog.text


def test_results_that_depend_on_the_batch_are_not_promised() -> None:
    with pytest.raises(ConfigError, match="deterministic is set, but Starcoder2ForCausalLM"):
        make_engine(tiny_of("starcoder2"), deterministic=True)
