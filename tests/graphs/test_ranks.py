"""Ranks that step together run the same graph, whatever each of them has to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_phases import block_phase, ragged_phase, simple_phase

from draftloop.engine.lockstep import Lockstep
from draftloop.graphs.phase import Launch
from draftloop.graphs.table import GraphTable
from draftloop.scheduler.step_shape import StepShape
from helpers import answers, greedy, make_engine, make_table, oracle, prompts

LADDER = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(sorted)


def ran(table: GraphTable) -> list[tuple[int, int]]:
    """(rows, tokens) of each graph that ran, and (0, 0) for each eager run."""
    rows = table.report().rows
    return [(row.rows, row.tokens) for row in rows for _ in range(row.replays)] + [
        (0, 0) for row in rows for _ in range(row.eager_runs)
    ]


@given(
    ladder=LADDER,
    live=st.lists(st.integers(0, 10), min_size=2, max_size=4),
    setting=st.sampled_from(["FULL", "PIECEWISE"]),
)
@settings(max_examples=25)
def test_all_ranks_run_the_graph_of_the_agreed_size(ladder: list[int], live: list[int], setting: str) -> None:
    agreed = max(1, *live)
    sizes = []
    for rows in live:
        table = make_table([simple_phase()], rows=ladder, setting=setting, largest_rows=10, poison=True)
        x = torch.arange(1.0, rows + 1)
        y = table.run("double", rows, {"x": x}, rows_across_ranks=agreed)["y"]
        assert y.tolist() == (2 * x).tolist(), "a rank gets its own rows back, and no others"
        sizes.append(ran(table))
    assert all(size == sizes[0] for size in sizes), "ranks ran unlike graphs, or one of them eager"
    fits = [size for size in ladder if size >= agreed]
    assert sizes[0] == [(min(fits), min(fits)) if fits else (0, 0)]


@given(ladder=LADDER, rows=st.integers(1, 9), more=st.integers(0, 9))
@settings(max_examples=25)
def test_the_larger_of_live_and_agreed_rows_decides(ladder: list[int], rows: int, more: int) -> None:
    table = make_table([block_phase("verify", 3)], rows=ladder, largest_rows=9)
    inputs = {"ids": torch.zeros(3 * rows, dtype=torch.int64), "scale": torch.ones(rows)}
    table.run("verify", rows, inputs, rows_across_ranks=more)
    key = table.key_for("verify", max(rows, more))
    assert ran(table) == [(key.rows, key.tokens) if key else (0, 0)]


def test_an_eager_run_is_explained_by_the_agreed_size() -> None:
    table = make_table([simple_phase()], rows=[1, 2], largest_rows=4)
    assert table.run("double", 1, {"x": torch.ones(1)}, rows_across_ranks=3)["y"].tolist() == [2.0]
    report = table.report()
    assert report.eager_runs == {"double": 1}
    assert report.rows[-1].reason == "3 rows exceed the largest captured size 2, on another rank"


def test_prompts_are_sized_by_tokens() -> None:
    table = make_table([ragged_phase()], tokens=[8, 16], prefill_rows=2)
    inputs = {"ids": torch.zeros(5, dtype=torch.int64), "query_starts": torch.tensor([0, 5], dtype=torch.int32)}
    table.run("ragged", 1, inputs, tokens=5, rows_across_ranks=2)
    assert ran(table) == [(2, 8)]


def test_an_eager_run_has_the_agreed_size_too() -> None:
    """Ranks whose tokens are gathered must bring equally many, with a graph or without."""
    seen = []

    def double(launch: Launch, x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append((launch.rows, x.shape[0]))
        return {"y": x * 2}

    table = make_table([replace(simple_phase(), fn=double), ragged_phase()], rows=[2], tokens=[8], largest_rows=4)
    seen.clear()
    for rows in (0, 1, 3):
        x = torch.arange(1.0, rows + 1)
        y = table.run("double", rows, {"x": x}, rows_across_ranks=3)["y"]
        assert y.tolist() == (2 * x).tolist()
    assert seen == [(3, 3)] * 3
    prompt = {"ids": torch.zeros(0, dtype=torch.int64), "query_starts": torch.tensor([0], dtype=torch.int32)}
    table.run("ragged", 0, prompt, tokens=0, tokens_across_ranks=5)
    assert ran(table)[0] == (2, 8)


class TwoRanks:
    """A group of which only one rank is here; the other needs `shape`, whenever it is asked."""

    rank, size = 0, 2

    def __init__(self, shape: StepShape) -> None:
        self._theirs = [*shape.to_ints(), 1, 0, 0]

    def max(self, values: list[int]) -> list[int]:
        return [max(pair) for pair in zip(values, self._theirs, strict=True)]


@pytest.mark.parametrize("agreed", [0, 3, 8])
def test_a_step_has_the_size_that_another_rank_needs(agreed: int) -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 2}
    llm = make_engine(speculative_config=spec, cudagraph_capture_sizes=(1, 4, 8))
    other = StepShape(decode_rows=agreed, prompt_tokens=agreed, num_drafts=2 if agreed else 0)
    llm.engine.core.lockstep = Lockstep(TwoRanks(other))  # type: ignore[arg-type]
    for _ in range(3):
        llm.engine.core.step()  # with nothing to do
    assert answers(llm.generate(prompts(1), greedy(8))) == [oracle(prompts(1)[0], 8)]
    rows = [row for row in llm.get_graph_report().rows if row.replays]
    used = {row.rows for row in rows if row.phase in ("target.verify", "target.decode", "accept.decode")}
    assert used == {{0: 1, 3: 4, 8: 8}[agreed]}
    assert ("target.decode" in {row.phase for row in rows}) == (not agreed), "who drafts nothing verifies with others"
