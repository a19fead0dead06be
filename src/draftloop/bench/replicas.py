"""Real replicas against their simulation: engines in processes of their own, requests to the shortest queue.

First every engine times its iterations and prompts, all of them at the same time, since they share the machine. Then
the same requests are served for real and in the simulation that was given these times.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console

from draftloop.bench.simulate import served_rows
from draftloop.bench.simulation import Costs, Job, Served, Simulation, least_loaded
from draftloop.bench.stamp import write_numbers
from draftloop.config import EngineConfig
from draftloop.errors import CapacityError, ConfigError
from draftloop.request import SamplingParams

STEADY_ITERATIONS = 24
PROMPTS_TIMED = 6
END_S = 10.0


def run_replicas(
    config: EngineConfig,
    *,
    replicas: int,
    concurrency: int,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    tolerance: float,
    out: Path,
) -> Path:
    """Measure, simulate, print and write both; the file. Raises CapacityError if throughputs differ by more than
    `tolerance`, a share; ConfigError if an engine cannot start."""
    shape = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    rows = sorted({1, max(config.max_num_seqs // 2, 1), config.max_num_seqs})
    engines = [_Engine(config, 1 / replicas) for _ in range(replicas)]
    try:
        facts, *_ = [one.receive() for one in engines]
        for one in engines:
            one.send(("measure", rows, prompt_tokens, output_tokens))
        costs = _mean_costs([one.receive() for one in engines])
        jobs = [Job(arrival_s=0.0, **shape)] * num_requests
        measured, seconds = _serve(engines, jobs, concurrency)
    finally:
        for one in engines:
            one.close()
    simulation = Simulation(costs, replicas=replicas, rows=config.max_num_seqs, route=least_loaded)
    simulated = served_rows(simulation.run(jobs, concurrency=concurrency), [one.busy_s for one in simulation.replicas])
    real = served_rows(measured, [seconds] * replicas)
    error = simulated[0]["value"] / real[0]["value"] - 1
    asked = {"replicas": replicas, "concurrency": concurrency, "prompt": prompt_tokens, "output": output_tokens}
    found: list[dict[str, Any]] = [
        {"metric": "replica_iteration_ms", "batch": count, "value": round(seconds * 1e3, 4)}
        for count, seconds in costs.iteration_s
    ]
    found.append({"metric": "replica_prompt_token_ms", "value": round(costs.prompt_token_s * 1e3, 5)})
    for mine, theirs in zip(real, simulated, strict=True):
        name = theirs["metric"].removeprefix("simulated_")
        found += [{**mine, "metric": f"replicas_{name}"}, theirs]
    found.append({"metric": "simulation_error", "value": round(error, 4), "tolerance": tolerance})
    common = {**facts, **asked, "acceptance_length": round(costs.acceptance_length, 3)}
    path = write_numbers(out, [{**common, **row} for row in found])
    for mine, theirs in zip(real, simulated, strict=True):
        name = theirs["metric"].removeprefix("simulated_")
        Console().print(f"{name}: measured {mine['value']:g}, simulated {theirs['value']:g}")
    Console().print(f"throughput differs by {error:+.1%}; written to {path}")
    if abs(error) > tolerance:
        raise CapacityError(f"the simulation's throughput is {error:+.1%} off, by more than {tolerance:.0%}")
    return path


def _serve(engines: Sequence[_Engine], jobs: Sequence[Job], concurrency: int) -> tuple[list[Served], float]:
    """Answer all jobs, so many at a time, each where fewest are open. Their times, and the seconds in all."""
    source, waiting, served = random.Random(0), deque(enumerate(jobs)), []
    loads, places = [0] * len(engines), {}
    begin = time.perf_counter()

    def send_next() -> None:
        number, job = waiting.popleft()
        at = loads.index(min(loads))
        loads[at] += 1
        places[number] = at
        engines[at].send(("add", number, source.random(), job.prompt_tokens, job.output_tokens))

    for _ in range(min(concurrency, len(jobs))):
        send_next()
    while len(served) < len(jobs):
        for connection in wait([one.connection for one in engines]):
            number, arrived, first_token, finished = _received(connection)  # pyrefly: ignore[bad-argument-type]
            loads[places[number]] -= 1
            served.append(
                Served(
                    job=jobs[number],
                    replica=places[number],
                    arrived=arrived,
                    first_token=first_token,
                    finished=finished,
                )
            )
            if waiting:
                send_next()
    return served, time.perf_counter() - begin


def _mean_costs(measured: Sequence[dict[str, Any]]) -> Costs:
    """One replica's costs, on average over all of them."""
    counts = [count for count, _ in measured[0]["iteration_s"]]
    means = [statistics.mean(one["iteration_s"][at][1] for one in measured) for at in range(len(counts))]
    return Costs(
        iteration_s=tuple(zip(counts, means, strict=True)),
        prompt_token_s=statistics.mean(one["prompt_token_s"] for one in measured),
        acceptance_length=statistics.mean(one["acceptance_length"] for one in measured),
        num_drafts=measured[0]["num_drafts"],
    )


