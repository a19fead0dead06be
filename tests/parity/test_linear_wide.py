"""Linears of many tokens against exact sums: plain, split along K, and with the gate in them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftloop.bench.wide_view import STREAMED_TOKENS
from draftloop.kernels import linear_wide as module
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.linear_multicast import MulticastTiles
from draftloop.kernels.linear_wide import (
    MEASURED,
    AnyTiles,
    Kind,
    Range,
    WideTiles,
    choose,
    linear_wide,
    linear_wide_torch,
    linear_wide_triton,
    token_parts,
)

SMALL = WideTiles(block_n=64, block_k=64, splits=1, max_tokens=96, num_warps=4, num_stages=2)
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


def half(device: torch.device) -> torch.dtype:
    # numpy, and so the interpreter, multiplies no bf16
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def make(tokens: int, columns: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = half(device)
    x = torch.randn(tokens, size, device=device).to(dtype)
    weight = (torch.randn(columns, size, device=device) * size**-0.5).to(dtype)
    return x, weight, torch.randn(columns, device=device).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parts = [x.double() @ part.double().T for part in weight.split(8192)]
    return torch.cat(parts, 1) + (0 if bias is None else bias.double())


def poisoned(shape: tuple[int, ...], x: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)


@given(st.integers(1, 4096), st.sampled_from([16, 64, 96, 128, 160, 192, 256]))
def test_parts_hold_all_tokens_and_pad_little(tokens: int, limit: int) -> None:
    blocks, first, second = token_parts(tokens, limit)
    assert blocks * (first + second) >= tokens
    assert first & (first - 1) == second & (second - 1) == 0
    assert second <= first
    assert first + second <= max(limit, 16)
    assert blocks == -(-tokens // limit)
    share = -(-tokens // blocks)
    assert first + second <= max(32, share * 3 // 2)  # a power of two alone pads up to twice


@pytest.mark.parametrize(
    ("tokens", "parts"), [(192, (1, 128, 64)), (96, (1, 64, 32)), (160, (1, 128, 32)), (128, (1, 128, 0))]
)
def test_usual_batches_are_not_padded(tokens: int, parts: tuple[int, int, int]) -> None:
    assert token_parts(tokens, 192) == parts


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("tokens", "columns", "size"),
    [(96, 64, 128), (90, 100, 256), (1, 64, 64), (150, 72, 128), (33, 64, 192), (200, 136, 128)],
)
def test_plain(device: torch.device, bias: bool, tokens: int, columns: int, size: int) -> None:
    x, weight, b = make(tokens, columns, size, device)
    b = b if bias else None
    out = linear_wide_triton(x, weight, b, kind=Kind.PLAIN, tiles=SMALL, out=poisoned((tokens, columns), x))
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(out.double(), exact(x, weight, b), rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("tokens", "columns"), [(96, 64), (70, 100)])
@pytest.mark.parametrize("splits", [1, 3, 4])
def test_sums(device: torch.device, bias: bool, tokens: int, columns: int, splits: int) -> None:
    """Each split against its own part of K, so that a bias or a block that lands in two of them shows."""
    x, weight, b = make(tokens, columns, 512, device)
    b = b if bias else None
    tiles = SMALL._replace(splits=splits)
    sums = linear_wide_triton(x, weight, b, kind=Kind.SUMS, tiles=tiles)
    assert sums.dtype == torch.float32
    # 8 blocks in 3 parts are 2, 3 and 3
    expected = linear_wide_torch(x, weight, b, kind=Kind.SUMS, splits=splits, block_k=tiles.block_k)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.double().sum(0), exact(x, weight, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("tokens", "inner"), [(96, 64), (70, 56), (130, 32)])
def test_gated(device: torch.device, bias: bool, tokens: int, inner: int) -> None:
    """Rounded where the layer and the activation round, so almost every element has the very bits."""
    x, weight, b = make(tokens, 2 * inner, 256, device)
    b = b if bias else None
    out = linear_wide_triton(x, weight, b, kind=Kind.GATED, tiles=SMALL, out=poisoned((tokens, inner), x))
    expected = linear_wide_torch(x, weight, b, kind=Kind.GATED)
    gate, up = exact(x, weight, b).chunk(2, 1)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=3 * TOLERANCE[x.dtype], atol=1e-3)
    assert (out == expected).double().mean() > 0.9


def test_tokens_past_the_last_are_neither_read_nor_written(device: torch.device) -> None:
    wide, weight, _ = make(80, 64, 128, device)
    wide[70:] = float("nan")
    memory = torch.zeros(80, 64, dtype=wide.dtype, device=device)
    linear_wide_triton(wide[:70], weight, kind=Kind.PLAIN, tiles=SMALL, out=memory[:70])
    torch.testing.assert_close(
        memory[:70].double(), exact(wide[:70], weight, None), rtol=TOLERANCE[wide.dtype], atol=1e-4
    )
    assert not memory[70:].any()


def test_no_tokens(device: torch.device) -> None:
    _, weight, _ = make(1, 64, 128, device)
    x = torch.empty(0, 128, dtype=weight.dtype, device=device)
    assert linear_wide_triton(x, weight, kind=Kind.PLAIN, tiles=SMALL).shape == (0, 64)


def test_only_measured_tokens_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {(64, 128, Kind.PLAIN): {Range(65, 96): SMALL, Range(100, 128): SMALL._replace(block_n=128)}}
    monkeypatch.setattr(module, "MEASURED", {"a GPU": entry})
    monkeypatch.setattr(module, "gpu_name", lambda device: "a GPU")
    module._measured.cache_clear()
    weight = torch.empty(64, 128, dtype=torch.bfloat16)

    def taken(tokens: int, kind: Kind = Kind.PLAIN, dtype: torch.dtype = torch.bfloat16) -> WideTiles | None:
        return choose(torch.empty(tokens, 128, dtype=dtype), weight, kind)

    assert taken(64) is taken(97) is taken(99) is taken(129) is None
    assert taken(65) == taken(96) == SMALL
    assert taken(100) == taken(128) == SMALL._replace(block_n=128)
    assert taken(96, Kind.GATED) is None
    assert taken(96, dtype=torch.float32) is None
    assert batch_invariant(taken)(96) is None
    # columns of a wider tensor
    assert choose(torch.empty(96, 256, dtype=torch.bfloat16)[:, :128], weight, Kind.PLAIN) is None
    module._measured.cache_clear()


def test_measured_ranges_do_not_overlap() -> None:
    for layers in MEASURED.values():
        for (columns, size, kind), ranges in layers.items():
            ends = sorted(ranges)
            assert all(first <= last for first, last in ends)
            assert all(a.last < b.first for a, b in itertools.pairwise(ends))
            assert all(r.first > STREAMED_TOKENS for r in ends), "fewer are a pass in one kernel"
            for tiles in ranges.values():
                assert size % (tiles.block_k if isinstance(tiles, WideTiles) else 64) == 0
                assert kind is Kind.SUMS or tiles.splits == 1
                assert columns % 16 == 0


CUDA = torch.device("cuda")
LARGE = [
    WideTiles(256, 64, 1, 192, 8, 4),
    WideTiles(128, 64, 1, 256, 8, 4),
    WideTiles(128, 64, 1, 192, 4, 2),
    WideTiles(128, 128, 1, 96, 4, 4),
    WideTiles(64, 64, 1, 192, 4, 6),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", LARGE, ids=str)
@pytest.mark.parametrize("tokens", [65, 96, 192, 250, 768])
def test_real_shapes(tiles: WideTiles, tokens: int) -> None:
    """No worse than cuBLAS against exact sums, and the same bits every time."""
    for columns, size in [(6144, 4096), (4096, 14336), (28672, 4096), (4104, 4096)]:
        x, weight, _ = make(tokens, columns, size, CUDA)
        expected, cublas = exact(x, weight, None), F.linear(x, weight)
        out = linear_wide_triton(x, weight, kind=Kind.PLAIN, tiles=tiles, out=poisoned((tokens, columns), x))
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[x.dtype], atol=1e-4)
        assert (out.double() - expected).abs().mean() <= 1.05 * (cublas.double() - expected).abs().mean()
        split = tiles._replace(splits=5)
        sums = linear_wide_triton(x, weight, kind=Kind.SUMS, tiles=split)
        torch.testing.assert_close(sums.double().sum(0), expected, rtol=1e-4, atol=1e-4)
        for _ in range(3):
            assert torch.equal(linear_wide_triton(x, weight, kind=Kind.PLAIN, tiles=tiles), out)
            assert torch.equal(linear_wide_triton(x, weight, kind=Kind.SUMS, tiles=split), sums)
        if tiles.block_n >= 128 and columns % 2 == 0:
            gated = linear_wide_triton(x, weight, kind=Kind.GATED, tiles=tiles)
            reference = linear_wide_torch(x, weight, kind=Kind.GATED)
            torch.testing.assert_close(gated, reference, rtol=3 * TOLERANCE[x.dtype], atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles",
    [(LARGE[0], LARGE[0]), (MulticastTiles(224, 1, 2, False, 3), MulticastTiles(128, 1, 2, True, 5))],
    ids=["triton", "multicast"],
)
def test_replays_of_a_chain_repeat_the_eager_bits(tiles: tuple[AnyTiles, AnyTiles]) -> None:
    """Kernels that start early wait for each other, and descriptors live on in the graph."""
    hidden, inner = 4096, 14336
    x, gate_up, _ = make(192, 2 * inner, hidden, CUDA)
    down = make(1, hidden, inner, CUDA)[1]

    def chain(sync: bool) -> Tensor:
        out = x
        for _ in range(6):
            out = linear_wide(out, gate_up, kind=Kind.GATED, tiles=tiles[0])
            if sync:
                torch.cuda.synchronize()
            out = linear_wide(out, down, kind=Kind.PLAIN, tiles=tiles[1])
            if sync:
                torch.cuda.synchronize()
            out = out / out.float().square().mean(1, keepdim=True).sqrt().to(out.dtype)
        return out

    expected = chain(sync=True)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(sync=False)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
