"""Logprobs of answers and prompts, several answers, cut prompts: against transformers forced on the same ids."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_parameters import judge_logprobs, reference_logits, target

from draftloop.errors import ConfigError, RequestError
from draftloop.request import SamplingParams
from helpers import (
    VOCAB,
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    near_draft,
    oracle,
    prompts,
    tiny_model,
)
from parameters import log_softmax, wanted_logits, wanted_probs

NEAR = {"method": "draft_model", "model": near_draft(), "num_speculative_tokens": 3}


def judged_engine(spec=None, **options):
    spec = spec and {**spec, "model": tiny_model("judged-near", words="w", noise=0.06)}
    return engine(target(), speculative_config=spec, cudagraph_capture_sizes=(2, 8), **options)


# ---- of answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL", "poison": True},
        {"cudagraph_mode": "FULL", "iteration_graph": True, "async_scheduling": True, "poison": True},
    ],
    ids=["eager", "phases", "iteration, depth 2"],
)
@pytest.mark.parametrize("spec", [None, NEAR], ids=["plain", "draft_model"])
def test_logprobs_are_those_of_the_model_wherever_the_token_came_from(spec, settings):
    llm = judged_engine(spec, **settings)
    asked = prompts(6)
    params = [
        greedy(14, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=14, seed=1, logprobs=5, ignore_eos=True),
        greedy(14, ignore_eos=True),
        greedy(14, logprobs=0, presence_penalty=1.5, ignore_eos=True),
        SamplingParams(max_tokens=9, seed=2, top_k=2, temperature=3, logprobs=20, ignore_eos=True),
        greedy(1, logprobs=2, ignore_eos=True),
    ]
    for prompt, one, output in zip(asked, params, llm.generate(asked, params), strict=True):
        answer = output.outputs[0]
        if one.logprobs is None:
            assert answer.logprobs is None
            continue
        logits = reference_logits(prompt, answer.token_ids)[len(prompt) - 1 :]
        judge_logprobs(answer.logprobs, answer.token_ids, logits, one.logprobs)
        assert all(entry.decoded_token == f"w{token}" for report in answer.logprobs for token, entry in report.items())
    assert_all_free(llm)


def test_a_stream_has_as_many_logprobs_as_tokens_at_every_moment():
    llm = judged_engine(NEAR)
    moments = []
    for output in llm.stream(prompts(1)[0], greedy(15, logprobs=1, ignore_eos=True)):
        answer = output.outputs[0]
        assert len(answer.logprobs) == len(answer.token_ids)
        moments.append(len(answer.token_ids))
    assert moments[-1] == 15
    assert len(moments) < 15, "some steps gave several tokens"


@pytest.mark.parametrize("spec", [None, NEAR], ids=["plain", "draft_model"])
def test_processed_logprobs_are_of_the_distribution_that_was_drawn_from(spec):
    llm = judged_engine(spec, logprobs_mode="processed_logprobs")
    asked = prompts(3)
    params = [
        SamplingParams(temperature=2, top_k=7, seed=3, frequency_penalty=1, max_tokens=12, logprobs=7, ignore_eos=True),
        greedy(8, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.5, seed=3, repetition_penalty=1.5, max_tokens=12, logprobs=4, ignore_eos=True),
    ]
    for prompt, one, output in zip(asked, params, llm.generate(asked, params), strict=True):
        ids = output.outputs[0].token_ids
        logits = reference_logits(prompt, ids)[len(prompt) - 1 :]
        for place, (token, report) in enumerate(zip(ids, output.outputs[0].logprobs, strict=True)):
            with np.errstate(divide="ignore"):
                exact = np.log(wanted_probs(wanted_logits(logits[place], prompt, ids[:place], one), one))
            assert report[token].logprob == pytest.approx(exact[token], abs=5e-3)
            values = [entry.logprob for entry in sorted(report.values(), key=lambda entry: entry.rank)][: one.logprobs]
            assert values == pytest.approx(np.sort(exact)[::-1][: one.logprobs], abs=5e-3)


# ---- of prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 12}], ids=["whole", "in chunks"])
@pytest.mark.parametrize("spec", [None, NEAR], ids=["plain", "draft_model"])
def test_prompt_logprobs_are_those_of_the_model_and_the_first_token_has_none(spec, settings):
    llm = judged_engine(spec, **settings)
    asked = [[*prompt, 7] for prompt in prompts(4, longest=40)]
    numbers = (0, None, 4, 2)
    params = [greedy(5, prompt_logprobs=number, logprobs=1, ignore_eos=True) for number in numbers]
    for prompt, number, output in zip(asked, numbers, llm.generate(asked, params), strict=True):
        if number is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs[0] is None
        judge_logprobs(output.prompt_logprobs[1:], prompt[1:], reference_logits(prompt, []), number)
    assert answers(llm.generate(asked, params)) == answers(judged_engine().generate(asked, params))


def test_a_prompt_of_one_token_has_one_entry_which_is_none():
    assert judged_engine().generate([5], greedy(2, prompt_logprobs=2))[0].prompt_logprobs == [None]


# ---- several answers ------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, NEAR], ids=["plain", "draft_model"])
def test_several_answers_are_those_of_the_seeds_that_follow(spec):
    llm = engine(speculative_config=spec)
    prompt = prompts(2)[1]
    params = SamplingParams(n=3, seed=11, max_tokens=12, logprobs=0, prompt_logprobs=0)
    output = llm.generate(prompt, params)[0]
    alone = [answers(llm.generate(prompt, SamplingParams(seed=11 + i, max_tokens=12)))[0] for i in range(3)]
    assert [answer.token_ids for answer in output.outputs] == alone
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert all(len(answer.logprobs) == 12 for answer in output.outputs)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.finished
    if spec:
        assert sum(output.spec.acceptance_histogram) == output.spec.num_spec_steps > 3
    seen = []
    for moment in llm.stream(prompt, params):
        assert moment.finished == all(answer.finish_reason for answer in moment.outputs)
        seen.append([list(answer.token_ids) for answer in moment.outputs])
    assert seen[-1] == alone
    for earlier, later in itertools.pairwise(seen):
        assert all(b[: len(a)] == a for a, b in zip(earlier, later, strict=True))
    assert_all_free(llm)


def test_several_answers_without_a_seed_differ_and_an_abandoned_stream_ends_all_of_them():
    llm = engine()
    output = llm.generate([1, 2, 3], SamplingParams(n=4, max_tokens=10))[0]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    stream = llm.stream([1, 2, 3], SamplingParams(n=4, max_tokens=50))
    next(stream)
    stream.close()
    assert_all_free(llm)


# ---- what the engine must know to refuse ----------------------------------------------------


def test_a_prompt_is_cut_from_its_beginning():
    llm = engine()
    prompt = prompts(9, longest=40)[7]
    output = llm.generate(prompt, greedy(8, truncate_prompt_tokens=5))[0]
    assert output.prompt_token_ids == prompt[-5:]
    assert answers([output]) == [oracle(prompt[-5:], 8)]
    assert llm.generate(prompt, greedy(8, truncate_prompt_tokens=500))[0].prompt_token_ids == prompt
    long = [i % VOCAB for i in range(300)]
    output = llm.generate(long, greedy(8, truncate_prompt_tokens=-1))[0]
    assert output.prompt_token_ids == long[-120:]
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs is 21; this engine reports at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; this engine reports at most 20"),
        ({"allowed_token_ids": [3, VOCAB]}, f"allowed_token_ids holds token id {VOCAB}"),
        ({"logit_bias": {VOCAB + 2: 1}}, f"logit_bias holds token id {VOCAB + 2}"),
        ({"extra_args": {"x": 1}}, "extra_args has 'x'"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 128}, "max_tokens is 128; .* must be below max_model_len, 128"),
        ({"bad_words": ["x"]}, "bad_words is .* without a tokenizer"),
    ],
)
def test_what_this_engine_cannot_serve_is_refused_by_name(params, message):
    llm = engine()
    with pytest.raises(RequestError, match=message):
        llm.generate([1], greedy(**{"max_tokens": 3, **params}))
    assert_all_free(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": [" ".join(["w1"] * 17)]}, "of 17 tokens; at most 16"),
        ({"bad_words": [f"w{i}" for i in range(129)]}, "bad_words has 129 texts .*; at most 128"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ],
)
def test_lists_that_no_row_has_room_for_are_refused_by_name(params, message):
    llm = engine(tiny_model("many-words", words="w", vocab=400), cudagraph_mode="NONE")
    with pytest.raises(RequestError, match=message):
        llm.generate([1], greedy(3, **params))


def test_engine_settings_of_logprobs_and_processors_are_checked():
    with pytest.raises(ConfigError, match="max_logprobs is -1; it must be an integer >= 0"):
        make_engine(max_logprobs=-1)
    with pytest.raises(ConfigError, match="logprobs_mode"):
        make_engine(logprobs_mode="raw")
    with pytest.raises(ConfigError, match="names 'nowhere:X', which cannot be loaded"):
        make_engine(logits_processors=["nowhere:X"])
    llm = make_engine(max_logprobs=0, max_num_seqs=2)
    report = llm.generate([1], greedy(3, logprobs=0))[0].outputs[0].logprobs
    assert [len(entry) for entry in report] == [1, 1, 1]
    with pytest.raises(RequestError, match="at most 0"):
        llm.generate([1], greedy(3, logprobs=1))
    llm.close()


def test_the_judge_would_notice():
    """An oracle that finds everything right shows nothing."""
    prompt = prompts(3)[1]
    answer = judged_engine().generate(prompt, greedy(6, logprobs=1, ignore_eos=True))[0].outputs[0]
    logits = reference_logits(prompt, answer.token_ids)[len(prompt) - 1 :]
    exact = log_softmax(logits[0])[answer.token_ids[0]]
    assert exact == pytest.approx(answer.logprobs[0][answer.token_ids[0]].logprob, abs=2e-3)
    with pytest.raises(AssertionError):
        judge_logprobs(answer.logprobs, answer.token_ids, logits[1:], 1)
