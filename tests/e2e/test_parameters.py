"""Every sampling parameter on every verified position: random requests, batches and drafters against transformers.

A request's tokens are judged one by one: transformers' logits behind the tokens before, the parameters applied by
`parameters.py`, must make this token the likeliest (temperature 0), or possible.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftloop.request import CompletionOutput, SamplingParams
from helpers import VOCAB, answers, assert_all_free, engine, greedy, prompts, tiny_model
from parameters import log_softmax, wanted_logits, wanted_probs

K, EOS = 3, 21
PROMPTS = [[*prompt, 100 + index] for index, prompt in enumerate(prompts(10, longest=9, seed=3))]

SCRIPT: dict[tuple[int, ...], list[int]] = {}
"""By prompt: what the scripted drafter holds for the answer, token by token; -1 where it has nothing to say."""


def target() -> str:
    return tiny_model("judged", words="w", eos=EOS)


def script(request_id: str, token_ids: list[int], k: int) -> list[int]:
    for length in range(len(token_ids), 0, -1):
        if (held := SCRIPT.get(tuple(token_ids[:length]))) is not None:
            drafts = held[len(token_ids) - length :][:k]
            return drafts[: drafts.index(-1)] if -1 in drafts else drafts
    return []


def near_drafter() -> dict:
    model = tiny_model("judged-near", words="w", noise=0.06)
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 2}


def judged_engine(spec=None, **options):
    spec = spec or {"method": "scripted", "script": script, "num_speculative_tokens": K}
    return engine(
        target(),
        speculative_config=spec,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=(2, 8),
        logits_processors=("parameters:Only",),
        **options,
    )


@functools.cache
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32)


def reference_logits(prompt: list[int], output: list[int]) -> np.ndarray:
    """[len(prompt) + len(output), V]"""
    return logits_after((*prompt, *output))


@functools.lru_cache(maxsize=256)  # an answer is judged with drafts and without
@torch.inference_mode()
def logits_after(token_ids: tuple[int, ...]) -> np.ndarray:
    return reference()(torch.tensor([token_ids])).logits[0].double().numpy()


@functools.cache
def plain_text(index: int) -> list[int]:
    """What a prompt's answer would be without parameters."""
    return (
        engine(target(), cudagraph_mode="NONE")
        .generate(PROMPTS[index], greedy(16, ignore_eos=True))[0]
        .outputs[0]
        .token_ids
    )


@pytest.fixture(scope="module", autouse=True)
def _texts() -> None:
    """Strategies read them, and must not run an engine."""
    for index in range(len(PROMPTS)):
        plain_text(index)


def wanted(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    words = [[int(w[1:]) for w in text.split()] for text in params.bad_words]
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))]
    x = wanted_logits(logits, prompt, output, params, ends=ends, bad_words=words)
    only = params.extra_args or {}
    if len(output) >= only.get("only_after", math.inf):
        x[np.arange(len(x)) != only["only_token"]] = -np.inf
    return x


def judge(prompt: list[int], answer: CompletionOutput, params: SamplingParams) -> None:
    ids = answer.token_ids
    logits = reference_logits(prompt, ids)[len(prompt) - 1 :]
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    text, ended = "", None
    for place, token in enumerate(ids):
        assert ended is None, f"token {place} comes after the end"
        x = wanted(logits[place], prompt, ids[:place], params)
        if params.greedy:
            assert x[token] >= x.max() - 1e-3, (place, token, int(x.argmax()))
        else:
            assert wanted_probs(x, params)[token] > 0, (place, token)
        if token in ends:
            ended = ("stop", token if token in params.stop_token_ids else None)
            continue
        before = len(text)
        text += f" w{token}" if text else f"w{token}"
        for stop in params.stop if place + 1 > params.min_tokens else ():
            at = text.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0:
                ended = ("stop", stop)
                text = text[: at + len(stop) * params.include_stop_str_in_output]
    x = wanted(logits[len(ids)], prompt, ids, params)
    if ended is None and len(ids) == params.max_tokens:
        ended = ("length", None)
    elif ended is None and x.max() == -np.inf:
        ended = ("error", None)
    assert (answer.finish_reason, answer.stop_reason) == ended
    assert answer.text == text
    if params.logprobs is None:
        assert answer.logprobs is answer.cumulative_logprob is None
        return
    judge_logprobs(answer.logprobs, ids, logits, params.logprobs)
    assert answer.cumulative_logprob == pytest.approx(
        sum(x[t].logprob for t, x in zip(ids, answer.logprobs, strict=True))
    )


def judge_logprobs(reports, ids: list[int], logits: np.ndarray, num_top: int) -> None:
    assert len(reports) == len(ids)
    for place, (token, report) in enumerate(zip(ids, reports, strict=True)):
        exact = log_softmax(logits[place])
        assert next(iter(report)) == token
        assert len(report) in (num_top, num_top + 1) if num_top else len(report) == 1
        for one, entry in report.items():
            assert entry.logprob == pytest.approx(exact[one], abs=2e-3)
            assert entry.decoded_token == f"w{one}"
            better = (exact > exact[one] + 2e-3).sum()
            assert better < entry.rank <= (exact >= exact[one] - 2e-3).sum()
        ranked = sorted(report.values(), key=lambda entry: entry.rank)[:num_top]
        assert [entry.rank for entry in ranked] == list(range(1, num_top + 1))


