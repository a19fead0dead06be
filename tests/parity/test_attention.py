"""Attention backends against a dense softmax written out here, over lengths and layouts that go wrong in the field."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_cases import TOLERANCE, Case, attend_in_splits, backend, make, sinks
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_flashinfer
from draftloop.attention.base import AttentionShape
from draftloop.attention.registry import BACKENDS, attention_backend
from draftloop.errors import ConfigError
from draftloop.graphs.tape import TapeRecorder
from draftloop.kernels.native.functions import switched_off


def check(
    name: str,
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    num_splits: int | None = None,
) -> None:
    if name == "flashinfer" and device.type == "cuda":
        if case.head_dim not in (64, 128, 256):
            pytest.skip("flashinfer has no kernel for this head size")
        if dtype is torch.float32:
            dtype = torch.bfloat16
    case = replace(case, lets_go=attention_backend(name, device.type).keeps_to_windows)
    q, kv, batch, expected = make(case, device, dtype)
    out = torch.full_like(q, float("nan"))
    sinks_H = sinks(case).to(device) if case.sinks else None
    if num_splits is None:
        found = backend(name, case, device, dtype)
        found.attend(q, kv, batch, out, sliding_window=case.window, sinks_H=sinks_H)
    else:
        query_len = batch.max_query_len if batch.uniform else 0
        has_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        how = {"causal": batch.causal, "window": case.window or 0, "sinks_H": sinks_H, "pdl": has_pdl}
        attend_in_splits(q, kv, batch, out, case, num_splits, query_len=query_len, **how)
    torch.testing.assert_close(out.float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


NAMES = pytest.mark.parametrize("name", BACKENDS)
UNIFORM = ((5, 33), (5, 5), (5, 0), (5, 81))
RAGGED = ((1, 17), (5, 33), (3, 3), (0, 0), (2, 0), (37, 50), (1, 80), (1, 60))


@NAMES
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize("lens", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_masks(
    name: str, device: torch.device, lens: tuple[tuple[int, int], ...], causal: bool, window: int | None
) -> None:
    """Rows without keys, lengths on and around page edges, windows that start inside a page."""
    uniform = lens is UNIFORM
    check(
        name,
        Case(
            lens=lens, heads=2, kv_heads=1, causal=causal, window=window, uniform=uniform, padding=0 if uniform else 3
        ),
        device,
    )


@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lens", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_scores_are_capped(
    name: str, device: torch.device, lens: tuple[tuple[int, int], ...], window: int | None
) -> None:
    """By a cap that most scores reach, and by one that none does."""
    case = Case(lens=lens, heads=2, kv_heads=1, window=window, uniform=lens is UNIFORM)
    for soft_cap in (0.5, 50.0):
        check(name, replace(case, soft_cap=soft_cap), device)


@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize("lens", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_heads_have_sinks(
    name: str, device: torch.device, lens: tuple[tuple[int, int], ...], causal: bool, window: int | None
) -> None:
    """Also where scores are capped, and where blocks are too long for the C kernel: RAGGED has one of 37 tokens."""
    case = Case(lens=lens, heads=2, kv_heads=1, causal=causal, window=window, sinks=True, uniform=lens is UNIFORM)
    check(name, case, device)
    check(name, replace(case, soft_cap=2.0), device)
    if name == "sdpa":
        with switched_off():
            check(name, case, device)


@NAMES
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1)], ids=["group1", "group4", "group8"])
def test_groups_and_pages(name: str, device: torch.device, heads: int, kv_heads: int, page_size: int) -> None:
    lens = ((3, 2 * page_size + 1), (3, 2 * page_size), (3, page_size - 1))
    check(name, Case(lens=lens, heads=heads, kv_heads=kv_heads, page_size=page_size, uniform=True), device)


@NAMES
def test_group_of_three(name: str, device: torch.device) -> None:
    check(name, Case(lens=((6, 40), (6, 6)), heads=9, kv_heads=3, uniform=True), device)
    check(name, Case(lens=((13, 40), (1, 6)), heads=9, kv_heads=3), device)


@NAMES
@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 256, 512])
def test_head_sizes(name: str, device: torch.device, head_dim: int) -> None:
    check(name, Case(lens=((2, 35), (2, 0)), head_dim=head_dim, uniform=True), device)


@NAMES
def test_half_precision(name: str, device: torch.device) -> None:
    # numpy, and so the interpreter, multiplies no bf16
    dtype = torch.float16 if name == "triton" and device.type == "cpu" else torch.bfloat16
    check(name, Case(lens=UNIFORM, uniform=True), device, dtype)
    check(name, Case(lens=RAGGED, padding=2), device, dtype)
    # tiles of these types hold several pages, of which the first may be behind the window, and another row's
    check(name, Case(lens=RAGGED, window=33), device, dtype)


@pytest.mark.parametrize("num_splits", [3, 8])
@pytest.mark.parametrize("lens", [((3, 161), (3, 17), (3, 0)), ((1, 161), (4, 17), (2, 0))], ids=["uniform", "ragged"])
def test_splits(device: torch.device, lens: tuple[tuple[int, int], ...], num_splits: int) -> None:
    """Short rows leave splits empty; rows without keys leave all of them empty."""
    uniform = lens[0][0] == lens[1][0]
    for window, has_sinks in ((None, False), (20, True)):
        padding = 0 if uniform else 2
        case = Case(lens=lens, heads=2, kv_heads=1, uniform=uniform, window=window, sinks=has_sinks, padding=padding)
        check("triton", case, device, num_splits=num_splits)


@NAMES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
def test_blocks_of_one_to_k_plus_one(name: str, device: torch.device, causal: bool) -> None:
    """Field case B13: 1..K+1 tokens per row, uneven lengths, a page edge inside each block."""
    lens = tuple((n, 16 * (n + 1) + n // 2) for n in range(1, 7))
    check(name, Case(lens=lens, causal=causal, padding=1), device)
    for queries in (1, 2, 6):
        lens = tuple((queries, 16 * pages + queries // 2) for pages in (1, 2, 5))
        check(name, Case(lens=lens, causal=causal, uniform=True), device)


@NAMES
def test_padding_row_with_a_poisoned_table(name: str, device: torch.device) -> None:
    """Field case B09: three live rows and a padding row, whose table entries (-1) and pages must not be read."""
    check(name, Case(lens=((1, 18), (1, 1), (1, 40), (1, 0)), uniform=True), device)


@NAMES
def test_more_tokens_than_keys(name: str, device: torch.device) -> None:
    """Tokens before the sequence's start see nothing and get zeros."""
    check(name, Case(lens=((5, 3), (5, 1)), uniform=True), device)


