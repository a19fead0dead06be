"""Matrices that stay bf16 on a CPU change no bit: the same text, and as many drafts accepted, as from float32 ones."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftloop.engine.llm import LLM
from draftloop.models import weights
from example_drafters import each_drafter, example_configs
from helpers import answers, example_target, greedy, make_engine, prompts, tiny_model


def in_bf16(folder: str, into: Path) -> str:
    """A copy of a model or drafter whose floats are rounded."""
    copy = into / Path(folder).name
    if not copy.exists():
        shutil.copytree(folder, copy)
        for file in copy.glob("*.safetensors"):
            found = load_file(file)
            save_file({name: x.bfloat16() if x.is_floating_point() else x for name, x in found.items()}, file)
    return str(copy)


def rounded(spec: Mapping[str, Any], into: Path) -> dict[str, Any]:
    """The same configuration of copies."""
    found = dict(spec)
    if "model" in spec:
        found["model"] = in_bf16(spec["model"], into)
    if "drafters" in spec:
        found["drafters"] = [rounded(one, into) for one in spec["drafters"]]
    return found


def run(llm: LLM) -> tuple[list[list[int]], int, int]:
    texts = answers(llm.generate(prompts(5, longest=40), greedy(24)))
    stats = llm.engine.core.stats
    found = texts, stats.num_draft_tokens, stats.num_accepted_tokens
    llm.close()
    return found


@pytest.mark.parametrize(("name", "index"), each_drafter())
def test_every_drafter(name: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = example_configs()[name][index]
    settings = {
        "model": in_bf16(example_target(spec) or tiny_model(), tmp_path),
        "speculative_config": rounded(spec, tmp_path),
        "dtype": "float32",
        "cudagraph_capture_sizes": (2, 8),
    }
    asked: list[int] = []
    monkeypatch.setattr(weights, "available", lambda: asked.append(1) is None)
    narrow = make_engine(**settings)
    assert len(asked) >= 1 + ("model" in spec), "the target's matrices and the drafter's own stay"
    monkeypatch.setattr(weights, "available", lambda: False)
    wide = make_engine(**settings)
    assert run(narrow) == run(wide)
