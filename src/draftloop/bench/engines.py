"""Several engines at once, that share their experts or nothing: how fast they are together, and that they go on.

Two parts. `steady`: every engine has its rows full for some hundred steps; tokens per second of all together, of one
alone, and how long engines that step together take to agree on a step. `mixed`: requests of every kind come to each
engine at any time, engines are idle for a while or full, and draft or do not; it has passed if it ends.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.distributed.replica import Replica
from draftloop.errors import DraftloopError, RankError
from draftloop.observability import log
from draftloop.request import SamplingParams

if TYPE_CHECKING:
    from draftloop.engine.llm import LLM

WATCHDOG_S = 60.0
"""Engines that make no step for so long are stuck."""
START_S = 1200.0
"""The same while they load and capture."""
WORD_S = 5.0
"""How often an engine says how far it is."""
STRETCH = 50
"""Steps for which an engine has equally many requests in the mixed part."""

logger = log.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every engine gets to do."""

    name: str
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0

    @property
    def is_mixed(self) -> bool:
        return self.name == "mixed"


def run_engines(config: EngineConfig, loads: Sequence[Load], *, with_one: bool, out: Path) -> Path:
    """Run every load on all engines, and the steady ones on one alone where `with_one`; print and write the numbers.

    They are written after each load. Raises RankError where an engine ends or gets stuck.
    """
    rows: list[dict[str, Any]] = []
    for load, found in _on_engines(config, loads):
        rows += _rows(load, found)
        out = write_numbers(out, rows)
    if with_one:
        alone = replace(config, data_parallel_size=1, enable_expert_parallel=False)
        for load, found in _on_engines(alone, [load for load in loads if not load.is_mixed]):
            one = _rows(load, found)
            for row in rows:
                if row["metric"] == "tokens_per_s" and row["load"] == load.name:
                    row["share_of_linear"] = round(row["value"] / (config.data_parallel_size * one[0]["value"]), 4)
            rows += one
            out = write_numbers(out, rows)
    for row in rows:
        share = f", {row['share_of_linear']:.1%} of linear" if "share_of_linear" in row else ""
        print(f"{row['engines']} engines, {row['load']}: {row['metric']} {row['value']}{share}")
    print(f"written to {out}")
    return out


