"""The offline engine on a tiny model: answers, limits, mistakes, and what is left behind."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from draftloop.errors import CapacityError, ConfigError, GraphError, RequestError
from draftloop.request import SamplingParams
from helpers import (
    MODES,
    VOCAB,
    answers,
    assert_all_free,
    engine,
    example_configs,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

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


# ---- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "the prompt is empty"),
        ([1] * 128, "128 tokens; with max_model_len 128 it may have at most 127"),
        ([1, VOCAB], f"token id {VOCAB}; this model's ids are 0 to {VOCAB - 1}"),
        ([1, -1], "token id -1"),
        ("text", "no tokenizer"),
    ],
    ids=["empty", "too_long", "unknown_id", "negative_id", "text"],
)
def test_a_bad_prompt_is_refused_and_the_engine_goes_on(plain, prompt, message):
    with pytest.raises(RequestError, match=message):
        plain.generate(prompt, greedy(4))
    assert_all_free(plain)
    assert answers(plain.generate(prompts(1)[0], greedy(4))) == [oracle(prompts(1)[0], 4)]


def test_one_bad_prompt_among_several_ends_alone(plain):
    good = prompts(2)
    bad = [1, 2, VOCAB + 5]
    outputs = plain.generate([good[0], bad, [], good[1]], greedy(8))
    assert [output.finished for output in outputs] == [True] * 4
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert f"token id {VOCAB + 5}" in outputs[1].error
    assert "empty" in outputs[2].error
    assert outputs[1].prompt_token_ids == bad
    assert outputs[0].error is outputs[3].error is None
    assert [answers(outputs)[i] for i in (0, 3)] == [oracle(p, 8) for p in good]
    assert_all_free(plain)


def test_stop_parameters_that_cannot_work_are_refused(plain):
    with pytest.raises(RequestError, match=f"stop_token_ids holds token id {VOCAB}"):
        plain.generate([1], greedy(4, stop_token_ids=(VOCAB,)))
    with pytest.raises(RequestError, match="without a tokenizer"):
        plain.generate([1], greedy(4, stop=("x",)))
    with pytest.raises(RequestError, match="2 prompts came with 3 sampling_params"):
        plain.generate([[1], [2]], [greedy(4)] * 3)
    with pytest.raises(RequestError, match="no chat template"):
        plain.chat([{"role": "user", "content": "hi"}])


def test_a_request_that_needs_more_memory_than_there_is_names_the_pages():
    page = 2 * 2 * 16 * 2 * 16 * 4
    llm = make_engine(max_num_seqs=2, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=6 * page)
    assert llm.engine.pool.num_pages == 6
    llm.engine.core.scheduler.pages.allocate(1)  # as if the cache were smaller than one request
    llm.engine.core.scheduler.pages.num_pages -= 2
    with pytest.raises(RequestError, match=r"need 4 pages of 16 tokens, but the cache has 3.*--kv-cache-memory-bytes"):
        llm.generate([1] * 40, greedy(24))


def test_a_cache_too_small_for_any_request_stops_the_start_saying_how_much_is_needed():
    with pytest.raises(CapacityError, match=r"needs \d+ MiB for a single request, but \d+ MiB are left"):
        make_engine(kv_cache_memory_bytes=1000, enforce_eager=True)


def test_a_cache_for_one_request_at_a_time_serves_many():
    page = 2 * 2 * 16 * 2 * 16 * 4
    llm = make_engine(enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=6 * page)
    asked = prompts(6, longest=40)
    busiest = []
    for i, prompt in enumerate(asked):
        llm.engine.core.add(str(i), prompt, greedy(20))
    ended = run_through(llm, lambda: busiest.append(len(llm.engine.core.scheduler.running)))
    assert ended == {str(i): oracle(prompt, 20) for i, prompt in enumerate(asked)}
    assert max(busiest) < 6
    assert_all_free(llm)


def test_an_id_in_use_is_refused(plain):
    core = plain.engine.core
    core.add("a", [1, 2], greedy(2))
    with pytest.raises(RequestError, match="'a' is running already"):
        core.add("a", [1, 2], greedy(2))
    run_through(plain)
    core.add("a", [1, 2], greedy(2))
    assert run_through(plain) == {"a": oracle([1, 2], 2)}


def test_aborting_what_is_unknown_or_over_does_nothing(plain):
    plain.engine.core.abort("never heard of")
    assert_all_free(plain)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"cudagraph_mode": "FULL_AND_PIECEWISE", "require_graphs": True, "cudagraph_capture_sizes": (4,)},
         ConfigError, "ends at 4, below max_num_seqs 8"),
        ({"cudagraph_mode": "NONE", "require_graphs": True}, ConfigError, "leave one out"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY", "require_graphs": True, "speculative_config": NGRAM},
         GraphError, "target.prefill: cudagraph_mode is FULL_DECODE_ONLY"),
        ({"cudagraph_mode": "PIECEWISE", "require_graphs": True, "speculative_config": SELF_DRAFT},
         GraphError, "draft.decode: "),
    ],
)  # fmt: skip
def test_required_graphs_that_are_not_there_stop_the_start(settings, error, message):
    with pytest.raises(error, match=message):
        make_engine(**settings)


# ---- using it -------------------------------------------------------------------------------


def test_two_engines_work_side_by_side():
    one, two = (make_engine(speculative_config=spec, cudagraph_mode="FULL", max_num_seqs=2) for spec in (NGRAM, None))
    first, second = prompts(2)
    for llm, prompt in ((one, first), (two, second)):
        llm.engine.core.add("x", prompt, greedy(20))
    ended = {}
    while not (one.engine.core.idle and two.engine.core.idle):
        for llm in (one, two):
            for sequence, _ in llm.engine.core.step():
                if sequence.finish_reason:
                    ended[llm] = sequence.output_ids
    assert ended == {one: oracle(first, 20), two: oracle(second, 20)}
    one.close()
    assert answers(two.generate(second, greedy(20))) == [oracle(second, 20)]


def test_a_closed_engine_gives_back_its_memory_and_says_that_it_is_closed():
    llm = make_engine(enforce_eager=True)
    cache = weakref.ref(llm.engine.pool)
    llm.generate([1, 2], greedy(2))
    llm.close()
    llm.close()
    gc.collect()
    assert cache() is None
    for use in (lambda: llm.generate([1], greedy(1)), llm.get_graph_report, llm.get_metrics, llm.get_tokenizer):
        with pytest.raises(RequestError, match="closed"):
            use()


@pytest.mark.parametrize("spec", [None, SELF_DRAFT], ids=["plain", "self_draft"])
def test_a_stream_grows_to_the_whole_answer(spec):
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL")
    prompt = prompts(3)[2]
    seen = [(list(output.outputs[0].token_ids), output.finished) for output in llm.stream(prompt, greedy(17))]
    text = oracle(prompt, 17)
    assert seen[-1] == (text, True)
    assert [len(ids) for ids, _ in seen] == sorted({len(ids) for ids, _ in seen})
    assert all(ids == text[: len(ids)] and not ended for ids, ended in seen[:-1])
    assert len(seen) == (17 if spec is None else 5)  # the first token, then blocks of 5 up to the limit
    assert_all_free(llm)


def test_leaving_a_stream_ends_its_request(plain):
    for output in plain.stream(prompts(1)[0], greedy(60)):
        if len(output.outputs[0].token_ids) == 3:
            break
    gc.collect()
    assert_all_free(plain)


def test_other_prompts_answered_while_a_stream_is_open_do_not_lose_its_end(plain):
    first, second = prompts(2)
    stream = plain.stream(first, greedy(6))
    next(stream)
    assert answers(plain.generate(second, greedy(20))) == [oracle(second, 20)]
    last = None
    for number, output in enumerate(stream):
        assert number < 10, "the stream does not end"
        last = output
    assert last is not None
    assert (last.outputs[0].token_ids, last.finished) == (oracle(first, 6), True)
    assert_all_free(plain)


def test_streams_side_by_side_both_reach_their_end(plain):
    first, second = prompts(2)
    one, two = plain.stream(first, greedy(6)), plain.stream(second, greedy(9))
    next(one), next(two)
    assert [list(stream)[-1].outputs[0].token_ids for stream in (one, two)] == [oracle(first, 6), oracle(second, 9)]
    assert_all_free(plain)


def test_leaving_one_stream_does_not_end_another(plain):
    first, second = prompts(2)
    one, two = plain.stream(first, greedy(30)), plain.stream(second, greedy(9))
    next(one), next(two)
    one.close()
    seen = [len(output.outputs[0].token_ids) for output in two]
    assert seen == list(range(2, 10))
    assert_all_free(plain)


def test_a_stream_whose_request_is_aborted_ends(plain):
    stream = plain.stream(prompts(1)[0], greedy(30))
    plain.engine.core.abort(next(stream).request_id)
    assert list(stream) == []
    assert_all_free(plain)


def test_an_interrupt_leaves_no_request_behind(plain, monkeypatch):
    core = plain.engine.core
    step, calls = core.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plain.generate(prompts(3), greedy(20))
    monkeypatch.undo()
    run_through(plain)
    assert_all_free(plain)
    assert answers(plain.generate(prompts(3), greedy(9))) == [oracle(p, 9) for p in prompts(3)]


def test_outputs_come_in_the_order_of_the_prompts(plain):
    asked = prompts(12)
    outputs = plain.generate(asked, [greedy(24 - 2 * i) for i in range(12)])
    assert [output.prompt_token_ids for output in outputs] == asked
    assert [len(tokens) for tokens in answers(outputs)] == [24 - 2 * i for i in range(12)]
    assert plain.generate([], greedy(2)) == []


def test_metrics_and_reports_of_a_run(plain):
    asked = prompts(3)
    outputs = plain.generate(asked, greedy(10))
    metrics = plain.get_metrics()
    assert metrics["prompt_tokens"] == sum(map(len, asked))
    assert metrics["generation_tokens"] == 30
    assert metrics["spec_decode_num_drafts"] == 0
    for output in outputs:
        assert output.spec is None
        assert 0 <= output.metrics["queue_time_ms"] <= output.metrics["time_to_first_token_ms"]
        assert output.metrics["time_to_first_token_ms"] <= output.metrics["generation_time_ms"]
        assert output.metrics["tokens_per_second"] > 0
    report = plain.get_graph_report()
    assert json.loads(json.dumps(report.to_dict()))["cudagraph_mode"] == "FULL"
    assert report.replays["target.decode"] == 9
    assert set(report.eager_runs.values()) == {0}


def test_capture_sizes_that_are_no_multiple_of_the_block_start():
    """B06: the unit is rows."""
    llm = engine(
        speculative_config={**NGRAM, "num_speculative_tokens": 2}, cudagraph_capture_sizes=(1, 2, 4, 8),
        cudagraph_mode="FULL",
    )  # fmt: skip
    asked = prompts(5)
    assert answers(llm.generate(asked, greedy(12))) == [oracle(p, 12) for p in asked]
    verify = [row for row in llm.get_graph_report().rows if row.phase == "target.verify"]
    assert [(row.rows, row.tokens) for row in verify] == [(1, 3), (2, 6), (4, 12), (8, 24)]


def test_33_rows_with_three_drafts_run_in_their_largest_graph():
    """B11 in a whole engine: 33 rows of 1 + 3 tokens."""
    llm = engine(
        speculative_config=NGRAM,
        max_num_seqs=33,
        max_prefill_rows=33,
        max_num_batched_tokens=512,
        cudagraph_capture_sizes=(8, 33),
        cudagraph_mode="FULL_DECODE_ONLY",
        poison=True,
    )
    asked = prompts(33)
    assert answers(llm.generate(asked, greedy(6))) == [oracle(p, 6) for p in asked]
    used = {row.rows for row in llm.get_graph_report().rows if row.phase == "target.verify" and row.replays}
    assert 33 in used
