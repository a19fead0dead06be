"""Running phases through the table: graphs equal eager, nothing stale is read, nothing runs eager unseen."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_phases import VOCAB, block_phase, modes, ragged_phase, simple_phase
from torch import Tensor

from draftloop.errors import GraphError
from draftloop.graphs.phase import GraphMode, Launch, Output, Pad, Phase, Slot, Unit
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from helpers import MODES, make_table

QUERY = 3
relaxed = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def inputs_for(rows: int, generator: torch.Generator, device: str, padded: int | None = None) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (rows * QUERY,), generator=generator)
    scale = torch.rand(rows, generator=generator) + 0.5
    extra = (padded or rows) - rows
    pad = torch.nn.functional.pad
    return {"ids": pad(ids, (0, extra * QUERY)).to(device), "scale": pad(scale, (0, extra)).to(device)}


def eager_at(table: GraphTable, rows: int, inputs: dict[str, Tensor], live: int) -> dict[str, Tensor]:
    """What the phase's own function gives for these (padded) inputs, cut to the live rows."""
    outputs = table.phases["block"].fn(Launch(rows=rows, tokens=rows * QUERY, attend=lambda call: call()), **inputs)
    return {name: value[: live * QUERY if name == "logits" else live] for name, value in outputs.items()}


# ---- declarations ---------------------------------------------------------------------------


def test_two_phases_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two phases are called 'double'"):
        make_table([simple_phase(), simple_phase()])


@pytest.mark.parametrize(
    "other",
    [
        Slot(unit=Unit.ROW, dtype=torch.float64),
        Slot(unit=Unit.ROW, dtype=torch.float32, shape=(2,)),
    ],
    ids=["type", "shape"],
)
def test_one_buffer_name_with_two_meanings_is_refused(other):
    clash = Phase(name="other", fn=lambda launch, y: {}, slots={"y": other})
    with pytest.raises(ValueError, match=r"buffer 'y' .* phase 'double', but .* in phase 'other'"):
        make_table([simple_phase(), clash])


def test_an_unknown_slot_is_refused():
    with pytest.raises(ValueError, match=r"double has no slot 'z'; it takes \['x'\]"):
        make_table([simple_phase()]).run("double", 1, {"z": torch.ones(1)})


def test_a_ragged_phase_needs_its_token_count():
    with pytest.raises(ValueError, match="ragged: say how many tokens"):
        make_table([ragged_phase()]).run("ragged", 1)


@pytest.mark.parametrize("value", [torch.ones(9), torch.ones(1, 2)], ids=["too_long", "misshapen"])
def test_a_value_that_does_not_fit_its_buffer_is_refused(value):
    with pytest.raises(ValueError, match=r"buffer 'x' holds \(4,\); cannot take"):
        make_table([simple_phase()]).run("double", 1, {"x": value})


@pytest.mark.parametrize("returned", [{}, {"y": 1, "z": 1}, {"z": 1}])
def test_outputs_other_than_declared_are_refused(returned):
    phase = simple_phase(fn=lambda launch, x: dict.fromkeys(returned, x))
    with pytest.raises(ValueError, match=r"double declares the outputs \['y'\], but returned"):
        make_table([phase])


