"""Sizes that are covered, and that nothing runs eager unseen."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_phases import VOCAB, block_phase, modes, ragged_phase, simple_phase
from torch import Tensor

from draftloop.errors import GraphError
from draftloop.graphs.phase import GraphMode, Launch
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from helpers import MODES, make_table

QUERY = 3
relaxed = settings(max_examples=20)


# ---- sizes ----------------------------------------------------------------------------------


def largest_use(table: GraphTable, name: str) -> tuple[int, int]:
    """The largest (rows, tokens) that the table can run a phase at, padded or eager."""
    phase = table.phases[name]
    if phase.ragged:
        keys = [table.key_for(name, 1, t) for t in range(1, table.largest_tokens + 1)]
        sizes = [(key.rows, key.tokens) for key in keys if key]
        sizes.append((table.ladders.prefill_rows, table.largest_tokens))
    else:
        q = phase.tokens_per_row
        keys = [table.key_for(name, rows) for rows in range(1, table.largest_rows + 1)]
        sizes = [(key.rows, key.tokens) for key in keys if key]
        sizes.append((table.largest_rows, table.largest_rows * q))
    return max(rows for rows, _ in sizes), max(tokens for _, tokens in sizes)


@settings(max_examples=80)
@given(
    num_seqs=st.integers(1, 70),
    num_drafts=st.integers(0, 8),
    ladder=st.lists(st.integers(1, 96), min_size=1, max_size=6, unique=True).map(sorted),
    setting=st.sampled_from(MODES),
)
def test_every_buffer_holds_the_largest_padded_batch(num_seqs, num_drafts, ladder, setting):
    """B11: outputs included, and whatever the largest batch is padded to."""
    table = make_table(
        [block_phase(tokens_per_row=1 + num_drafts), ragged_phase()],
        rows=ladder,
        tokens=ladder,
        largest_rows=num_seqs,
        largest_tokens=num_seqs * 3,
        setting=setting,
        capture=False,
    )
    for name, phase in table.phases.items():
        rows, tokens = largest_use(table, name)
        for buffer, spec in {**phase.slots, **phase.outputs}.items():
            assert table.buffers[buffer].shape[0] >= spec.unit.count(rows, tokens), (name, buffer)


def test_33_rows_of_4_tokens_padded_to_34_rows_fit():
    """B11: 132 tokens are needed, 136 are dispatched."""
    table = make_table([block_phase(tokens_per_row=4)], rows=[2, 34], largest_rows=33)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (33 * 4,), generator=generator)
    outputs = table.run("block", 33, {"ids": ids, "scale": torch.ones(33)})
    assert table.buffers["ids"].shape[0] == table.buffers["logits"].shape[0] == 136
    assert outputs["logits"].shape == (132, VOCAB)
    assert outputs["best"].shape == (33,)


# ---- never silently eager -------------------------------------------------------------------


def test_replays_and_eager_runs_are_counted_with_the_reason():
    table = make_table([simple_phase()], rows=[1, 2], largest_rows=4)
    for rows in (1, 2, 2, 3, 4, 4):
        assert table.run("double", rows, {"x": torch.ones(rows)})["y"].tolist() == [2.0] * rows
    report = table.report()
    assert report.replays == {"double": 3}
    assert report.eager_runs == {"double": 3}
    by_size = {row.rows: row for row in report.rows}
    assert (by_size[1].replays, by_size[2].replays, by_size[4].replays) == (1, 2, 0)
    assert not by_size[4].captured
    assert "3 rows exceed the largest captured size 2" in by_size[4].reason
    assert "4 rows exceed the largest captured size 2" in by_size[4].reason
    table.reset_counts()
    assert table.report().replays == table.report().eager_runs == {"double": 0}


def test_the_report_holds_every_size_and_goes_through_json(device):
    table = make_table(
        [block_phase(device=device), ragged_phase(device=device), simple_phase(modes=modes("NONE"), reason="a script")],
        setting="FULL_AND_PIECEWISE",
        device=device,
    )
    report = table.report()
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.to_dict()["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    rows = {(row["phase"], row["rows"], row["tokens"]): row for row in report.to_dict()["rows"]}
    assert set(rows) == {
        ("block", 1, 3), ("block", 2, 6), ("block", 4, 12), ("ragged", 2, 8), ("ragged", 2, 16), ("double", 4, 4),
    }  # fmt: skip
    assert {row["mode"] for row in rows.values() if row["phase"] == "block"} == {"FULL"}
    assert {row["mode"] for row in rows.values() if row["phase"] == "ragged"} == {"PIECEWISE"}
    for row in rows.values():
        if row["phase"] == "double":
            assert (row["captured"], row["mode"], row["reason"]) == (False, "NONE", "a script")
            assert row["ms"] is row["mib"] is None
        else:
            assert row["captured"]
            assert row["ms"] > 0
            assert row["mib"] >= 0
    table_text = report.format()
    for word in ("block", "FULL", "rows 1,2,4", "ragged", "PIECEWISE", "tokens 8,16", "double", "a script"):
        assert word in table_text


def test_where_nothing_is_captured_before_it_is_used_the_start_says_so_in_a_line():
    table = make_table([block_phase(), ragged_phase()], capture=False, setting="FULL_DECODE_ONLY")
    table.recorder.on_first_use = True
    table.capture()
    line = table.report().at_start()
    assert line == "block, on first use at 1,2,4 rows; ragged eager: cudagraph_mode is FULL_DECODE_ONLY"


@pytest.mark.parametrize("setting", MODES)
def test_an_uncovered_largest_batch_is_reported(setting):
    table = make_table([block_phase(), ragged_phase()], largest_rows=9, largest_tokens=20, setting=setting)
    gaps = table.uncovered()
    # what the user's mode does not ask to capture is not a gap
    expected = {}
    if setting.uniform is not GraphMode.NONE:
        expected["block"] = "9 rows exceed the largest captured size 4"
    if setting.ragged is not GraphMode.NONE:
        expected["ragged"] = "20 tokens exceed the largest captured size 16"
    assert gaps == expected


def test_coverage_is_complete_where_the_ladder_reaches_the_largest_batch():
    assert make_table([block_phase(), ragged_phase()]).uncovered() == {}


def test_required_graphs_stop_the_start_naming_phase_and_reason():
    table = make_table([simple_phase()], largest_rows=9, require_graphs=True, capture=False)
    with pytest.raises(GraphError, match=r"--require-graphs.*double: 9 rows exceed the largest captured size 4"):
        table.capture(lambda key, total: pytest.fail("a capture that is thrown away takes minutes on a GPU"))


def test_required_graphs_do_not_ask_a_phase_that_has_none():
    table = make_table([simple_phase(modes=modes("NONE"), reason="host")], require_graphs=True)
    assert table.run("double", 1, {"x": torch.ones(1)})["y"].tolist() == [2.0]
    assert table.report().eager_runs == {"double": 1}


def test_required_graphs_refuse_an_eager_run():
    table = make_table([simple_phase()], require_graphs=True)
    table.largest_rows = 9  # a batch that the configuration did not announce
    table.buffers = make_table([simple_phase()], rows=[9], capture=False).buffers
    with pytest.raises(GraphError, match="double would run eager: 5 rows exceed the largest captured size 4"):
        table.run("double", 5, {"x": torch.ones(5)})


@pytest.mark.parametrize("setting", ["NONE", "FULL"])
def test_a_phase_that_forbids_eager_never_runs_so(setting):
    table = make_table([simple_phase(modes=modes("FULL"))], setting=setting, rows=[2], largest_rows=3)
    rows = 3 if setting == "FULL" else 1
    with pytest.raises(GraphError, match=r"double: .*, and the phase does not allow eager"):
        table.run("double", rows, {"x": torch.ones(rows)})


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_a_failed_capture_names_phase_and_size(setting):
    phase = simple_phase("reader", fn=lambda launch, x: {"y": x * x.sum().item()})
    with pytest.raises(GraphError, match=r"phase 'reader' at 4 rows, 4 tokens: .*item"):
        make_table([phase], setting=setting)


def test_a_phase_that_cannot_be_captured_runs_where_nothing_is():
    phase = simple_phase("reader", fn=lambda launch, x: {"y": x * x.sum().item()})
    table = make_table([phase], setting="NONE")
    assert table.run("reader", 2, {"x": torch.ones(2)})["y"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE", "NONE"])
def test_capture_does_not_count_as_use(setting):
    table = make_table([block_phase()], setting=setting)
    assert table.report().replays == {"block": 0}
    assert table.report().eager_runs == {"block": 0}


def test_the_same_function_is_captured_and_run_eager():
    """There is no second path made for capture."""
    seen = []

    def fn(launch: Launch, x: Tensor) -> dict[str, Tensor]:
        seen.append((launch.rows, launch.tokens))
        return {"y": x + 1}

    table = make_table([simple_phase(fn=fn)], rows=[2], largest_rows=3)
    assert seen == [(2, 2)]
    table.run("double", 1, {"x": torch.ones(1)})
    assert seen == [(2, 2)], "a replay does not call Python"
    table.run("double", 3, {"x": torch.ones(3)})
    assert seen == [(2, 2), (3, 3)]


def test_a_size_recorded_on_first_use_is_a_replay_from_the_first_run_on():
    table = make_table([simple_phase()], recorder=TapeRecorder(on_first_use=True))
    assert {(row.captured, row.ms) for row in table.report().rows} == {(True, None)}
    for value in (1.0, 3.0):
        assert table.run("double", 1, {"x": torch.full((1,), value)})["y"].tolist() == [2 * value]
    assert table.report().replays["double"] == 2
    assert table.report().eager_runs["double"] == 0


def test_graphs_that_the_mode_does_not_ask_for_are_not_required():
    table = make_table([block_phase(), ragged_phase()], setting="FULL_DECODE_ONLY", require_graphs=True)
    bounds = torch.tensor([0, 3], dtype=table.phases["ragged"].slots["query_starts"].dtype)
    table.run("ragged", 1, {"ids": torch.zeros(3, dtype=torch.int64), "query_starts": bounds}, tokens=3)
    assert table.report().eager_runs["ragged"] == 1
