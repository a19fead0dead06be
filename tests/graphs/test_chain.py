"""A chain of phases is one graph of the same code: what one part leaves, the next ones read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftloop.graphs.phase import GraphMode, Launch, Output, Phase, Slot, Unit, chain
from draftloop.graphs.table import GraphTable
from helpers import make_table


def parts(device: str = "cpu") -> list[Phase]:
    """double: [R] -> [R]; spread: [R] -> [2R]; gather: [2R], [R] -> [R], and counts its runs."""
    ran = torch.zeros(1, device=device)

    def double(launch: Launch, x: Tensor) -> dict[str, Tensor]:
        return {"y": 2 * x}

    def spread(launch: Launch, y: Tensor) -> dict[str, Tensor]:
        return {"z": torch.stack([y, y + 1], 1).flatten()}

    def gather(launch: Launch, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        ran.add_(1)
        return {"sum": z.view(-1, 2).sum(1) + y, "ran": ran.expand(launch.rows)}

    row, token = (Slot(unit=unit, dtype=torch.float32) for unit in (Unit.ROW, Unit.TOKEN))
    out, outs = (Output(unit=unit, dtype=torch.float32) for unit in (Unit.ROW, Unit.TOKEN))
    return [
        Phase(name="double", fn=double, slots={"x": row}, outputs={"y": out}, tokens_per_row=2),
        Phase(name="spread", fn=spread, slots={"y": row}, outputs={"z": outs}, tokens_per_row=2),
        Phase(
            name="gather", fn=gather, slots={"z": token, "y": row}, outputs={"sum": out, "ran": out}, tokens_per_row=2
        ),
    ]


def chained(device: str, **settings) -> GraphTable:
    phases = parts(device)
    return make_table([*phases, chain("all", phases)], device=device, **settings)


@pytest.mark.parametrize("poison", [False, True])
def test_a_chain_gives_what_its_parts_give_one_by_one(device, poison):
    table = chained(device, poison=poison)
    for rows in (1, 3, 2, 4):
        x = torch.arange(rows, dtype=torch.float32, device=device) + rows
        table.run("double", rows, {"x": x})
        table.run("spread", rows)
        apart = table.run("gather", rows)["sum"].tolist()
        whole = table.run("all", rows, {"x": x})
        assert whole["sum"].tolist() == apart == (6 * x + 1).tolist()
        assert whole["z"].shape == (2 * rows,)


def test_a_chain_is_one_replay_and_its_parts_are_not_counted(device):
    table = chained(device)
    for _ in range(5):
        table.run("all", 2, {"x": torch.ones(2, device=device)})
    assert {k: v for k, v in table.report().replays.items() if v} == {"all": 5}


def test_a_chain_asks_only_for_what_no_part_makes(device):
    table = chained(device)
    assert set(table.phases["all"].slots) == {"x"}
    with pytest.raises(ValueError, match="slot 'x' holds 0 live entries, 3 are needed"):
        table.run("all", 3)


def test_parts_may_be_run_on_from_where_a_chain_ended(device):
    table = chained(device)
    table.run("all", 2, {"x": torch.ones(2, device=device)})
    assert table.run("gather", 2)["sum"].tolist() == [7.0, 7.0]


def test_a_part_may_come_twice(device):
    phases = parts(device)
    table = make_table([*phases, chain("again", [*phases, phases[-1]])], device=device)
    before = table.run("again", 1, {"x": torch.ones(1, device=device)})["ran"].tolist()[0]
    assert table.run("again", 1, {"x": torch.ones(1, device=device)})["ran"].tolist() == [before + 2]


@pytest.mark.parametrize("setting", ["NONE", "PIECEWISE"])
def test_a_chain_is_full_or_nothing(setting):
    table = chained("cpu", setting=setting)
    assert not table.covers("all", 1)
    assert {row.mode for row in table.report().rows if row.phase == "all"} == {"NONE"}


def test_a_chain_covers_what_the_ladder_covers():
    table = chained("cpu", rows=(1, 2), largest_rows=4)
    assert [table.covers("all", rows) for rows in (1, 2, 3)] == [True, True, False]
    assert not table.covers("another", 1)
    assert "all" in table.uncovered()


def test_ragged_or_uncapturable_parts_are_our_own_mistake():
    eager = Phase(name="eager", fn=lambda launch: {}, slots={}, modes=frozenset({GraphMode.NONE}))
    with pytest.raises(AssertionError, match="eager"):
        chain("all", [*parts(), eager])
    ragged = Phase(name="ragged", fn=lambda launch: {}, slots={}, tokens_per_row=None)
    with pytest.raises(AssertionError, match="ragged"):
        chain("all", [*parts(), ragged])
