"""Linears of many tokens in CUDA C++: against exact sums, plain, split along K, and with the gate in them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from multicast_linear_host import HostLinear
from torch import Tensor

from draftloop.bench.wide_candidates import LAYERS, few_multicast_candidates
from draftloop.kernels.cuda_source import compile_source
from draftloop.kernels.linear import MAX_TOKENS
from draftloop.kernels.linear_multicast import SOURCE, MulticastTiles
from draftloop.kernels.linear_wide import MEASURED, Kind, linear_wide, linear_wide_torch, make_out

WEIGHT_FIRST = MulticastTiles(128, 3, 2, True, 3, 192)
TOKEN_FIRST = MulticastTiles(224, 3, 2, False, 3, 192)
FEW = MulticastTiles(128, 1, 1, True, 3, shared_kb=88)


class Case(NamedTuple):
    tiles: MulticastTiles
    tokens: int
    columns: int
    size: int


CASES = [
    Case(TOKEN_FIRST, 192, 448, 256),
    Case(TOKEN_FIRST, 150, 896, 320),  # 64 rows of a tile, which both groups divide, are not full
    Case(TOKEN_FIRST, 70, 448, 256),
    Case(TOKEN_FIRST, 200, 224, 256),  # two tiles of tokens share weights
    Case(WEIGHT_FIRST, 130, 256, 704),
    Case(WEIGHT_FIRST._replace(max_tokens=96), 280, 128, 256),  # the last of four tiles has no tokens
    Case(MulticastTiles(64, 2, 1, False, 4), 190, 192, 192),
    Case(FEW._replace(rows=64, splits=2), 48, 256, 320),
    Case(FEW._replace(splits=2, cluster=2), 40, 256, 320),
    Case(FEW, 21, 256, 320),
    Case(FEW._replace(rows=192, splits=3), 16, 384, 384),
    Case(TOKEN_FIRST._replace(cluster=1), 64, 448, 256),
    Case(TOKEN_FIRST._replace(rows=96), 50, 192, 256),
]
CUDA = torch.device("cuda")


def make(tokens: int, columns: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(tokens, size, device=device).bfloat16()
    weight = (torch.randn(columns, size, device=device) * size**-0.5).bfloat16()
    return x, weight, torch.randn(columns, device=device).bfloat16()


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Kind, tiles: MulticastTiles) -> None:
    """Each split against its own part of K, so that a bias or a step that lands in two of them shows."""
    if kind is Kind.SUMS:
        expected = linear_wide_torch(x, weight, bias, kind=kind, splits=tiles.splits, block_k=64)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        return
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if kind is Kind.GATED:
        gate, up = exact.chunk(2, 1)
        exact = F.silu(gate) * up
        assert (out == linear_wide_torch(x, weight, bias, kind=kind)).double().mean() > 0.9
    torch.testing.assert_close(out.double(), exact, rtol=3 * 2**-7, atol=1e-3)


def launch(case: Case, kind: Kind, bias: bool) -> None:
    x, weight, b = make(case.tokens, case.columns, case.size, CUDA)
    tiles = case.tiles if kind is Kind.SUMS else case.tiles._replace(splits=1)
    out = make_out(x, weight, kind, tiles.splits).fill_(torch.nan)
    check(
        linear_wide(x, weight, b if bias else None, kind=kind, tiles=tiles, out=out),
        x,
        weight,
        b if bias else None,
        kind,
        tiles,
    )


def run_on_host(case: Case, kind: Kind, folder: Path) -> None:
    x, weight, bias = make(case.tokens, case.columns, case.size, torch.device("cpu"))
    host = HostLinear(x, weight, bias, kind, case.tiles, folder)
    assert not host.run(seed=0)
    check(host.out, x, weight, bias, kind, case.tiles)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case(TOKEN_FIRST._replace(rows=64, splits=2, token_slots=2), 150, 128, 320), Kind.SUMS),
        (Case(TOKEN_FIRST._replace(rows=32, splits=1, max_tokens=96), 110, 64, 320), Kind.GATED),
        (Case(WEIGHT_FIRST._replace(splits=1), 70, 256, 256), Kind.GATED),
        # few tokens: 64 rows, which both groups multiply by half of the other side, 128 and 192 of them
        (Case(FEW._replace(rows=64, splits=2), 45, 128, 320), Kind.SUMS),
        (Case(FEW._replace(rows=64, cluster=2), 30, 128, 192), Kind.GATED),
        (Case(FEW, 40, 128, 448), Kind.GATED),
        (Case(FEW._replace(cluster=2), 9, 256, 448), Kind.PLAIN),
        (Case(FEW._replace(rows=192, splits=3), 20, 192, 384), Kind.SUMS),
        (Case(FEW._replace(rows=48, weights_first=False, cluster=2), 33, 96, 192), Kind.PLAIN),
        (Case(FEW._replace(rows=64, weights_first=False), 64, 64, 192), Kind.GATED),
    ],
    ids=str,
)
def test_it_computes_the_same_as_fibers_on_the_host(case: Case, kind: Kind, tmp_path: Path) -> None:
    """All but the instructions themselves, which have stand-ins, and their timing. Barriers order every two accesses of
    which one writes."""
    run_on_host(case, kind, tmp_path)


@dataclass(frozen=True)
class Tried:
    """A candidate of the sweep, in a layer of the fewest tiles and stages."""

    kind: Kind
    tokens: int
    tiles: MulticastTiles

    @property
    def case(self) -> Case:
        tiles = self.tiles
        return Case(tiles, self.tokens, tiles.rows * tiles.cluster, 64 * (tiles.splits * (tiles.token_slots + 1) + 1))


def tried(every: bool) -> list[Tried]:
    """Kernels that `sweep_wide` tries at few tokens, with one depth of rings each, or the first of some layers."""
    found: dict[tuple, Tried] = {}
    for layer, tokens in itertools.product(LAYERS, (48, 64, 32, 24, 16)):
        for kind in layer.kinds:
            all_tiles = few_multicast_candidates(layer, tokens, kind)
            for tiles in all_tiles if every else all_tiles[: tokens == 48 and layer.name in ("gate_up", "qkv", "1b.o")]:
                depth = {"WEIGHT_SLOTS": 0, "TOKEN_SLOTS": 0}
                found.setdefault(tuple((tiles.definitions(tokens, kind) | depth).values()), Tried(kind, tokens, tiles))
    return list(found.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "candidate" in metafunc.fixturenames:
        metafunc.parametrize("candidate", tried(metafunc.config.getoption("every_combination")), ids=str)


def test_candidates_compute_the_same_on_the_host(candidate: Tried, tmp_path: Path) -> None:
    case, kind = candidate.case, candidate.kind
    assert case.tiles.fits(case.tokens, case.columns, case.size, kind)
    run_on_host(case, kind, tmp_path)


def test_candidates_fit() -> None:
    """In shared memory, of which a multiprocessor keeps 1 KB for each block; none is tried twice."""
    for layer, tokens in itertools.product(LAYERS, (16, 32, 48, 64)):
        for kind in layer.kinds:
            candidates = few_multicast_candidates(layer, tokens, kind)
            assert len(set(candidates)) == len(candidates)
            for tiles in candidates:
                assert tiles.fits(tokens, layer.columns, layer.size, kind)
                assert tokens <= tiles.padded(tokens) <= MAX_TOKENS
                blocks = layer.columns // tiles.rows * tiles.splits
                assert (tiles.memory_bytes(tokens) + 1024) * -(-blocks // 132) <= 228 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_layers(case: Case, kind: Kind, bias: bool) -> None:
    launch(case, kind, bias)


def measured() -> list[tuple[int, int, int, Kind, MulticastTiles]]:
    """Entries of the table: tokens, columns, size."""
    return [
        (tokens, columns, size, kind, tiles)
        for (columns, size, kind), ranges in MEASURED["NVIDIA H200"].items()
        for reach, tiles in ranges.items()
        if isinstance(tiles, MulticastTiles)
        for tokens in {reach.first, reach.last}
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("entry", measured(), ids=lambda entry: "-".join(map(str, entry[:4])))
def test_what_serves(entry: tuple[int, int, int, Kind, MulticastTiles]) -> None:
    """No worse than cuBLAS against exact sums, and the same bits every time."""
    tokens, columns, size, kind, tiles = entry
    x, weight, _ = make(tokens, columns, size, CUDA)
    out = linear_wide(x, weight, kind=kind, tiles=tiles)
    for _ in range(3):
        assert torch.equal(linear_wide(x, weight, kind=kind, tiles=tiles), out)
    if kind is Kind.GATED:
        torch.testing.assert_close(out, linear_wide_torch(x, weight, kind=kind), rtol=3 * 2**-7, atol=2e-2)
        return
    exact = torch.cat([x.double() @ part.double().T for part in weight.split(8192)], 1)
    rounded = out.sum(0).bfloat16() if kind is Kind.SUMS else out
    error, cublas = ((one.double() - exact).abs().mean() for one in (rounded, F.linear(x, weight)))
    assert error <= 1.05 * cublas


@pytest.mark.parametrize(("tokens", "kind"), [(192, Kind.GATED), (256, Kind.GATED), (160, Kind.SUMS), (48, Kind.PLAIN)])
def test_it_compiles(tokens: int, kind: Kind) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA builds")
    tiles = {Kind.SUMS: WEIGHT_FIRST, Kind.GATED: TOKEN_FIRST, Kind.PLAIN: FEW}[kind]
    assert compile_source(SOURCE, tiles.definitions(tokens, kind), (9, 0)).startswith(b"\x7fELF")


def test_what_serves_fits() -> None:
    for tokens, columns, size, kind, tiles in measured():
        assert tiles.fits(tokens, columns, size, kind)
        assert tiles.blocks(tokens) * tiles.padded(tokens) >= tokens
        assert tiles.memory_bytes(tokens) <= 227 << 10
