"""`bench latency` and `throughput`: what is measured of a decoding batch, and what cannot be."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from draftloop import cli
from draftloop.bench import steady
from draftloop.bench.roofline import Ceiling, ceiling_of, floor_ms
from draftloop.bench.sampling_mix import SamplingMix
from draftloop.bench.steady import PHASE_ROUNDS, SteadyBatch, against_floor, against_greedy, measure_steady
from draftloop.bench.throughput import serve, throughput_rows
from draftloop.bench.trace import TRACED, write_trace
from draftloop.engine.llm import LLM
from draftloop.errors import CapacityError, ConfigError
from draftloop.graphs.phase import Cost, Phase, chain
from example_drafters import example_configs
from helpers import answers, assert_all_free, engine, greedy, make_engine, prompts

K = 3
CEILING = Ceiling(bytes_per_s=1e9, flops_per_s=1e12)
EAGLE = {
    "method": "eagle3",
    "model": "eagle3-tiny",
    "num_speculative_tokens": K,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.5,
}


def tiny(**settings: Any) -> LLM:
    return engine("tiny", load_format="dummy", max_model_len=768, **settings)


def measured(llm: LLM, rows: int = 2, *, output_tokens: int = 24) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    step, *phases = measure_steady(llm, rows, CEILING, prompt_tokens=16, output_tokens=output_tokens, repeats=1)
    return step, {row["phase"]: row for row in phases}


def test_sampled_batches_are_held_against_greedy_ones():
    llm = tiny(max_num_seqs=3, speculative_config=EAGLE)
    options = {"prompt_tokens": 16, "output_tokens": 24, "repeats": 1}
    greedy, *_ = measure_steady(llm, 3, CEILING, **options)
    for mix, kind in ((SamplingMix.SAMPLED, "sampled"), (SamplingMix.ALL_PARAMETERS_HALF, "constrained")):
        step, *phases = against_greedy(llm, greedy, CEILING, mix, **options)
        assert (step["metric"], step["batch"], step["sampling"]) == ("sampled_iteration_ms", 3, mix)
        assert step["greedy"] == greedy["value"]
        assert step["to_greedy"] == pytest.approx(step["value"] / greedy["value"], rel=1e-3)
        assert f"accept.{kind}" in {row["phase"] for row in phases}
        assert {row["metric"] for row in phases} == {"sampled_phase_ms"}
    assert_all_free(llm)


def test_half_of_a_mix_asks_for_everything_and_the_rest_for_nothing():
    asked = [SamplingMix.ALL_PARAMETERS_HALF.params(i, max_tokens=9, vocab_size=1000) for i in range(4)]
    assert [(p.constrained, p.greedy) for p in asked] == [(True, False), (False, True)] * 2
    assert all(p.max_tokens == 9 and p.ignore_eos for p in asked)


# ---- floors ---------------------------------------------------------------------------------


def phase(name: str, tokens_per_row: int, **cost: int) -> Phase:
    return Phase(name=name, fn=lambda launch: {}, slots={}, tokens_per_row=tokens_per_row, cost=Cost(**cost))


def test_a_floor_is_bytes_or_operations_whichever_takes_longer():
    decode = phase("decode", 1, weight_bytes=1_000_000, cache_bytes=100, flops=10_000_000)
    assert floor_ms(decode, CEILING, rows=1, context=0) == pytest.approx(1.0)
    assert floor_ms(decode, CEILING, rows=10, context=1000) == pytest.approx(1.0 + 1.0)
    verify = replace(decode, name="verify", tokens_per_row=50)
    assert floor_ms(verify, CEILING, rows=10, context=1000) == pytest.approx(5.0)
    both = chain("both", [verify, replace(decode, name="decode")])
    assert floor_ms(both, CEILING, rows=10, context=1000) == pytest.approx(7.0)


def test_a_floor_counts_the_experts_that_are_expected_to_be_hit():
    cost = {"expert_bytes": 1_000_000, "num_experts": 128, "experts_per_token": 8}
    one = phase("decode", 1, **cost)
    assert floor_ms(one, CEILING, rows=1, context=0) == pytest.approx(8.0)
    source = random.Random(0)
    hit = [len({e for _ in range(6) for e in source.sample(range(128), 8)}) for _ in range(4000)]
    assert floor_ms(replace(one, tokens_per_row=6), CEILING, rows=1, context=0) == pytest.approx(fmean(hit), rel=0.01)
    assert floor_ms(one, CEILING, rows=10_000, context=0) == pytest.approx(128.0)


def test_what_has_no_floor_has_no_ratio():
    assert against_floor([3.0, 1.0, 2.0], 0.5) == {"value": 2.0, "min": 1.0, "max": 3.0, "floor": 0.5, "ratio": 4.0}
    assert against_floor([2.0], 0)["ratio"] is None
    assert against_floor([], 1.0) == {"value": None, "min": None, "max": None, "floor": 1.0, "ratio": None}


def test_a_machine_that_is_not_listed_is_measured():
    found = ceiling_of(torch.device("cpu"), torch.float32)
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.flops_per_s < 1e15


# ---- iterations and their phases ------------------------------------------------------------


def test_phases_of_an_iteration_add_up_to_its_floor():
    llm = tiny(speculative_config=EAGLE)
    step, phases = measured(llm)
    runs = {name: row["runs"] for name, row in phases.items()}
    assert runs == {"target.verify": 1, "accept": 1, "draft.prefill": 1, "draft.decode": K - 1}
    assert step["launches"] == 3 + K - 1
    assert step["eager_runs"] == 0
    assert 16 < step["context"] < phases["accept"]["context"]
    declared = llm.engine.table.phases
    floors = [
        count * floor_ms(declared[name], CEILING, rows=2, context=step["context"]) for name, count in runs.items()
    ]
    assert step["floor"] == pytest.approx(sum(floors), rel=0.01)
    for name in ("target.verify", "draft.prefill", "draft.decode"):
        assert phases[name]["ratio"] == pytest.approx(phases[name]["value"] / phases[name]["floor"], rel=0.01)
        assert phases[name]["min"] <= phases[name]["value"] <= phases[name]["max"]
    assert phases["accept"]["floor"] is None
    assert_all_free(llm)


def test_phases_are_timed_over_the_rows_that_decode():
    """They do the iterations' work, so the rows' tokens and caches grow under them."""
    llm = tiny(speculative_config=EAGLE)
    state = llm.engine.core.worker.state
    with SteadyBatch(llm, 2, prompt_tokens=16, num_iterations=4) as batch:
        rows = [sequence.row for sequence in llm.engine.core.scheduler.running]
        iterations = batch.measure(4)
        before = state.num_tokens_M[rows].clone()
        times, context = batch.time_phases(iterations)
        grown = (state.num_tokens_M[rows] - before).tolist()
    assert all(PHASE_ROUNDS < count <= (PHASE_ROUNDS + 1) * (K + 1) for count in grown)
    assert len(times["draft.decode"]) == PHASE_ROUNDS * (K - 1)
    assert before.float().mean() < context < state.num_tokens_M[rows].float().mean()


def test_a_device_loop_is_one_launch_for_all_of_its_iterations():
    llm = tiny(speculative_config=EAGLE, device_loop=8)
    step, phases = measured(llm, output_tokens=16 * (K + 1))
    assert step["launches"] == pytest.approx(1 / 8)
    assert phases["draft.decode"]["runs"] == K - 1
    chained = phases["iteration"]
    assert (chained["chain"], chained["runs"]) == (True, 1)
    assert chained["floor"] == pytest.approx(
        sum(row["runs"] * (row["floor"] or 0) for row in phases.values() if not row["chain"]), rel=0.01
    )
    assert_all_free(llm)


def test_an_iteration_graph_is_one_launch():
    step, phases = measured(tiny(speculative_config=EAGLE, iteration_graph=True))
    assert step["launches"] == 1
    assert phases["iteration"]["min"] > phases["target.verify"]["min"]


def test_what_runs_eager_is_counted_and_timed():
    step, phases = measured(tiny(cudagraph_mode="NONE"), output_tokens=8)
    assert (step["launches"], step["eager_runs"], step["acceptance_length"]) == (0, 2 * 8, 1)
    assert all(row["value"] > 0 for row in phases.values())


@pytest.mark.parametrize("name", sorted(example_configs()))
def test_every_drafters_phases_can_be_timed(name):
    llm = engine(speculative_config=example_configs()[name][0], max_model_len=192)
    with SteadyBatch(llm, 2, prompt_tokens=8, num_iterations=4) as batch:
        iterations = batch.measure(4)
        times, _ = batch.time_phases(iterations)
    assert set(times) == set(iterations.phases)
    assert {"target.verify", "target.decode"} & set(times)
    assert all(ms > 0 for values in times.values() for ms in values)
    assert_all_free(llm)


def test_a_phase_that_few_iterations_run_is_listed_without_a_time():
    """Lookup finds nothing in some steps, which then are plain decoding."""
    llm = engine(
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 3}, max_model_len=192
    )
    with SteadyBatch(llm, 1, prompt_tokens=16, num_iterations=6) as batch:
        iterations = replace(batch.measure(6), runs={"target.verify": 0.7, "accept": 0.7, "target.decode": 0.3})
        times, context = batch.time_phases(iterations)
    assert set(times) == {"target.verify", "accept"}
    rows = {row["phase"]: row for row in steady._phase_rows(llm, 1, CEILING, iterations, times, context)}
    assert rows["target.decode"]["value"] is None
    assert rows["target.decode"]["runs"] == 0.3
    assert rows["target.verify"]["value"] > 0


def test_the_engine_answers_as_before_after_a_measurement():
    llm = engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, max_model_len=192)
    asked = prompts(3)
    before = answers(llm.generate(asked, greedy()))
    with SteadyBatch(llm, 3, prompt_tokens=8, num_iterations=4) as batch:
        batch.time_phases(batch.measure(4))
    assert answers(llm.generate(asked, greedy())) == before


def test_rows_that_do_not_fit_are_refused():
    llm = tiny(max_num_seqs=2)
    with (
        pytest.raises(CapacityError, match="only 2 of 3 rows"),
        SteadyBatch(llm, 3, prompt_tokens=16, num_iterations=4),
    ):
        pass
    assert_all_free(llm)
    few = make_engine(kv_cache_memory_bytes=1 << 17, max_model_len=128, enforce_eager=True)
    with (
        pytest.raises(CapacityError, match=r"only \d of 3 rows of 128 tokens fit; raise .*--kv-cache-memory-bytes"),
        SteadyBatch(few, 3, prompt_tokens=60, num_iterations=20),
    ):
        pass
    assert_all_free(few)
    with pytest.raises(ConfigError, match="after a prompt of 700, but only 68 are left to max_model_len 768"):
        SteadyBatch(llm, 1, prompt_tokens=700, num_iterations=60)


def test_the_first_rows_may_not_end_before_the_last_ones_begin():
    """Prompts run one at a time, while earlier rows already decode."""
    llm = engine(max_model_len=128, max_prefill_rows=1, max_num_seqs=8)
    batch = SteadyBatch(llm, 8, prompt_tokens=40, num_iterations=55)
    with pytest.raises(ConfigError, match="measuring takes up to 84 tokens after a prompt of 40, but only"), batch:
        pass
    assert_all_free(llm)
    with SteadyBatch(llm, 8, prompt_tokens=20, num_iterations=55) as batch:
        assert len(llm.engine.core.scheduler.running) == 8
        assert batch.measure(55).context > 20 + 55 / 2


@pytest.mark.gpu
def test_on_a_gpu_phases_are_timed_by_events_and_a_loop_is_one_launch(tmp_path):
    llm = LLM("smollm2-135m-shape", load_format="dummy", max_model_len=2048, max_num_seqs=2, device="cuda",
              cudagraph_capture_sizes=(2,), speculative_config={**EAGLE, "model": "eagle3-smollm2-135m"})  # fmt: skip
    try:
        step, phases = measured(llm)
        assert step["eager_runs"] == 0
        if llm.engine.core.worker.loop:
            assert step["launches"] == pytest.approx(1 / 64)
        assert {"iteration", "target.verify", "draft.decode"} <= phases.keys()
        assert all(row["value"] > 0 for row in phases.values())
        write_trace(llm, tmp_path / "trace.json", rows=2, prompt_tokens=16)
    finally:
        llm.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) > 100


# ---- trace ----------------------------------------------------------------------------------


def test_a_trace_names_iterations_and_phases(tmp_path):
    llm = tiny(speculative_config=EAGLE, device_loop=8)
    loop = llm.engine.core.worker.loop
    write_trace(llm, tmp_path / "new" / "trace.json.gz", rows=2, prompt_tokens=16)
    assert llm.engine.core.worker.loop is loop
    events = json.loads(gzip.decompress((tmp_path / "new" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert names == {"iteration": TRACED, "target.verify": 1, "accept": 1, "draft.prefill": 1, "draft.decode": K - 1}


# ---- throughput -----------------------------------------------------------------------------


def test_as_many_requests_are_open_as_asked_for(monkeypatch):
    llm = tiny(speculative_config=EAGLE)
    core, step, most = llm.engine.core, llm.engine.core.step, []

    def watched():
        most.append(len(core.scheduler.running) + len(core.scheduler.waiting))
        return step()

    monkeypatch.setattr(core, "step", watched)
    params = greedy(12, ignore_eos=True)
    requests, seconds = serve(llm, prompts(7), params, concurrency=3)
    assert max(most) == 3
    assert [len(request.output_ids) for request in requests] == [12] * 7
    assert_all_free(llm)
    assert seconds > 0
    for index, request in enumerate(requests):
        assert request.arrived <= request.started <= request.first_token <= request.finished
        request.arrived, request.first_token = 1.0, 1.5 + index
        request.finished = request.first_token + 11 * 0.1
    speed, *waits = throughput_rows(requests, 20.0, 3)
    assert (speed["metric"], speed["batch"], speed["num_requests"]) == ("tokens_per_s", 3, 7)
    assert speed["value"] == 7 * 12 / 20
    assert 1 < speed["acceptance_length"] < K + 1
    assert [(row["metric"], row["p50"]) for row in waits] == [("ttft_ms", 3500), ("tpot_ms", 100), ("request_ms", 4600)]
    assert waits[0]["p90"] == pytest.approx(5900)


DUMMY = ("--load-format", "dummy", "--device", "cpu", "--max-model-len", "512", "--prompt-tokens", "16")


def test_throughput_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shapes = ["--concurrency", "1,2", "--num-requests", "3", "--output-tokens", "8", "--repeats", "1"]
    out = tmp_path / "run.json"
    cli.main(["bench", "throughput", "tiny", *DUMMY, *shapes, "-sc", json.dumps(EAGLE), "--out", str(out)])
    written = json.loads(out.read_text())["rows"]
    speeds = [row for row in written if row["metric"] == "tokens_per_s"]
    assert [(row["batch"], row["num_requests"], row["k"], row["prompts"]) for row in speeds] == [
        (1, 3, K, "random"),
        (2, 3, K, "random"),
    ]
    assert {row["metric"] for row in written if row.get("batch") == 2} == {
        "tokens_per_s", "ttft_ms", "tpot_ms", "request_ms", "iteration_ms", "phase_ms",
    }  # fmt: skip
    assert out.with_suffix(".png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "draft.prefill" in printed


def test_latency_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, trace = tmp_path / "run.json", tmp_path / "trace.json"
    shapes = ["--batch-sizes", "1,2", "--output-tokens", "8", "--repeats", "1", "--cudagraph-capture-sizes", "1,2"]
    cli.main(["bench", "latency", "tiny", *DUMMY, *shapes, "--out", str(out), "--trace", str(trace)])
    written = json.loads(out.read_text())["rows"]
    start = next(row for row in written if row["metric"] == "startup_s")
    assert not start["all_sizes"]
    assert start["num_graphs"] > 0
    assert [(row["batch"], row["phase"]) for row in written if row["metric"] == "phase_ms"] == [
        (batch, name) for batch in (1, 2) for name in ("target.decode", "accept.decode")
    ]
    assert {"traceEvents", "schemaVersion"} <= json.loads(trace.read_text()).keys()
    assert out.with_suffix(".png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "Phases, one by one" in printed
    assert str(trace) in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--trace", "trace.txt"], "--trace is 'trace.txt'; its name must end with .json or .json.gz"),
        (["latency", "--output-tokens", "1"], "--output-tokens is 1; it must be at least 2"),
        (["throughput", "--num-requests", "0"], "--num-requests is 0; it must be at least 1"),
        (["throughput", "--concurrency", "4,0"], "--concurrency is 0; it must be at least 1"),
        (["throughput", "--prompts", "mtbench"], "did you mean 'mt_bench'"),
        (["throughput", "--temperature", "-1"], "temperature is -1.0"),
        (["throughput", "tiny", *DUMMY, "--output-tokens", "600"], "16 prompt tokens and 600 output tokens exceed"),
        (["latency", "tiny", *DUMMY, "--output-tokens", "600"], "exceed max_model_len 512"),
        (["report", "nowhere"], "nowhere holds no *.json"),
    ],
)
def test_what_cannot_be_measured_is_one_line(argv, message, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", *argv])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