@st.composite
def asked(draw, index: int) -> SamplingParams:
    """A few parameters at a time, which matter to this prompt: they name tokens of its plain answer."""
    text = plain_text(index)
    token = st.sampled_from(text)
    word = token.map(lambda t: f"w{t}")
    run = st.tuples(st.integers(0, 8), st.integers(1, 3)).map(lambda at: [f"w{t}" for t in text[at[0] : sum(at)]])
    max_tokens = draw(st.integers(1, 14))
    values = {
        "temperature": st.just(0.9),
        "min_p": st.just(0.01),
        "presence_penalty": st.sampled_from([1.5, -2]),
        "frequency_penalty": st.sampled_from([2, -2]),
        "repetition_penalty": st.sampled_from([1.3, 0.6]),
        "logit_bias": st.dictionaries(token, st.sampled_from([-100, -4, 3, 100]), min_size=1, max_size=3),
        "allowed_token_ids": st.lists(token, min_size=1, max_size=8),
        "bad_words": st.lists(run.map(" ".join), min_size=1, max_size=3),
        "min_tokens": st.integers(1, max_tokens),
        "stop_token_ids": st.lists(token, min_size=1, max_size=2),
        "stop": st.lists(word, min_size=1, max_size=1),
        "extra_args": st.fixed_dictionaries({"only_token": token, "only_after": st.integers(0, 9)}),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(values)), max_size=4))
    return SamplingParams(
        **{"temperature": 0, **{name: draw(values[name]) for name in sorted(chosen)}},
        max_tokens=max_tokens,
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def batches(draw):
    """Prompts, parameters, and for each what the drafter does: right, wrong or illegal at some places, or silent."""
    indices = draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=5, unique=True))
    faults = st.dictionaries(st.integers(0, 12), st.sampled_from([-1, -7, VOCAB, VOCAB + 90, 3, 50]), max_size=2)
    return [(index, draw(asked(index)), draw(faults)) for index in indices]


def run(llm, batch, **options) -> list[CompletionOutput]:
    outputs = llm.generate([PROMPTS[index] for index, _, _ in batch], [params for _, params, _ in batch], **options)
    for output in outputs:
        assert (output.error is not None) == (output.outputs[0].finish_reason == "error")
    return [output.outputs[0] for output in outputs]


def same(one: CompletionOutput, other: CompletionOutput) -> None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.logprobs is None) == (other.logprobs is None)
    for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
        assert next(iter(mine)) == next(iter(theirs))
        assert next(iter(mine.values())).logprob == pytest.approx(next(iter(theirs.values())).logprob, abs=2e-3)


@settings(max_examples=40)
@given(batch=batches())
def test_whatever_is_drafted_every_token_is_what_the_request_asked_for(batch):
    llm = judged_engine()
    SCRIPT.clear()
    plain = run(llm, batch, speculation=False)
    for (index, params, faults), answer in zip(batch, plain, strict=True):
        judge(PROMPTS[index], answer, params)
        drafts = [*answer.token_ids, 1, 2, 3, 4]
        SCRIPT[tuple(PROMPTS[index])] = [faults.get(place, token) for place, token in enumerate(drafts)]
    for (index, params, _), answer, before in zip(batch, run(llm, batch), plain, strict=True):
        judge(PROMPTS[index], answer, params)
        if params.greedy:
            same(answer, before)
    assert_all_free(llm)


@pytest.mark.parametrize("rule", ["standard", "block"])
@settings(max_examples=18)
@given(batch=batches())
def test_whole_steps_and_loops_of_them_do_what_the_request_asked_for(rule, batch):
    spec = {**near_drafter(), "rejection_sample_method": rule}
    llm = judged_engine(spec, iteration_graph=True, device_loop=4, async_scheduling=True)
    for (index, params, _), answer in zip(batch, run(llm, batch), strict=True):
        judge(PROMPTS[index], answer, params)
    assert_all_free(llm)


@pytest.mark.parametrize("drafter", ["scripted", "draft_model", "block"])
def test_sampled_tokens_follow_what_the_parameters_leave_of_the_model(drafter):
    """800 answers of three tokens against the exact probabilities of each, by chi-square."""
    index, count = 5, 800
    prompt, text = PROMPTS[index], plain_text(index)
    allowed = sorted({*text[:2], prompt[0], prompt[-1], 3})
    base = {"temperature": 4.0, "max_tokens": 3, "allowed_token_ids": allowed, "ignore_eos": True}
    params = SamplingParams(
        **base,
        frequency_penalty=-2,
        presence_penalty=1,
        repetition_penalty=0.8,
        logit_bias={allowed[0]: 2.5},
        bad_words=[f"w{allowed[0]} w{allowed[0]}", f"w{allowed[1]} w{allowed[2]}"],
    )
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in exact.items():
            x = wanted(reference_logits(prompt, list(tokens))[-1], prompt, list(tokens), params)
            probs = wanted_probs(x, params)
            longer |= {(*tokens, int(t)): probability * probs[t] for t in probs.nonzero()[0]}
        exact = longer
    near = near_drafter()
    spec = {"draft_model": near, "block": {**near, "rejection_sample_method": "block"}}.get(drafter)
    llm = judged_engine(spec, max_num_seqs=32, max_prefill_rows=16, max_num_batched_tokens=384)
    SCRIPT[tuple(prompt)] = [allowed[1], allowed[0], allowed[2]]
    seen = Counter(tuple(tokens) for tokens in answers(llm.generate([prompt] * count, params)))
    assert set(seen) <= set(exact)
    frequent = [tokens for tokens, probability in exact.items() if probability * count >= 5]
    rest = sum(probability for tokens, probability in exact.items() if tokens not in frequent)
    observed = [*(seen[tokens] for tokens in frequent), sum(n for tokens, n in seen.items() if tokens not in frequent)]
    expected = [*(exact[tokens] * count for tokens in frequent), rest * count]
    if rest * count < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert len(observed) >= 10
    assert stats.chisquare(observed, expected).pvalue > 1e-4