@NAMES
@settings(max_examples=12)
@given(data=st.data())
def test_random_ragged_batches(name: str, device: torch.device, data: st.DataObject) -> None:
    queries = st.integers(0, 20)
    lens = data.draw(
        st.lists(queries.flatmap(lambda n: st.tuples(st.just(n), st.just(0) | st.integers(n, n + 70))), min_size=1,
                 max_size=5)
    )  # fmt: skip
    if not any(n for n, _ in lens):
        lens[0] = (1, 1)
    case = Case(
        lens=lens,
        heads=data.draw(st.sampled_from([2, 6])),
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(1, 60)),
        padding=data.draw(st.integers(0, 4)),
        seed=data.draw(st.integers(0, 99)),
    )
    check(name, case, device)


def test_sdpa_reads_adjacent_pages_in_place(device: torch.device) -> None:
    """Adjacent pages are read without a gather, to the same result."""
    case = Case(lens=((2, 50),), uniform=True)
    q, kv, batch, expected = make(case, device, torch.float32)
    row = batch.page_table_MN[batch.rows_R.long()][0, :4].long()
    ordered = torch.full_like(kv, float("nan"))
    ordered[:, 1:5] = kv[:, row]
    batch.page_table_MN[batch.rows_R.long(), :4] = torch.arange(1, 5, dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    backend("sdpa", case, device, torch.float32).attend(q, ordered, batch, out, sliding_window=None)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (8, 4, 256), (8, 8, 96), (16, 2, 512)], ids=str
)
def test_model_shapes(name: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Real shapes: verify, draft decode and prefill."""
    if name == "flashinfer" and (dtype is torch.float32 or head_dim != 128):
        pytest.skip("each of its kernels takes half a minute to compile")
    device = torch.device("cuda")
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for lens in (((6, 700),), ((6, 1023), (6, 0), (6, 64), (6, 257)), ((1, 513),) * 40):
        for page_size in (16, 64):
            check(name, Case(lens=lens, uniform=True, page_size=page_size, **shape), device, dtype)
    check(name, Case(lens=((200, 300), (6, 500), (1, 90), (130, 130)), padding=15, **shape), device, dtype)
    check(name, Case(lens=((200, 300), (6, 500)), window=100, **shape), device, dtype)
    if name != "flashinfer":
        for causal in (True, False):
            case = Case(lens=((16, 700), (16, 0), (16, 64)), uniform=True, causal=causal, sinks=True, **shape)
            check(name, case, device, dtype)
            check(name, replace(case, window=100), device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("uniform", [True, False])
def test_replays_follow_device_lengths(uniform: bool) -> None:
    """One captured launch serves lengths that change on the device, and repeats bit for bit."""
    device = torch.device("cuda")
    case = Case(lens=((3, 200), (3, 90)), uniform=uniform)
    q, kv, batch, _ = make(case, device, torch.bfloat16)
    out = torch.empty_like(q)
    triton = backend("triton", case, device, torch.bfloat16)
    triton.attend(q, kv, batch, out, sliding_window=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton.attend(q, kv, batch, out, sliding_window=None)
    for lens in ([200, 90], [17, 3], [33, 0], [200, 90]):
        batch.kv_lens_R.copy_(torch.tensor(lens))
        eager = torch.empty_like(q)
        triton.attend(q, kv, batch, eager, sliding_window=None)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
        assert not out.isnan().any()


SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=64, scale=1.0, page_size=16, dtype=torch.float32, kv_dtype=torch.float32
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head size 72"),
        ({"page_size": 8}, "page size 8"),
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"kv_dtype": torch.float16}, "cache dtype"),
        ({"num_kv_heads": 3}, "do not divide"),
    ],
)
def test_triton_refuses_what_it_has_no_kernel_for(change: dict, message: str) -> None:
    triton = attention_backend("triton", "cuda")
    triton.check(SHAPE, "cuda")
    with pytest.raises(ConfigError, match=message):
        triton.check(replace(SHAPE, **change), "cuda")


def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftloop.attention import triton

    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        backend("triton", Case(lens=((1, 1),)), torch.device("cpu"), torch.float32)


def test_a_tape_of_sdpa_follows_lengths() -> None:
    """Recorded as one op, sdpa reads the lengths and pages of each replay, not those of the recording."""
    device = torch.device("cpu")
    q, kv, batch, expected = make(Case(lens=((2, 35), (2, 20)), uniform=True), device, torch.float32)
    out = torch.empty_like(q)
    sdpa = backend("sdpa", Case(lens=((1, 1),)), device, torch.float32)
    lens = batch.kv_lens_R.clone()
    batch.kv_lens_R.copy_(torch.tensor([3, 0]))
    tape = TapeRecorder().record(lambda _: sdpa.attend(q, kv, batch, out, sliding_window=None), piecewise=False)
    assert (out[2:] == 0).all()
    batch.kv_lens_R.copy_(lens)
    tape.replay()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_sdpa_refuses_another_cache_dtype() -> None:
    shape = AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=64, scale=1.0, page_size=16, dtype=torch.float32, kv_dtype=torch.float16
    )
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        attention_backend("sdpa", "cpu").check(shape, "cpu")


def test_flashinfer_has_no_sinks() -> None:
    """Said before any weights are loaded."""
    fake = mock.patch.dict(sys.modules, flashinfer=fake_flashinfer)
    with fake, pytest.raises(ConfigError, match=r"does not support attention sinks.* use attention backend triton"):
        attention_backend("flashinfer", "cuda").check(
            replace(SHAPE, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, sinks=True), "cuda"
        )


def test_names() -> None:
    assert attention_backend("auto", "cpu").name == "sdpa"
    assert attention_backend("auto", "cuda").name == "triton"
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        attention_backend("tritn", "cpu")


def test_graph_support_is_told_with_a_reason() -> None:
    for name in ("sdpa", "triton", "flashinfer"):
        for device_type in ("cpu", "cuda"):
            support = attention_backend(name, device_type).graph_support(device_type)
            assert support.reason or (support.uniform and support.ragged)
