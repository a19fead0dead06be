"""What stands between two attentions, in one kernel: against the same operations one after the other."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

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


def make(shape: Shape, *, last: bool, device: str = "cuda") -> LayerWeights:
    def weight(rows: int, size: int) -> Tensor:
        return (torch.randn(rows, size, device=device) * size**-0.5).bfloat16()

    def norm() -> Tensor:
        return (torch.rand(shape.hidden, device=device) + 0.5).bfloat16()

    hidden, query, inner, qkv = shape
    projection = None if last else weight(qkv, hidden)
    return LayerWeights(
        weight(hidden, query), norm(), weight(2 * inner, hidden), weight(hidden, inner), norm(), projection
    )


def inputs(shape: Shape, num_tokens: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    return (
        torch.randn(num_tokens, shape.query, device=device).bfloat16(),
        torch.randn(num_tokens, shape.hidden, device=device).bfloat16(),
    )


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("shape", "num_sms", "num_tokens", "last"),
    [
        # several passes over an odd number of gates; a stage that eight warps share unevenly
        (Shape(128, 192, 640, 256), 4, 8, False),
        # odd numbers of tiles, padding
        (Shape(192, 128, 384, 192), 8, 3, True),
    ],
)
def test_it_computes_the_same_as_fibers_on_the_host(
    shape: Shape, num_sms: int, num_tokens: int, last: bool, tmp_path: Path
) -> None:
    """All but the instructions themselves, which have stand-ins, and their timing."""
    torch.manual_seed(0)
    plan = make_plan(shape, num_sms)
    assert plan is not None
    here, library = Path(__file__).parent, tmp_path / "streamed_layer.so"
    macros = [f"-D{name}={value}" for name, value in definitions(shape, plan, with_qkv=not last).items()]
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I", str(SOURCE.parent), "-I", str(here), *macros]
    subprocess.run(["c++", *options, str(here / "streamed_layer_host.cpp"), "-o", str(library)], check=True)

    weights, (attended, residual) = make(shape, last=last, device="cpu"), inputs(shape, num_tokens, device="cpu")
    out = torch.full((num_tokens, shape.qkv), torch.nan).bfloat16()
    sums, scratch = torch.full_like(residual, torch.nan), torch.full((8 * (shape.hidden + shape.inner),), torch.nan)
    counter = torch.zeros(1, dtype=torch.int64)
    tensors = [attended, residual, weights.mlp_norm_C, weights.next_norm_C, out, sums]
    tensors += [
        scratch[: 8 * shape.hidden],
        scratch[8 * shape.hidden :],
        torch.full((16 * num_sms,), torch.nan),
        counter,
    ]
    boxes = [
        (weights.o_CQ, plan.hidden_tiles),
        (weights.gate_up_2IC, plan.inner_tiles // plan.passes),
        (weights.down_CI, plan.hidden_tiles),
        (weights.o_CQ if weights.qkv_EC is None else weights.qkv_EC, plan.qkv_tiles),
    ]
    maps = [number for matrix, tiles in boxes for number in (matrix.data_ptr(), *matrix.shape, 8 * tiles)]
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_bool
    for _ in range(2):  # the counter goes on from where it was
        addresses = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        numbers = (ctypes.c_long * len(maps))(*maps)
        assert launch(plan.num_blocks, numbers, addresses, num_tokens, ctypes.c_float(EPS)), "blocks wait for ever"
    assert int(counter) == 2 * 3 * plan.num_blocks
    expected = streamed_layer_torch(attended, residual, weights, EPS)
    if last:
        out = out.flatten()[: num_tokens * shape.hidden].view(num_tokens, -1)
    for one, other in zip((out, sums), expected, strict=True):
        assert distance(one, other) < 1e-2


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
