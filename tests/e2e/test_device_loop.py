"""The engine with steps that the device repeats: the same tokens, wherever they end and whatever comes between."""

from __future__ import annotations

import functools
import threading
import time

import pytest

from blocks import wide_block
from draftloop.config.engine import EngineConfig
from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError, GraphError
from draftloop.graphs.ring import Ring, Stop, Word
from draftloop.graphs.tape import Tape, TapeRecorder
from draftloop.kvcache.rows import MAX_STOP_IDS
from draftloop.request import SamplingParams
from example_drafters import example_configs, works_on_host
from heads import wide_head
from helpers import (
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    near_draft,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

load_drafters()
CASES = [(name, index) for name, configs in example_configs().items() for index in range(len(configs))]
REPEATING = [(n, i) for n, i in CASES if not works_on_host(n, i) and not DRAFTERS[n].observes]
SPEC = {"method": "draft_model", "model": near_draft(), "num_speculative_tokens": 3}


def looping(steps: int = 64, **settings) -> LLM:
    return engine(**{"device_loop": steps, "cudagraph_capture_sizes": (2, 8), "speculative_config": SPEC, **settings})


def iterations(llm: LLM) -> int:
    return sum(row.iterations for row in llm.get_graph_report().loops)


def ring(llm: LLM) -> Ring:
    loop = llm.engine.core.worker.loop
    assert loop is not None
    return loop.ring


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations take as long as the host needs to take the last one out of the ring, or to interrupt."""
    publish = Ring.publish

    def publish_and_wait(ring: Ring, *args, **options) -> Stop:
        stop, words = publish(ring, *args, **options), ring._words
        while stop is Stop.NONE and words[Word.READ] < words[Word.PUBLISHED]:
            if words[Word.INTERRUPT] >= words[Word.LAUNCH]:
                break
            time.sleep(0.001)
        return stop

    monkeypatch.setattr(Ring, "publish", publish_and_wait)


# ---- the same tokens ------------------------------------------------------------------------


def test_rows_with_penalties_are_repeated_and_those_whose_steps_need_the_host_are_not():
    asked = prompts(4)
    params = [greedy(20, presence_penalty=1, min_tokens=4), greedy(20, frequency_penalty=-1), greedy(20), greedy(12)]
    expected = answers(engine(cudagraph_mode="NONE").generate(asked, params))
    loop = looping()
    loop.reset_graph_counts()
    assert answers(loop.generate(asked, params)) == expected
    assert iterations(loop) > 0
    loop.reset_graph_counts()
    reported = [*params[:3], greedy(70, logprobs=1)]
    assert answers(loop.generate(asked, reported))[:3] == expected[:3]
    assert iterations(loop) == 0, "each step brings logprobs to the host"


@functools.cache
def phase_by_phase(name: str, index: int, temperature: float) -> list[list[int]]:
    spec = example_configs()[name][index] if name != "none" else None
    apart = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8))
    return answers(apart.generate(prompts(7), seven(temperature)))


def seven(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=7, max_tokens=4 + i) for i in range(7)]


@pytest.mark.parametrize(
    ("name", "index", "steps", "overlap"),
    [
        *[(name, index, 5, True) for name, index in [*REPEATING, ("none", 0)]],
        *[("draft_model", 0, steps, False) for steps in (2, 64)],  # which is the loop's affair, whoever drafts
    ],
)
def test_tokens_are_those_of_the_phases_one_by_one(name, index, steps, overlap):
    spec = example_configs()[name][index] if name != "none" else None
    loop = looping(steps, async_scheduling=overlap, speculative_config=spec)
    for temperature in (0.0, 0.8):
        expected = phase_by_phase(name, index, temperature)
        loop.engine.table.poison = steps == 5
        loop.reset_graph_counts()
        assert answers(loop.generate(prompts(7), seven(temperature))) == expected, temperature
        assert iterations(loop) > 0
    assert_all_free(loop)


def wide_spec(name: str) -> dict | None:
    return {
        "none": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
        "draft_model": {**SPEC, "model": tiny_model("wide-near", hidden=256, noise=0.06)},
        "eagle3": {"method": "eagle3", "model": wide_head("eagle3"), "num_speculative_tokens": 3},
        "dflash": {"method": "dflash", "model": wide_block("dflash"), "num_speculative_tokens": 3},
        "dspark": {"method": "dspark", "model": wide_block("dspark"), "num_speculative_tokens": 3},
    }[name]


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2, 5, 64])
@pytest.mark.parametrize("name", ["none", "ngram", "draft_model", "eagle3", "dflash", "dspark"])
def test_tokens_are_those_of_the_phases_one_by_one_on_a_gpu(name, steps):
    """40 prompts, eight at a time, so that both engines see the same batches; greedy and sampled with a seed."""
    shared = {"device": "cuda", "dtype": "float32", "cudagraph_capture_sizes": (2, 8)}
    shared |= {"model": tiny_model("wide", hidden=256), "speculative_config": wide_spec(name)}
    apart = make_engine(**shared, iteration_graph=False, device_loop="off")
    loop = make_engine(**shared, device_loop=steps)
    assert loop.engine.core.worker.loop is not None, "see the log for the reason"
    asked = prompts(40)
    for temperature, seed in ((0.0, 7), (0.8, 7)):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=10 + 7 * i) for i in range(8)]
        for poison in (False, True):
            loop.engine.table.poison = poison
            loop.reset_graph_counts()
            for start in range(0, 40, 8):
                batch = asked[start : start + 8]
                assert answers(loop.generate(batch, params)) == answers(apart.generate(batch, params)), temperature
            assert iterations(loop) > 0
            launches = sum(row.launches for row in loop.get_graph_report().loops)
            assert iterations(loop) > launches
    stops = oracle_of(apart, asked[0])
    output = loop.generate(asked[0], greedy(60, stop_token_ids=(stops[17],)))[0].outputs[0]
    assert output.token_ids == stops[: stops.index(stops[17]) + 1]
    assert output.finish_reason == "stop"
    assert_all_free(loop)
    apart.close()
    loop.close()


def oracle_of(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate(prompt, greedy(60))[0].outputs[0].token_ids


@pytest.mark.gpu
def test_a_host_that_stalls_on_a_gpu_loses_nothing():
    shared = {"device": "cuda", "dtype": "float32", "model": tiny_model("wide", hidden=256)}
    llm = make_engine(**shared, speculative_config=wide_spec("draft_model"), device_loop=1000)
    expected = oracle_of(make_engine(**shared, device_loop="off"), prompts(3)[2])
    core = llm.engine.core
    core.add("a", prompts(3)[2], greedy(60))
    assert run_through(llm, lambda: time.sleep(0.2 if ring(llm).published % 7 == 3 else 0)) == {"a": expected}
    llm.close()


# ---- where requests end ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stop_ids", "max_tokens", "more_ids_than_the_device_keeps"])
def test_a_request_ends_at_its_own_end_and_its_neighbours_go_on(kind):
    llm, asked = looping(), prompts(4)
    whole = [oracle(prompt, 40) for prompt in asked]
    for at in (0, 1, 7, 18):
        if kind == "max_tokens":
            params, expected = greedy(at + 1), whole[1][: at + 1]
        else:
            ids = (whole[1][at],)
            if kind == "more_ids_than_the_device_keeps":
                ids = (*[i for i in range(160) if i not in whole[1]][:MAX_STOP_IDS], *ids)
            params, expected = greedy(40, stop_token_ids=ids), whole[1][: whole[1].index(whole[1][at]) + 1]
        outputs = llm.generate(asked, [greedy(40), params, greedy(40), greedy(40)])
        assert answers(outputs) == [whole[0], expected, whole[2], whole[3]]
        assert outputs[1].outputs[0].finish_reason == ("length" if kind == "max_tokens" else "stop")
    assert_all_free(llm)


def test_a_loop_ends_with_the_iteration_in_which_a_request_ends():
    llm, prompt = looping(), prompts(3)[2]
    llm.generate(prompt, greedy(40))
    before = ring(llm).published
    tokens = oracle(prompt, 40)
    output = llm.generate(prompt, greedy(40, stop_token_ids=(tokens[20],)))[0]
    assert output.outputs[0].token_ids == tokens[: tokens.index(tokens[20]) + 1]
    assert output.spec is not None
    assert ring(llm).published - before == output.spec.num_spec_steps


def test_eos_ends_a_loop():
    asked = prompts(4)
    eos = oracle(asked[2], 40)[15]
    llm = make_engine(tiny_model("loop-eos", eos=eos), device_loop=64, speculative_config=SPEC)
    for prompt, output in zip(asked, llm.generate(asked, greedy(40)), strict=True):
        whole = oracle(prompt, 40)
        assert output.outputs[0].token_ids == (whole[: whole.index(eos) + 1] if eos in whole else whole)
    assert_all_free(llm)
    llm.close()


def test_a_stop_text_ends_a_request_though_only_the_host_knows_it():
    model = tiny_model("loop-words", words="w")
    plain, llm = engine(model), looping(model=model)
    prompt = prompts(3)[1]
    text = plain.generate(prompt, greedy(40))[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    params = greedy(40, stop=(stop,))
    expected, output = (one.generate(prompt, params)[0].outputs[0] for one in (plain, llm))
    assert (output.text, output.token_ids, output.stop_reason) == (expected.text, expected.token_ids, stop)
    assert iterations(llm) > 0
    assert_all_free(llm)


# ---- what comes between ---------------------------------------------------------------------


def decoding(llm: LLM, count: int, max_tokens: int = 100) -> list[list[int]]:
    """Requests "0", "1", .. in a loop that has made its first iteration."""
    asked, core = prompts(count), llm.engine.core
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(max_tokens))
    while not (core._in_flight and core._in_flight[0].repeats):
        core.step()
    core.step()
    assert core._in_flight[0].repeats
    return asked


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
def test_a_new_request_starts_within_two_iterations(slow_device, overlap):
    llm = looping(1000, async_scheduling=overlap)
    llm.generate(prompts(2), greedy(8))  # records, so that the loop begins at once
    asked = decoding(llm, 2)
    core, late = llm.engine.core, prompts(5)[4]
    before = ring(llm).published
    late_one = core.add("late", late, greedy(10))
    while late_one.num_prefilled == 0:
        core.step()
    assert ring(llm).published - before <= 2
    ended = run_through(llm)
    assert ended == {"late": oracle(late, 10), "0": oracle(asked[0], 100), "1": oracle(asked[1], 100)}
    assert_all_free(llm)


def test_an_abort_ends_within_two_iterations_and_its_row_is_used_again(slow_device):
    llm = looping(1000)
    llm.generate(prompts(2), greedy(8))
    asked = decoding(llm, 2)
    core = llm.engine.core
    before = ring(llm).published
    core.abort("0")
    while core._in_flight:
        core._commit_oldest()
    assert ring(llm).published - before <= 2
    core.add("next", prompts(3)[2], greedy(30))
    assert run_through(llm) == {"1": oracle(asked[1], 100), "next": oracle(prompts(3)[2], 30)}
    assert_all_free(llm)


def test_an_abandoned_stream_leaves_nothing_running():
    llm = looping(1000)
    for _ in llm.stream(prompts(3)[2], greedy(100)):
        if ring(llm).published > 3:
            break
    assert_all_free(llm)
    assert answers(llm.generate(prompts(2), greedy(20))) == [oracle(p, 20) for p in prompts(2)]


def test_text_streams_while_a_loop_runs(slow_device):
    llm = looping(1000)
    llm.generate(prompts(1), greedy(8))
    sizes, ahead = [], []
    for output in llm.stream(prompts(3)[2], greedy(60)):
        sizes.append(len(output.outputs[0].token_ids))
        ahead.append(any(flight.repeats and not flight.ended for flight in llm.engine.core._in_flight))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 60
    assert sum(ahead) > 5, "most tokens came out of a loop that was still running"


def test_a_host_that_stalls_loses_nothing():
    """Longer than the ring lasts, so that the device must stop by itself."""
    llm = looping(1000, max_num_seqs=4, cudagraph_capture_sizes=(2, 4))
    assert llm.engine.core.worker.loop is not None
    asked = decoding(llm, 2)
    stalls = iter([0.2] * 3)
    assert run_through(llm, lambda: time.sleep(next(stalls, 0))) == {
        str(i): oracle(prompt, 100) for i, prompt in enumerate(asked)
    }
    assert_all_free(llm)


def test_closing_ends_the_loop():
    llm = make_engine(device_loop=100_000, speculative_config=SPEC)
    llm.generate(prompts(2), greedy(8))
    decoding(llm, 2)
    shared = ring(llm)
    llm.close()
    published = shared.published
    time.sleep(0.05)
    assert shared.published == published


def test_what_goes_wrong_in_a_loop_is_raised_and_the_engine_can_be_closed(monkeypatch):
    llm = make_engine(device_loop=64, speculative_config=SPEC)
    llm.generate(prompts(2), greedy(8))
    replay = Tape.replay

    def fails_in_the_loop(tape: Tape) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise GraphError("the device is on fire")
        replay(tape)

    monkeypatch.setattr(Tape, "replay", fails_in_the_loop)
    with pytest.raises(GraphError, match="on fire"):
        llm.generate(prompts(2), greedy(40))
    monkeypatch.undo()
    assert answers(llm.generate(prompts(2), greedy(20))) == [oracle(p, 20) for p in prompts(2)]
    llm.close()


# ---- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3, True, "abc", 2.5])
def test_a_bad_value_is_refused(value):
    with pytest.raises(ConfigError, match=f"device_loop is {value!r}; it must be .*'auto'.*'off'.*integer"):
        EngineConfig.from_mapping(device_loop=value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cudagraph_mode": "NONE"}, "cudagraph_mode 'NONE' has no full graphs"),
        ({"cudagraph_mode": "PIECEWISE"}, "cudagraph_mode 'PIECEWISE' has no full graphs"),
        ({"iteration_graph": False}, "iteration_graph is off"),
        ({"speculative_config": example_configs()["scripted"][0]}, "this drafter works on the host"),
    ],
)
def test_settings_that_leave_nothing_to_repeat_are_refused(settings, why):
    with pytest.raises(ConfigError, match=f"device_loop is 8, but {why}"):
        make_engine(device_loop=8, **settings)


def test_a_drafter_that_looks_at_each_step_runs_without_a_loop_and_says_so(caplog):
    with caplog.at_level("WARNING"):
        llm = make_engine(device_loop=8, speculative_config=example_configs()["extract_hidden_states"][0])
    assert "no device loop" in caplog.text
    assert answers(llm.generate(prompts(2), greedy(20))) == [oracle(p, 20) for p in prompts(2)]
    llm.close()


@pytest.mark.parametrize("fault", ["driver", "graph"])
def test_without_conditional_nodes_one_line_says_so_and_iteration_graphs_run(fault, caplog, monkeypatch):
    def refuse(*args: object) -> None:
        raise GraphError("cuGraphInstantiate: CUDA_ERROR_NOT_SUPPORTED")

    if fault == "driver":
        monkeypatch.setattr(TapeRecorder, "why_no_loops", lambda self: "the driver speaks CUDA 12.2")
    else:
        monkeypatch.setattr(TapeRecorder, "loop", refuse)
    with caplog.at_level("WARNING"):
        llm = make_engine(device_loop=8, speculative_config=SPEC, require_graphs=True)
        assert answers(llm.generate(prompts(2), greedy(20))) == [oracle(p, 20) for p in prompts(2)]
    lines = [record.getMessage() for record in caplog.records if "device loop" in record.getMessage()]
    assert len(lines) == 1
    assert ("CUDA 12.2" if fault == "driver" else "CUDA_ERROR_NOT_SUPPORTED") in lines[0]
    report = llm.get_graph_report()
    assert report.loops == ()
    assert report.replays["iteration"] > 0
    llm.close()


def test_on_a_cpu_there_is_no_loop_unless_asked_for():
    llm = engine(speculative_config=SPEC)
    assert llm.engine.core.worker.loop is None
    assert llm.get_graph_report().loops == ()
