"""`draftloop bench engines`: what it measures, and that an engine that hangs or ends does not hang the measurement."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from draftloop.bench import engines as bench
from draftloop.bench.engines import Load, run_engines
from draftloop.config.engine import EngineConfig
from draftloop.distributed.replica import Replica
from draftloop.errors import RankError
from helpers import tiny_model


def test_engines_that_share_nothing_are_measured_together(tmp_path, capfd):
    spec = {"method": "ngram", "num_speculative_tokens": 2}
    config = EngineConfig.from_mapping(
        model=tiny_model(), device="cpu", data_parallel_size=2, max_num_seqs=3, max_model_len=64,
        kv_cache_memory_bytes=1 << 22, cudagraph_capture_sizes=(1, 3), speculative_config=spec,
    )  # fmt: skip
    loads = [
        Load(name="steady", num_steps=20, prompt_tokens=12, output_tokens=8),
        Load(name="mixed", num_steps=120, prompt_tokens=12, output_tokens=8),
    ]
    path = run_engines(config, loads, with_one=False, out=tmp_path / "found.json")
    rows = json.loads(path.read_text())["rows"]
    speeds = [row for row in rows if row["metric"] == "tokens_per_s"]
    assert [(row["engines"], row["load"]) for row in speeds] == [(2, "steady"), (2, "mixed")]
    assert all(row["value"] > 0 and row["steps"] for row in speeds)
    assert min(speeds[0]["tokens_by_engine"]) > 0
    assert "2 engines, mixed: tokens_per_s" in capfd.readouterr().out


def test_together_they_are_compared_with_as_many_times_one(tmp_path, monkeypatch):
    def measured(config: EngineConfig, loads: list[Load]) -> list[tuple[Load, list[dict[str, Any]]]]:
        size = config.data_parallel_size
        one = {
            "facts": {"model": "m"}, "steps_together": config.steps_together, "rows": 4, "steps": 10, "seconds": 1.0,
            "tokens": 90 if size > 1 else 100, "acceptance_length": 2.0, "agree_us": [], "eager_runs": 0,
            "eager_reasons": {},
        }  # fmt: skip
        return [(load, [one] * size) for load in loads]

    monkeypatch.setattr(bench, "_on_engines", measured)
    config = EngineConfig(data_parallel_size=2, enable_expert_parallel=True)
    load = Load(name="steady", num_steps=10, prompt_tokens=1, output_tokens=1)
    rows = json.loads(run_engines(config, [load], with_one=True, out=tmp_path / "found.json").read_text())["rows"]
    both, one = (row for row in rows if row["metric"] == "tokens_per_s")
    assert (both["value"], both["share_of_linear"], both["expert_parallel"]) == (180, 0.9, True)
    assert (one["value"], one["engines"], one["expert_parallel"]) == (100, 1, False)


def test_what_all_have_done_is_there_though_one_ends_later():
    loads = [Load(name=name, num_steps=1, prompt_tokens=1, output_tokens=1) for name in ("steady", "mixed")]
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    receiving = [one for one, _ in pipes]
    pipes[0][1].send(("found", 1))
    pipes[1][1].send(("found", 2))
    pipes[0][1].send(("found", 3))
    pipes[1][1].close()
    found = bench._gather(receiving, loads)
    assert next(found) == (loads[0], [1, 2])
    with pytest.raises(RankError, match="engine 1 has ended"):
        next(found)
    for one in (*receiving, pipes[0][1]):
        one.close()


def test_an_engine_that_ends_or_says_nothing_is_named(monkeypatch):
    loads = [Load(name="mixed", num_steps=8, prompt_tokens=1, output_tokens=1)]
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    receiving = [one for one, _ in pipes]
    pipes[0][1].send(("found", []))
    pipes[1][1].send(("said", "mixed, step 7"))
    monkeypatch.setattr(bench, "WATCHDOG_S", 0.1)
    monkeypatch.setattr(bench, "START_S", 0.1)
    with pytest.raises(RankError, match="engine 1 has made no step for 0 s; last heard of: mixed, step 7"):
        next(bench._gather(receiving, loads))
    pipes[0][1].send(("found", []))
    pipes[1][1].close()
    with pytest.raises(RankError, match="engine 1 has ended, last heard of: it starts"):
        next(bench._gather(receiving, loads))
    for one in (*receiving, pipes[0][1]):
        one.close()


def test_an_engine_that_fails_says_why():
    loads = [Load(name="mixed", num_steps=8, prompt_tokens=200, output_tokens=1)]
    receiving, sending = multiprocessing.Pipe(duplex=False)
    config = EngineConfig.from_mapping(
        model=tiny_model(), device="cpu", max_model_len=64, kv_cache_memory_bytes=1 << 20
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.log, "setup", lambda level: None)
        bench._engine(config, Replica(rank=0, size=1), loads, sending)
    with pytest.raises(
        RankError, match=r"^engine 0 has failed: the prompt has \d+ tokens; with max_model_len 64 it may"
    ):
        next(bench._gather([receiving], loads))
    for one in (receiving, sending):
        one.close()
