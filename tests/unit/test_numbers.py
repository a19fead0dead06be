"""Result files carry what makes their numbers mean something."""

from __future__ import annotations

import json

import pytest

from draftloop.bench.prompts import NAMES, load_prompts
from draftloop.bench.stamp import stamp, write_numbers
from draftloop.errors import ConfigError

ROWS = [{"metric": "tpot_ms", "model": "org/Model-1B", "method": "none", "value": 1.5}, {"metric": "x", "value": None}]


def test_stamp_names_machine_and_versions():
    got = stamp("draftloop bench latency")
    assert list(got) == ["command", "gpu", "cpu", "git", "dirty", "date", "versions"]
    assert got["command"] == "draftloop bench latency"
    assert set(got["versions"]) == {"torch", "triton", "transformers", "driver", "python"}
    assert got["cpu"].endswith("cores")


def test_numbers_are_never_overwritten_in_a_folder(tmp_path):
    first = write_numbers(tmp_path, ROWS, "a")
    second = write_numbers(str(tmp_path), ROWS, "b")
    assert first != second
    assert first.name.startswith("tpot-ms-org-model-1b-none-")
    got = json.loads(first.read_text())
    assert got["rows"] == ROWS
    assert got["command"] == "a"
    assert len(list(tmp_path.iterdir())) == 2
    assert write_numbers(tmp_path, ROWS, name="latency").name.startswith("latency-org-model-1b-none-")


def test_numbers_to_a_file(tmp_path):
    path = write_numbers(tmp_path / "sub" / "run.json", [], "c")
    assert json.loads(path.read_text())["rows"] == []


@pytest.mark.parametrize("name", NAMES)
def test_prompts(name):
    prompts = load_prompts(name)
    assert len(prompts) == 80
    assert all(prompt.turns and all(prompt.turns) for prompt in prompts)


def test_unknown_prompts():
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        load_prompts("gsm8")


def test_some_prompts_are_spread_over_all_categories():
    some = load_prompts("mt_bench", 16)
    assert len({prompt.question_id for prompt in some}) == 16
    assert {prompt.category for prompt in some} == {prompt.category for prompt in load_prompts("mt_bench")}
    for count in (0, 81):
        with pytest.raises(ConfigError, match=f"{count} prompts of 'mt_bench' are asked for; it has 80"):
            load_prompts("mt_bench", count)
