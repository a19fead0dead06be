"""The offline engine on a tiny model: exact answers, seeds, and where they end."""

from __future__ import annotations

import pytest
import torch

from draftloop.request import SamplingParams
from example_drafters import example_configs
from helpers import MODES, VOCAB, answers, assert_all_free, engine, greedy, make_engine, oracle, prompts, tiny_model

SELF_DRAFT = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 4}
NGRAM = example_configs()["ngram"][0]


@pytest.fixture
def plain():
    return engine(cudagraph_mode="FULL", cudagraph_capture_sizes=(2, 8))


def sampled(seed: int | None = 7, *, temperature: float = 1, max_tokens: int = 20, **options) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, **options)


# ---- exactness ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)


@torch.inference_mode()
def test_the_plain_engine_says_what_transformers_says(reference):
    for prompt in prompts(4):
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )
        assert oracle(prompt, 40) == ids[0, len(prompt) :].tolist()


def test_the_oracle_is_worth_comparing_with():
    """Varied text, so that a wrong token shows."""
    for prompt in prompts(6):
        assert len(set(oracle(prompt, 40))) > 15


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("mode", MODES)
def test_without_speculation_every_mode_and_batch_says_the_same(mode, overlap):
    llm = engine(
        cudagraph_mode=mode.value,
        cudagraph_capture_sizes=(2, 8),
        max_num_batched_tokens=24,
        async_scheduling=overlap,
        poison=True,
    )
    for batch in (1, 3, 12):
        asked = prompts(batch)
        assert answers(llm.generate(asked, greedy(20))) == [oracle(p, 20) for p in asked]
    assert_all_free(llm)


@pytest.mark.parametrize("setting", ["FULL", "NONE"])
def test_page_size_and_chunk_size_change_nothing(setting):
    for page, chunk in ((16, 5), (32, 17), (64, 64)):
        llm = make_engine(
            block_size=page,
            max_num_batched_tokens=chunk,
            cudagraph_mode=setting,
            cudagraph_capture_sizes=(4,),
            max_num_seqs=4,
            speculative_config=NGRAM,
        )
        asked = prompts(5, longest=50)
        assert answers(llm.generate(asked, greedy(30))) == [oracle(p, 30) for p in asked]


@pytest.mark.parametrize(
    "spec", [None, NGRAM, example_configs()["draft_model"][0]], ids=["none", "ngram", "draft_model"]
)
@torch.inference_mode()
def test_sampled_tokens_follow_the_model(reference, spec):
    """1200 answers of three tokens against the exact probabilities of all 27 (top_k 3), by chi-square."""
    prompt, top, count = prompts(2)[1], 3, 1200
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in exact.items():
            logits = reference(torch.tensor([prompt + list(tokens)])).logits[0, -1] / 3.0
            best = logits.topk(top)
            for token, share in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
                longer[(*tokens, token)] = probability * share
        exact = longer
    llm = engine(
        speculative_config=spec,
        max_num_seqs=32,
        max_prefill_rows=16,
        max_num_batched_tokens=384,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=(32,),
    )
    params = SamplingParams(temperature=3.0, top_k=top, max_tokens=3)
    seen: dict[tuple[int, ...], int] = {}
    for tokens in answers(llm.generate([prompt] * count, params)):
        seen[tuple(tokens)] = seen.get(tuple(tokens), 0) + 1
    assert set(seen) <= set(exact)
    frequent = [tokens for tokens, probability in exact.items() if probability * count >= 5]
    rest = [tokens for tokens in exact if tokens not in frequent]
    cells = [([t], exact[t]) for t in frequent] + ([(rest, sum(exact[t] for t in rest))] if rest else [])
    chi = sum((sum(seen.get(t, 0) for t in ts) - p * count) ** 2 / (p * count) for ts, p in cells)
    from scipy.stats import chi2

    assert len(cells) > 8
    assert chi2.sf(chi, len(cells) - 1) > 1e-4, (chi, len(cells))


# ---- seeds ----------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(plain):
    asked = prompts(5)
    alone = answers(plain.generate(asked[2], sampled()))[0]
    assert answers(plain.generate(asked[2], sampled()))[0] == alone
    beside = [sampled(None), greedy(30), sampled(), sampled(None, temperature=2), sampled(8, top_k=5)]
    assert answers(plain.generate(asked, beside))[2] == alone
    assert answers(plain.generate(asked[2], sampled(8)))[0] != alone


def test_requests_without_a_seed_differ_from_each_other(plain):
    same = answers(plain.generate([prompts(1)[0]] * 4, sampled(None)))
    assert len({tuple(tokens) for tokens in same}) == 4


def test_two_engines_of_one_seed_agree_also_where_requests_bring_none():
    texts = [
        answers(make_engine(seed=seed, enforce_eager=True, max_num_seqs=4).generate(prompts(3), sampled(None)))
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


# ---- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, SELF_DRAFT], ids=["plain", "self_draft"])
def test_stop_token_ids_end_the_answer_inside_a_block(spec):
    """B35: with self-drafting all of a block is accepted; nothing after the stop token is delivered."""
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL")
    prompt = prompts(6)[4]
    text = oracle(prompt, 16)
    for place in range(9):
        stop = text[place]
        first = text.index(stop)
        answer = llm.generate(prompt, greedy(16, stop_token_ids=(stop,)))[0].outputs[0]
        assert answer.token_ids == text[: first + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert llm.get_metrics()["generation_tokens"] == sum(text.index(text[place]) + 1 for place in range(9))
    assert_all_free(llm)


def test_stop_texts_end_the_answer_inside_a_block():
    words = tiny_model("words", words="word")
    llm = make_engine(words, speculative_config={**SELF_DRAFT, "model": words}, enforce_eager=True, max_num_seqs=2)
    prompt = "word1 word2 word3"
    whole = llm.generate(prompt, greedy(16))[0].outputs[0]
    pieces = whole.text.split()
    for place in (1, 4, 6):
        stop = pieces[place]
        answer = llm.generate(prompt, greedy(16, stop=(stop,)))[0].outputs[0]
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


@pytest.mark.parametrize("ignore", [False, True])
def test_several_end_tokens_and_ignoring_them(ignore):
    prompt = prompts(3)[1]
    text = oracle(prompt, 12)
    folder = tiny_model("two-ends", eos=text[5])
    llm = make_engine(folder, enforce_eager=True, max_num_seqs=1)
    answer = llm.generate(prompt, greedy(12, ignore_eos=ignore))[0].outputs[0]
    first = text.index(text[5])
    assert answer.token_ids == (text if ignore else text[: first + 1])
    assert answer.finish_reason == ("length" if ignore else "stop")
    assert answer.stop_reason is None


@pytest.mark.parametrize("spec", [None, SELF_DRAFT, NGRAM], ids=["plain", "self_draft", "ngram"])
@pytest.mark.parametrize("length", [1, 30, 62, 63])
def test_a_prompt_near_the_length_limit_gets_what_fits(length, spec):
    llm = engine(speculative_config=spec, max_model_len=64, cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL")
    prompt = [(5 * i + length) % VOCAB for i in range(length)]
    answer = llm.generate(prompt, greedy(None))[0].outputs[0]
    assert answer.finish_reason == "length"
    assert answer.token_ids == oracle(prompt, 64 - length)
    assert len(answer.token_ids) == 64 - length
