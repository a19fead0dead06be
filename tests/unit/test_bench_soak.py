"""`bench soak`: what it finds, and what it writes."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftloop.bench import soak
from draftloop.bench.soak import Traffic, growth, run_soak
from draftloop.config.engine import EngineConfig
from draftloop.errors import CapacityError, ConfigError
from helpers import drafting_spec, make_engine, tiny_model


def config() -> EngineConfig:
    return EngineConfig.from_mapping(
        model=tiny_model(),
        speculative_config=drafting_spec(),
        device="cpu",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 19,  # so that requests are preempted
        cudagraph_mode="FULL",
        device_loop=16,
    )


def test_a_short_soak_answers_everything_and_writes_its_numbers(tmp_path):
    path = run_soak(config(), minutes=0.02, longest_prompt=60, longest_answer=60, out=tmp_path / "soak.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["value"] >= 4
    assert (row["metric"], row["path"], len(row["samples"]) >= 2) == ("soak_requests", "loop", True)
    assert row["ended_by"] == "--minutes"


@pytest.mark.parametrize("cause", ["SIGTERM", "--max-seconds"])
def test_an_interrupted_soak_writes_what_it_has(cause, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SAVE_S", 0.2)
    steps, saved, write = itertools.count(), [], soak.write_numbers

    def step(self: Traffic) -> int:
        if next(steps) == 30 and cause != "--max-seconds":
            signal.raise_signal(signal.Signals[cause])
        return real_step(self)

    def write_numbers(path: Path, rows: list[dict[str, Any]]) -> Path:
        saved.append((rows[0]["ended_by"], written := write(path, rows)))
        return written

    real_step = Traffic.step
    monkeypatch.setattr(Traffic, "step", step)
    monkeypatch.setattr(soak, "write_numbers", write_numbers)
    given = {"minutes": 1, "longest_prompt": 60, "longest_answer": 60, "out": tmp_path}
    if cause == "--max-seconds":
        run_soak(config(), **given, max_seconds=soak.ENDING_S + 1.5)
    else:
        with pytest.raises(SystemExit) as ended:
            run_soak(config(), **given)
        assert ended.value.code == 128 + signal.Signals[cause]
    (path,) = tmp_path.iterdir()
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["ended_by"], row["metric"]) == (cause, "soak_requests")
    assert {why for why, _ in saved[:-1]} <= {"nothing yet"}
    assert {where for _, where in saved} == {path}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="100 prompt tokens and 60 output tokens exceed max_model_len 128"):
        run_soak(config(), minutes=1, longest_prompt=100, longest_answer=60, out=tmp_path)


def test_memory_that_grows_and_pages_that_are_lost_are_found():
    assert growth([(0, 50.0), *((i, 100 + 0.02 * i) for i in range(10, 400, 10))]) == pytest.approx(2.0)
    assert growth([(0, 50.0), *((i, 100.0) for i in range(10, 400, 10))]) == pytest.approx(0, abs=1e-9)
    llm = make_engine()
    llm.engine.core.scheduler.groups[0].allocate(3)
    traffic = Traffic(llm, longest_prompt=20, longest_answer=10, seed=0)
    traffic.fill()
    with pytest.raises(CapacityError, match="3 pages and 0 rows are held although nothing runs"):
        traffic.finish()


def test_a_request_that_fails_ends_the_traffic(monkeypatch):
    llm = make_engine()
    traffic = Traffic(llm, longest_prompt=20, longest_answer=10, seed=0)
    traffic.fill()
    ended = SimpleNamespace(request_id=traffic._open[0], finish_reason="error", error="the model's logits are NaN")
    monkeypatch.setattr(llm.engine.core, "step", lambda: [(ended, [])])
    with pytest.raises(CapacityError, match="a request ended by 'error': the model's logits are NaN"):
        traffic.step()
