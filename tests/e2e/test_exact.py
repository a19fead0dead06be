"""SmolLM2 in fp32 gives transformers' greedy tokens, however it runs.

The suite runs a selection, with a part of the prompts; `pytest tests/e2e/test_exact.py --every-combination`
runs all of drafter x graph mode x batch size with all of them, to the end of what transformers said.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draftloop import LLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "smollm2_greedy.json"
NUM_TOKENS, FEWER_TOKENS = 24, 12
NEAR_TIE = 1e-3
"""Where transformers' own top two logits are closer than this, either token is right."""

SPECULATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "self": {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 3},
}
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SELECTED = {
    ("none", "FULL_AND_PIECEWISE", 16): 5,
    ("ngram", "FULL_DECODE_ONLY", 1): 20,
    ("ngram", "NONE", 7): 6,
    ("self", "FULL", 7): 6,
}
"""Of so many prompts one is asked."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = [(s, mode, batch) for s in SPECULATION for mode in MODES for batch in (1, 7, 16)]
    chosen = [c for c in everything if metafunc.config.getoption("every_combination") or c in SELECTED]
    metafunc.parametrize(("speculation", "mode", "batch"), chosen)


@cache
def golden() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engines():
    """One engine at a time: the combinations of one drafter and mode come in a row."""
    kept: dict[tuple[str, str], LLM] = {}

    def get(speculation: str, mode: str) -> LLM:
        if (speculation, mode) not in kept:
            for llm in kept.values():
                llm.close()
            kept.clear()
            kept[speculation, mode] = LLM(
                "smollm2-135m",
                dtype="float32",
                device="cpu",
                max_num_seqs=16,
                max_model_len=512,
                cudagraph_mode=mode,
                speculative_config=SPECULATION[speculation],
            )
        return kept[speculation, mode]

    yield get
    for llm in kept.values():
        llm.close()


def test_tokens_equal_transformers(engines, monkeypatch, pytestconfig, speculation: str, mode: str, batch: int) -> None:
    monkeypatch.setenv("DRAFTLOOP_POISON", "1")
    llm = engines(speculation, mode)
    assert llm.engine.table.poison
    whole = pytestconfig.getoption("every_combination")
    every, num_tokens = (1, NUM_TOKENS) if whole else (SELECTED[speculation, mode, batch], FEWER_TOKENS)
    rows = golden()[::every]
    assert len(golden()) == 40
    near_ties = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        for row, output in zip(part, llm.generate([r["prompt_ids"] for r in part], params), strict=True):
            ours, theirs = output.outputs[0].token_ids, row["token_ids"][:num_tokens]
            where = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            if where is None:
                assert len(ours) == len(theirs), (ours, theirs)
            else:
                assert row["gaps"][where] < NEAR_TIE, (row["prompts"], row["question_id"], where, ours, theirs)
                near_ties.append((row["prompts"], row["question_id"], where))
            if speculation == "self" and output.spec is not None:
                drafted = output.spec.num_draft_tokens
                # the last block may be cut by max_tokens; every draft before it is accepted
                assert output.spec.num_accepted_draft_tokens >= drafted - SPECULATION["self"]["num_speculative_tokens"]
    print(f"{speculation}, {mode}, batch {batch}: {len(rows)} prompts equal, near ties: {near_ties}")
