"""Faults of other engines with sampling parameters under speculation, by the number of their field case."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parameters import PROMPTS, SCRIPT, judge, judged_engine, plain_text, run

from draftloop.drafters.base import DRAFTERS as DRAFTER_TYPES
from draftloop.drafters.base import load_drafters
from draftloop.request import SamplingParams
from example_drafters import example_configs
from helpers import (
    VOCAB,
    answers,
    assert_all_free,
    engine,
    example_target,
    greedy,
    make_engine,
    near_draft,
    oracle,
    prompts,
    tiny_model,
)

SELF_DRAFT = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
load_drafters()
DRAFTERS = {name: spec[0] for name, spec in example_configs().items() if name not in ("scripted", "synthetic")}


def graphs(spec=None, **options):
    return engine(speculative_config=spec, cudagraph_mode="FULL", cudagraph_capture_sizes=(2, 8), **options)


def script(index: int, drafts: list[int]) -> None:
    """What the scripted drafter holds for a prompt, from its first token on."""
    SCRIPT[tuple(PROMPTS[index])] = drafts


# ---- temperatures and seeds -----------------------------------------------------------------


def test_b22_greedy_rows_beside_sampled_ones_are_greedy_where_blocks_are_judged_whole():
    llm = graphs({**SELF_DRAFT, "rejection_sample_method": "block"})
    asked = prompts(4)
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0, 1, 0, 0.7)]
    texts = answers(llm.generate(asked, params))
    assert [texts[i] for i in (0, 2)] == [oracle(asked[i], 20) for i in (0, 2)]
    assert all(texts[i] != oracle(asked[i], 20) for i in (1, 3))


def test_drafts_that_are_drawn_are_judged_whole_by_default():
    spec, texts = {**SELF_DRAFT, "model": near_draft()}, []
    params = SamplingParams(max_tokens=16, seed=7)
    for rule in ({}, {"rejection_sample_method": "block"}, {"rejection_sample_method": "standard"}):
        texts.append(answers(graphs({**spec, **rule}).generate(prompts(5), params)))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_b23_a_seed_gives_the_same_tokens_whatever_runs_beside_it_and_however_it_runs(rule, n):
    spec = {**SELF_DRAFT, "model": near_draft(), "rejection_sample_method": rule}
    llm = graphs(spec)
    asked = prompts(5)

    def texts(llm, prompt, seed, **options):
        found = llm.generate(prompt, SamplingParams(n=n, seed=seed, max_tokens=16, **options))[0].outputs
        return [answer.token_ids for answer in found]

    alone = texts(llm, asked[2], 7)
    assert len({tuple(tokens) for tokens in alone}) == n
    assert texts(llm, asked[2], 7) == alone
    assert texts(llm, asked[2], 8)[0] != alone[0]
    beside = [
        SamplingParams(max_tokens=30),
        SamplingParams(n=2, max_tokens=9),
        SamplingParams(n=n, seed=7, max_tokens=16),
    ]
    beside += [greedy(12, presence_penalty=1, logprobs=2), SamplingParams(top_k=3, seed=7, max_tokens=20)]
    outputs = llm.generate(asked, beside)
    assert [answer.token_ids for answer in outputs[2].outputs] == alone
    for settings in ({"cudagraph_mode": "NONE"}, {"iteration_graph": True, "async_scheduling": True}):
        other = engine(speculative_config=spec, **settings)
        assert texts(other, asked[2], 7) == alone
    # logprobs and parameters that change nothing run other phases, not other tokens
    assert texts(llm, asked[2], 7, logprobs=3) == alone
    assert texts(llm, asked[2], 7, logit_bias={0: 0.0}) == alone


# ---- parameters on every position -----------------------------------------------------------


PENALTIES = {
    "frequency up": {"frequency_penalty": 2},
    "frequency down": {"frequency_penalty": -2},
    "presence": {"presence_penalty": 1},
    "repetition": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_b27_penalties_have_their_effect_whoever_drafts(drafter):
    """And the same through single phases, through a whole step as one graph, and beside rows that have none."""
    asked = prompts(5)
    params = [greedy(10, **PENALTIES[name], logprobs=1) for name in PENALTIES] + [greedy(10)]
    spec = DRAFTERS[drafter]
    folder = example_target(spec)
    plain = engine(folder).generate(asked, params)
    texts = answers(plain)
    changed = [text for text, prompt in zip(texts[:4], asked, strict=False) if text != oracle(prompt, 10, model=folder)]
    assert len(changed) >= 2, "penalties that matter"
    on_host = DRAFTER_TYPES[drafter].on_host
    whole = {} if on_host else {"iteration_graph": True, "async_scheduling": True}
    llm = make_engine(folder, speculative_config=spec, cudagraph_mode="FULL", cudagraph_capture_sizes=(2, 8), **whole)
    outputs = llm.generate(asked, params)
    assert answers(outputs) == texts
    for mine, theirs in zip(outputs[:4], plain[:4], strict=True):
        raw, exact = (
            torch.tensor([next(iter(report.values())).logprob for report in output.outputs[0].logprobs])
            for output in (mine, theirs)
        )
        torch.testing.assert_close(raw, exact, atol=2e-3, rtol=0)
    without = [greedy(10, **PENALTIES[name]) for name in PENALTIES] + [greedy(10)]
    llm.reset_graph_counts()
    assert answers(llm.generate(asked, without)) == texts, "without logprobs, whole steps"
    if not (on_host or llm.engine.drafter.observes):
        assert llm.get_graph_report().replays["iteration.constrained"] > 0
    llm.close()


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.3}])
def test_b27_penalties_count_the_drafts_of_the_block_that_they_stand_in(penalty):
    """Of a few tokens: which one is next follows from how often each has come, in this very block too."""
    llm = judged_engine()
    SCRIPT.clear()
    for index in range(5):
        params = greedy(10, logit_bias=dict.fromkeys(range(30, 80), 40), ignore_eos=True, **penalty)
        (alone,) = run(llm, [(index, params, {})], speculation=False)
        judge(PROMPTS[index], alone, params)
        script(index, alone.token_ids)
        (answer,) = run(llm, [(index, params, {})])
        assert answer.token_ids == alone.token_ids


def test_b29_each_row_has_its_own_rules_however_many_drafts_its_neighbours_have():
    llm = judged_engine()
    SCRIPT.clear()
    second, third = plain_text(1), plain_text(2)
    first_masked = greedy(10, min_tokens=2, stop_token_ids=[second[0]], ignore_eos=True)
    soon = run(llm, [(1, first_masked, {})], speculation=False)[0].token_ids
    params = [
        greedy(10, presence_penalty=2, ignore_eos=True),
        greedy(10, min_tokens=2, stop_token_ids=[second[0], soon[2]], ignore_eos=True),
        greedy(10, bad_words=[f"w{third[0]}", f"w{third[1]} w{third[2]}"], ignore_eos=True),
    ]
    alone = [run(llm, [(i, one, {})], speculation=False)[0] for i, one in enumerate(params)]
    for i, (one, answer) in enumerate(zip(params, alone, strict=True)):
        judge(PROMPTS[i], answer, one)
    assert alone[1].token_ids == soon[:3], "the third token may end it"
    script(0, alone[0].token_ids)
    script(1, [-1] * 10)
    script(2, [token if i % 2 else -1 for i, token in enumerate(alone[2].token_ids)])
    together = run(llm, [(i, one, {}) for i, one in enumerate(params)])
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_b30_a_processor_takes_effect_at_its_very_token_inside_a_block_that_is_all_right():
    llm = judged_engine()
    SCRIPT.clear()
    text = plain_text(3)
    for after in range(1, 8):
        params = greedy(10, extra_args={"only_token": 77, "only_after": after}, ignore_eos=True)
        script(3, text)  # right for the plain answer, so that the block crosses the place
        (answer,) = run(llm, [(3, params, {})])
        assert answer.token_ids == text[:after] + [77] * (10 - after)


def test_b30_a_bad_word_is_seen_across_drafts_and_its_beginning_alone_is_allowed():
    llm = judged_engine()
    SCRIPT.clear()
    text = plain_text(4)
    for at in range(6):
        a, b = text[at : at + 2]
        params = greedy(10, bad_words=[f"w{a} w{b}"], ignore_eos=True)
        script(4, text)
        (answer,) = run(llm, [(4, params, {})])
        assert answer.token_ids[: at + 1] == text[: at + 1]
        assert answer.token_ids[at + 1] != b
        judge(PROMPTS[4], answer, params)


# ---- ends inside a block --------------------------------------------------------------------


def test_b35_an_end_token_inside_an_accepted_block_ends_text_ids_logprobs_and_usage_alike():
    prompt, text = next((p, text) for p in prompts(9) if (text := oracle(p, 12)).index(text[6]) == 6)
    folder = tiny_model("seventh-ends", eos=text[6])
    llm = make_engine(folder, speculative_config={**SELF_DRAFT, "model": folder, "num_speculative_tokens": 4})
    output = llm.generate(prompt, greedy(12, logprobs=1))[0]
    answer = output.outputs[0]
    assert answer.token_ids == text[:7]
    assert len(answer.logprobs) == 7
    assert answer.finish_reason == "stop"
    assert llm.get_metrics()["generation_tokens"] == 7
    assert output.spec.num_accepted_draft_tokens == 5, "of seven, the first is the prompt's, and one the target's own"
    assert_all_free(llm)
    llm.close()


@pytest.mark.parametrize("place", [0, 1, 2, 7, 14])
def test_b35_a_stop_text_anywhere_in_a_long_block_is_found(place):
    words = tiny_model("long", words="word", max_len=160)
    spec = {"method": "draft_model", "model": words, "num_speculative_tokens": 15}
    llm = engine(words, speculative_config=spec, max_num_seqs=2)
    prompt = "word1 word2 word3"
    whole = llm.generate(prompt, greedy(17))[0].outputs[0]
    stop = whole.text.split()[1 + place] + " " if place < 14 else whole.text.split()[1 + place]
    output = llm.generate(prompt, greedy(17, stop=(stop,), logprobs=0))[0]
    answer = output.outputs[0]
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert len(answer.logprobs) == len(answer.token_ids) <= 3 + place


# ---- numbers that are none ------------------------------------------------------------------


def broken_model(name: str, ids: list[int]) -> str:
    """The tiny model, but these tokens are embedded as NaN."""
    folder = Path(tiny_model(name))
    if not (folder / "broken").exists():
        shutil.copytree(tiny_model(), folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][ids] = float("nan")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "broken").touch()
    return str(folder)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 0, "min_tokens": 1}]
)
@pytest.mark.parametrize("spec", [None, SELF_DRAFT], ids=["plain", "self_draft"])
def test_bad_logits_end_their_request_with_an_error_and_change_no_neighbour(spec, params):
    bad = VOCAB - 3
    folder = broken_model("nan-target", [bad])
    spec = spec and {**spec, "model": folder}
    llm = engine(folder, speculative_config=spec, cudagraph_mode="FULL", cudagraph_capture_sizes=(2, 8))
    asked = prompts(4, vocab=VOCAB - 10)
    one = SamplingParams(max_tokens=16, **params)
    alone = [answers(llm.generate(prompt, one))[0] for prompt in asked[:3]]
    outputs = llm.generate([asked[0], [3, bad, 4], asked[1], [bad], asked[2]], one)
    assert [answers(outputs)[i] for i in (0, 2, 4)] == alone
    for i in (1, 3):
        assert outputs[i].outputs[0].finish_reason == "error"
        assert outputs[i].outputs[0].token_ids == []
        assert (
            f"after {len(outputs[i].prompt_token_ids)} tokens are NaN" in outputs[i].error or "NaN" in outputs[i].error
        )
    assert_all_free(llm)
    assert [answers(llm.generate(prompt, one))[0] for prompt in asked[:3]] == alone, "its pages are used again"
    ((*_, last),) = [list(llm.stream([bad], one))]
    assert last.finished
    assert last.outputs[0].finish_reason == "error"


def test_bad_logits_in_the_middle_end_the_request_after_the_tokens_before():
    prompt = prompts(3)[1]
    text = oracle(prompt, 12)
    place = 5
    assert text.index(text[place]) == place
    assert text[place] not in prompt
    folder = broken_model("nan-later", [text[place]])
    for spec in (None, {**SELF_DRAFT, "model": folder}, {**SELF_DRAFT, "model": near_draft()}):
        llm = make_engine(folder, speculative_config=spec, enforce_eager=True)
        output = llm.generate(prompt, greedy(12, logprobs=0))[0]
        assert output.outputs[0].token_ids == text[: place + 1], "the bad one is produced; what follows it is not"
        assert output.outputs[0].finish_reason == "error"
        assert len(output.outputs[0].logprobs) == place + 1
        llm.close()


def test_a_drafter_that_computes_nonsense_costs_speed_and_nothing_else():
    asked = prompts(4)
    ids = sorted({t for prompt in asked for t in oracle(prompt, 16)[::3]})
    spec = {**SELF_DRAFT, "model": broken_model("nan-draft", ids)}
    llm = graphs(spec)
    assert answers(llm.generate(asked, greedy(16))) == [oracle(prompt, 16) for prompt in asked]
    sampled = [SamplingParams(seed=i, max_tokens=16) for i in range(4)]
    texts = answers(llm.generate(asked, sampled))
    assert all(0 <= token < VOCAB for text in texts for token in text)
    assert all(len(text) == 16 for text in texts)


@pytest.mark.gpu
def test_a_gpu_says_what_a_cpu_says_whatever_is_asked_for():
    """All parameters through phases, through a whole step as one graph, and through a loop on the device."""
    asked = prompts(6)
    params = [
        greedy(20, presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2),
        greedy(20, allowed_token_ids=list(range(0, VOCAB, 2)), min_tokens=3),
        greedy(20, logit_bias={5: 4.0, 7: -100}),
        greedy(20),
        greedy(20, logprobs=3, prompt_logprobs=2, presence_penalty=-1),
        greedy(20, logprobs=0),
    ]
    expected = engine(cudagraph_mode="NONE").generate(asked, params)
    spec = {**SELF_DRAFT, "model": near_draft()}
    for settings in ({"iteration_graph": False}, {"iteration_graph": True}, {"device_loop": 16}):
        llm = make_engine(
            device="cuda", dtype="float32", speculative_config=spec, cudagraph_capture_sizes=(2, 8), **settings
        )
        outputs = llm.generate(asked, params)
        assert answers(outputs) == answers(expected)
        for mine, theirs in zip(outputs[4:], expected[4:], strict=True):
            for reports, others in (
                (mine.outputs[0].logprobs, theirs.outputs[0].logprobs),
                (mine.prompt_logprobs or [], theirs.prompt_logprobs or []),
            ):
                for report, other in zip(reports, others, strict=True):
                    values, exact = ([entry.logprob for entry in (x or {}).values()] for x in (report, other))
                    assert values == pytest.approx(exact, abs=2e-3)
        assert answers(llm.generate(asked[:4], params[:4])) == answers(expected[:4]), "nothing reported: whole steps"
        assert_all_free(llm)
        llm.close()
