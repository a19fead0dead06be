"""Linears of many tokens in CUDA C++: against exact sums, plain, split along K, and with the gate in them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.cuda_source import compile_source
from draftloop.kernels.linear_multicast import SOURCE, MulticastTiles, Product
from draftloop.kernels.linear_wide import MEASURED, Kind, linear_wide, linear_wide_torch, make_out

WEIGHT_FIRST = MulticastTiles(128, 3, 2, True, 3, 192)
TOKEN_FIRST = MulticastTiles(224, 3, 2, False, 3, 192)


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


class Rows(ctypes.Structure):
    """What the host's copy engine knows of a matrix."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "columns", "box_rows", "halves")),
    ]


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case(TOKEN_FIRST._replace(rows=64, splits=2), 150, 128, 320), Kind.SUMS),
        (Case(TOKEN_FIRST._replace(rows=32, splits=1, max_tokens=96), 110, 64, 320), Kind.GATED),
        (Case(WEIGHT_FIRST._replace(splits=1), 70, 256, 256), Kind.GATED),
    ],
    ids=str,
)
def test_it_computes_the_same_as_fibers_on_the_host(case: Case, kind: Kind, tmp_path: Path) -> None:
    """All but the instructions themselves, which have stand-ins, and their timing."""
    (tiles, tokens, columns, size), here, library = case, Path(__file__).parent, tmp_path / "multicast_linear.so"
    macros = {**tiles.definitions(tokens, kind), "MEMORY_BYTES": tiles.memory_bytes(tokens)}
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I", str(SOURCE.parent), "-I", str(here)]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run(["c++", *options, str(here / "multicast_linear_host.cpp"), "-o", str(library)], check=True)
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_bool

    x, weight, bias = make(tokens, columns, size, torch.device("cpu"))
    out = make_out(x, weight, kind, tiles.splits).fill_(torch.nan)
    blocks, halves = tiles.blocks(tokens), 1 + (kind is Kind.GATED)
    weight_sharers, token_sharers = (1, tiles.cluster) if blocks == 1 else (tiles.cluster, 1)
    weight_rows = Rows(weight.data_ptr(), columns, size, tiles.rows // weight_sharers, halves)
    token_rows = Rows(x.data_ptr(), tokens, size, tiles.padded(tokens) // token_sharers, 1)
    product = Product(out.data_ptr(), bias.data_ptr(), tokens, columns // halves, size)
    arguments = [ctypes.byref(one) for one in (weight_rows, token_rows, product)]
    assert launch(columns // tiles.rows, tiles.splits, blocks, *arguments), "blocks wait for ever"
    check(out, x, weight, bias, kind, tiles)


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


@pytest.mark.parametrize(("tokens", "kind"), [(192, Kind.GATED), (256, Kind.GATED), (160, Kind.SUMS)])
def test_it_compiles(tokens: int, kind: Kind) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA builds")
    tiles = WEIGHT_FIRST if kind is Kind.SUMS else TOKEN_FIRST
    assert compile_source(SOURCE, tiles.definitions(tokens, kind), (9, 0)).startswith(b"\x7fELF")


def test_what_serves_fits() -> None:
    for tokens, columns, size, kind, tiles in measured():
        assert tiles.fits(tokens, columns, size, kind)
        assert tiles.blocks(tokens) * tiles.padded(tokens) >= tokens
        assert tiles.memory_bytes(tokens) <= 227 << 10
