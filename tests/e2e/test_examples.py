"""Every example runs as it is, over the model that is shipped; my_drafter.py and Ray's file have tests elsewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"my_drafter", "serve_and_query"}


@pytest.fixture
def example(monkeypatch):
    """Imports one by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_examples_are_short_and_all_of_them_run_in_tests():
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = {name for name in found if f'"{name}"' in Path(__file__).read_text(encoding="utf-8")}
    assert found == tested | ELSEWHERE
    for name in found:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60, name


def test_python_in_the_readme_runs_as_it_is_written_and_the_report_is_read_as_graphs_says(capsys):
    said: dict[str, Any] = {}
    for name in ("README.md", "docs/graphs.md"):
        text = (EXAMPLES.parent / name).read_text(encoding="utf-8")
        (code,) = [code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "llm" in code]
        exec(compile(code, name, "exec"), said)
    said["llm"].close()
    out = capsys.readouterr().out
    assert "River" in out
    assert "target.verify 1 FULL" in out


def test_offline(example, capsys):
    example("offline").main(max_tokens=8)
    out = capsys.readouterr().out
    assert "Paris" in out or "France" in out
    assert "tokens a step" in out


def test_structured_output(example, capsys):
    example("structured_output").main()
    assert "'city': 'Rome'" in capsys.readouterr().out


def test_hidden_states(example, capsys, tmp_path):
    example("hidden_states").main(tmp_path)
    assert "12 tokens, states (12, 1728)" in capsys.readouterr().out


def test_compare_drafters(example, tmp_path):
    example("compare_drafters").main(tmp_path / "compare.json", num_prompts=1, max_tokens=4)
    assert "smollm2-135m-eagle3:3" in (tmp_path / "compare.json").read_text()


def test_train_drafter(example, capsys, tmp_path):
    drafter = example("train_drafter").main(tiny_model(), tmp_path, record_tokens=2000, steps=2, max_tokens=8)
    assert (drafter / "model.safetensors").exists()
    assert "tokens a step" in capsys.readouterr().out
