"""`deterministic`: what a request says, and its logprobs bit for bit, do not depend on what runs beside it."""

from __future__ import annotations

from typing import Any

import pytest

from blocks import wide_block
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.kernels.native.functions import switched_off
from draftloop.request import RequestOutput, SamplingParams
from heads import tiny_head, wide_head
from helpers import make_engine, prompts, tiny_model

PROMPT = [(i * 37 + 11) % 160 for i in range(70)]
"""Longer than any other, so that it is cut in other places in other company."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def start(device: str, drafter: str, **settings: Any) -> LLM:
    wide = device == "cuda"  # kernels there want larger heads
    target = tiny_model("wide", hidden=256) if wide else tiny_model()
    models = {
        "eagle3": lambda: wide_head("eagle3") if wide else tiny_head("eagle3"),
        "dspark": lambda: wide_block("dspark"),
        "draft_model": lambda: tiny_model("wide-near", hidden=256, noise=0.06),
    }
    spec: dict[str, Any] | None = {"method": drafter, "num_speculative_tokens": 3}
    if drafter == "ngram":
        spec |= {"prompt_lookup_min": 1}
    elif drafter == "none":
        spec = None
    else:
        spec |= {"model": models[drafter]()}
    defaults = {"max_num_seqs": 16, "max_prefill_rows": 16, "max_model_len": 128, "cudagraph_mode": "FULL"}
    return make_engine(target, device=device, speculative_config=spec, **{**defaults, **settings})


def seen(output: RequestOutput) -> tuple:
    """All numbers of an answer."""
    (answer,) = output.outputs
    places = [*(answer.logprobs or ()), *(output.prompt_logprobs or ())]
    return answer.token_ids, [place and {token: one.logprob for token, one in place.items()} for place in places]


def company(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    asked = prompts(count, longest=33)
    params = [
        SamplingParams(temperature=0.7 * (i % 2), top_p=1 - 0.3 * (i % 3 == 2), max_tokens=4 + i) for i in range(count)
    ]
    return asked, params


def all_answers(device: str, drafter: str, sizes: list[dict[str, Any]], **settings: Any) -> dict[str, set[str]]:
    """For each way of asking, the different answers in all kinds of company, padded sizes and cuts of the prompt."""
    ways = {
        "greedy": SamplingParams(temperature=0, max_tokens=10, logprobs=5, prompt_logprobs=2),
        "sampled": SamplingParams(temperature=1.0, max_tokens=10, seed=3, logprobs=5),
        "unreported": SamplingParams(temperature=1.0, top_k=50, max_tokens=30, seed=4),  # may be a device loop
    }
    if device == "cpu":
        del ways["unreported"]
    found: dict[str, set[str]] = {way: set() for way in ways}
    for size in sizes:
        llm = start(device, drafter, **size, **settings)
        for count in (0, 15) if device == "cpu" else (0, 1, 4, 15):
            asked, params = company(count)
            for way, mine in ways.items():
                outputs = llm.generate([PROMPT, *asked], [mine, *params])
                found[way].add(repr(seen(outputs[0])))
        llm.close()
    return found


SIZES: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 256},
    {"max_num_batched_tokens": 40, "cudagraph_capture_sizes": (16,)},  # always padded; the prompt is cut beside others
    {"max_num_batched_tokens": 57, "cudagraph_mode": "NONE"},
]


@pytest.mark.parametrize(("drafter", "dtype"), [("eagle3", "float32"), ("none", "bfloat16")])
def test_an_answer_is_bit_for_bit_the_same_in_any_company(device, drafter, dtype):
    if device == "cuda":
        dtype = "bfloat16"
    found = all_answers(device, drafter, SIZES, dtype=dtype, deterministic=True)
    assert {way: len(answers) for way, answers in found.items()} == dict.fromkeys(found, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("drafter", ["none", "draft_model", "dspark", "eagle3"])
def test_every_kind_of_drafter_on_a_gpu(drafter, dtype):
    settings = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    sizes = [*SIZES[:2], {"max_num_batched_tokens": 57, **settings}]
    found = all_answers("cuda", drafter, sizes, dtype=dtype, deterministic=True)
    assert {way: len(answers) for way, answers in found.items()} == dict.fromkeys(found, 1)


def test_without_the_c_kernels_too():
    with switched_off():
        found = all_answers("cpu", "none", SIZES[:2], dtype="float32", deterministic=True)
    assert {way: len(answers) for way, answers in found.items()} == dict.fromkeys(found, 1)


def test_speculation_changes_no_greedy_token():
    texts = set()
    for drafter in ("none", "ngram", "eagle3"):
        llm = start("cpu", drafter, dtype="bfloat16", deterministic=True)
        texts.add(repr(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].token_ids))
        llm.close()
    assert len(texts) == 1


def test_without_it_company_is_noticed(device):
    """Or the tests above would show nothing. On a CPU it is the processor that says in which type."""
    with switched_off():
        found = [all_answers(device, "none", SIZES[:2], dtype=dtype) for dtype in ("bfloat16", "float32")]
    assert max(len(answers["greedy"]) for answers in found) > 1


def test_what_depends_on_the_batch_is_refused():
    with pytest.raises(ConfigError, match=r"attention backend 'flashinfer' depend on the batch .* leave"):
        make_engine(deterministic=True, attention_backend="flashinfer")