# ---- graphs equal eager ---------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
@given(
    ladder=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(sorted),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@relaxed
def test_uniform_graphs_equal_eager_bit_for_bit_whatever_ran_before(device, setting, ladder, sizes, seed):
    table = make_table([block_phase(device=device)], rows=ladder, setting=setting, device=device, poison=seed % 2 == 0)
    generator = torch.Generator().manual_seed(seed)
    for rows in sizes:
        key = table.key_for("block", rows)
        padded = key.rows if key else rows
        if key is None and rows > max(ladder):
            continue  # covered by the tests of eager runs
        inputs = inputs_for(rows, generator, device, padded)
        live = {"ids": inputs["ids"][: rows * QUERY], "scale": inputs["scale"][:rows]}
        got = {name: value.clone() for name, value in table.run("block", rows, live).items()}
        want = eager_at(table, padded, inputs, rows)
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert table.report().eager_runs["block"] == 0


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE", "NONE"])
@given(batches=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=2), min_size=1, max_size=4))
@relaxed
def test_ragged_graphs_equal_eager_whatever_ran_before(device, setting, batches):
    table = make_table([ragged_phase(device=device)], setting=setting, device=device, poison=True)
    generator = torch.Generator().manual_seed(len(batches))
    for lengths in batches:
        ids = torch.randint(0, VOCAB, (sum(lengths),), generator=generator).to(device)
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        sums = table.run("ragged", len(lengths), {"ids": ids, "query_starts": bounds}, tokens=sum(lengths))["sums"]
        expected = table.phases["ragged"].fn(
            Launch(rows=len(lengths), tokens=sum(lengths), attend=lambda call: call()), ids=ids, query_starts=bounds
        )["sums"]
        assert sums.shape == expected.shape
        assert torch.allclose(sums, expected, atol=1e-5), "padding tokens leaked into a row"


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE", "NONE"])
def test_a_phase_reads_what_an_earlier_phase_left_under_that_name(device, setting):
    second = Phase(
        name="second",
        fn=lambda launch, y: {"z": y + 1},
        slots={"y": Slot(unit=Unit.ROW, dtype=torch.float32, pad=Pad.KEEP)},
        outputs={"z": Output(unit=Unit.ROW, dtype=torch.float32)},
    )
    table = make_table([simple_phase(), second], setting=setting, device=device, poison=True)
    for rows in (4, 1, 3):
        table.run("double", rows, {"x": torch.arange(1.0, rows + 1, device=device)})
        assert table.run("second", rows)["z"].tolist() == [2.0 * i + 1 for i in range(1, rows + 1)]


@pytest.mark.parametrize("setting", ["FULL", "NONE"])
def test_a_slot_that_nobody_wrote_at_this_size_is_stale(setting):
    table = make_table([simple_phase()], setting=setting)
    with pytest.raises(ValueError, match="slot 'x' holds 0 live entries, 1 are needed"):
        table.run("double", 1)
    table.run("double", 3, {"x": torch.ones(3)})
    table.run("double", 3)  # still there
    for rows in (2, 4):
        with pytest.raises(ValueError, match=f"slot 'x' holds 3 live entries, {rows} are needed"):
            table.run("double", rows)


def test_outputs_are_views_that_the_next_run_overwrites(device):
    table = make_table([simple_phase()], device=device)
    first = table.run("double", 2, {"x": torch.ones(2, device=device)})["y"]
    table.run("double", 2, {"x": torch.full((2,), 5.0, device=device)})
    assert first.tolist() == [10, 10]


# ---- padding --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pad", "expected"),
    [(Pad.ZERO, [3.0, 0, 0, 0]), (Pad.FILL, [3.0, 7, 7, 7]), (Pad.LAST, [3.0, 3, 3, 3]), (Pad.KEEP, [3.0, 1, 1, 1])],
)
def test_padding_rows_hold_what_the_slot_declares(device, pad, expected):
    slot = Slot(unit=Unit.ROW, dtype=torch.float32, pad=pad, fill=7)
    output = {"y": Output(unit=Unit.ROW, dtype=torch.float32)}
    phase = Phase(name="copy", fn=lambda launch, x: {"y": x + 0}, slots={"x": slot}, outputs=output)
    table = make_table([phase], rows=[4], device=device)
    table.run("copy", 4, {"x": torch.ones(4, device=device)})  # what a larger batch leaves behind
    table.run("copy", 1, {"x": torch.tensor([3.0], device=device)})
    assert table.buffers["y"].tolist() == expected, "what the graph saw"


def test_kept_padding_is_poisoned_in_poison_mode(device):
    table = make_table([simple_phase(pad=Pad.KEEP)], rows=[4], device=device, poison=True)
    table.run("double", 4, {"x": torch.ones(4, device=device)})
    y = table.run("double", 1, {"x": torch.ones(1, device=device)})["y"]
    assert y.tolist() == [2.0]
    assert table.buffers["y"][1:].isnan().all()


