"""The real Gemma 3 270M says what transformers says that reads the same file.

It needs the file, which `draftloop generate --model gemma3-270m` fetches (240 MB), and some minutes.
"""

from __future__ import annotations

import pytest
import torch

from draftloop.engine.llm import LLM
from draftloop.models import gemma3
from draftloop.request import SamplingParams

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at")

pytestmark = pytest.mark.skipif(gemma3.cached_file() is None, reason="gemma3-270m is not in the cache")


@pytest.mark.parametrize(
    "speculation", [None, {"method": "ngram", "num_speculative_tokens": 4}], ids=["plain", "ngram"]
)
@torch.no_grad()
def test_greedy_text_is_that_of_transformers(speculation: dict | None) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate alone")
    from transformers import AutoModelForCausalLM

    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}
    llm = LLM("gemma3-270m", speculative_config=speculation, **settings)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    llm.close()
    file = gemma3.cached_file()
    assert file is not None
    reference = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        # without what ends a text: neither side may stop early
        said = reference.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == said[0, ids.shape[1] :].tolist()
