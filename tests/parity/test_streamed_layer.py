"""What stands between two attentions, in one kernel: against the same operations one after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.registry import attention_backend
from draftloop.kernels import streamed_layer as module
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.cuda_source import compile_source
from draftloop.kernels.streamed_layer import (
    MAX_TOKENS,
    SLOT_BYTES,
    SOURCE,
    TILE_BYTES,
    LayerWeights,
    Shape,
    definitions,
    make_plan,
    streamed_layer_cuda,
    streamed_layer_torch,
    token_limit,
    trying,
)
from draftloop.models import streamed
from draftloop.models.decoder import FINAL_HIDDEN
from draftloop.models.dense import DenseDecoder, attention_shape, cache_spec
from draftloop.models.presets import PRESETS

LLAMA_8B, LLAMA_1B = Shape(4096, 4096, 14336, 6144), Shape(2048, 2048, 8192, 3072)
SHAPES = [Shape(576, 576, 1536, 960), Shape(256, 512, 768, 1024), LLAMA_1B, LLAMA_8B]
EPS = 1e-5


def make(shape: Shape, *, last: bool) -> LayerWeights:
    def weight(rows: int, size: int) -> Tensor:
        return (torch.randn(rows, size, device="cuda") * size**-0.5).bfloat16()

    def norm() -> Tensor:
        return (torch.rand(shape.hidden, device="cuda") + 0.5).bfloat16()

    hidden, query, inner, qkv = shape
    projection = None if last else weight(qkv, hidden)
    return LayerWeights(
        weight(hidden, query), norm(), weight(2 * inner, hidden), weight(hidden, inner), norm(), projection
    )


def inputs(shape: Shape, num_tokens: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(num_tokens, shape.query, device="cuda").bfloat16(),
        torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16(),
    )


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_the_seven_kernels_compute(shape: Shape, last: bool) -> None:
    torch.manual_seed(0)
    weights = make(shape, last=last)
    for num_tokens in (1, 2, 5, 6, MAX_TOKENS):
        given_tensors = inputs(shape, num_tokens)
        found, expected = (run(*given_tensors, weights, EPS) for run in (streamed_layer_cuda, streamed_layer_torch))
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert distance(one, other) < 1e-2  # bf16 is rounded to four times on the way
        single = streamed_layer_cuda(given_tensors[0][:1], given_tensors[1][:1], weights, EPS)
        for one, other in zip(single, found, strict=True):
            assert torch.equal(one[0], other[0]), "a token's sums depend on how many others there are"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B], ids=str)
def test_it_gives_the_same_bits_each_time_in_graphs_and_out_of_them(shape: Shape) -> None:
    """Weights that overtake loads of those before them would show here."""
    torch.manual_seed(1)
    layers = [make(shape, last=False) for _ in range(2)]
    attended, residual = inputs(shape, MAX_TOKENS)

    def run() -> list[Tensor]:
        # one behind the other, so that a kernel starts while the one in front ends
        return [tensor for weights in layers for tensor in streamed_layer_cuda(attended, residual, weights, EPS)]

    expected = run()
    for _ in range(40):
        assert all(map(torch.equal, run(), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(60):
        graph.replay()
        assert all(map(torch.equal, captured, expected))


@pytest.mark.gpu
def test_streams_take_turns() -> None:
    """Two of these kernels at once would wait for each other's multiprocessors for ever."""
    shapes = [SHAPES[0], LLAMA_1B]
    work = [(make(shape, last=False), inputs(shape, 3), torch.cuda.Stream()) for shape in shapes]
    expected = [streamed_layer_torch(*tensors, weights, EPS)[0] for weights, tensors, _ in work]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[] for _ in work]
    for _ in range(30):
        for (weights, tensors, stream), outs in zip(work, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(streamed_layer_cuda(*tensors, weights, EPS)[0])
    torch.cuda.synchronize()
    assert all(distance(out, one) < 1e-2 for outs, one in zip(found, expected, strict=True) for out in outs)


@given(
    st.integers(1, 160).map(lambda n: 64 * n),
    st.integers(1, 160).map(lambda n: 64 * n),
    st.integers(1, 480).map(lambda n: 64 * n),
    st.integers(1, 160).map(lambda n: 64 * n),
    st.sampled_from([8, 60, 114, 132, 148]),
)
def test_plans_divide_rows_and_columns_and_fit(hidden: int, query: int, inner: int, qkv: int, num_sms: int) -> None:
    shape = Shape(hidden, query, inner, qkv)
    plan = make_plan(shape, num_sms)
    if plan is None:
        return
    assert plan.num_blocks <= num_sms
    for size, tiles in ((hidden, plan.hidden_tiles), (inner, plan.inner_tiles), (qkv, plan.qkv_tiles)):
        assert size % (8 * tiles) == 0
    gate_up_tiles = 2 * plan.inner_tiles // plan.passes
    assert plan.inner_tiles % plan.passes == 0
    for size, tiles, chunks in (
        (query, plan.hidden_tiles, plan.o_chunks),
        (hidden, gate_up_tiles, plan.gate_up_chunks),
        (inner, plan.hidden_tiles, plan.down_chunks),
        (hidden, plan.qkv_tiles, plan.qkv_chunks),
    ):
        assert size % (64 * chunks) == 0
        assert tiles * chunks * TILE_BYTES <= SLOT_BYTES
        assert tiles <= 16


def test_known_shapes_have_plans_that_use_nearly_all_multiprocessors() -> None:
    for shape in (LLAMA_8B, LLAMA_1B, Shape(4096, 4096, 12288, 6144)):
        plan = make_plan(shape, 132)
        assert plan is not None
        assert plan.num_blocks == 128
    assert make_plan(Shape(4096, 4096, 14337, 6144), 132) is None


@pytest.mark.parametrize("with_qkv", [False, True])
def test_it_compiles(with_qkv: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA builds")
    plan = make_plan(SHAPES[1], 132)
    assert plan is not None
    assert compile_source(SOURCE, definitions(SHAPES[1], plan, with_qkv=with_qkv), (9, 0)).startswith(b"\x7fELF")


def test_shapes_that_were_not_measured_are_not_streamed(device: torch.device) -> None:
    assert token_limit(Shape(64, 64, 128, 128), device) == 0
    with trying(5):
        assert token_limit(Shape(64, 64, 128, 128), device) == 5


CONFIG = replace(PRESETS["tiny"], hidden_size=128, head_dim=32, num_layers=3)


def make_decoder(device: torch.device, **changes: object) -> DenseDecoder:
    torch.manual_seed(3)
    config = replace(CONFIG, **changes)
    shape = attention_shape(config, page_size=16, dtype=torch.bfloat16)
    backend = attention_backend("triton" if device.type == "cuda" else "sdpa", device.type)(shape, device)
    model = DenseDecoder(config, backend, device=device, dtype=torch.bfloat16, max_positions=64)
    for name, weight in model.named_parameters():
        weight.data.normal_(mean=float(name.endswith("norm")), std=0.1)
    return model


def run_pass(model: DenseDecoder, num_tokens: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """What comes out of a pass of one row, and its cache."""
    spec = cache_spec(model.config, torch.bfloat16)
    cache = torch.zeros(
        spec.num_layers, 2, 3, 16, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=device
    )
    position_T = torch.arange(num_tokens, device=device)
    batch = AttentionBatch(
        rows_R=torch.zeros(1, dtype=torch.int32, device=device),
        query_starts_R1=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        kv_lens_R=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        positions_T=position_T,
        slots_T=16 + position_T,
        page_table_MN=torch.tensor([[1, 2]], dtype=torch.int32, device=device),
        max_query_len=num_tokens,
        uniform=True,
    )
    layers = (0, 1, model.config.num_layers, FINAL_HIDDEN)
    hidden, aux = model.forward(position_T.int() + 7, model.layer_caches((cache,)), batch, aux_layers=layers)
    return [hidden, *aux], cache


@torch.inference_mode()
def test_a_streamed_pass_is_the_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_decoder(device), []

    def counted(*args: object) -> tuple[Tensor, Tensor]:
        calls.append(args)
        return module.streamed_layer(*args)

    monkeypatch.setattr(streamed, "streamed_layer", counted)
    (plain, plain_cache) = run_pass(model, 4, device)
    assert not calls
    with trying(4):
        (found, cache) = run_pass(model, 4, device)
        assert len(calls) == 3
        run_pass(model, 5, device)
        assert len(calls) == 3, "a pass of more tokens is streamed"
        batch_invariant(run_pass)(model, 4, device)
        assert len(calls) == 3, "deterministic passes are streamed"
    for one, other in zip((*found, cache), (*plain, plain_cache), strict=True):
        assert distance(one, other) < 2e-2


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True}, {"mlp_bias": True}, {"activation": "gelu_tanh"}, {"residual_multiplier": 0.5}],
    ids=str,
)
@torch.inference_mode()
def test_layers_that_are_not_plain_are_not_streamed(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    names = {field.name for field in dataclasses.fields(CONFIG)}
    assert changes.keys() <= names
    with trying(MAX_TOKENS):
        assert streams(make_decoder(cpu))
        assert not streams(make_decoder(cpu, **changes))


def streams(model: DenseDecoder) -> bool:
    hidden_TC = torch.zeros(2, model.config.hidden_size)
    return streamed.behind_attentions(model.decoder_layers, model.final_norm, hidden_TC) is not None
