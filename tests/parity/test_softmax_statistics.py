"""Statistics of a softmax, and its cuts, against a sort: in Triton's interpreter, and with `-m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftloop.kernels.argmax import chunk_maxima
from draftloop.kernels.softmax_statistics import (
    Changed,
    Statistics,
    Truncation,
    softmax_statistics_torch,
    softmax_statistics_triton,
)
from draftloop.sampling.sampler import SamplingRows, probabilities, probabilities_from

INF, NAN = float("inf"), float("nan")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def truncation(device: torch.device, *rows: tuple[float, int, float, float]) -> Truncation:
    """Temperature, top_k, top_p and min_p of each row."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Truncation(
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
    )


MIXED = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.1),
    (0.7, 20, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 300, 0.35, 0.002),
    (2.0, -1, 0.9999, 0.0),
    (0.01, 1, 0.5, 0.0),
    (1e-35, 7, 0.8, 0.5),
    (1.0, 10**9, 1.0, 1.0),
)


def assert_same(made: Statistics, wanted: Statistics, logits_XV: Tensor, temperature_X: Tensor) -> None:
    """Equal tokens and equal sets of kept tokens; thresholds between the same tokens may differ."""
    made = Statistics(*(column.cpu() for column in made))
    wanted = Statistics(*(column.cpu() for column in wanted))
    assert torch.equal(made.token_X, wanted.token_X)
    live = (temperature_X.cpu() > 0) & (made.token_X >= 0)
    logits_XV = logits_XV.cpu().float()[live]
    kept, wanted_kept = (logits_XV >= s.threshold_X[live, None] for s in (made, wanted))
    assert torch.equal(kept, wanted_kept)
    torch.testing.assert_close(made.mass_X[live], wanted.mass_X[live], rtol=2e-5, atol=0)
    assert torch.equal(made.top_X[live], wanted.top_X[live])
    assert made.mass_X[made.token_X < 0].isnan().all()


@DTYPES
@pytest.mark.parametrize(("size", "places"), [(37, 2), (5000, 1)])
def test_statistics(device: torch.device, dtype: torch.dtype, size: int, places: int) -> None:
    torch.manual_seed(size)
    parameters = truncation(device, *MIXED)
    rows = torch.randperm(len(MIXED)).int().to(device)
    temperature_X = parameters.temperature_M[rows.long()].repeat_interleave(places)
    num = len(MIXED) * places
    logits = torch.randn(num, size) * 3
    logits[::3] = torch.randint(-4, 5, logits[::3].shape).float()
    logits[1::3] *= 1000
    logits[0, : size // 3] = -INF
    logits[-1, size // 2] = NAN
    logits = logits.to(device, dtype)
    made = softmax_statistics_triton(logits, rows, parameters)
    assert_same(made, softmax_statistics_torch(logits, rows, parameters), logits, temperature_X)
    if size < 100:
        made = softmax_statistics_triton(logits, rows, parameters, truncate=False)
        assert_same(made, softmax_statistics_torch(logits, rows, parameters, truncate=False), logits, temperature_X)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_logits_that_say_nothing(device: torch.device, bad: float) -> None:
    logits = torch.randn(2, 50, device=device)
    logits[0] = bad
    made = softmax_statistics_triton(logits, torch.tensor([0], dtype=torch.int32, device=device),
                                     truncation(device, (1.0, 5, 0.5, 0.0)))  # fmt: skip
    assert made.token_X.tolist()[0] == -1
    assert made.mass_X.isnan().tolist() == [True, False]


def test_a_cut_keeps_all_that_tie_at_it(device: torch.device) -> None:
    #                        likeliest, two that tie, the rest
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, 0.0, -1.0]], device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)

    def kept(*parameters: float) -> int:
        made = softmax_statistics_triton(logits, rows, truncation(device, parameters))
        return int((logits >= made.threshold_X).sum())

    assert [kept(1.0, k, 1.0, 0.0) for k in (1, 2, 3, 4, 5, 6)] == [1, 3, 3, 5, 5, 6]
    total = logits.exp().sum().item()
    first, second = (logits.exp()[0, :1].sum().item() / total, logits.exp()[0, :3].sum().item() / total)
    assert [kept(1.0, 0, p, 0.0) for p in (first - 0.01, first + 0.01, second - 0.01, second + 0.01)] == [1, 3, 3, 5]
    assert kept(1.0, 4, 0.999, 0.0) == 5, "top_p counts what top_k left"


def test_zeros_of_both_signs_tie(device: torch.device) -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]], device=device)
    made = softmax_statistics_triton(
        logits, torch.zeros(1, dtype=torch.int32, device=device), truncation(device, (1.0, 1, 1.0, 0.0))
    )
    assert made.token_X.tolist() == [0]
    assert (logits >= made.threshold_X[:, None]).tolist() == [[True, True, False, True]]


def test_rows_read_the_logits_that_are_theirs(device: torch.device) -> None:
    torch.manual_seed(0)
    parameters = truncation(device, *MIXED[:4])
    logits, other = torch.randn(8, 300, device=device), torch.randn(8, 300, device=device)
    rows = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device)
    is_changed = torch.tensor([1, 0, 0, 1], dtype=torch.int32, device=device)
    is_mine = is_changed[rows.long()].bool().repeat_interleave(2)[:, None]
    mixed = torch.where(is_mine, other, logits)
    other = torch.where(is_mine, other, NAN)
    made = softmax_statistics_triton(
        logits, rows, parameters, best_XC=chunk_maxima(mixed), changed=Changed(other, is_changed)
    )
    wanted = softmax_statistics_torch(mixed, rows, parameters)
    assert_same(made, wanted, mixed, parameters.temperature_M[rows.long()].repeat_interleave(2))


def test_probabilities_follow_from_statistics(device: torch.device) -> None:
    torch.manual_seed(0)
    parameters = truncation(device, *MIXED)
    rows = torch.arange(len(MIXED), dtype=torch.int32, device=device)
    logits = torch.randn(len(MIXED), 700, device=device) * 2
    logits[5, 3] = NAN
    made = probabilities_from(logits, softmax_statistics_triton(logits, rows, parameters), parameters.temperature_M)
    wanted = probabilities(logits, SamplingRows(*parameters, torch.zeros(len(MIXED), dtype=torch.int64)))
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-8, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_statistics_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    parameters = truncation(device, *MIXED)
    rows = torch.arange(len(MIXED), dtype=torch.int32, device=device)
    for spread in (0.5, 3.0, 12.0):
        logits = (torch.randn(len(MIXED) * 6, 128_256, device=device) * spread).to(dtype)
        made = softmax_statistics_triton(logits, rows, parameters)
        wanted = softmax_statistics_torch(logits, rows, parameters)
        assert torch.equal(made.token_X, wanted.token_X)
        live = parameters.temperature_M.repeat_interleave(6) > 0
        is_other = (logits >= made.threshold_X[:, None]) != (logits >= wanted.threshold_X[:, None])
        # sums of many small probabilities are rounded, and tokens that are as likely come and go together
        scaled = logits.double() / parameters.temperature_M.repeat_interleave(6).clamp(min=1e-6)[:, None]
        moved = torch.where(is_other, scaled.softmax(-1), 0.0).sum(-1)
        assert moved[live].max() < 2e-4
        torch.testing.assert_close(made.mass_X[live], wanted.mass_X[live], rtol=1e-4, atol=0)
        for mine, again in zip(made, softmax_statistics_triton(logits, rows, parameters), strict=True):
            assert torch.equal(mine, again), "the same every time"
