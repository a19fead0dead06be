"""The offline engine in use: mistakes, streams, several engines, reports, and what is left behind."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftloop.engine import build, memory
from draftloop.errors import CapacityError, ConfigError, GraphError, RequestError
from draftloop.request import SamplingParams
from example_drafters import example_configs
from helpers import (
    VOCAB,
    answers,
    assert_all_free,
    drafting_spec,
    engine,
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


# ---- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "the prompt is empty"),
        ([1] * 128, "128 tokens; with max_model_len 128 it may have at most 127"),
        ([1, VOCAB], f"token id {VOCAB}; this model's ids are 0 to {VOCAB - 1}"),
        ([1, -1], "token id -1"),
        ([1, True], "token id True"),
        ("text", "no tokenizer"),
        ({"prompt_token_ids": 7}, "the prompt is 7; it must be a text or a list of token ids"),
        ({"prompt_token_ids": [1] * 20, "cache_salt": "half \ud800"}, "cache_salt is"),
        (None, "prompts is None"),
    ],
    ids=["empty", "too_long", "unknown_id", "negative_id", "bool", "text", "no_list", "half_a_character", "nothing"],
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


def test_what_is_no_prompt_among_several_leaves_none_of_them_behind(plain):
    good = prompts(1)[0]
    outputs = plain.generate([good, 3], greedy(4))
    assert answers(outputs) == [oracle(good, 4), []]
    assert "the prompt is 3" in outputs[1].error
    with pytest.raises(RequestError, match="sampling_params is"):
        plain.generate([good], {"temperature": 0})
    assert_all_free(plain)


def test_arrays_and_tensors_of_token_ids_are_prompts_too(plain):
    good = prompts(1)[0]
    outputs = plain.generate([np.array(good), torch.tensor(good)], greedy(4))
    assert answers(outputs) == [oracle(good, 4)] * 2


def test_an_interrupt_while_requests_are_added_leaves_none_behind(plain, monkeypatch):
    core = plain.engine.core
    add, calls = core.add, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return add(*args, **options)

    monkeypatch.setattr(core, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):  # between two answers to one prompt
        plain.generate([[1], [2]], SamplingParams(n=2, max_tokens=4))
    monkeypatch.undo()
    assert plain._open == {}
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


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages are 'hi'; they must be a list of"),
        ({"role": "user", "content": "hi"}, "they must be a list of"),
        ([["hi"]], r"messages are \['hi'\]; they must be"),
        ([[]], r"messages are \[\]; they must be"),
        ([{"role": "user"}], "messages do not fit the chat template: 'content'"),
    ],
)
def test_messages_that_the_chat_template_cannot_take_are_refused(plain, monkeypatch, messages, message):
    def render(messages, **options):
        return "".join(one["content"] for one in messages)

    tokenizer = SimpleNamespace(chat_template="of some kind", apply_chat_template=render)
    monkeypatch.setattr(plain.engine, "tokenizer", tokenizer)
    with pytest.raises(RequestError, match=message):
        plain.chat(messages)


def test_a_request_that_needs_more_memory_than_there_is_names_the_pages():
    page = 2 * 2 * 16 * 2 * 16 * 4
    llm = make_engine(max_num_seqs=2, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=6 * page)
    assert llm.engine.pool.num_pages == 6
    llm.engine.core.scheduler.groups[0].allocate(1)  # as if the cache were smaller than one request
    llm.engine.core.scheduler.groups[0].num_pages -= 2
    with pytest.raises(RequestError, match=r"need 4 pages of 16 tokens, but the cache has 3.*--kv-cache-memory-bytes"):
        llm.generate([1] * 40, greedy(24))


def test_weights_that_cannot_fit_are_said_before_they_are_loaded(monkeypatch):
    monkeypatch.setattr(build, "load_target", None)
    monkeypatch.setattr(memory, "_free_memory", lambda: 3 << 30)
    with pytest.raises(
        CapacityError, match=r"llama-3.2-1b need 4\.6 GiB, but 3\.0 GiB of memory are free; use .* --dtype"
    ):
        make_engine("llama-3.2-1b", load_format="dummy", dtype="float32")


def test_a_gpu_whose_memory_ends_while_the_engine_is_made_says_what_to_do(monkeypatch):
    def load(*arguments, **options):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of .."
        )

    monkeypatch.setattr(build, "load_target", load)
    with pytest.raises(CapacityError, match=r"^CUDA out of memory while the engine was made; use a smaller model"):
        make_engine()


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


def test_the_start_says_what_memory_is_used_for(caplog):
    """B55: of the parts together no more is left out than the interpreter's own; all of them are named."""
    with caplog.at_level("INFO"):
        llm = make_engine(speculative_config=drafting_spec(), kv_cache_memory_bytes=1 << 26, max_model_len=192)
    memory = llm.engine.memory
    assert list(memory.parts) == ["weights", "drafter", "rows", "pages", "buffers", "graphs and workspace"]
    assert memory.parts["pages"] < llm.engine.pool.nbytes / 2, "pages take memory when they are used"
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: ")]
    assert "pages" in line
    assert "together" in line
    memory.budget_bytes = memory.in_use() - (5 << 20)
    memory.check()
    assert "more than --gpu-memory-utilization allows" in caplog.text