def _rows(load: Load, each: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all engines together, their tokens per second first; `each` is what one saw."""
    first = each[0]
    common = {
        **first["facts"],
        "load": load.name,
        "engines": len(each),
        "expert_parallel": first["steps_together"],
        "batch": first["rows"],
        "prompt": load.prompt_tokens,
        "output": load.output_tokens,
        "steps": first["steps"],
        "eager_runs": max(one["eager_runs"] for one in each),
        "eager_reasons": first["eager_reasons"],
    }
    seconds = max(one["seconds"] for one in each)
    speed = sum(one["tokens"] for one in each) / seconds
    lengths = [one["acceptance_length"] for one in each]
    acceptance = round(sum(lengths) / len(lengths), 3)
    rows = [
        {"metric": "tokens_per_s", **common, "value": round(speed, 2), "acceptance_length": acceptance}
        | {"seconds": round(seconds, 3), "tokens_by_engine": [one["tokens"] for one in each]},
        {"metric": "step_ms", **common, "value": round(seconds * 1e3 / first["steps"], 4)},
    ]
    if first["agree_us"]:
        p50, p99 = first["agree_us"]
        rows.append({"metric": "agree_us", **common, "value": p50, "p99": p99})
    return rows


# ---- processes ------------------------------------------------------------------------------


def _on_engines(config: EngineConfig, loads: Sequence[Load]) -> Iterator[tuple[Load, list[dict[str, Any]]]]:
    """Each load once all engines have done it, with what each saw."""
    size = config.data_parallel_size
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="draftloop-") as folder:
        store = f"{folder}/store" if config.steps_together else None
        pipes = [spawn.Pipe(duplex=False) for _ in range(size)]
        processes = [
            spawn.Process(
                target=_engine,
                args=(config, Replica(rank=rank, size=size, store=store), loads, pipes[rank][1]),
                name=f"draftloop-engine-{rank}",
                daemon=True,
            )
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sending in pipes:
                sending.close()  # so that an engine's end ends its pipe
            yield from _gather([receiving for receiving, _ in pipes], loads)
        finally:
            for process in processes:
                process.join(1)
                process.kill()
                process.join()


def _gather(pipes: Sequence[Connection], loads: Sequence[Load]) -> Iterator[tuple[Load, list[dict[str, Any]]]]:
    """See `_on_engines`. Raises RankError for an engine that ends before it is done, or says nothing for too long."""
    found: list[list[dict[str, Any]]] = [[] for _ in pipes]
    heard = [time.monotonic() + START_S - WATCHDOG_S] * len(pipes)
    said = ["it starts"] * len(pipes)
    for place, load in enumerate(loads):
        while open_ := [rank for rank, done in enumerate(found) if len(done) <= place]:
            for pipe in wait([pipes[rank] for rank in open_], timeout=1.0):
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    kind, value = pipes[rank].recv()
                except EOFError:
                    raise RankError(f"engine {rank} has ended, last heard of: {said[rank]}") from None
                heard[rank] = time.monotonic()
                if kind == "failed":
                    raise RankError(f"engine {rank} has failed: {value}")
                if kind == "found":
                    found[rank].append(value)
                else:
                    said[rank] = value
            for rank in open_:
                if time.monotonic() - heard[rank] > WATCHDOG_S:
                    last = said[rank]
                    raise RankError(f"engine {rank} has made no step for {WATCHDOG_S:.0f} s; last heard of: {last}")
        yield load, [done[place] for done in found]


def _engine(config: EngineConfig, replica: Replica, loads: Sequence[Load], pipe: Connection) -> None:
    log.setup("INFO" if replica.rank == 0 else "WARNING")
    from draftloop.engine.llm import LLM

    try:
        llm = LLM.from_config(config, replica=replica)
        pipe.send(("said", "it is ready"))
        for load in loads:
            pipe.send(("found", _drive(llm, load, replica.rank, pipe)))
    except DraftloopError as error:
        pipe.send(("failed", str(error)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


# ---- one engine -----------------------------------------------------------------------------


def _drive(llm: LLM, load: Load, rank: int, pipe: Connection) -> dict[str, Any]:
    """Step for as long as the load says, then until all engines are idle."""
    core, max_rows = llm.engine.core, llm.engine.resolved.max_num_seqs
    lockstep, agreeing = core.lockstep, []
    source = random.Random(load.seed * 1000 + rank)
    if not load.is_mixed:  # compiles what start-up did not
        _fill(llm, load, source, max_rows)
        for _ in range(30):
            core.step()
    llm.reset_graph_counts()
    if lockstep is not None:
        lockstep.spent.clear()
    stats = core.stats
    before = stats.generated_tokens, stats.num_spec_steps, stats.num_accepted_tokens
    want, said, begin = max_rows, time.monotonic(), time.perf_counter()
    for step in range(load.num_steps):
        if load.is_mixed and step % STRETCH == 0:
            want = source.choice([0, 0, 1, max(max_rows // 4, 1), max_rows])
        _fill(llm, load, source, want)
        core.step()
        if time.monotonic() - said > WORD_S:
            said = time.monotonic()
            pipe.send(("said", f"{load.name}, step {step}"))
    seconds = time.perf_counter() - begin
    tokens, steps, accepted = (
        after - known
        for after, known in zip(
            (stats.generated_tokens, stats.num_spec_steps, stats.num_accepted_tokens), before, strict=True
        )
    )
    if lockstep is not None:
        agreeing = sorted(lockstep.spent)
    for request_id in list(core.request_ids):
        core.abort(request_id)
    while not (core.idle if lockstep is None else lockstep.at_rest):
        core.step()
    report = llm.get_graph_report()
    return {
        "facts": engine_facts(llm),
        "steps_together": llm.config.steps_together,
        "rows": max_rows,
        "steps": load.num_steps,
        "tokens": tokens,
        "seconds": seconds,
        "acceptance_length": 1 + accepted / steps if steps else 1.0,
        "agree_us": [round(agreeing[int(len(agreeing) * share)] * 1e6, 1) for share in (0.5, 0.99)] if agreeing else [],
        "eager_runs": sum(report.eager_runs.values()),
        "eager_reasons": {row.phase: row.reason for row in report.rows if row.eager_runs},
    }


def _fill(llm: LLM, load: Load, source: random.Random, want: int) -> None:
    """Add requests until so many are open."""
    core = llm.engine.core
    while len(core.request_ids) < want:
        length, count, speculation = load.prompt_tokens, load.output_tokens, True
        options: dict[str, Any] = {"temperature": 0.0}
        if load.is_mixed:
            length, count = source.randint(1, length), source.randint(1, count)
            options |= source.choice([{}, {}, {"temperature": 0.8}, {"logprobs": 1}, {"logit_bias": {1: 2.0}}])
            speculation = source.random() < 0.8
        params = SamplingParams(**options, max_tokens=count, ignore_eos=True, detokenize=False, seed=1)
        prompt = source.choices(range(core.vocab_size), k=length)
        core.add(llm._next_id(), prompt, params, speculation=speculation)
