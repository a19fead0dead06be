"""The small kernels: Triton against plain formulas in fp32, torch references likewise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from draftloop.kernels.norm_concat import norm_concat_torch, norm_concat_triton
from draftloop.kernels.rms_norm import (
    Store,
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)
from draftloop.kernels.rope_write import rope_write, rope_write_torch, rope_write_triton
from draftloop.kernels.silu_mul import gelu_mul_torch, gelu_mul_triton, silu_mul_torch, silu_mul_triton

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("run", [rms_norm_torch, rms_norm_triton])
@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (5, 64), (3, 1000)])
def test_rms_norm(run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, tokens: int, size: int) -> None:
    torch.manual_seed(0)
    wide = torch.randn(tokens, 2 * size, device=device).to(dtype)
    x, weight = wide[:, :size], torch.randn(size, device=device).to(dtype)
    expected = x.float() / (x.float().pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight.float()
    close(run(x, weight, 1e-5), expected, dtype)


@DTYPES
@pytest.mark.parametrize("run", [add_rms_norm_torch, add_rms_norm_triton])
def test_add_rms_norm(run: Callable[..., tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*s, device=device).to(dtype) for s in ((5, 576), (5, 576), (576,)))
    before = residual.clone()
    normed, new_residual = run(x, residual, weight, 1e-5)
    assert torch.equal(residual, before), "an earlier residual may be kept as a hidden state"
    # the interpreter cuts bf16 off where a GPU rounds, so the sums are compared loosely, the rest from there
    close(new_residual, x.float() + residual.float(), dtype)
    total = new_residual.float()
    close(normed, total / (total.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight.float(), dtype)


@DTYPES
@pytest.mark.parametrize("run", [add_rms_norm_torch, add_rms_norm_triton])
@pytest.mark.parametrize("normed", [False, True])
def test_add_rms_norm_writes_to_rows_of_a_memory_too(run, device: torch.device, dtype: torch.dtype, normed) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*s, device=device).to(dtype) for s in ((3, 64), (3, 64), (64,)))
    memory, rows = torch.zeros(6, 64, device=device, dtype=dtype), torch.tensor([4, 0, 3], device=device).int()
    out = run(x, residual, weight, 1e-5, store=Store(memory, rows, normed=normed))
    assert torch.equal(memory[rows], out[0 if normed else 1])
    assert memory[[1, 2, 5]].eq(0).all()


@DTYPES
@pytest.mark.parametrize("run", [norm_concat_torch, norm_concat_triton])
@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (3, 100)])
def test_norm_concat(
    run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, tokens: int, size: int
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(tokens, 2 * size, device=device).to(dtype)
    first, second = wide[:, size:], wide[:, :size] * 3
    weights = torch.randn(2, size, device=device).to(dtype)

    def expected(*sides: Tensor) -> Tensor:
        return torch.cat([rms_norm_torch(x, w, 1e-5) for x, w in zip(sides, weights, strict=True)], 1).float()

    both, taken = run(first, second, *weights, 1e-5)
    close(both, expected(first, second), dtype)
    assert torch.equal(taken, second)
    ids, rows = torch.tensor([0, tokens - 1, 0, 0], device=device), torch.tensor([tokens - 1, 0, 0, 0], device=device)
    both, taken = run(first, second, *weights, 1e-5, first_T=ids, second_T=rows.int())
    close(both, expected(first[ids], second[rows]), dtype)
    assert torch.equal(taken, second[rows])


@DTYPES
@pytest.mark.parametrize("run", [silu_mul_torch, silu_mul_triton])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (5, 100)])
def test_silu_mul(run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, tokens: int, size: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(tokens, 2 * size, device=device).to(dtype)
    gate, up = gate_up.float().chunk(2, 1)
    close(run(gate_up), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter, for exp
@DTYPES
@pytest.mark.parametrize("run", [gelu_mul_torch, gelu_mul_triton])
def test_gelu_mul(run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Far from 0 too, where only one side of the gate is left."""
    gate_up = torch.cat((torch.linspace(-60, 60, 100), torch.randn(100))).to(device=device, dtype=dtype).unsqueeze(0)
    gate, up = gate_up.float().chunk(2, 1)
    close(run(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up, dtype)


def rope_write_many(*args: Any, **options: Any) -> Tensor:
    """With programs as large as for many tokens."""
    with mock.patch("draftloop.kernels.rope_write.FEW_TOKENS", 0):
        return rope_write_triton(*args, **options)


@DTYPES
@pytest.mark.parametrize("run", [rope_write_torch, rope_write_triton, rope_write_many])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "page_size"),
    [(9, 3, 64, 64, 16), (4, 4, 80, 32, 32), (0, 3, 64, 64, 16)],  # without queries: a block drafter's context
)
def test_rope_write(
    run: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    norm: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    page_size: int,
) -> None:
    """Each head against the formula with a rotation matrix written out; slots over page edges; all else untouched."""
    torch.manual_seed(0)
    tokens, pages = 6, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.rand(50, rotary_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([14, 15, 16, 17, 49, 0], device=device)
    slots = torch.tensor([3 * page_size - 2, 3 * page_size - 1, page_size, page_size + 1, 0, 0], device=device)
    kv = torch.full((2, pages, page_size, kv_heads, head_dim), 7.0, device=device).to(dtype)
    norms = [torch.randn(head_dim, device=device).to(dtype) for _ in range(2)] if norm else [None, None]

    q = run(
        qkv,
        positions,
        slots,
        cos_sin,
        kv,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        q_norm_D=norms[0],
        k_norm_D=norms[1],
        eps=1e-6,
    )

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.float()
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.float()
        half = rotary_dim // 2
        out = x.clone()
        for i in range(half):
            c, s = angles[positions, i].cos()[:, None], angles[positions, i].sin()[:, None]
            out[..., i] = c * x[..., i] - s * x[..., i + half]
            out[..., i + half] = s * x[..., i] + c * x[..., i + half]
        return out

    parts = qkv.view(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    close(q, rotated(parts[0], norms[0]), dtype)
    cache = kv.flatten(1, 2)
    # tokens 4 and 5 collide in the null page, where anything may be left
    close(cache[0, slots[:4]], rotated(parts[1], norms[1])[:4], dtype)
    assert torch.equal(cache[1, slots[:4]], parts[2][:4])
    untouched = torch.ones(pages * page_size, dtype=torch.bool, device=device)
    untouched[slots] = False
    assert (cache[:, untouched] == 7).all()


@DTYPES
@pytest.mark.parametrize("run", [rope_write_torch, rope_write_triton])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_write_adds_up_split_sums(
    run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, rotary_dim: int
) -> None:
    """Rounded as the layer rounds that is not split.

    The same bits, but for heads that are normed: threads share a head's squares otherwise in a kernel that adds up, and
    so add them up in another order. Those have the bits of a sum of one number and zeros in the same kernel.
    """
    torch.manual_seed(0)
    bits = 12 if device.type == "cuda" else 5  # more than bf16 has, which the interpreter does not round to nearest
    sums = torch.randint(-(2**bits), 2**bits, (3, 3, 4 * 64), device=device) / 2**10  # of which fp32 loses nothing
    whole = sums.sum(0).to(dtype)
    one = torch.zeros_like(sums)
    one[1] = whole
    slots, cos_sin = torch.tensor([17, 18, 40], device=device), torch.rand(50, rotary_dim, device=device)
    norms = torch.randn(2, 64, device=device).to(dtype)
    for names in ({}, dict(zip(("q_norm_D", "k_norm_D"), norms, strict=True))):
        found = []
        for x in (sums, one, whole):
            kv = torch.zeros(2, 3, 16, 1, 64, dtype=dtype, device=device)
            q = run(x, slots, slots, cos_sin, kv, num_heads=2, num_kv_heads=1, head_dim=64, dtype=dtype, **names)
            found.append((q, kv))
        (q, kv), of_one, of_whole = found
        assert q.dtype == dtype
        for q_of_other, kv_of_other in [of_one] if names else [of_one, of_whole]:
            assert torch.equal(q, q_of_other)
            assert torch.equal(kv, kv_of_other)
        q_of_whole, kv_of_whole = of_whole
        assert torch.equal(kv[1], kv_of_whole[1])
        close(q, q_of_whole.float(), dtype)
        close(kv, kv_of_whole.float(), dtype)
        assert kv.any(-1).sum() == 6


def test_rope_write_picks_the_reference_on_cpu() -> None:
    qkv, kv = torch.randn(1, 3 * 64), torch.zeros(2, 2, 16, 1, 64)
    slot = torch.tensor([17])
    q = rope_write(qkv, slot, slot, torch.ones(32, 64), kv, num_heads=1, num_kv_heads=1, head_dim=64)
    assert q.shape == (1, 1, 64)
    assert torch.equal(kv[1, 1, 1, 0], qkv[0, 128:])
