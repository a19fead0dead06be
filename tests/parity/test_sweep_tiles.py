"""The sweeps over linears and attention compare, print and serve; without a GPU their times are made up."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftloop.bench import best_tiles, kernels, sweep_attention, sweep_wide, wide_candidates, wide_view
from draftloop.kernels import linear, linear_wide
from draftloop.kernels.cluster_attention import Clusters
from draftloop.kernels.linear import Tiles
from draftloop.kernels.linear_multicast import MulticastTiles
from draftloop.kernels.linear_wide import Kind, Range, WideTiles


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> torch.device:
    """The device, for sweeps of small shapes; what is timed later is faster, unless it is timed."""
    monkeypatch.setattr(kernels, "COLD_BYTES", 1)
    for name, value in {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(kernels, name, value)
    if device.type == "cpu":
        times = itertools.accumulate(itertools.repeat(0.9), operator.mul, initial=100.0)

        def made_up(calls: list, **_) -> tuple[float, float, float]:
            calls[0]()
            now = next(times)
            return now, now, now

        for module in (kernels, sweep_wide):
            monkeypatch.setattr(module, "DTYPE", torch.float16)  # the interpreter multiplies no bf16
        for module in (sweep_wide, sweep_attention):
            monkeypatch.setattr(module, "time_us", made_up)
    return device


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the kernels may be changed."""
    monkeypatch.setattr(linear, "MEASURED", dict(linear.MEASURED))
    monkeypatch.setattr(linear_wide, "MEASURED", {gpu: dict(of_gpu) for gpu, of_gpu in linear_wide.MEASURED.items()})
    for cached in (linear.choose, linear_wide._measured):
        cached.cache_clear()


def cell(name: str, kind: Kind, tokens: int, *all_tiles: wide_candidates.Found) -> sweep_wide.Cell:
    layer, compiled = wide_candidates.Layer(name, 64, 256, (kind,)), Future()
    compiled.set_result(None)
    found = [
        sweep_wide.Candidate(kind.value, tiles, compiled, functools.partial(sweep_wide.run, kind=kind, tiles=tiles))
        for tiles in all_tiles
    ]
    return sweep_wide.Cell(layer, tokens, found)


@pytest.mark.parametrize(
    ("name", "kind", "tiles"),
    [
        ("o", Kind.SUMS, Tiles(16, 128, 2, 4, 3)),
        ("qkv", Kind.PLAIN, Tiles(32, 128, 1, 4, 3)),
        ("1b.gate_up", Kind.GATED, WideTiles(64, 64, 1, 64, 4, 2)),
        ("head.lm_head", Kind.PLAIN, Tiles(32, 128, 1, 4, 3)),
    ],
)
def test_linears(small: torch.device, name: str, kind: Kind, tiles: wide_candidates.Found) -> None:
    row = sweep_wide.measure(cell(name, kind, 24, tiles), small)
    assert [result["tiles"] for result in wide_view.usable(row)] == [list(tiles)], row
    printed = "\n".join(wide_view.table(row))
    assert f"{kind.value:6} {type(tiles).__name__}{tuple(tiles)}" in printed
    assert "T=24 " in printed


def result(kind: Kind, tiles: wide_candidates.Found, us: float, error: float = 1e-3) -> dict:
    return {"kind": kind.value, "kernel": type(tiles).__name__, "tiles": list(tiles), "us": us, "error": error}


FEW = MulticastTiles(64, 2, 1, True, 6)
ROWS = [
    # one kernel is faster at 48 tokens, the other at 32; what is wrong never wins
    {
        "layer": "o",
        "columns": 4096,
        "size": 4096,
        "tokens": 48,
        "today_us": 10.0,
        "results": [
            result(Kind.SUMS, FEW._replace(splits=4), 7.0, error=0.5),
            result(Kind.SUMS, FEW, 8.0),
            result(Kind.SUMS, Tiles(64, 128, 4, 4, 5), 9.0),
        ],
    },
    {
        "layer": "o",
        "columns": 4096,
        "size": 4096,
        "tokens": 32,
        "today_us": 10.0,
        "results": [result(Kind.SUMS, Tiles(32, 128, 4, 4, 5), 8.5), result(Kind.SUMS, FEW, 9.0)],
    },
    # no gain
    {"layer": "o", "columns": 64, "size": 64, "tokens": 48, "today_us": 8.1, "results": [result(Kind.PLAIN, FEW, 8.0)]},
    # faster at 32 tokens, but not measured above
    {
        "layer": "qkv",
        "columns": 96,
        "size": 256,
        "tokens": 32,
        "today_us": 8.0,
        "results": [result(Kind.SUMS, Tiles(32, 128, 4, 4, 5), 6.0)],
    },
]


def test_what_serves_is_what_was_fastest(tables: None) -> None:
    printed = "\n".join(wide_view.entries(ROWS))
    found = "Range(33, 48): MulticastTiles(64, 2, 1, True, 6, 256, 227),  # 8.0 us, without 10.0"
    assert f"(4096, 4096, Kind.SUMS): {{\n    {found}\n}}," in printed
    pair = Tiles(32, 128, 4, 4, 5), Tiles(64, 128, 4, 4, 5)
    assert "(4096, 4096, True): (Tiles(32, 128, 4, 4, 5), Tiles(64, 128, 4, 4, 5))," in printed
    assert "64, 64" not in printed
    assert "(96, 256, True)" not in printed
    before = linear_wide.MEASURED["NVIDIA H200"][4096, 4096, Kind.SUMS]
    wide_view.set_best(ROWS, "NVIDIA H200")
    assert linear.choose(4096, 4096, 132, may_split=True, few=True) == pair[0]
    for tokens in (33, 48):
        assert linear_wide._measured("NVIDIA H200", tokens, 4096, 4096, Kind.SUMS) == FEW
    assert linear_wide._measured("NVIDIA H200", 32, 4096, 4096, Kind.SUMS) is None
    for reach, tiles in before.items():
        assert linear_wide._measured("NVIDIA H200", reach.last, 4096, 4096, Kind.SUMS) == tiles


