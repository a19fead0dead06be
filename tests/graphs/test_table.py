"""Running phases through the table: graphs equal eager, nothing stale is read, nothing runs eager unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_phases import VOCAB, block_phase, ragged_phase, simple_phase
from torch import Tensor

from draftloop.graphs.phase import Launch, Output, Pad, Phase, Slot, Unit
from draftloop.graphs.table import GraphTable
from helpers import make_table

QUERY = 3
relaxed = settings(max_examples=20)


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
