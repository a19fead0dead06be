"""The sweeps over tiles run, compare and print; without a GPU each call is made once, and its time is made up."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from draftloop.bench import quantised_candidates, sweep_experts, sweep_quantised, sweep_view
from draftloop.bench.sweep_report import SweepReport, gpu
from draftloop.kernels.linear import Tiles
from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_wide import Kind


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> torch.device:
    """The device, for a sweep of small layers."""
    monkeypatch.setattr(sweep_quantised, "COLD_BYTES", 1)
    monkeypatch.setattr(sweep_quantised, "HEAD_DIM", 16)
    monkeypatch.setattr(sweep_quantised, "NUM_KV_HEADS", 1)
    monkeypatch.setattr(sweep_quantised, "TOKENS", {"few": (3, 1), "some": (5,)})
    if device.type == "cpu":
        for module in (quantised_candidates, sweep_quantised, sweep_experts):
            monkeypatch.setattr(module, "DTYPE", torch.float16)  # the interpreter multiplies no bf16
        for sweep in (sweep_quantised, sweep_experts):
            monkeypatch.setattr(sweep, "time_us", made_up)
    return device


def made_up(calls: list, **_) -> tuple[float, float, float]:
    calls[0]()
    return 2.0, 1.0, 3.0


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_experts(small: torch.device) -> None:
    mixture = sweep_experts.Mixture("small", 4, 64, 32, 2, (1, 3), 40)
    weights = sweep_experts.weights_of(mixture, small)
    for gated in (True, False):
        layer = sweep_experts.Layer(mixture, gated=gated, tall=False)
        compiled = {(16, Tiles(32, 32, 1, 4, 3)): done()}
        sweep_experts.compile_one(layer, *compiled, weights, sweep_experts.routed(mixture, 1, small))
        row = sweep_experts.measure(layer, compiled, weights)
        assert len(sweep_experts.usable(row["results"])) == 1
        assert "T=3 " in "\n".join(sweep_experts.table(row))
        assert "(16, Tiles(block_n=32" in "\n".join(sweep_experts.entry(row))


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_quantised_layers(small: torch.device, form: str) -> None:
    rows = []
    tiles = PlaneTiles(32, 128, 2, 8, 4, 3)
    for kind in (Kind.GATED, Kind.PLAIN, Kind.SUMS):
        layer = quantised_candidates.Layer(kind.value, 64, 256, kind)
        tiles = tiles._replace(splits=1 if kind is Kind.GATED else 2)
        found = [(quantised_candidates.planes(layer, tiles), done())]
        copies = sweep_quantised.copies_of(form, layer, small)
        for regime in ("few", "some"):
            rows.append(sweep_quantised.measure(sweep_quantised.Cell(form, layer, regime, found), copies, small))
            assert len(sweep_view.usable(rows[-1]["results"])) == 1, rows[-1]
            assert " us  planes" in "\n".join(sweep_view.table(rows[-1]))
    other = {64: tiles._replace(splits=1)}
    printed = "\n".join(sweep_view.entries(rows, {form: {"a GPU": {(8, 8, False): other}}}))
    assert f"{form}, a GPU:" in printed
    assert "    (64, 256, True): {" in printed
    assert "        64: PlaneTiles(32, 128, 2, 8, 4, 3)," in printed
    assert "    (8, 8, False): {" in printed
    measured = {"a GPU": {(64, 256, True): other, (8, 8, False): other}}
    best = sweep_view.with_best(measured, form, [row for row in rows if row["regime"] == "few"])["a GPU"]
    assert best[64, 256, True] == {**other, 8: tiles}
    assert best[64, 256, False] == {8: tiles._replace(splits=1)}
    assert best[8, 8, False] == other
    # a layer that was whole, and is split for few tokens
    best = sweep_view.with_best(
        {"a GPU": {(64, 256, False): other}}, form, [row for row in rows if row["regime"] == "few"]
    )
    assert best["a GPU"][64, 256, True][64].splits == 1


def test_candidates_fit() -> None:
    """In shared memory and in a pipeline."""
    for layer in quantised_candidates.LAYERS:
        for regime, integer in (("few", True), ("few", False), ("some", True), ("many", True)):
            for tiles in quantised_candidates.plane_tiles(layer, regime, integer=integer):
                assert layer.size % (tiles.block_k * tiles.splits) == 0
                weights = tiles.block_n * tiles.block_k // (2 if integer else 1)
                shared = tiles.num_stages * (weights + 2 * tiles.max_tokens * tiles.block_k)
                assert shared <= quantised_candidates.SHARED_BYTES
    for layer in sweep_experts.LAYERS:
        for block_m, tiles in sweep_experts.candidates(layer):
            tile = layer.halves * tiles.block_n + block_m
            assert 2 * tiles.num_stages * tiles.block_k * tile <= sweep_experts.SHARED_BYTES


def test_a_sweep_keeps_its_rows_and_stops_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = SweepReport(tmp_path / "out.json", seconds=60)
    assert not report.is_late()
    report.add({"us": 1.5}, ["a layer"])
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == [{"us": 1.5}]
    assert SweepReport(None, seconds=-1).is_late()
    first, took, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("a layer", "stopped after -1 s")
    assert took.endswith(" s")


def test_without_a_gpu_sweeps_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no usable one"):
        gpu()