def picking_phase(pad: Pad) -> Phase:
    """Picks one token of each row by its index, as a model does before its output head."""

    def pick(launch: Launch, x: Tensor, last_indices: Tensor) -> dict[str, Tensor]:
        return {"picked": x[last_indices]}

    return Phase(
        name="pick",
        fn=pick,
        slots={
            "x": Slot(unit=Unit.TOKEN, dtype=torch.float32, pad=Pad.KEEP),
            "last_indices": Slot(unit=Unit.ROW, dtype=torch.int64, pad=pad),
        },
        outputs={"picked": Output(unit=Unit.ROW, dtype=torch.float32)},
        tokens_per_row=2,
    )


def run_picking(pad: Pad, *, poison: bool, before: int | None) -> list[float]:
    table = make_table([picking_phase(pad)], rows=[2, 4], poison=poison)
    for rows in [before, 1] if before else [1]:
        ends = torch.arange(1, 2 * rows, 2).flip(0)
        picked = table.run("pick", rows, {"x": torch.arange(2.0 * rows), "last_indices": ends})["picked"]
    return picked.tolist()


def test_indices_that_a_larger_batch_left_behind_are_never_read():
    """Padding rows read with the stale index of a batch of 4, which lies outside of a batch of 2."""
    assert run_picking(Pad.ZERO, poison=True, before=4) == [1.0]
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        run_picking(Pad.KEEP, poison=False, before=4)  # the fault, where padding is not declared


def test_poison_finds_undeclared_padding_before_a_larger_batch_came():
    assert run_picking(Pad.KEEP, poison=False, before=None) == [1.0]  # without poison it goes unseen
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        run_picking(Pad.KEEP, poison=True, before=None)


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_poison_finds_a_live_row_that_depends_on_padding(device, setting):
    phase = simple_phase(fn=lambda launch, x: {"y": x + x.sum()}, pad=Pad.KEEP)
    clean, poisoned = (make_table([phase], rows=[4], setting=setting, device=device, poison=p) for p in (False, True))
    x = {"x": torch.ones(1, device=device)}
    assert clean.run("double", 1, x)["y"].isfinite().all()
    assert poisoned.run("double", 1, x)["y"].isnan().all()


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE", "NONE"])
def test_poison_calls_for_more_before_every_run(setting):
    calls = []
    table = make_table([simple_phase()], setting=setting, poison=True, poison_more=lambda: calls.append(1))
    for _ in range(3):
        table.run("double", 1, {"x": torch.ones(1)})
    table.poison = False
    table.run("double", 1, {"x": torch.ones(1)})
    assert len(calls) == 3


def test_poison_covers_outputs_but_not_what_a_phase_writes_over(device):
    """A phase may update a buffer in place; what it has not computed in this run is poison."""
    slots = {"x": Slot(unit=Unit.ROW, dtype=torch.float32)}
    outputs = {name: Output(unit=Unit.ROW, dtype=torch.float32) for name in ("x", "y")}
    phase = Phase(name="step", fn=lambda launch, x: {"x": x + 1, "y": x * 2}, slots=slots, outputs=outputs)
    table = make_table([phase], rows=[2, 4], device=device, poison=True)
    table.run("step", 2, {"x": torch.ones(2, device=device)})
    assert table.run("step", 2)["x"].tolist() == [3, 3]
    assert table.buffers["y"][2:].isnan().all()


@pytest.mark.gpu
def test_poison_fills_the_memory_of_cuda_graphs():
    """Whatever a graph allocated is NaN before each replay, so a read of a value of the last one shows."""
    table = make_table([block_phase(device="cuda")], device="cuda", poison=True)
    recorder = table.recorder
    assert recorder.owned_bytes() > 0
    recorder.poison_pool()
    for segment in recorder._segments():
        from draftloop.graphs.cuda import _Bytes

        memory = torch.as_tensor(_Bytes(segment["address"], segment["total_size"]), device="cuda")
        assert memory.eq(0xFF).all()
    inputs = inputs_for(3, torch.Generator().manual_seed(0), "cuda")
    assert table.run("block", 3, inputs)["logits"].isfinite().all()


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


@settings(max_examples=80, deadline=None)
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
    table = make_table([simple_phase()], capture=False)
    table.recorder = TapeRecorder(on_first_use=True)
    table.capture()
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
