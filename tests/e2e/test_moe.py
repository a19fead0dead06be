"""Mixtures of experts as targets: speculation changes no text, whatever is captured, padded and poisoned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from heads import tiny_head
from helpers import MODES, VOCAB, _folder, answers, assert_all_free, engine, greedy, make_engine, oracle, prompts

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_hidden_layers": 2, "intermediate_size": 48, "num_local_experts": 4}),
}
DRAFTERS = {
    "ngram": lambda name: {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "draft_model": lambda name: {
        "method": "draft_model",
        "model": moe_model(name, noise=0.01),
        "num_speculative_tokens": 3,
    },
    "eagle3": lambda name: {"method": "eagle3", "model": tiny_head("eagle3"), "num_speculative_tokens": 3},
}


@functools.cache
def moe_model(name: str, *, noise: float = 0.0) -> str:
    """Folder of a tiny random model; with `noise` one that says nearly the same."""
    family, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for spread in (1.0, noise):
            for weight in made.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2 * spread)
    folder = _folder() / f"moe-{name}-{noise}"
    made.save_pretrained(folder)
    return str(folder)


def check(llm: LLM, name: str) -> None:
    asked = prompts(5)
    assert answers(llm.generate(asked, greedy())) == [oracle(prompt, 24, model=moe_model(name)) for prompt in asked]
    assert_all_free(llm)


ALL_MODES = [("qwen3", "draft_model", mode) for mode in MODES]
BY_DEFAULT = [("qwen3", "eagle3"), ("qwen3", "ngram"), ("mixtral", "draft_model")]


@pytest.mark.parametrize(
    ("name", "drafter", "mode"), [*ALL_MODES, *((*case, "FULL_AND_PIECEWISE") for case in BY_DEFAULT)]
)
def test_drafts_change_no_text(name: str, drafter: str, mode: str) -> None:
    """Each decoding step hits other experts than the one that was captured; what padding holds hits none that count."""
    spec = DRAFTERS[drafter](name)
    sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": (2, 8)}
    llm = engine(moe_model(name), speculative_config=spec, poison=True, **sizes)
    check(llm, name)
    if drafter == "draft_model":
        assert llm.engine.core.stats.num_accepted_tokens > 20
    report = llm.get_graph_report()
    assert mode == "NONE" or not [row for row in report.rows if row.phase == "target.verify" and row.eager_runs]


def test_the_text_is_that_of_transformers() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(moe_model("qwen3"))
    for prompt in prompts(2):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert oracle(prompt, 24, model=moe_model("qwen3")) == expected[0, len(prompt) :].tolist()


def test_deterministic_means_bit_for_bit() -> None:
    llm = make_engine(moe_model("qwen3"), deterministic=True)
    asked = prompts(4)
    together = llm.generate(asked, greedy(12, logprobs=0))
    alone = [llm.generate(prompt, greedy(12, logprobs=0))[0] for prompt in asked]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    llm.close()


def test_experts_of_8_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization is 'fp8'; experts of 8 or 4 bits are not supported"):
        make_engine(moe_model("qwen3"), quantization="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_graphs_and_loops_give_the_text_of_plain_decoding(name: str, drafter: str | None) -> None:
    """In fp32; the device loop is on."""
    settings = {"device": "cuda", "dtype": "float32"}
    plain = make_engine(moe_model(name), **settings, cudagraph_mode="NONE", max_num_seqs=1, max_prefill_rows=1)
    asked = prompts(5)
    expected = [plain.generate(prompt, greedy())[0].outputs[0].token_ids for prompt in asked]
    plain.close()
    spec = DRAFTERS[drafter](name) if drafter else None
    llm = make_engine(moe_model(name), **settings, speculative_config=spec)
    assert answers(llm.generate(asked, greedy())) == expected
    assert_all_free(llm)
    llm.close()
