"""Skinny linears against exact sums, and the residual norm that adds up what they leave split."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kernels import linear as module
from draftloop.kernels.linear import (
    FEW_TOKENS,
    MAX_TOKENS,
    MEASURED,
    SHARED_BYTES,
    Tiles,
    choose,
    linear,
    linear_split_torch,
    linear_split_triton,
    linear_torch,
    linear_triton,
    residual_linear,
)
from draftloop.kernels.rms_norm import add_rms_norm_torch, add_rms_norm_triton

ULPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
SMALL = Tiles(block_n=32, block_k=64, splits=1, num_warps=4, num_stages=2)

SHAPES = [
    # columns, size: Llama 8B, then Llama 1B, then a head over 3 hidden states and one over a small vocabulary
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (3072, 2048),
    (2048, 2048),
    (16384, 2048),
    (2048, 8192),
    (128256, 2048),
    (4096, 12288),
    (32000, 4096),
    # Qwen 7B and 0.5B, Llama 70B
    (3584, 18944),
    (896, 4864),
    (896, 896),
    (8192, 28672),
]


def make(
    tokens: int, columns: int, size: int, device: torch.device, dtype: torch.dtype, *, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(tokens, size, device=device).to(dtype)
    weight = (torch.randn(columns, size, device=device) * size**-0.5).to(dtype)
    return x, weight, torch.randn(columns, device=device).to(dtype) if bias else None


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # in pieces: all weights of a big layer in fp64 would take gigabytes
    parts = [x.double() @ part.double().T for part in weight.split(8192)]
    return torch.cat(parts, 1) + (0 if bias is None else bias.double())


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=ULPS[dtype], atol=1e-4)


def half(device: torch.device) -> torch.dtype:
    # numpy, and so the interpreter, multiplies no bf16
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("tokens", "columns", "size"), [(1, 64, 128), (6, 100, 256), (16, 33, 128), (17, 32, 384), (64, 32, 128)]
)
def test_linear(device: torch.device, bias: bool, tokens: int, columns: int, size: int) -> None:
    dtype = half(device)
    x, weight, b = make(tokens, columns, size, device, dtype, bias=bias)
    close(linear_triton(x, weight, b, tiles=SMALL), exact(x, weight, b), dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (6, 100), (32, 33)])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_split_sums(device: torch.device, bias: bool, tokens: int, columns: int, splits: int) -> None:
    """Each split against its own part of K, so that a bias or a part that lands in two of them shows."""
    x, weight, b = make(tokens, columns, 512, device, half(device), bias=bias)
    sums = linear_split_triton(x, weight, b, tiles=SMALL._replace(splits=splits))
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, linear_split_torch(x, weight, b, splits=splits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.double().sum(0), exact(x, weight, b), rtol=1e-4, atol=1e-4)


def test_tokens_past_the_last_are_neither_read_nor_written(device: torch.device) -> None:
    tokens, columns, size = 3, 32, 128
    wide, weight, _ = make(tokens + 1, columns, size, device, half(device), bias=False)
    wide[tokens] = float("nan")
    out = linear_triton(wide[:tokens], weight, tiles=SMALL)
    close(out, exact(wide[:tokens], weight, None), half(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("run", [add_rms_norm_torch, add_rms_norm_triton])
@pytest.mark.parametrize("splits", [1, 3, 4])
def test_add_rms_norm_takes_split_sums(run, device: torch.device, dtype: torch.dtype, splits: int) -> None:
    """Split sums give what their sum in order, rounded to the model's dtype, gives."""
    torch.manual_seed(0)
    sums = torch.randn(splits, 5, 576, device=device)
    if device.type == "cpu":
        # the interpreter cuts bf16 off where torch rounds: sums that bf16 holds exactly hide that
        sums = (sums * 8).round() / 8
    residual, weight = (torch.randn(*s, device=device).to(dtype) for s in ((5, 576), (576,)))
    before = sums.clone(), residual.clone()
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    normed, new_residual = run(sums, residual, weight, 1e-5)
    expected_normed, expected_residual = run(total.to(dtype), residual, weight, 1e-5)
    assert torch.equal(sums, before[0])
    assert torch.equal(residual, before[1])
    assert normed.dtype == new_residual.dtype == dtype
    if run is add_rms_norm_triton:
        assert torch.equal(new_residual, expected_residual)
        assert torch.equal(normed, expected_normed)
    else:
        # torch may add up in another order
        torch.testing.assert_close(new_residual, expected_residual, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(normed, expected_normed, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [FEW_TOKENS, MAX_TOKENS])
@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choice(shape: tuple[int, int], may_split: bool, tokens: int) -> None:
    """Tiles divide K and fit shared memory with the tokens; every SM gets work where the layer is wide enough, unless
    less was measured to be faster."""
    columns, size = shape
    tiles = choose(columns, size, 132, may_split=may_split, few=tokens == FEW_TOKENS)
    assert size % (tiles.block_k * tiles.splits) == 0
    assert may_split or tiles.splits == 1
    assert tiles.num_stages * (tiles.block_n + tokens) * tiles.block_k * 2 <= SHARED_BYTES
    programs = -(-columns // tiles.block_n) * tiles.splits
    # 64 tokens leave room for one program on an SM, and longer runs pay
    assert programs >= (120 if tokens == FEW_TOKENS else 96) or columns < 2048 or (*shape, may_split) in MEASURED
    assert programs <= 8 * 132 or columns > 100_000


def test_choice_of_measured_shapes() -> None:
    for (columns, size, may_split), both in MEASURED.items():
        for few, tiles in zip((True, False), both, strict=True):
            assert choose(columns, size, 132, may_split=may_split, few=few) == tiles


def test_cpu_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel on CPU tensors")

    monkeypatch.setattr(module, "_launch", fail)
    x, weight, bias = make(2, 64, 128, torch.device("cpu"), torch.bfloat16, bias=True)
    for run in (linear, linear_torch, residual_linear):
        assert torch.equal(run(x, weight, bias), F.linear(x, weight, bias))


cuda = pytest.mark.gpu
CUDA = torch.device("cuda")


@cuda
@pytest.mark.parametrize("tokens", [1, 6, 32, 48, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_real_shapes(shape: tuple[int, int], tokens: int) -> None:
    """Within bf16 rounding of exact sums, no worse than cuBLAS, split or not; the same bits every time."""
    x, weight, _ = make(tokens, *shape, CUDA, torch.bfloat16, bias=False)
    expected = exact(x, weight, None)
    out = linear(x, weight)
    close(out, expected, torch.bfloat16)
    # an fp32 sum may fall on the other side of a rounding boundary, but not often
    cublas_error = (F.linear(x, weight).double() - expected).abs().mean()
    assert (out.double() - expected).abs().mean() <= 1.05 * cublas_error
    sums = residual_linear(x, weight)
    total = sums.sum(0) if sums.dim() == 3 else sums.float()
    torch.testing.assert_close(total.double(), expected, rtol=ULPS[torch.bfloat16], atol=1e-4)
    for _ in range(5):
        assert torch.equal(linear(x, weight), out)
        assert torch.equal(residual_linear(x, weight), sums)


@cuda
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_token_does_not_depend_on_how_many_others_there_are(shape: tuple[int, int]) -> None:
    """Verification of drafts and plain decoding see the same logits, bit for bit."""
    x, weight, _ = make(32, *shape, CUDA, torch.bfloat16, bias=False)
    out, sums = linear(x, weight), residual_linear(x, weight)
    for tokens in (1, 6, 16, 17):
        assert torch.equal(linear(x[:tokens], weight), out[:tokens])
        assert torch.equal(residual_linear(x[:tokens], weight), sums[..., :tokens, :])


@cuda
def test_chain_in_a_graph() -> None:
    """Kernels that start early wait for each other: replays of a captured chain repeat the eager bits."""
    hidden, inner = 4096, 14336
    x, qkv, _ = make(6, hidden, hidden, CUDA, torch.bfloat16, bias=False)
    gate = make(1, inner, hidden, CUDA, torch.bfloat16, bias=False)[1]
    down = make(1, hidden, inner, CUDA, torch.bfloat16, bias=False)[1]
    weight = torch.ones(hidden, device=CUDA, dtype=torch.bfloat16)

    def chain() -> Tensor:
        normed = residual = x
        for _ in range(8):
            normed, residual = add_rms_norm_triton(residual_linear(normed, qkv), residual, weight, 1e-5)
            normed, residual = add_rms_norm_triton(residual_linear(linear(normed, gate), down), residual, weight, 1e-5)
        return residual

    def synchronized_chain() -> Tensor:
        normed = residual = x
        for _, (first, second) in itertools.product(range(8), ((qkv, None), (gate, down))):
            out = residual_linear(normed, first) if second is None else linear(normed, first)
            torch.cuda.synchronize()
            if second is not None:
                out = residual_linear(out, second)
                torch.cuda.synchronize()
            normed, residual = add_rms_norm_triton(out, residual, weight, 1e-5)
            torch.cuda.synchronize()
        return residual

    expected = synchronized_chain()
    assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@cuda
def test_what_the_kernel_does_not_take_goes_to_cublas() -> None:
    x, weight, _ = make(6, 256, 256, CUDA, torch.bfloat16, bias=False)
    many = x.repeat(11, 1)
    assert torch.equal(linear(many, weight), F.linear(many, weight))
    assert residual_linear(many, weight).shape == (66, 256)
    assert torch.equal(linear(x.float(), weight.float()), F.linear(x.float(), weight.float()))
    assert torch.equal(linear(x[:, :130], weight[:, :130]), F.linear(x[:, :130], weight[:, :130]))
    assert linear(x[:0], weight).shape == (0, 256)


def test_weights_past_offsets_of_32_bits_have_no_sums_that_ignore_the_batch() -> None:
    x_TK, weight_NK = torch.empty(1, 2**15, device="meta"), torch.empty(2**16, 2**15, device="meta")
    with pytest.raises(ConfigError, match=r"a layer of \(65536, 32768\) weights is too large .*; leave it out"):
        module.linear_invariant_triton(x_TK, weight_NK)
