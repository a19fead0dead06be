"""The real Gemma 3 270M says what transformers says that reads the same file: `pytest --large-models`.

Fetches 240 MB, unless they are in the cache, and takes about two minutes.
"""

from __future__ import annotations

import pytest
import torch

from draftloop.engine.llm import LLM
from draftloop.models import gemma3
from draftloop.request import SamplingParams

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at")
SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}


@pytest.fixture(scope="module", autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--large-models"):
        pytest.skip("fetches 240 MB; --large-models runs it")
    gemma3.prepare()


@pytest.fixture(scope="module")
@torch.no_grad()
def expected() -> list[list[int]]:
    """Of each prompt, what transformers says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gemma3.cached_file()
    assert file is not None
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    said = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        # without what ends a text: neither side may stop early
        found = model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        said.append(found[0, ids.shape[1] :].tolist())
    return said


@pytest.mark.parametrize(
    "speculation", [None, {"method": "ngram", "num_speculative_tokens": 4}], ids=["plain", "ngram"]
)
def test_greedy_text_is_that_of_transformers(speculation: dict | None, expected: list[list[int]]) -> None:
    llm = LLM("gemma3-270m", speculative_config=speculation, **SETTINGS)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    llm.close()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert "France" in outputs[0].outputs[0].text
