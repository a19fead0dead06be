"""Profiles of an engine that goes on serving: what is in them, and that nothing is left of them."""

from __future__ import annotations

import gzip
import json

import pytest

from draftloop.engine import profiler as profiler_module
from draftloop.engine.profiler import StepProfiler
from draftloop.errors import RequestError
from helpers import answers, greedy, make_engine, prompts, tiny_model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_profile_names_what_ran_and_changes_nothing(device, tmp_path):
    spec = {"method": "draft_model", "model": tiny_model("wide", hidden=256), "num_speculative_tokens": 3}
    llm = make_engine(tiny_model("wide", hidden=256), device=device, speculative_config=spec)
    core = llm.engine.core
    loop = core.worker.loop
    ids = prompts(1)[0]
    expected = answers(llm.generate(ids, greedy(20)))
    profiler = StepProfiler(llm.engine)
    for _ in range(2):
        profiler.start(tmp_path / "traces")
        assert core.worker.loop is None
        assert answers(llm.generate(ids, greedy(20))) == expected
        file = tmp_path / "traces" / profiler.stop()
        trace = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = [event.get("name") for event in trace if event.get("cat") == "user_annotation"]
        assert names.count("step") >= 5
        assert "target.prefill" in names
        if device == "cuda":
            assert any(event.get("cat") == "kernel" for event in trace)
        assert core.worker.loop is loop
        assert "step" not in vars(core)
    assert len(list((tmp_path / "traces").iterdir())) == 2
    assert answers(llm.generate(ids, greedy(20))) == expected
    llm.close()


def test_a_profile_that_nobody_ends_is_written_at_its_limit(tmp_path, monkeypatch, caplog):
    llm = make_engine(enforce_eager=True)
    profiler = StepProfiler(llm.engine)
    with pytest.raises(RequestError, match="no profile is being recorded"):
        profiler.stop()
    profiler.start(tmp_path)
    with pytest.raises(RequestError, match="already"):
        profiler.start(tmp_path)
    llm.generate([1], greedy(2))
    profiler.stepped()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(profiler_module, "MAX_S", 0.0)
    profiler.stepped()
    (file,) = tmp_path.iterdir()
    assert profiler.stop() == file.name, "whoever asks is told"
    with pytest.raises(RequestError, match="no profile"):
        profiler.stop()
    folder = tmp_path / "removed"
    profiler.start(folder)
    folder.rmdir()
    profiler.stepped()
    assert "cannot be written" in caplog.text, "requests go on without it"
    with pytest.raises(RequestError, match="no profile"):
        profiler.stop()
    (tmp_path / "a file").touch()
    with pytest.raises(OSError, match="a file"):
        profiler.start(tmp_path / "a file")
    assert "step" not in vars(llm.engine.core)
    llm.close()
