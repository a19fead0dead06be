"""Argmax in two launches against torch's: ties, NaN, infinities, chunk edges, strided rows."""

from __future__ import annotations

import pytest
import torch

from draftloop.kernels.argmax import (
    CHUNK,
    argmax,
    argmax_torch,
    argmax_triton,
    chunk_maxima,
    maxima_torch,
    unpack_maxima,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
BOTH = pytest.mark.parametrize("run", [argmax_torch, argmax_triton])
INF, NAN = float("inf"), float("nan")


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 77), (2, CHUNK), (6, CHUNK + 1), (2, 5 * CHUNK - 3)])
def test_matches_torch(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(0)
    # few distinct values: ties everywhere, within chunks and between them
    for x in (torch.randn(rows, size), torch.randint(-3, 4, (rows, size)), -torch.rand(rows, size) - 1):
        x = x.to(device, dtype)
        out = argmax_triton(x)
        assert out.dtype == torch.int64
        first = (x == x.amax(1, keepdim=True)).int().cpu().argmax(1)  # argmax of 0 and 1 on CPU: the first
        assert torch.equal(out.cpu(), first)


@BOTH
@pytest.mark.parametrize(
    ("placed", "best"),
    [
        ({}, 0),
        ({5: 0.0, CHUNK + 5: 0.0}, 5),
        ({7: -0.0, 9: 0.0}, 7),
        ({7: 0.0, 9: -0.0}, 7),
        ({CHUNK - 1: 2.0, CHUNK: 2.0}, CHUNK - 1),
        ({3: 1.0, 2 * CHUNK: 1.5}, 2 * CHUNK),
        ({3: INF, 2 * CHUNK: NAN}, 2 * CHUNK),
        ({8: -NAN, 2 * CHUNK: INF, CHUNK: NAN}, 8),
        ({4: -1e30}, 4),
    ],
)
@pytest.mark.parametrize("rest", [-INF, -3e38])
def test_edges(run, device: torch.device, placed: dict[int, float], best: int, rest: float) -> None:
    x = torch.full((1, 2 * CHUNK + 1), rest)
    for index, value in placed.items():
        x[0, index] = value
    assert run(x.to(device)).tolist() == [best]


@BOTH
def test_rows_may_be_strided(run, device: torch.device) -> None:
    """A padded vocabulary is cut off: what lies beyond is larger and must not be seen."""
    torch.manual_seed(0)
    wide = torch.randn(4, 2 * CHUNK + 8, device=device)
    x = wide[:, : CHUNK + 3]
    wide[:, CHUNK + 3 :] = 100.0
    assert torch.equal(run(x), x.contiguous().argmax(-1))
    assert torch.equal(run(wide[::2, :50]), wide[::2, :50].contiguous().argmax(-1))


@pytest.mark.parametrize(("size", "num_live", "first"), [(77, 77, 0), (CHUNK + 9, CHUNK - 1, 300), (50, 0, 50)])
def test_packed_maxima_of_a_part_match_torch(device: torch.device, size: int, num_live: int, first: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (5, size)).float()
    x[:, num_live:] = INF
    x[1:3, : num_live // 2] = torch.tensor([[NAN], [-INF]])
    expected = maxima_torch(x, first=first, num_live=num_live)
    found = chunk_maxima(x.to(device), first=first, num_live=num_live).amax(1, keepdim=True).cpu()
    assert torch.equal(found, expected)
    if num_live:
        index, is_finite = unpack_maxima(expected)
        top = x[:, :num_live].max(-1)
        assert torch.equal(index, first + top.indices)
        assert torch.equal(is_finite, top.values.isfinite())


def test_no_rows(device: torch.device) -> None:
    assert argmax_triton(torch.empty(0, 10, device=device)).shape == (0,)


def test_any_rank_on_cpu() -> None:
    x = torch.randn(2, 3, 10)
    assert torch.equal(argmax(x), x.argmax(-1))
    assert torch.equal(argmax(x[0, 0]), x[0, 0].argmax(-1))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 128256), (6, 128256), (192, 32000), (5, 151_936), (2, 262_145)])
def test_vocabularies(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, size, device="cuda").to(dtype)
    value, first = x.max(-1, keepdim=True)[0], argmax(x)
    expected = (x == value).int().cpu().argmax(1)
    assert torch.equal(first.cpu(), expected)
    for _ in range(5):
        assert torch.equal(argmax(x), first)


@pytest.mark.gpu
def test_ranks_and_fallbacks_on_a_gpu() -> None:
    x = torch.randn(2, 3, 5000, device="cuda")
    for y in (x, x[0, 0], x[:, :, :4097], x.double(), x.transpose(1, 2), x[:, 1:]):
        assert torch.equal(argmax(y), y.argmax(-1))
