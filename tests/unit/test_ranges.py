"""Names of steps and phases in a profiler's timeline: as they run, and no trace of them where nobody asks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from draftloop.config import Environment
from draftloop.engine import build, startup
from draftloop.engine.ranges import name_steps
from draftloop.errors import ConfigError
from example_drafters import example_configs
from helpers import answers, greedy, make_engine, oracle, prompts

NGRAM = example_configs()["ngram"][0]


def recorder():
    """A range maker, and what it made: names in the order of their beginning, with their depth."""
    made, depth = [], [0]

    @contextmanager
    def make(name):
        made.append((depth[0], name))
        depth[0] += 1
        yield
        depth[0] -= 1

    return make, made


def test_steps_hold_their_phases_and_nothing_is_left_when_undone():
    llm = make_engine(speculative_config=NGRAM)
    core = llm.engine.core
    assert "step" not in vars(core)
    make, made = recorder()
    undo = name_steps(core, make)
    ids = prompts(1)[0]
    assert answers(llm.generate(ids, greedy(6))) == [oracle(ids, 6)]
    assert made[0] == (0, "step")
    assert {name for depth, name in made if depth == 0} == {"step"}
    phases = {name for depth, name in made if depth == 1}
    assert {"target.prefill", "accept.prompt"} <= phases <= set(llm.engine.table.phases)
    undo()
    assert "step" not in vars(core)
    assert "run" not in vars(core.worker.table)
    count = len(made)
    llm.generate(ids, greedy(3))
    assert len(made) == count
    llm.close()


def test_the_environment_asks_for_nvtx_ranges(monkeypatch):
    make, made = recorder()
    monkeypatch.setenv("DRAFTLOOP_NVTX", "1")
    monkeypatch.setattr(build, "nvtx_range", make)
    monkeypatch.setattr(startup, "check_nvtx", lambda: None)
    llm = make_engine(enforce_eager=True)
    llm.generate([1, 2], greedy(2))
    assert (0, "step") in made
    llm.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nvtx_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_NVTX", "1")
    with pytest.raises(ConfigError, match="DRAFTLOOP_NVTX is 1"):
        make_engine(enforce_eager=True)


@pytest.mark.gpu
def test_nvtx_ranges_change_nothing_on_a_gpu(monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_NVTX", "1")
    assert Environment.read().nvtx
    ids = prompts(1)[0]
    named = make_engine(device="cuda", speculative_config=NGRAM)
    found = answers(named.generate(ids, greedy(12)))
    named.close()
    monkeypatch.delenv("DRAFTLOOP_NVTX")
    plain = make_engine(device="cuda", speculative_config=NGRAM)
    assert answers(plain.generate(ids, greedy(12))) == found
    plain.close()
