"""Linear layers of quantised weights against exact sums over the weights that they stand for.

Errors are relative to the largest number of the expected output. 1e-6: fp32 sums. 2^-8 (bf16), 2^-11 (fp16): those
sums, rounded once. What quantisation itself loses is measured against the plain weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.gated_linear import Activation, gated, gated_linear
from draftloop.kernels.linear import linear, qkv_linear, residual_linear
from draftloop.kernels.linear_fp8 import FP8, Activations, Fp8Values, Fp8Weight, quantise_activations, quantise_fp8
from draftloop.kernels.linear_int4 import Int4Values, Int4Weight, pack, quantise_int4, unpack
from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_w8a8 import linear_w8a8_triton, quantise_triton
from draftloop.kernels.linear_wide import Kind, WideTiles
from draftloop.kernels.packed_values import pack_fp8, unpack_fp8
from draftloop.kernels.quantised import INVARIANT_TOKENS, QuantisedWeight, choose
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kernels.silu_mul import silu_mul_torch

SMALL = PlaneTiles(block_n=32, block_k=128, splits=1, max_tokens=16, num_warps=4, num_stages=2)
TOKENS = [1, 6, 33]
SHAPES_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
FORMATS = {
    "fp8 per column": lambda n, k, device: Fp8Weight(n, k, device=device),
    "fp8 per block": lambda n, k, device: Fp8Weight(n, k, block=(128, 128), device=device),
    "int4 of 128": lambda n, k, device: Int4Weight(n, k, group_size=128, device=device),
    "int4 of 64": lambda n, k, device: Int4Weight(n, k, group_size=64, device=device),
    "int4 of 32, zeros": lambda n, k, device: Int4Weight(n, k, group_size=32, has_zeros=True, device=device),
    "int4 of 128, zeros": lambda n, k, device: Int4Weight(n, k, group_size=128, has_zeros=True, device=device),
    "int4 of rows": lambda n, k, device: Int4Weight(n, k, group_size=-1, device=device),
    "int4 in another order": lambda n, k, device: Int4Weight(n, k, group_size=128, is_ordered=True, device=device),
}


def half(device: torch.device) -> torch.dtype:
    # numpy, and so the interpreter, multiplies no bf16
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def make(name: str, columns: int, size: int, device: torch.device) -> tuple[Any, Tensor]:
    """A weight, and the floats that it stands for."""
    torch.manual_seed(0)
    weight: QuantisedWeight = FORMATS[name](columns, size, device)
    values: Any = weight.quantise(torch.randn(columns, size, device=device) * size**-0.5)
    if isinstance(values, Fp8Values) and values.block is not None:
        values = values._replace(scale_PQ=values.scale_PQ * (torch.rand_like(values.scale_PQ) + 0.5))
    if isinstance(values, Int4Values):
        if isinstance(weight, Int4Weight) and weight.zero_GN is not None:
            zero = torch.randint(0, 17, values.scale_NG.shape, device=device)
            values = values._replace(zero_NG=zero.to(torch.uint8))
        if isinstance(weight, Int4Weight) and weight.order_K is not None:
            values = values._replace(order_K=torch.randperm(size, device=device))
    weight.fill(0, values)
    return weight, values.dequantise()


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_stands_for_what_it_was_filled_with(name: str) -> None:
    weight, floats = make(name, 48, 256, torch.device("cpu"))
    assert torch.equal(weight.dequantise(torch.float32), floats)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", FORMATS)
def test_linear(device: torch.device, name: str, tokens: int) -> None:
    """Columns that no block divides, with a bias, whole and split along K; a split holds only its part."""
    weight, floats = make(name, 50, 256, device)
    x = torch.randn(tokens, 256, device=device).to(half(device))
    bias = torch.randn(50, device=device).to(half(device))
    expected = x.double() @ floats.double().T + bias.double()
    out = weight.linear_triton(x, bias, tiles=SMALL)
    assert out.dtype == x.dtype
    assert off(out, expected) < 2**-8
    assert off(weight.linear_torch(x, bias), expected) < 2**-6  # weights are rounded too
    sums = weight.linear_split_triton(x, bias, tiles=SMALL._replace(splits=2))
    assert sums.dtype == torch.float32
    assert off(sums.sum(0), expected) < 1e-6
    if "order" not in name:
        assert off(sums[1], x[:, 128:].double() @ floats[:, 128:].double().T) < 1e-6


@pytest.mark.parametrize("name", ["int4 of 128", "int4 of 128, zeros", "int4 of 32, zeros", "fp8 per block"])
def test_scales_are_those_of_their_groups(device: torch.device, name: str) -> None:
    """They are read ahead, in loops of one group and of several. Zero points lose nothing that fp32 sums would keep."""
    weight, floats = make(name, 48, 512, device)
    x = torch.randn(6, 512, device=device).to(half(device))
    for block_k in (128, 256):
        sums = weight.linear_split_triton(x, tiles=SMALL._replace(splits=2, block_k=block_k))
        assert off(sums.sum(0), x.double() @ floats.double().T) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["fp8 per column", "int4 of 32, zeros"])
def test_a_gate_in_the_kernel(device: torch.device, name: str, activation: Activation) -> None:
    """Rounds where the layer and the gate behind it round: nearly all numbers are the same bits."""
    weight, _ = make(name, 2 * 40, 256, device)
    x, bias = (torch.randn(*shape, device=device).to(half(device)) for shape in ((5, 256), (80,)))
    out = weight.gated_linear_triton(x, bias, activation, tiles=SMALL)
    plain = weight.linear_triton(x, bias, tiles=SMALL)
    expected = gated(plain, activation=activation)
    assert out.shape == (5, 40)
    assert (out == expected).float().mean() > 0.97
    assert off(out, expected.double()) < 2**-7


@pytest.mark.parametrize("size", [128, 384])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantise(device: torch.device, name: str, size: int) -> None:
    """Rounded once, rows that no block divides and columns in another order included."""
    weight, floats = make(name, 100, size, device)
    dtype = half(device)
    assert torch.equal(weight.dequantise_triton(dtype), floats.to(dtype))
    assert torch.equal(weight.dequantise_torch(dtype), floats.to(dtype))


@pytest.mark.parametrize("name", ["int4 of 64", "int4 of 32, zeros", "int4 of rows"])
def test_an_input_that_no_block_divides(device: torch.device, name: str) -> None:
    weight, floats = make(name, 32, 192, device)
    x = torch.randn(3, 200, device=device).to(half(device))[:, :192].contiguous()
    sums = weight.linear_split_triton(x, tiles=SMALL)
    assert off(sums.sum(0), x.double() @ floats.double().T) < 1e-6
    assert torch.equal(weight.dequantise_triton(half(device)), floats.to(half(device)))


@pytest.mark.parametrize("name", ["fp8 per block", "int4 of 128, zeros"])
def test_tokens_past_the_last_are_neither_read_nor_written(device: torch.device, name: str) -> None:
    weight, floats = make(name, 32, 128, device)
    wide = torch.randn(4, 128, device=device).to(half(device))
    wide[3] = float("nan")
    assert off(weight.linear_triton(wide[:3], tiles=SMALL), wide[:3].double() @ floats.double().T) < 2**-8


def test_all_8_bit_floats_are_decoded(device: torch.device) -> None:
    """Zeros of both signs, subnormals and the largest, exactly, in each of the two planes."""
    bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8, device=device)
    weight = Fp8Weight(len(bits), 128, device=device)
    values = torch.zeros(len(bits), 128, dtype=torch.uint8, device=device)
    values[:, 5], values[:, 64 + 9] = bits, bits.flip(0)
    weight.fill(0, Fp8Values(values.view(FP8), torch.ones(1, 1, device=device)))
    x = torch.zeros(2, 128, device=device, dtype=half(device))
    x[0, 5], x[1, 64 + 9] = 1, 1
    out = weight.linear_split_triton(x, tiles=SMALL)[0]
    assert torch.equal(out[0], bits.view(FP8).float())
    assert torch.equal(out[1], bits.flip(0).view(FP8).float())


def test_all_4_bit_values_with_all_zero_points_are_decoded(device: torch.device) -> None:
    weight = Int4Weight(16 * 17, 128, group_size=128, has_zeros=True, device=device)
    value, zero = (part.flatten() for part in torch.meshgrid(torch.arange(16), torch.arange(17), indexing="ij"))
    values = torch.full((16 * 17, 128), 8)
    values[:, 77] = value
    scale = torch.full((16 * 17, 1), 0.5)
    weight.fill(0, Int4Values(values.byte().to(device), scale.to(device), zero.byte().unsqueeze(1).to(device)))
    x = torch.zeros(1, 128, device=device, dtype=half(device))
    x[0, 77] = 1
    assert torch.equal(weight.linear_split_triton(x, tiles=SMALL)[0, 0].cpu(), (value - zero) * 0.5)


@given(st.integers(0, 2**32), st.sampled_from([128, 384]))
@settings(max_examples=20)
def test_packing_loses_nothing(seed: int, size: int) -> None:
    values = torch.randint(0, 16, (5, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    assert torch.equal(unpack(pack(values)), values)
    assert torch.equal(unpack_fp8(pack_fp8(values)), values)


def test_what_rounding_loses() -> None:
    """Of normal weights, relative to their size: 8 bits 2.6 %, 4 bits in groups of 128 11 %, of 32 9 %."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))

    def loss(values: Fp8Values | Int4Values) -> float:
        return float((values.dequantise() - weight).norm() / weight.norm())

    assert 0.02 < loss(quantise_fp8(weight)) < 0.03
    assert 0.10 < loss(quantise_int4(weight, 128)) < 0.13
    assert 0.07 < loss(quantise_int4(weight, 32)) < 0.10


