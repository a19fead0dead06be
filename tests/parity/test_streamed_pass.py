"""A pass of few tokens in one kernel: against a decoder's own pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streamed_cases import (
    CASES,
    LLAMA_1B,
    LLAMA_8B,
    REAL_SHAPES,
    SMOLLM2,
    Case,
    check,
    distance,
    make_batch,
    make_cache,
    make_decoder,
    name,
    run_pass,
)
from streamed_host import HostPass, find_weights
from torch import Tensor

from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.cuda_source import compile_source
from draftloop.kernels.streamed_pass import SOURCE, streamed_pass
from draftloop.kernels.streamed_plan import (
    BF16,
    FP8,
    INT4,
    INT4_ZEROS,
    MAX_SUMS,
    MAX_TOKENS,
    Format,
    Shape,
    can_attend,
    definitions,
    make_plan,
    token_limit,
    trying,
)
from draftloop.models import dense, streamed
from draftloop.models.quantisation import Quantisation, Scheme, online


@pytest.mark.parametrize("case", CASES, ids=name)
@torch.inference_mode()
def test_it_computes_the_same_as_fibers_on_the_host(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """All but the instructions themselves, which have stand-ins, and their timing. Barriers, fences and words order
    every two accesses of which one writes."""
    host = HostPass(case, tmp_path, monkeypatch)
    assert not host.run(0)
    if case in (CASES[0], CASES[-1]) or pytestconfig.getoption("every_combination"):
        before = host.out.clone()
        assert not host.run(1)  # counters go on from where they were
        assert torch.equal(bits(host.out), bits(before)), "who is faster changes results"
    check(case, host.found(), host.expected, host.cache, host.plain_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *REAL_SHAPES], ids=name)
@torch.inference_mode()
def test_it_is_the_pass_of_many_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    model, batch = make_decoder(case, device), make_batch(case, device)
    plain_cache = make_cache(case, batch, device)
    cache = plain_cache.clone()
    expected = run_pass(model, batch, plain_cache)
    calls = []

    def counted(*given: object, **named: object) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return streamed_pass(*given, **named)

    monkeypatch.setattr(streamed, "streamed_pass", counted)
    with trying(MAX_TOKENS):
        found = run_pass(model, batch, cache)
    assert len(calls) == 1
    check(case, found, expected, cache, plain_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *REAL_SHAPES], ids=name)
@torch.inference_mode()
def test_bits_are_the_same_each_time(case: Case) -> None:
    """In graphs and out of them; weights that overtake loads of those before them would show here."""
    device = torch.device("cuda")
    model, batch = make_decoder(case, device), make_batch(case, device)
    cache = make_cache(case, batch, device)
    with trying(MAX_TOKENS):
        first = run_pass(model, batch, cache)
        kept = cache.clone()
        for _ in range(20):
            again = run_pass(model, batch, cache)
            assert all(torch.equal(*map(bits, pair)) for pair in zip((*again, cache), (*first, kept), strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_pass(model, batch, cache)
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(*map(bits, pair)) for pair in zip((*captured, cache), (*first, kept), strict=True))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@pytest.mark.gpu
@torch.inference_mode()
def test_streams_take_turns() -> None:
    """A kernel starts when all of its blocks can run, else two would wait for each other for ever."""
    device, work = torch.device("cuda"), []
    for case in (CASES[0], Case(LLAMA_1B, 3, 16, [1], [513])):
        model, batch = make_decoder(case, device), make_batch(case, device)
        cache = make_cache(case, batch, device)
        work.append((model, batch, cache, run_pass(model, batch, cache), torch.cuda.Stream()))
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[] for _ in work]
    with trying(MAX_TOKENS):
        for _ in range(30):
            for (model, batch, cache, _, stream), outs in zip(work, found, strict=True):
                with torch.cuda.stream(stream):
                    outs.append(run_pass(model, batch, cache)[0])
    torch.cuda.synchronize()
    for (*_, expected, _), outs in zip(work, found, strict=True):
        assert all(distance(out, expected[0]) < 2e-2 for out in outs)


@given(
    st.integers(1, 160).map(lambda n: 64 * n),
    st.integers(1, 480).map(lambda n: 64 * n),
    st.integers(1, 12),
    st.integers(1, 16),
    st.sampled_from([64, 128]),
    st.sampled_from([8, 60, 114, 132, 148]),
    st.sampled_from([BF16, FP8, INT4, INT4_ZEROS]),
)
def test_plans_divide_rows_and_columns_and_fit(
    hidden: int, inner: int, group: int, num_kv_heads: int, head_dim: int, num_sms: int, weights: Format
) -> None:
    shape = Shape(hidden, inner, group * num_kv_heads, num_kv_heads, head_dim, weights)
    plan = make_plan(shape, num_sms)
    if plan is None:
        return
    assert plan.num_blocks <= num_sms
    assert weights.memory_bytes <= 227 << 10
    for size, tiles in ((hidden, plan.hidden_tiles), (inner, plan.inner_tiles), (shape.qkv, plan.qkv_tiles)):
        assert size % (8 * tiles) == 0
    assert plan.inner_tiles % plan.passes == 0
    for size, tiles, chunks in (
        (shape.query, plan.hidden_tiles, plan.o_chunks),
        (hidden, 2 * plan.inner_tiles // plan.passes, plan.gate_up_chunks),
        (inner, plan.hidden_tiles, plan.down_chunks),
        (hidden, plan.qkv_tiles, plan.qkv_chunks),
    ):
        assert size % (weights.chunk_columns * chunks) == 0
        assert weights.stage_bytes(tiles, chunks) <= weights.slot_bytes
        assert tiles <= MAX_SUMS


def test_known_shapes_have_plans_that_use_nearly_all_multiprocessors() -> None:
    for shape in (LLAMA_8B, LLAMA_1B, Shape(4096, 12288, 32, 8, 128)):
        plan = make_plan(shape, 132)
        assert plan is not None
        assert plan.num_blocks == 128
    assert make_plan(Shape(4096, 14337, 32, 8, 128), 132) is None
    assert make_plan(Shape(4096, 14336, 32, 8, 96), 132) is None


def test_each_row_and_key_head_needs_a_block_and_each_row_32_queries_at_most() -> None:
    def fits(num_rows: int, max_query_len: int, page_size: int = 16, shape: Shape = LLAMA_8B) -> bool:
        return can_attend(
            shape,
            num_rows=num_rows,
            max_query_len=max_query_len,
            page_size=page_size,
            num_sms=132,
        )

    assert fits(8, 1)
    assert fits(1, 8)
    assert not fits(32, 1)
    assert not fits(1, 9)
    assert not fits(1, 1, page_size=8)
    many_heads = Shape(2048, 8192, 32, 32, 64)
    assert fits(4, 1, shape=many_heads)
    assert not fits(5, 1, shape=many_heads)


@pytest.mark.parametrize(
    ("shape", "max_query_len"),
    [
        (LLAMA_8B, 8),
        (SMOLLM2, 6),
        *((LLAMA_8B._replace(weights=weights), 6) for weights in (FP8, INT4, INT4_ZEROS)),
    ],
)
def test_it_compiles(shape: Shape, max_query_len: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA builds")
    plan = make_plan(shape, 132)
    assert plan is not None
    sizes = definitions(shape, plan, max_query_len=max_query_len, page_size=16)
    assert compile_source(SOURCE, sizes, (9, 0)).startswith(b"\x7fELF")


def test_shapes_that_were_not_measured_are_not_streamed(device: torch.device) -> None:
    assert token_limit(CASES[0].shape, device) == 0
    with trying(5):
        assert token_limit(CASES[0].shape, device) == 5


@torch.inference_mode()
def test_a_decoder_hands_its_pass_over_and_takes_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case, device = CASES[0], torch.device("cpu")
    model, batch = make_decoder(case, device), make_batch(case, device)
    cache = make_cache(case, batch, device)
    plain = run_pass(model, batch, cache)
    monkeypatch.setattr(dense, "streamed_weights", lambda *given: find_weights(model, given[4]))
    monkeypatch.setattr(streamed, "streamed_pass", lambda *_, **__: (plain[0], torch.stack(plain[2:])))
    with trying(MAX_TOKENS):
        assert all(map(torch.equal, run_pass(model, batch, cache), plain))


def test_only_plain_layers_and_passes_are_streamed() -> None:
    case, cpu = CASES[0], torch.device("cpu")
    batch, model = make_batch(case, cpu), make_decoder(case, cpu)
    assert find_weights(model, batch) is None
    with trying(4):
        assert find_weights(model, batch) is None, "a pass of more tokens is streamed"
    with trying(MAX_TOKENS):
        assert find_weights(model, batch) is not None
        assert batch_invariant(find_weights)(model, batch) is None
        for change in ({"invariant": True}, {"causal": False}, {"attend": lambda call: call()}):
            assert find_weights(model, replace(batch, **change)) is None
        for changes in (
            {"qkv_bias": True},
            {"mlp_bias": True},
            {"activation": "gelu_tanh"},
            {"residual_multiplier": 0.5},
            {"qk_norm": True},
            {"sliding_window": 64},
            {"attention_cap": 30.0},
            {"rope": replace(model.config.rope, share=0.5)},
        ):
            assert find_weights(make_decoder(case, cpu, **changes), batch) is None, changes


def test_matrices_are_all_in_one_format_that_the_kernel_knows() -> None:
    case, cpu = Case(Shape(128, 128, 2, 1, 64, INT4), 2, 16, [3], [20]), torch.device("cpu")
    batch, plain = make_batch(case, cpu), online("int4")
    ((names, scheme),) = plain.groups

    def streams(quantisation: Quantisation) -> bool:
        model = make_decoder(case, cpu, quantisation=quantisation)
        with trying(MAX_TOKENS):
            found = find_weights(model, batch) is not None
            said = streamed.describe(model.decoder_layers, model.backend, cpu)
        assert said.startswith("one kernel up to 8 tokens" if found else "many kernels, since not all layers")
        assert "were not measured" in streamed.describe(model.decoder_layers, model.backend, cpu) or not found
        return found

    assert streams(plain)
    assert not streams(replace(plain, ignored=("model.layers.1.mlp.down_proj",)))
    for change in ({"group_size": 64}, {"is_ordered": True}):
        assert not streams(replace(plain, groups=((names, replace(scheme, **change)),)))
    fp8 = Scheme(kind="fp8", layout="fp8")
    assert streams(replace(plain, groups=((names, fp8),)))
    assert not streams(replace(plain, groups=((names, replace(fp8, block=(128, 128))),)))
