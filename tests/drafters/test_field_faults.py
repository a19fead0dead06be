"""Three faults that engines had in the field: each is undone here, to see that it would not go unseen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.engine.llm import LLM
from draftloop.errors import GraphError
from draftloop.graphs.phase import GraphMode, Key, Launch, ModeSetting, Pad, Phase, Slot, Unit, settle_mode
from draftloop.graphs.sizes import Ladders
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from example_drafters import example_configs
from helpers import answers, greedy, make_engine, near_draft, oracle, prompts

load_drafters()
SPEC = {"model": near_draft(), "num_speculative_tokens": 3}


def drafting(spec: dict, **settings) -> LLM:
    return make_engine(speculative_config=spec, **{"cudagraph_capture_sizes": (2, 8), **settings})


# ---- a phase that is declared, but missing from what is captured ------------------------------


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_phase_that_is_left_out_of_the_capture_is_refused_and_never_run_eager(name, monkeypatch):
    llm = drafting(example_configs()[name][0], cudagraph_mode="FULL")
    table = llm.engine.table
    llm.generate(prompts(3), greedy(12))
    used = {row.phase for row in llm.get_graph_report().rows if row.replays}
    assert "accept.prompt" in used
    keys = table.keys()
    for missing in sorted(used):
        monkeypatch.setattr(table, "keys", lambda missing=missing: [key for key in keys if key.phase != missing])
        table.capture()
        with pytest.raises(GraphError, match=f"{missing} at .* is dispatched, but was never captured"):
            llm.generate(prompts(3), greedy(12))
        while not llm.engine.core.idle:
            llm.engine.core.step()


# ---- padding that nobody declared -------------------------------------------------------------


def undeclare(table: GraphTable, phase: str, slot: str) -> None:
    state = table._states[phase]
    slots = {**state.phase.slots, slot: replace(state.phase.slots[slot], pad=Pad.KEEP)}
    state.phase = replace(state.phase, slots=slots)


# the others: rows of prompts are read through their tokens, and padded boundaries crash the process without theirs
@pytest.mark.parametrize(
    ("phase", "slot"),
    [("target.verify", "rows"), ("draft.prefill", "rows"), ("draft.decode", "rows")],
)
def test_poison_finds_each_slot_whose_padding_is_dropped(phase, slot):
    llm = drafting(SPEC, cudagraph_mode="FULL")
    llm.engine.table.poison = True
    asked = prompts(3)
    expected = [oracle(prompt, 12) for prompt in asked]
    assert answers(llm.generate(asked, greedy(12))) == expected
    undeclare(llm.engine.table, phase, slot)
    try:
        found = answers(llm.generate(asked, greedy(12)))
    except (IndexError, RuntimeError):
        return
    assert found != expected, f"{phase} runs the same without the padding of {slot!r}"


# ---- one token per row, piecewise: tokens are padded, rows are not -----------------------------


class Recorded:
    """A backend that takes one token per row, as some do, and reads past its rows where there are more."""

    def __init__(self) -> None:
        self.calls = 0

    def attend(self, tokens_T: Tensor, kv_lens_R: Tensor) -> None:
        assert tokens_T.shape[0] == kv_lens_R.shape[0], "reads past the rows it has been told about"
        self.calls += 1


def chain(backend: Recorded, modes: set[GraphMode]) -> Phase:
    def decode(launch: Launch, tokens: Tensor, kv_lens: Tensor) -> dict[str, Tensor]:
        launch.attend(lambda: backend.attend(tokens, kv_lens))
        return {}

    slots = {
        "tokens": Slot(unit=Unit.TOKEN, dtype=torch.int32),
        "kv_lens": Slot(unit=Unit.ROW, dtype=torch.int32),
    }
    return Phase(name="draft.decode", fn=decode, slots=slots, modes=frozenset(modes))


def table_of(cls: type[GraphTable], phase: Phase, setting: str) -> GraphTable:
    ladders = Ladders(rows=(2, 8), tokens=(2, 8), prefill_rows=2)
    table = cls([phase], ladders, ModeSetting(setting), TapeRecorder(), torch.device("cpu"), largest_rows=8,
                largest_tokens=8, poison=False)  # fmt: skip
    table.capture()
    return table


def run_chain(table: GraphTable, rows: int) -> None:
    ones = torch.ones(rows, dtype=torch.int32)
    table.run("draft.decode", rows, {"tokens": ones, "kv_lens": ones})


class PadsTokensOnly(GraphTable):
    """The field's piecewise graphs: captured for a number of tokens, with the rows of the moment."""

    def key_for(self, name: str, rows: int, tokens: int | None = None) -> Key | None:
        key = super().key_for(name, rows, tokens)
        return key and replace(key, rows=min(rows, 5)) if key and key.mode is GraphMode.PIECEWISE else key


def test_the_fault_shows_where_piecewise_pads_tokens_only():
    phase = chain(Recorded(), {GraphMode.NONE, GraphMode.PIECEWISE})
    with pytest.raises(AssertionError, match="reads past the rows"):
        table_of(PadsTokensOnly, phase, "PIECEWISE")


@pytest.mark.parametrize("setting", [mode.value for mode in ModeSetting])
@pytest.mark.parametrize("modes", [{GraphMode.NONE, GraphMode.FULL}, set(GraphMode)], ids=["declared", "allowed"])
def test_rows_are_padded_with_their_tokens_in_every_mode(setting, modes):
    """Even where a chain phase allows PIECEWISE, which none of ours does, its rows are padded too."""
    backend = Recorded()
    table = table_of(GraphTable, chain(backend, modes), setting)
    for rows in (1, 2, 3, 7, 8):
        run_chain(table, rows)
    assert backend.calls


def chain_phases() -> Iterator[tuple[str, Phase]]:
    for name in sorted(DRAFTERS):
        for phase in drafting(example_configs()[name][0]).engine.table.phases.values():
            if phase.name.startswith("draft.decode"):
                yield name, phase


def test_no_drafter_declares_a_chain_phase_that_may_be_piecewise():
    found = list(chain_phases())
    assert "draft_model" in dict(found)
    for name, phase in found:
        assert GraphMode.PIECEWISE not in phase.modes, name
        assert phase.reason, name
        for setting in ModeSetting:
            assert settle_mode(phase, setting)[0] in (GraphMode.FULL, GraphMode.NONE)
