"""The C kernels against torch's operators: shapes of every size, odd ones too, and one or two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.attention.sdpa import paged_attention
from draftloop.graphs.tape import TapeRecorder
from draftloop.kernels.linear import linear, linear_invariant_cpu, linear_torch
from draftloop.kernels.native import ops as native
from draftloop.kernels.native.build import BuildError, find_compiler
from draftloop.kernels.native.functions import available, switched_off
from draftloop.kernels.norm_concat import norm_concat, norm_concat_torch
from draftloop.kernels.rms_norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from draftloop.kernels.rope_write import rope_write, rope_write_torch
from draftloop.kernels.silu_mul import silu_mul, silu_mul_torch
from draftloop.kernels.widened import WIDENED_AT_ONCE

INF, NAN = float("inf"), float("nan")
MANY = settings(max_examples=25)
SEEDS = st.integers(0, 99)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    assert available()


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(actual: Tensor, expected: Tensor) -> None:
    """Near in units of the largest element: sums may cancel."""
    scale = expected.abs().max().clamp(min=1e-30).item() if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=1e-5)


@MANY
@given(tokens=st.integers(1, 16), columns=st.integers(1, 300), size=st.integers(1, 700), bias=st.booleans(), seed=SEEDS)
def test_linear(threads: int, tokens: int, columns: int, size: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight, b = torch.randn(tokens, size), torch.randn(columns, size), torch.randn(columns) if bias else None
    assert native.takes_linear(x, weight, b)
    expected = linear_torch(x.double(), weight.double(), None if b is None else b.double())
    close(linear(x, weight, b), expected.float())


@settings(parent=MANY, max_examples=60)
@given(
    tokens=st.integers(1, native.MAX_TOKENS) | st.sampled_from([17, 40]),
    columns=st.integers(1, 90) | st.just(400),
    size=st.integers(1, 200) | st.just(577),
    bias=st.booleans(),
    seed=SEEDS,
)
def test_bf16_weights_give_the_bits_of_float32_ones(
    threads: int, tokens: int, columns: int, size: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, narrow, b = torch.randn(tokens, size), torch.randn(columns, size).bfloat16(), None
    if bias:
        b = torch.randn(columns)
    wide, out = narrow.float(), torch.empty(tokens, columns)
    assert native.takes_linear(x, narrow, b) == (tokens <= native.MAX_TOKENS)
    expected = linear(x, wide, b)
    assert torch.equal(linear(x, narrow, b), expected)
    assert torch.equal(linear(x, narrow, b, out_TN=out), expected)
    assert torch.equal(linear_invariant_cpu(x, narrow, b), linear_invariant_cpu(x, wide, b))
    with switched_off():
        expected = linear(x, wide, b)
        assert torch.equal(linear(x, narrow, b), expected)
        assert torch.equal(linear_invariant_cpu(x, narrow, b), linear_invariant_cpu(x, wide, b))


@pytest.mark.parametrize("bias", [False, True])
def test_many_tokens_widen_large_bf16_weights_part_by_part(bias: bool) -> None:
    x, weight, b = torch.randn(3, 40, 577), torch.randn(1000, 577).bfloat16(), torch.randn(1000) if bias else None
    assert weight.numel() > 2 * WIDENED_AT_ONCE
    close(linear(x, weight, b), linear_torch(x, weight.float(), b))


def test_bf16_numbers_of_every_kind_are_widened_exactly() -> None:
    """Infinities, NaN, subnormals and both zeros among them: all of the 65,536."""
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)[:, None]
    assert torch.equal(
        linear(torch.ones(1, 1), weight)[0].nan_to_num(7.0), (0.0 + weight.float()[:, 0]).nan_to_num(7.0)
    )


@pytest.mark.parametrize(("columns", "size"), [(960, 576), (577, 1537)])
def test_a_token_s_result_depends_on_nothing_else(columns: int, size: int) -> None:
    """Bit for bit the same alone, among any number of others, and with any number of threads."""
    torch.manual_seed(0)
    x, weight = torch.randn(16, size), torch.randn(columns, size)
    alone = torch.cat([linear(row[None], weight) for row in x])
    before = torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for tokens in range(1, 17):
            assert torch.equal(linear(x[:tokens], weight), alone[:tokens])
    torch.set_num_threads(before)


@MANY
@given(tokens=st.integers(0, 20), size=st.integers(1, 700), seed=SEEDS)
def test_norms(tokens: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual, weight = torch.randn(tokens, size), torch.randn(tokens, size) * 3, torch.randn(size)
    assert native.takes_serial(x, residual, weight)
    close(rms_norm(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5))
    other = torch.randn(size)
    both = norm_concat(x, residual, weight, other, 1e-5)
    for mine, theirs in zip(both, norm_concat_torch(x, residual, weight, other, 1e-5), strict=True):
        close(mine, theirs)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = add_rms_norm_torch(x, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    assert torch.equal(total, expected_total)
    close(normed, expected_normed)


def test_norm_of_zeros_and_of_what_is_no_number() -> None:
    weight = torch.ones(40)
    assert (rms_norm(torch.zeros(1, 40), weight, 1e-5) == 0).all()
    x = torch.zeros(2, 40)
    x[0, 39] = NAN
    assert rms_norm(x, weight, 1e-5)[0].isnan().all()
    assert (rms_norm(x, weight, 1e-5)[1] == 0).all()


@MANY
@given(tokens=st.integers(0, 20), size=st.integers(1, 700), scale=st.sampled_from([0.01, 1.0, 30.0, 1e4]), seed=SEEDS)
def test_silu_mul(tokens: int, size: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = torch.randn(tokens, 2 * size) * scale
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_torch(gate_up), atol=1e-30, rtol=1e-5)


def test_silu_at_the_ends() -> None:
    gate = torch.tensor([0.0, -0.0, 87.0, -87.0, 88.7, -88.7, 89.0, -89.0, 200.0, -200.0, 3e38, -3e38, INF, NAN])
    out = silu_mul(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(out, expected, atol=1e-35, rtol=1e-5, equal_nan=True)
    # every exponent that a softmax can meet
    gate = torch.linspace(-87, 87, 100_001)
    out = silu_mul(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate.double()).float(), atol=0, rtol=1e-6)


@MANY
@given(data=st.data())
def test_rope_write(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    heads, kv_heads, head_dim = data.draw(st.sampled_from([(9, 3, 64), (4, 4, 80), (2, 1, 24), (1, 1, 7), (0, 3, 64)]))
    rotary_dim = data.draw(st.sampled_from([head_dim // 2 * 2, head_dim // 4 * 2]))
    tokens, pages, page_size = data.draw(st.integers(0, 20)), 4, data.draw(st.sampled_from([8, 16, 5]))
    norms = [torch.randn(head_dim), torch.randn(head_dim)] if data.draw(st.booleans()) else [None, None]
    qkv, cos_sin = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim), torch.randn(50, rotary_dim)
    positions, slots = torch.randint(50, (tokens,)), torch.randperm(pages * page_size)[:tokens]
    # one layer of a cache whose layers lie inside of each page
    wide = torch.full((2, pages, 3, page_size, kv_heads, head_dim), 7.0)
    cache, expected_cache = wide[:, :, 1], wide[:, :, 1].clone()
    settings = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6}
    settings |= {"q_norm_D": norms[0], "k_norm_D": norms[1]}
    assert native.takes_rope_write(qkv, positions, slots, cos_sin, cache, *norms)
    q = rope_write(qkv, positions[: len(slots)], slots, cos_sin, cache, **settings)
    close(q, rope_write_torch(qkv, positions, slots, cos_sin, expected_cache, **settings))
    close(cache, expected_cache)
    assert (wide[:, :, [0, 2]] == 7).all()


@pytest.mark.parametrize(("position", "slot"), [(50, 0), (-1, 0), (0, 64), (0, -1)])
def test_rope_write_refuses_what_does_not_exist(position: int, slot: int) -> None:
    qkv, cache = torch.randn(1, 3 * 64), torch.zeros(2, 4, 16, 1, 64)
    with pytest.raises(IndexError, match="outside"):
        rope_write(qkv, torch.tensor([position]), torch.tensor([slot]), torch.ones(50, 64), cache, num_heads=1,
                   num_kv_heads=1, head_dim=64)  # fmt: skip


def attention_batch(data: st.DataObject) -> tuple[list, dict]:
    """Arguments of `paged_attention`: pages in any order, NaN wherever nobody may look."""
    heads, kv_heads, head_dim = data.draw(st.sampled_from([(9, 3, 64), (4, 4, 16), (8, 1, 80), (2, 1, 256)]))
    page_size = data.draw(st.sampled_from([16, 32, 48, 64]))
    uniform = data.draw(st.booleans())
    longest = data.draw(st.sampled_from([1, 6, 16, 40]))
    entries = data.draw(st.integers(1, 5))
    lens = [longest if uniform else data.draw(st.integers(0, longest)) for _ in range(entries)]
    kv_lens = [data.draw(st.just(0) | st.integers(max(1, n - 2), n + 150)) for n in lens]
    padding = 0 if uniform else data.draw(st.integers(0, 3))
    width = -(-max(kv_lens) // page_size) + 1
    pages = torch.randperm(entries * width).int() + 1
    table = torch.full((entries + 1, width), -1, dtype=torch.int32)
    rows = (torch.randperm(entries) + 1).int()
    kv = torch.full((2, entries * width + 1, page_size, kv_heads, head_dim), NAN)
    for entry, (row, kv_len) in enumerate(zip(rows.tolist(), kv_lens, strict=True)):
        for i in range(-(-kv_len // page_size)):
            table[row, i] = page = pages[entry * width + i]
            used = min(page_size, kv_len - i * page_size)
            kv[:, page, :used] = torch.randn(2, used, kv_heads, head_dim)
    starts = [0]
    for n in lens:
        starts.append(starts[-1] + n)
    q = torch.randn(starts[-1] + padding, heads, head_dim) * data.draw(st.sampled_from([0.1, 1.0, 8.0]))
    scalars = {
        "query_len": longest if uniform else 0,
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.just(0) | st.integers(1, 70)),
        "scale": head_dim**-0.5,
        "soft_cap": data.draw(st.sampled_from([0.0, 0.5, 50.0])),
        "sinks_H": torch.randn(heads) * 4 if data.draw(st.booleans()) else None,
    }
    tensors = [q, kv, rows, torch.tensor(starts, dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32), table]
    return tensors, scalars


@settings(parent=MANY, max_examples=150)
@given(data=st.data(), seed=SEEDS)
def test_paged_attention(threads: int, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    tensors, scalars = attention_batch(data)
    q = tensors[0]
    out, expected = torch.full_like(q, NAN), torch.full_like(q, NAN)
    assert native.takes_attention(q, tensors[1], out, *tensors[2:])
    paged_attention(*tensors, out, **scalars)
    with switched_off():
        paged_attention(*tensors, expected, **scalars)
    # the reference's softmax over nothing, for which only causal blocks have a rule there
    torch.testing.assert_close(out, expected.nan_to_num(0.0), atol=2e-5, rtol=1e-4)


def test_verifying_gives_what_decoding_gives() -> None:
    """Attention of a block of drafts equals that of its tokens one by one, bit for bit."""
    torch.manual_seed(0)
    q, kv = torch.randn(6, 9, 64), torch.randn(2, 21, 16, 3, 64)
    row, table = torch.zeros(1, dtype=torch.int32), torch.randperm(20, dtype=torch.int32)[None]
    starts = torch.tensor([0, 6], dtype=torch.int32)

    def attend(q: Tensor, kv_len: int) -> Tensor:
        out = torch.empty_like(q)
        paged_attention(q, kv, row, starts, torch.tensor([kv_len], dtype=torch.int32), table, out, len(q), True, 0, 0.1)
        return out

    for kv_len in (6, 31, 32, 33, 300):
        one_by_one = torch.cat([attend(q[i : i + 1], kv_len - 5 + i) for i in range(6)])
        assert torch.equal(attend(q, kv_len), one_by_one)


@pytest.mark.parametrize("break_it", [{"page": 5}, {"page": -1}, {"row": 1}, {"kv_len": 33}])
def test_attention_refuses_what_does_not_exist(break_it: dict[str, int]) -> None:
    q, kv = torch.randn(1, 2, 64), torch.randn(2, 5, 16, 1, 64)
    rows, lens = (torch.tensor([break_it.get(name, good)]).int() for name, good in (("row", 0), ("kv_len", 20)))
    table = torch.tensor([[1, break_it.get("page", 2)]], dtype=torch.int32)
    with pytest.raises(IndexError, match="does not exist"):
        paged_attention(q, kv, rows, torch.tensor([0, 1]).int(), lens, table, torch.empty_like(q), 1, True, 0, 1.0)


def test_what_is_left_to_torch() -> None:
    x, weight = torch.randn(2, 64), torch.randn(8, 64)
    assert native.takes_linear(x, weight, None)
    assert not native.takes_linear(torch.randn(17, 64), weight, None)
    assert not native.takes_linear(x[:0], weight, None)
    assert not native.takes_linear(x[None], weight, None)
    assert not native.takes_linear(x.bfloat16(), weight.bfloat16(), None)
    assert not native.takes_linear(x[:, ::2], weight[:, :32].contiguous(), None)
    assert not native.takes_linear(x, weight.clone().requires_grad_(), None)
    with switched_off():
        assert not native.takes_linear(x, weight, None)
    assert native.takes_linear(x, weight, None)
    # all of these still work
    for wide in (torch.randn(17, 64), x[:0], x.double()):
        close(linear(wide, weight.to(wide.dtype)), linear_torch(wide, weight.to(wide.dtype)))


@pytest.mark.parametrize("piecewise", [False, True])
def test_each_is_one_op_on_a_tape(piecewise: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight, norm = torch.randn(3, 32), torch.randn(3, 32), torch.randn(64, 32), torch.randn(32)
    out, total = torch.empty(3, 32), torch.empty(3, 32)

    def body(attend: object) -> None:
        hidden = silu_mul(linear(rms_norm(x, norm, 1e-5), weight))
        normed, summed = add_rms_norm(hidden, residual, norm, 1e-5)
        out.copy_(normed)
        total.copy_(summed)

    tape = TapeRecorder().record(body, piecewise=piecewise)
    assert len(tape._ops) == 6
    x.normal_()
    tape.replay()
    hidden = silu_mul_torch(linear_torch(rms_norm_torch(x, norm, 1e-5), weight))
    expected, expected_total = add_rms_norm_torch(hidden, residual, norm, 1e-5)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(total, expected_total, atol=1e-4, rtol=1e-4)
