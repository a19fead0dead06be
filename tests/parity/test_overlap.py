"""Kernels that reach into the ones before them: what is asked for ahead, and that no result depends on it."""

from __future__ import annotations

import pytest
import torch

from draftloop.bench.sweep_overlap import Case, best, make_pass, replayed
from draftloop.kernels import overlap as module
from draftloop.kernels.overlap import Overlap, early_options, overlap_of, rows_ahead, trying

CPU = torch.device("cpu")


@pytest.fixture
def dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pdl_options", lambda device: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(module, "gpu_name", lambda device: "a GPU")


def test_nothing_overlaps_where_launches_do_not_depend_on_each_other() -> None:
    with trying(Overlap(early=True, bytes_ahead=1 << 30)):
        assert overlap_of(CPU) == Overlap()
        assert not early_options(CPU)["EARLY"]
        assert rows_ahead(CPU, 1, 64, 1) == 0


@pytest.mark.usefixtures("dependent_launches")
def test_what_was_measured_holds_until_something_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap_of(CPU) == Overlap()
    monkeypatch.setitem(module.MEASURED, "a GPU", Overlap(early=True))
    assert early_options(CPU) == {"PDL": True, "launch_pdl": True, "EARLY": True}
    with trying(Overlap()):
        assert not early_options(CPU)["EARLY"]
    assert overlap_of(CPU).early


@pytest.mark.usefixtures("dependent_launches")
def test_programs_ask_for_whole_rows_within_the_bytes() -> None:
    with trying(Overlap(bytes_ahead=8 << 20)):
        assert rows_ahead(CPU, 224, 128, 8192) == 4  # 7 MiB; a fifth row would make it 8.75
        assert rows_ahead(CPU, 2004, 64, 8192) == 0  # an output head, whose programs do not all run at once
        assert rows_ahead(CPU, 256, 32, 1024) == 32  # all that there is


def test_the_best_choice_has_the_right_bits() -> None:
    def row(decides: bool, *times: tuple[bool, int, float, bool]) -> dict:
        results = [{"overlap": [early, ahead], "us": us, "same": same} for early, ahead, us, same in times]
        return {"case": {"decides": decides}, "results": results}

    rows = [
        row(True, (False, 0, 10.0, True), (True, 0, 8.0, True), (True, 9, 5.0, True)),
        row(True, (False, 0, 100.0, True), (True, 0, 90.0, True), (True, 9, 50.0, False)),
        row(False, (False, 0, 1.0, True), (True, 0, 100.0, True), (True, 9, 1.0, True)),
    ]
    assert best(rows) == Overlap(early=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "query_len"), [(1, 1), (1, 6), (5, 3)])
@torch.inference_mode()
def test_bits_do_not_depend_on_overlapping(rows: int, query_len: int) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    run, _ = make_pass(Case("llama-3.2-1b", 4, rows, query_len), device)
    expected = replayed(run, times=1)[0]
    assert expected.isfinite().all()
    for overlap in (Overlap(early=True), Overlap(bytes_ahead=4 << 20), Overlap(early=True, bytes_ahead=64 << 20)):
        with trying(overlap):
            assert all(torch.equal(out, expected) for out in replayed(run, times=50)), overlap
