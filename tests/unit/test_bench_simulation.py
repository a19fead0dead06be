"""The simulation of replicas against what queueing theory says, and against schedules that can be written down."""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import threading
import time
from types import SimpleNamespace

import pytest

from draftloop.bench import replicas
from draftloop.bench.simulation import (
    ROUTES,
    Costs,
    Job,
    Simulation,
    costs_from_rows,
    least_loaded,
    make_jobs,
    prefix,
    round_robin,
    two_choices,
)
from draftloop.cli import bench_replicas, main
from draftloop.errors import CapacityError, ConfigError

EVEN = Costs(iteration_s=((1, 0.010),), prompt_token_s=0.001)


def run(jobs, costs=EVEN, *, replicas=1, rows=1, route=round_robin, concurrency=None, **options):
    simulation = Simulation(costs, replicas=replicas, rows=rows, route=route, **options)
    return simulation.run(jobs, concurrency=concurrency)


def test_a_schedule_that_can_be_written_down():
    """Two rows; prompts of 10 tokens take 10 ms, an iteration of one row 10 ms and of two 12 ms."""
    costs = Costs(iteration_s=((1, 0.010), (2, 0.012)), prompt_token_s=0.001)
    jobs = [Job(arrival_s=at, prompt_tokens=10, output_tokens=3) for at in (0.0, 0.015, 0.016)]
    served = run(jobs, costs, rows=2)
    # the first: prompt to 10 ms, tokens at 20 and, beside the second's prompt, at 40; the third waits for its row
    assert [one.first_token for one in served] == pytest.approx([0.010, 0.040, 0.060])
    assert [one.finished for one in served] == pytest.approx([0.040, 0.072, 0.082])


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_row_waits_as_m_d_1_says(load):
    """Poisson arrivals, constant service: the mean wait is load * service / (2 * (1 - load)), of Pollaczek and
    Khinchine."""
    service = 10 * 0.001 + 0.010
    jobs = make_jobs(30_000, requests_per_s=load / service, prompt_tokens=10, output_tokens=2)
    wait = statistics.mean(one.finished - one.arrived for one in run(jobs)) - service
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)


def test_one_row_waits_as_m_m_1_says():
    """Exponential service: the mean time in the system is service / (1 - load)."""
    chance, service, load = random.Random(1), 0.100, 0.7
    costs = Costs(iteration_s=((1, 1e-9),), prompt_token_s=0.001)
    jobs = make_jobs(30_000, requests_per_s=load / service, prompt_tokens=1, output_tokens=1)
    jobs = [
        Job(arrival_s=job.arrival_s, prompt_tokens=max(round(chance.expovariate(0.01)), 1), output_tokens=1)
        for job in jobs
    ]
    time_s = statistics.mean(one.finished - one.arrived for one in run(jobs, costs, prompt_budget=10**9))
    assert time_s == pytest.approx(service / (1 - load), rel=0.1)


def test_full_rows_give_what_iterations_allow_and_replicas_multiply_it():
    costs = Costs(iteration_s=((1, 0.01), (8, 0.02)), prompt_token_s=0.0, acceptance_length=2.5, num_drafts=3)
    speeds = []
    for number in (1, 2, 4):
        jobs = [Job(arrival_s=0.0, prompt_tokens=1, output_tokens=400)] * (64 * number)
        served = run(jobs, costs, replicas=number, rows=8, route=least_loaded, concurrency=8 * number)
        speeds.append(len(jobs) * 400 / max(one.finished for one in served))
    expected = 8 * 2.5 / 0.02
    assert speeds[0] == pytest.approx(expected, rel=0.1)
    assert [speed / speeds[0] for speed in speeds] == pytest.approx([1, 2, 4], rel=0.06)


def test_acceptance_and_iterations_are_those_that_were_measured():
    costs = Costs(iteration_s=((1, 0.01), (8, 0.02), (32, 0.05)), prompt_token_s=0, acceptance_length=2.2, num_drafts=5)
    simulation = Simulation(costs, replicas=1, rows=1, route=round_robin)
    assert statistics.mean(simulation._draw_tokens() for _ in range(20_000)) == pytest.approx(2.2, rel=0.03)
    assert [costs.iteration(rows) for rows in (0, 1, 8, 20, 32, 40)] == pytest.approx(
        [0, 0.01, 0.02, 0.035, 0.05, 0.06]
    )


def test_shorter_queues_are_better_than_turns_and_two_choices_are_nearly_as_good_as_all():
    """Mitzenmacher, The power of two choices in randomized load balancing (2001)."""
    chance, waits = random.Random(0), {}
    jobs = [
        Job(arrival_s=job.arrival_s, prompt_tokens=10, output_tokens=chance.choice([2, 2, 2, 40]))
        for job in make_jobs(4000, requests_per_s=60, prompt_tokens=10, output_tokens=2)
    ]
    for route in (round_robin, two_choices, least_loaded):
        served = run(jobs, replicas=8, rows=1, route=route)
        waits[route.__name__] = statistics.mean(one.first_token - one.arrived for one in served)
    assert waits["least_loaded"] < waits["two_choices"] < waits["round_robin"]


def test_conversations_that_stay_find_their_prompts_cached():
    jobs = make_jobs(2000, requests_per_s=8, prompt_tokens=50, output_tokens=4, turns=6)
    assert max(job.known_tokens for job in jobs) > 300
    ttft = {
        route.__name__: statistics.mean(
            one.first_token - one.arrived for one in run(jobs, replicas=4, rows=4, route=route)
        )
        for route in (prefix, least_loaded)
    }
    assert ttft["prefix"] < 0.85 * ttft["least_loaded"]