def test_zeros_stay_zeros() -> None:
    for values in (quantise_fp8(torch.zeros(2, 128)), quantise_int4(torch.zeros(2, 128), 128)):
        assert not values.dequantise().any()


@pytest.mark.parametrize("block", [(128, 128), (64, 96), (50, 128)])
def test_blocks_that_do_not_fit_a_fused_weight_are_made_smaller(block: tuple[int, int]) -> None:
    """The parts' last blocks are cut off, and each part begins a new one."""
    sizes, size = (160, 100), 192
    weight = Fp8Weight(sum(sizes), size, block=block, parts=sizes, device=torch.device("cpu"))
    expected = []
    for part in weight.split(sizes):
        rows = part.shape[0]
        scale = torch.rand(-(-rows // block[0]), -(-size // block[1])) + 0.5
        values = Fp8Values(torch.randn(rows, size).to(FP8), scale, block)
        part.fill(values)
        expected.append(values.dequantise())
    assert torch.equal(weight.dequantise(torch.float32), torch.cat(expected))


def test_scales_that_16_bits_would_round_keep_32() -> None:
    weight = Int4Weight(2, 256, group_size=128, device=torch.device("cpu"))
    scale = torch.tensor([[1.0, 1 / 3], [2e-9, 1.0]])
    values = Int4Values(torch.full((2, 256), 11, dtype=torch.uint8), scale)
    weight.fill(0, values)
    assert torch.equal(weight.dequantise(torch.float32), values.dequantise())


def test_parts_in_different_orders_are_refused() -> None:
    weight = Int4Weight(64, 128, group_size=128, is_ordered=True, device=torch.device("cpu"))
    first, second = weight.split((32, 32))
    values = quantise_int4(torch.randn(32, 128), 128)
    first.fill(values._replace(order_K=torch.arange(128).flip(0)))
    with pytest.raises(ValueError, match="different orders"):
        second.fill(values)


def test_a_static_scale_serves_all_parts() -> None:
    weight = Fp8Weight(64, 128, activations="static", device=torch.device("cpu"))
    for part, scale in zip(weight.split((32, 32)), (0.25, 0.5), strict=True):
        part.fill(quantise_fp8(torch.randn(32, 128))._replace(input_scale=torch.tensor(scale)))
    assert weight.input_scale is not None
    assert float(weight.input_scale) == 0.5


def test_linear_takes_quantised_weights() -> None:
    """On a CPU by floats; where a norm follows too."""
    weight, floats = make("int4 of 64", 64, 128, torch.device("cpu"))
    x, bias, residual = torch.randn(3, 128), torch.randn(64), torch.randn(3, 64)
    expected = x @ floats.T + bias
    torch.testing.assert_close(linear(x, weight, bias), expected)
    out = torch.empty(3, 64)
    assert linear(x, weight, bias, out_TN=out) is out
    torch.testing.assert_close(out, expected)
    _, total = add_rms_norm(residual_linear(x, weight, bias), residual, torch.ones(64), 1e-5)
    torch.testing.assert_close(total, residual + expected)


def test_activations_in_8_bits() -> None:
    """By the largest number of each token, or by a scale that is given and clips what is beyond it."""
    x = torch.randn(5, 128) * torch.tensor([1e-3, 1, 10, 0, 1]).unsqueeze(1)
    rounded, scale = quantise_activations(x)
    torch.testing.assert_close(rounded.float() * scale, x, rtol=2**-4, atol=1e-4)
    rounded, scale = quantise_activations(x, torch.tensor(0.001))
    torch.testing.assert_close(rounded.float() * scale, x.clamp(-0.448, 0.448), rtol=2**-4, atol=1e-4)


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES_8B, (3584, 18944), (896, 4864), (896, 896), (8192, 28672)], ids=str)
def test_choice(shape: tuple[int, int], may_split: bool) -> None:
    for tiles in choose(*shape, 132, may_split=may_split).values():
        assert shape[1] % (tiles.block_k * tiles.splits) == 0
        assert may_split or tiles.splits == 1
        assert -(-shape[0] // tiles.block_n) * tiles.splits >= 112 or shape[0] < 4096


@pytest.mark.parametrize("kind", [Fp8Weight, Int4Weight])
def test_measured_tiles_fit_their_layers(kind: type[Fp8Weight | Int4Weight]) -> None:
    """And some of them serve any number of tokens where a token's sums must not depend on the others."""
    for layers in kind.measured.values():
        for (_, size, may_split), by_tokens in layers.items():
            assert all(size % (tiles.block_k * tiles.splits) == 0 for tiles in by_tokens.values())
            assert may_split or all(tiles.splits == 1 for tiles in by_tokens.values())
            assert list(by_tokens) == sorted(by_tokens)
            assert max(by_tokens) >= INVARIANT_TOKENS


@pytest.mark.parametrize("kind", [Fp8Weight, Int4Weight])
def test_what_is_split_in_front_of_the_rotation_for_few_tokens_is_whole_for_more(
    kind: type[Fp8Weight | Int4Weight],
) -> None:
    """By the tiles of the layer that is never split, so that those passes, and invariant ones, have its bits."""
    layers = kind.measured["NVIDIA H200"]
    assert (6144, 4096, True) in layers
    for *shape, may_split in layers:
        if may_split and (whole := layers.get((*shape, False))):
            by_tokens = layers[*shape, True]
            assert list(by_tokens) == list(whole)
            few, *more = by_tokens
            assert few < INVARIANT_TOKENS
            assert by_tokens[few].splits > 1
            assert all(by_tokens[last] == whole[last] for last in more)


@pytest.mark.parametrize("name", ["fp8 per column", "int4 of 64"])
def test_deterministic_layers_pad_tokens_always_alike(device: torch.device, name: str) -> None:
    weight, floats = make(name, 64, 256, device)
    x = torch.randn(20, 256, device=device).to(half(device))
    tiles = SMALL._replace(splits=2)
    run = batch_invariant(weight.linear_split_triton)
    sums = run(x, tiles=tiles)
    assert off(sums.sum(0), x.double() @ floats.double().T) < 1e-6
    for tokens in (1, 9):
        assert torch.equal(run(x[:tokens], tiles=tiles), sums[:, :tokens])


@pytest.mark.parametrize("given", [None, 0.004], ids=["dynamic", "static"])
def test_8_bits_on_both_sides(device: torch.device, given: float | None) -> None:
    """Two parts of tokens, several blocks, rows that no block divides, sums and gates; a stored scale clips."""
    weight, floats = make("fp8 per column", 208, 384, device)
    assert isinstance(weight, Fp8Weight)
    x, bias = (torch.randn(*shape, device=device).to(half(device)) for shape in ((70, 384), (208,)))
    input_scale = None if given is None else torch.tensor(given, device=device)
    rounded, scale_T1 = quantise_triton(x, input_scale)
    packed_TBS = rounded.unflatten(1, (-1, 128))
    restored = unpack_fp8(packed_TBS.transpose(0, 1))
    if device.type == "cuda":  # the interpreter does not round to 8 bits as the device does
        expected_TK, expected_T1 = quantise_activations(x, input_scale)
        torch.testing.assert_close(scale_T1, expected_T1.expand(70, 1))
        assert off(restored.float() * scale_T1, expected_TK.double() * expected_T1) < 2**-4
    if given is not None:
        assert torch.equal(scale_T1, torch.full((70, 1), given, device=device))
        assert float((restored.float() * scale_T1).abs().max()) == pytest.approx(given * 448)
    expected = (restored.double() * scale_T1.double()) @ floats.double().T + bias.double()
    arguments, tiles = (rounded, scale_T1, weight.packed_BNS, weight.scale_PQ, bias), WideTiles(64, 128, 2, 48, 4, 3)
    assert off(linear_w8a8_triton(*arguments, kind=Kind.SUMS, tiles=tiles).sum(0), expected) < 2**-10
    out = linear_w8a8_triton(*arguments, kind=Kind.GATED, tiles=tiles._replace(splits=1), dtype=half(device))
    assert off(out, silu_mul_torch(expected.to(half(device))).double()) < 2**-6


CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6, 33])
@pytest.mark.parametrize("name", ["fp8 per column", "fp8 per block", "int4 of 128", "int4 of 128, zeros"])
@pytest.mark.parametrize("shape", SHAPES_8B, ids=str)
def test_real_shapes(shape: tuple[int, int], name: str, tokens: int) -> None:
    """Exact sums rounded once, whole and split; the same bits every time, and whatever tokens the same tiles serve."""
    weight, floats = make(name, *shape, CUDA)
    x = torch.randn(8 if tokens <= 8 else 64, shape[1], device=CUDA).bfloat16()
    expected = x[:tokens].double() @ floats.double().T
    out, sums = linear(x[:tokens], weight), residual_linear(x[:tokens], weight)
    assert off(out, expected) < 2**-8
    assert off(sums.sum(0) if sums.dim() == 3 else sums, expected) < (3e-6 if sums.dim() == 3 else 2**-8)
    assert torch.equal(linear(x[:tokens], weight), out)
    assert torch.equal(linear(x, weight)[:tokens], out)
    assert torch.equal(residual_linear(x, weight)[..., :tokens, :], sums)
    gate = gated_linear(x[:tokens], weight)
    assert off(gate, silu_mul_torch(expected.bfloat16()).double()) < 2**-6
    assert torch.equal(gated_linear(x, weight)[:tokens], gate)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [Fp8Weight, Int4Weight])
