"""The output head that keeps only the likeliest token, against the logits' argmax: ties, faults, edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftloop.kernels.argmax import UNPACK, argmax
from draftloop.kernels.lm_head_argmax import HeadTiles, head_maxima_torch, head_maxima_triton

# padding tokens are 0, and 0 * inf is NaN there
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")

SMALL = HeadTiles(block_n=64, block_k=64, programs=3, num_warps=4, num_stages=2)
INF, NAN = float("inf"), float("nan")


def half(device: torch.device) -> torch.dtype:
    # numpy, and so the interpreter, multiplies no bf16
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def unpack(best_TC: Tensor) -> Tensor:
    return UNPACK - (best_TC.amax(1) & UNPACK)


def is_bad(best_TC: Tensor) -> Tensor:
    """As acceptance sees it: the largest is NaN or inf, or nothing but -inf."""
    largest = best_TC.amax(1) >> 32
    return (largest >= 0x7F800000) | (largest <= -0x7F800001)


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 64), (6, 300), (40, 257), (96, 500), (130, 130)])
def test_matches_the_argmax_of_logits(device: torch.device, tokens: int, vocab: int) -> None:
    """Whole numbers, so that sums are exact, and few of them, so that ties are everywhere."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (tokens, 128), device=device).to(half(device))
    x[:, 3:] = 0
    weight = torch.randint(-1, 2, (vocab, 128), device=device).to(x.dtype)
    logits = (x.float() @ weight.float().T).to(x.dtype)
    assert (logits == logits.amax(1, keepdim=True)).sum() > tokens, "there are ties"
    best = head_maxima_triton(x, weight, tiles=SMALL)
    assert best.dtype == torch.int64
    first = (logits == logits.amax(1, keepdim=True)).int().cpu().argmax(1)
    assert torch.equal(unpack(best).cpu(), first)
    assert torch.equal(unpack(head_maxima_torch(x.cpu().float(), weight.cpu().float())), first)
    assert torch.equal(best.amax(1).cpu(), head_maxima_torch(x.cpu().float(), weight.cpu().float())[:, 0])


@pytest.mark.parametrize(
    ("placed", "best", "bad"),
    [
        ({}, 0, False),
        ({70: 2.0, 150: 2.0}, 70, False),
        ({70: 2.0, 71: 2.0}, 70, False),
        ({4: -0.0, 150: 0.0}, 4, False),
        ({4: 0.0, 150: -0.0}, 4, False),
        ({3: INF, 190: NAN}, 190, True),
        ({199: INF}, 199, True),
        ({199: -1.0}, 199, False),
    ],
)
def test_edges(device: torch.device, placed: dict[int, float], best: int, bad: bool) -> None:
    """All other logits are negative: what is read past the vocabulary is 0, and must not win."""
    weight = torch.zeros(200, 64, dtype=half(device), device=device)
    weight[:, 0] = -3.0
    for index, value in placed.items():
        weight[index, 0] = value
    x = torch.zeros(2, 64, dtype=weight.dtype, device=device)
    x[:, 0] = 1.0
    out = head_maxima_triton(x, weight, tiles=SMALL)
    assert unpack(out).tolist() == [best] * 2
    assert is_bad(out).tolist() == [bad] * 2


def test_all_minus_infinity_is_a_fault(device: torch.device) -> None:
    x = torch.ones(3, 64, dtype=half(device), device=device)
    weight = torch.full((130, 64), -INF, dtype=x.dtype, device=device)
    assert is_bad(head_maxima_triton(x, weight, tiles=SMALL)).all()


def test_one_row_with_nan_spoils_no_other(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64, device=device).to(half(device))
    weight = torch.randn(130, 64, device=device).to(x.dtype)
    clean = unpack(head_maxima_triton(x, weight, tiles=SMALL))
    x[7] = NAN
    out = head_maxima_triton(x, weight, tiles=SMALL)
    others = torch.arange(20, device=device) != 7
    assert is_bad(out)[7]
    assert not is_bad(out)[others].any()
    assert torch.equal(unpack(out)[others], clean[others])


def test_no_rows(device: torch.device) -> None:
    weight = torch.empty(130, 64, dtype=half(device), device=device)
    assert head_maxima_triton(torch.empty(0, 64, dtype=weight.dtype, device=device), weight, tiles=SMALL).shape[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6, 48, 192, 768])
@pytest.mark.parametrize(("vocab", "size"), [(128256, 4096), (32000, 4096), (151_936, 2048)])
@pytest.mark.parametrize(
    "tiles", [HeadTiles(128, 64, 264, 4, 3), HeadTiles(256, 64, 132, 8, 4), HeadTiles(64, 128, 264, 4, 2)], ids=str
)
def test_vocabularies(tokens: int, vocab: int, size: int, tiles: HeadTiles) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, size, device="cuda").bfloat16()
    weight = (torch.randn(vocab, size, device="cuda") * size**-0.5).bfloat16()
    best = head_maxima_triton(x, weight, tiles=tiles)
    chosen = unpack(best)
    logits = x.double() @ weight[chosen].double().T
    top = torch.cat([x.double() @ part.double().T for part in weight.split(16384)], 1).amax(1)
    # another rounding of nearly equal logits may win
    assert (logits.diagonal() >= top - top.abs() * 2**-7).all()
    assert (chosen == argmax(torch.nn.functional.linear(x, weight))).double().mean() > 0.9
    for _ in range(3):
        assert torch.equal(head_maxima_triton(x, weight, tiles=tiles), best)