def test_costs_are_read_from_the_files_that_latency_writes(tmp_path, capsys):
    step = {"metric": "iteration_ms", "model": "m", "method": "eagle3", "k": 5, "dtype": "bfloat16", "path": "loop"}
    first = {"metric": "ttft_ms", "prompt": 500, "batch": 1, "value": 12.0, "min": 10.0}
    rows = [{**step, "batch": batch, "value": 5.0 + batch, "acceptance_length": 3.0} for batch in (8, 1)]
    costs = costs_from_rows([*rows, first])
    assert costs == Costs(
        iteration_s=((1, 0.006), (8, 0.013)), prompt_token_s=pytest.approx(2e-5), acceptance_length=3.0, num_drafts=5
    )
    file, out = tmp_path / "latency.json", tmp_path / "simulated.json"
    file.write_text(json.dumps({"rows": [*rows, first]}))
    arguments = ["--requests-per-s", "5", "--num-requests", "40", "--routing", "prefix,two_choices", "--turns", "3"]
    main(["bench", "simulate", "--costs", str(file), "--replicas", "1,3", *arguments, "--out", str(out)])
    found = json.loads(out.read_text())["rows"]
    speeds = {(row["routing"], row["replicas"]): row["value"] for row in found if "tokens_per_s" in row["metric"]}
    assert set(speeds) == {(route, number) for route in ("prefix", "two_choices") for number in (1, 3)}
    assert all(value == pytest.approx(5 * number * 128, rel=0.3) for (_, number), value in speeds.items())
    assert out.with_suffix(".png").exists()
    assert "m, eagle3, K=5, 512 + 128 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--routing", "prefx"], "did you mean 'prefix'"),
        (["--requests-per-s", "0"], "--requests-per-s is 0; it must be above 0"),
        (["--turns", "0.5"], "--turns is 0.5; it must be at least 1"),
        (["--acceptance-length", "3"], "--acceptance-length is 3; it must be in [1, 1]"),
        (["--replicas", "0"], "--replicas is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path, capsys, options, message):
    file = tmp_path / "latency.json"
    step = {"metric": "iteration_ms", "batch": 1, "value": 1.0, "acceptance_length": 1.0, "k": 0}
    file.write_text(json.dumps({"rows": [step, {"metric": "ttft_ms", "prompt": 8, "batch": 1, "value": 1.0}]}))
    with pytest.raises(SystemExit):
        main(["bench", "simulate", "--costs", str(file), *options, "--out", str(tmp_path / "out.json")])
    assert message in capsys.readouterr().err


def test_a_file_without_iterations_is_refused(tmp_path, capsys):
    file = tmp_path / "other.json"
    for text in ('{"rows": []}', "no json"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["bench", "simulate", "--costs", str(file)])
        assert f"--costs {file}" in capsys.readouterr().err


def test_the_command_names_the_routes_that_there_are():
    assert tuple(ROUTES) == bench_replicas.ROUTES


class Fake:
    """An engine in a thread: prompts take no time, and steps 20 ms, whatever runs. They say so; how long its thread
    really sleeps is the machine's affair."""

    step_s = measured_s = 0.02
    clock = 0.0
    """The latest time that any of them knows."""

    def __init__(self, config, share):
        self.connection, theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()

    def send(self, message):
        self.connection.send(message)

    def receive(self):
        return self.connection.recv()

    def close(self):
        self.send(("close",))
        self._thread.join()

    def _run(self, connection):
        connection.send({"model": "fake", "method": "none", "k": 0})
        open_, now = {}, 0.0
        while True:
            while connection.poll(0 if open_ else None):
                match connection.recv():
                    case ("measure", counts, _, _):
                        table = [(count, self.measured_s) for count in counts]
                        costs = {"iteration_s": table, "prompt_token_s": 0.0}
                        connection.send({**costs, "acceptance_length": 1.0, "num_drafts": 0})
                    case ("add", number, _, _, output_tokens):
                        now = now if open_ else max(now, Fake.clock)
                        open_[number] = (now, output_tokens - 1)
                    case ("close",):
                        return
            time.sleep(self.step_s)
            now += self.step_s
            Fake.clock = max(Fake.clock, now)
            for number, (arrived, left) in list(open_.items()):
                open_[number] = (arrived, left - 1)
                if left == 1:
                    del open_[number]
                    connection.send((number, arrived, arrived, now))


def test_real_replicas_are_held_against_their_simulation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replicas, "_Engine", Fake)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(perf_counter=lambda: Fake.clock))
    out = tmp_path / "replicas.json"
    command = ["bench", "replicas", "--num-requests", "12", "--concurrency", "6", "--output-tokens", "5"]
    main([*command, "--tolerance", "0.3", "--out", str(out)])
    found = {row["metric"]: row for row in json.loads(out.read_text())["rows"]}
    assert found["replicas_tokens_per_s"]["value"] == pytest.approx(12 * 5 / (2 * 4 * 0.02), rel=0.3)
    assert abs(found["simulation_error"]["value"]) < 0.3
    assert {row["batch"] for row in [found["replica_iteration_ms"]]} == {4}
    monkeypatch.setattr(Fake, "measured_s", 0.2)
    with pytest.raises(SystemExit):
        main([*command, "--out", str(out)])
    assert "the simulation's throughput is -" in capsys.readouterr().err


def test_an_engine_that_fails_or_ends_is_an_error_of_one_line():
    receiving, sending = multiprocessing.Pipe(duplex=False)
    sending.send(CapacityError("the weights need 9 GiB"))
    with pytest.raises(ConfigError, match="an engine has failed: the weights need 9 GiB"):
        replicas._received(receiving)
    sending.close()
    with pytest.raises(ConfigError, match="an engine's process has ended; its log says why"):
        replicas._received(receiving)
    receiving.close()