def test_all_candidates_are_compiled_in_the_order_of_what_is_measured() -> None:
    asked: list[tuple] = []

    class Pool:
        def submit(self, _, x: torch.Tensor, weight: torch.Tensor, kind: Kind, tiles: wide_candidates.Found) -> Future:
            asked.append((x.shape[0], *weight.shape, kind, tiles))
            return Future()

    cells = sweep_wide.parse_cells(["48:gate_up,1b.o", "192:o"])
    planned = sweep_wide.plan(cells, Pool(), 3, torch.device("meta"))  # pyrefly: ignore[bad-argument-type]
    assert [(found.layer, found.tokens) for found in planned] == cells
    assert len(asked) == sum(len(found.candidates) for found in planned)
    assert list(dict.fromkeys(row[:3] for row in asked)) == [
        (48, 28672, 4096),
        (48, 2048, 2048),
        (192, 4096, 4096),
    ]
    kernels_of = {row[0]: {type(other[4]) for other in asked if other[0] == row[0]} for row in asked}
    assert kernels_of == {48: {Tiles, MulticastTiles}, 192: {WideTiles, MulticastTiles}}


def test_cells() -> None:
    assert [(layer.name, tokens) for layer, tokens in sweep_wide.parse_cells(["48:o,1b.o", "16:down"])] == [
        ("o", 48),
        ("1b.o", 48),
        ("down", 16),
    ]
    with pytest.raises(ValueError, match="names no layer 'up'; known: gate_up, down"):
        sweep_wide.parse_cells(["48:up"])


def test_triton_candidates_fit() -> None:
    for layer in wide_candidates.LAYERS:
        for tokens in (16, 32, 48, 64):
            found = {kind: wide_candidates.few_candidates(layer, tokens, kind, 8) for kind in layer.kinds}
            assert any(found.values())
            for kind, all_tiles in found.items():
                for tiles in all_tiles:
                    assert (tiles.splits > 1) == (kind is Kind.SUMS)
                    assert layer.size % (tiles.block_k * tiles.splits) == 0


def test_attention(small: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where no clusters run, in the place of two the kernel that serves, and in that of another nothing."""
    case = sweep_attention.parse_case("2x2x40")
    tried = [Clusters(1), Clusters(2), Clusters(3, 3)]
    monkeypatch.setattr(sweep_attention, "candidates", lambda _: tried)
    with ThreadPoolExecutor(1) as pool:
        if small.type == "cpu":
            attend = sweep_attention.make_backend("triton", 16, small)

            def in_their_place(q: torch.Tensor, kv: torch.Tensor, *rest: torch.Tensor, **named: object) -> None:
                if named["clusters"] == tried[2]:
                    rest[-1].zero_()
                    return
                *_, batches = sweep_attention.attention_batches(attend, 2, 2, 40, uniform=True)
                rows, lens, table, out = rest
                batch = replace(batches[0], rows_R=rows, kv_lens_R=lens, page_table_MN=table)
                attend.attend(q, kv, batch, out, sliding_window=None)

            monkeypatch.setattr(sweep_attention, "cluster_attention", in_their_place)
        row = sweep_attention.Sweep(case, pool, small).measure()
    printed = "\n".join(sweep_attention.table(row))
    assert "2 x 2, 40 keys: floor" in printed
    assert "Clusters(splits=2, stages=2, warps=4)" in printed
    assert len(row["results"]) == 3
    assert len(sweep_attention.usable(row["results"])) == (2 if small.type == "cpu" else 3), row
    assert ("WRONG" in printed) == (small.type == "cpu")


@pytest.mark.parametrize("text", sweep_attention.CASES)
def test_attention_candidates_fit(text: str) -> None:
    case = sweep_attention.parse_case(text)
    found = sweep_attention.candidates(case)
    assert len(set(found)) == len(found) >= 6
    assert all(case.shape.fits(clusters) for clusters in found)


def test_a_case_is_three_numbers() -> None:
    with pytest.raises(ValueError, match="'8x6' is no case of attention"):
        sweep_attention.parse_case("8x6")


def test_the_bench_runs_with_what_was_found(tables: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "linears").write_text(json.dumps({"rows": ROWS}))
    asked: list[str] = []
    monkeypatch.setattr(best_tiles, "run_bench", asked.extend)
    monkeypatch.setattr(best_tiles, "gpu", lambda: torch.device("cuda"))
    monkeypatch.setattr(best_tiles, "gpu_name", lambda _: "NVIDIA H200")
    arguments = [
        "best_tiles",
        "--linears",
        str(tmp_path / "linears"),
        "--",
        "latency",
        "llama-3.1-8b",
        "--repeats",
        "2",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    best_tiles.main()
    assert asked == ["latency", "llama-3.1-8b", "--repeats", "2"]
    assert linear_wide.MEASURED["NVIDIA H200"][4096, 4096, Kind.SUMS][Range(33, 48)] == FEW
