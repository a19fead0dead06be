"""The embedded model: found by its alias, and its tokenizer. That its answers are transformers': test_exact.py."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from draftloop.cli import main
from draftloop.models import smollm2
from draftloop.models.loader import ModelSource, eos_token_ids, load_config, load_tokenizer, resolve_model

TEXTS = [
    "Hello, world! Don't they say it's   easy?\n\n\tTabs and  spaces ",
    "def area(r: float) -> float:\n    return 3.14159 * r**2  # 1234567890\n",
    "In 2024, 1,000,000 people paid $3.50; that is 100%.",
    "Grüße, π ≈ 3.14 — 日本語のテキスト, кириллица, عربي, 😀👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    found = load_tokenizer(source)
    assert found is not None
    return found


def test_a_second_resolve_neither_downloads_nor_reads_the_weights(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_download", "sha256"):
        monkeypatch.setattr(smollm2, name, None)
    assert resolve_model("smollm2-135m") == source


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(source: ModelSource, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < load_config(source).vocab_size


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert tokenizer("<|im_end|>")["input_ids"] == list(eos_token_ids(source)) == [2]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_through_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second question means nothing without the first."""
    lines = iter(["What is the capital of France?", "And of Italy?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    main(["chat", "smollm2-135m", "--temperature", "0", "--max-tokens", "12", "--max-model-len", "256"])
    said = capsys.readouterr().out
    assert "Paris" in said
    assert "Rome" in said