class _Engine:
    """The parent's side of one engine's process."""

    def __init__(self, config: EngineConfig, share: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(config, share, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: tuple) -> None:
        self.connection.send(message)

    def receive(self) -> Any:
        return _received(self.connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone
            self.send(("close",))
        self._process.join(END_S)
        self._process.kill()
        self._process.join()


def _received(connection: Connection) -> Any:
    """The next message. Raises ConfigError for what went wrong on the other side."""
    try:
        message = connection.recv()
    except EOFError:
        raise ConfigError("an engine's process has ended; its log says why") from None
    if isinstance(message, Exception):
        raise ConfigError(f"an engine has failed: {message}") from message
    return message


def _run(config: EngineConfig, share: float, connection: Connection) -> None:
    """The engine's process: obeys messages, and steps while there is something to do."""
    import os

    import torch

    from draftloop.bench.stamp import engine_facts
    from draftloop.engine.llm import LLM

    torch.set_num_threads(max(int(len(os.sched_getaffinity(0)) * share), 1))
    try:
        llm = LLM.from_config(config)
        core, numbers = llm.engine.core, {}
        connection.send(engine_facts(llm))
        while True:
            while connection.poll(None if core.idle else 0):
                match connection.recv():
                    case ("measure", counts, prompt_tokens, output_tokens):
                        connection.send(_measure(llm, counts, prompt_tokens, output_tokens))
                    case ("add", number, seed, prompt_tokens, output_tokens):
                        prompt = random.Random(seed).choices(range(core.vocab_size), k=prompt_tokens)
                        request_id = llm._next_id()
                        numbers[request_id] = number
                        core.add(request_id, prompt, _params(output_tokens))
                    case ("close",):
                        llm.close()
                        return
            for sequence, _ in core.step():
                if sequence.finish_reason is not None:
                    times = sequence.arrived, sequence.first_token, sequence.finished
                    connection.send((numbers.pop(sequence.request_id), *times))
    except Exception as error:
        connection.send(error)


def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)


def _measure(llm: Any, counts: Sequence[int], prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Seconds of steady iterations by number of rows and of a prompt's token, and how many tokens an iteration gave."""
    from draftloop.bench.steady import SteadyBatch

    table, drafted, accepted = [], 0, 0
    for rows in counts:
        for warm in (True, False):
            number = min(STEADY_ITERATIONS, output_tokens)
            with SteadyBatch(llm, rows, prompt_tokens=prompt_tokens, num_iterations=number) as batch:
                found = batch.measure(number)
            if not warm:
                table.append((rows, found.ms / 1e3))
                drafted, accepted = drafted + found.num_drafted_steps, accepted + found.num_accepted
    prompts = [random.Random(at).choices(range(llm.engine.core.vocab_size), k=prompt_tokens) for at in range(9)]
    llm.generate(prompts[:1], _params(1), use_tqdm=False)
    begin = time.perf_counter()
    for prompt in prompts[1 : 1 + PROMPTS_TIMED]:
        llm.generate([prompt], _params(1), use_tqdm=False)
    seconds = (time.perf_counter() - begin) / PROMPTS_TIMED
    llm.reset_prefix_cache()
    return {
        "iteration_s": table,
        "prompt_token_s": seconds / prompt_tokens,
        "acceptance_length": 1 + accepted / drafted if drafted else 1.0,
        "num_drafts": llm.engine.core.stats.num_drafts,
    }