def test_sums_in_front_of_the_rotation(monkeypatch: pytest.MonkeyPatch, form: type[Fp8Weight | Int4Weight]) -> None:
    """Split for few tokens where that was measured; whole for more, and where the number of tokens plays no part."""
    weight, floats = make("fp8 per column" if form is Fp8Weight else "int4 of 128", 384, 1024, CUDA)
    x = torch.randn(200, 1024, device=CUDA).bfloat16()
    assert qkv_linear(x[:6], weight).shape == (6, 384)
    split = {8: SMALL._replace(splits=2), 64: SMALL}
    gpu = torch.cuda.get_device_name(CUDA)
    monkeypatch.setattr(form, "measured", {gpu: {(384, 1024, True): split, (384, 1024, False): {8: SMALL, 64: SMALL}}})
    sums = qkv_linear(x[:6], weight)
    assert sums.shape == (2, 6, 384)
    assert off(sums.sum(0), x[:6].double() @ floats.double().T) < 2**-6
    for tokens in (9, 48, 200):
        assert torch.equal(qkv_linear(x[:tokens], weight), linear(x[:tokens], weight))
    for tokens in (6, 200):
        found = batch_invariant(qkv_linear)(x[:tokens], weight)
        assert torch.equal(found, batch_invariant(linear)(x[:tokens], weight))


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["none", "dynamic", "static"])
@pytest.mark.parametrize("name", FORMATS)
def test_many_tokens(name: str, activations: Activations) -> None:
    """By floats; where the checkpoint rounds activations to 8 bits, as those products say, within 4 % of exact ones."""
    weight, floats = make(name, 4096, 4096, CUDA)
    x = torch.randn(160, 4096, device=CUDA).bfloat16()
    tolerance = 2**-6
    if isinstance(weight, Fp8Weight):
        if activations == "static":
            weight.input_scale = torch.nn.Parameter(x.abs().max().float().view(1) / 448, requires_grad=False)
        weight.activations = activations
        assert weight.max_tokens(x) == (64 if weight.block is None and activations != "none" else float("inf"))
        if weight.block is None and activations != "none":
            rounded, scale = quantise_activations(x, weight.input_scale)
            w8a8 = (rounded.double() * scale.double()) @ floats.double().T
            assert off(linear(x, weight), w8a8) < 2**-7
            assert off(linear(x.repeat(4, 1), weight)[:160], w8a8) < 2**-7
            sums = residual_linear(x, weight)
            assert off(sums.sum(0), w8a8) < 2**-7
            assert off(gated_linear(x, weight), silu_mul_torch(w8a8.bfloat16()).double()) < 2**-6
            tolerance = 0.04
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert off(out, x.double() @ floats.double().T) < tolerance
