"""The embedded model: from the alias to an answer equal to transformers'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from draftloop.attention.base import AttentionBatch
from draftloop.attention.sdpa import SdpaBackend
from draftloop.models import smollm2
from draftloop.models.dense import attention_shape
from draftloop.models.loader import ModelSource, eos_token_ids, load_config, load_model, load_tokenizer, resolve_model

CPU = torch.device("cpu")
PAGE_SIZE = 16
NUM_NEW = 20

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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other are many times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.usefixtures("one_thread")
@torch.inference_mode()
def test_greedy_continuation_equals_transformers(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Tell me more about it."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    reference = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]),
        # said outright: the padding id is also in the prompt, and generate would mask it
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )[0, len(prompt) :].tolist()

    config = load_config(source)
    backend = SdpaBackend(attention_shape(config, page_size=PAGE_SIZE, dtype=torch.float32), CPU)
    model = load_model(source, config, backend, device=CPU, dtype=torch.float32, max_positions=256)
    num_pages = 256 // PAGE_SIZE
    kv = torch.zeros(config.num_layers, 2, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    page_table = torch.randperm(num_pages - 1, dtype=torch.int32)[None] + 1
    token_ids, start, output = torch.tensor(prompt), 0, []
    while len(output) < NUM_NEW:
        length = len(token_ids)
        positions = torch.arange(start, start + length)
        batch = AttentionBatch(
            rows_R=torch.zeros(1, dtype=torch.int32),
            query_starts_R1=torch.tensor([0, length], dtype=torch.int32),
            kv_lens_R=torch.tensor([start + length], dtype=torch.int32),
            positions_T=positions,
            slots_T=page_table[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE,
            page_table_MN=page_table,
            max_query_len=length,
            uniform=True,
        )
        hidden, _ = model(token_ids, kv, batch)
        token_ids, start = model.logits(hidden[-1:]).argmax(-1), start + length
        output.append(int(token_ids))
    assert output == expected
    assert "Paris" in tokenizer.decode(output)
