"""A pass of few tokens in one kernel: against a decoder's own pass."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.registry import attention_backend
from draftloop.attention.triton import TritonBackend
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.cuda_source import compile_source
from draftloop.kernels.streamed_pass import (
    MAPS_BYTES,
    SOURCE,
    TENSORS_BYTES,
    PassBatch,
    PassWeights,
    Scratch,
    boxes,
    fill_in,
    layer_addresses,
    streamed_pass,
)
from draftloop.kernels.streamed_plan import (
    MAX_SUMS,
    MAX_TOKENS,
    MEMORY_BYTES,
    SLOT_BYTES,
    TILE_BYTES,
    Shape,
    can_attend,
    definitions,
    make_plan,
    token_limit,
    trying,
)
from draftloop.models import dense, streamed
from draftloop.models.decoder import FINAL_HIDDEN
from draftloop.models.dense import DenseDecoder, attention_shape, cache_spec
from draftloop.models.presets import PRESETS

LLAMA_8B, LLAMA_1B = Shape(4096, 14336, 32, 8, 128), Shape(2048, 8192, 32, 8, 64)
SMOLLM2 = Shape(576, 1536, 9, 3, 64)
MAX_POSITIONS = 16384


class Case(NamedTuple):
    """A model, and a pass: how many tokens each row has, and how many keys there are behind them."""

    shape: Shape
    num_layers: int
    page_size: int
    query_lens: list[int]
    old_lens: list[int | None]
    """None: a row of padding."""
    uniform: bool = True
    padding: int = 0
    """Tokens behind those of the last row."""
    num_sms: int = 8


CASES = [
    # 4 splits; the last tile and the last page are not full
    Case(Shape(128, 192, 4, 2, 64), 3, 16, [5], [71]),
    # a split for each row, a tile that is full, no keys but one's own, padding; an odd number of heads
    Case(Shape(192, 128, 3, 1, 128), 2, 32, [1] * 8, [0, 16, 17, None, 1, 33, 64, 40]),
    # more tiles than warps; 32 queries; several passes over an odd number of gates
    Case(Shape(128, 640, 4, 1, 64), 2, 64, [8], [610], num_sms=4),
    # rows of unequal lengths, one without tokens, and tokens without a row
    Case(Shape(64, 64, 2, 2, 64), 2, 16, [3, 0, 2], [30, 40, 7], uniform=False, padding=2, num_sms=16),
]


def make_decoder(case: Case, device: torch.device, **changes: object) -> DenseDecoder:
    torch.manual_seed(3)
    hidden, inner, num_heads, num_kv_heads, head_dim = case.shape
    config = replace(
        PRESETS["tiny"], hidden_size=hidden, intermediate_size=inner, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, num_layers=case.num_layers,
    )  # fmt: skip
    config = replace(config, **changes)
    shape = attention_shape(config, page_size=case.page_size, dtype=torch.bfloat16)
    backend = attention_backend("triton" if device.type == "cuda" else "sdpa", device.type)(shape, device)
    model = DenseDecoder(config, backend, device=device, dtype=torch.bfloat16, max_positions=MAX_POSITIONS)
    for name, weight in model.named_parameters():
        spread = 0.1 if name.endswith("norm") else weight.shape[-1] ** -0.5
        weight.data.normal_(mean=float(name.endswith("norm")), std=spread)
    return model


def make_batch(case: Case, device: torch.device) -> AttentionBatch:
    """Pages of rows stand in reverse order, behind page 0."""
    rows, page_size = len(case.query_lens), case.page_size
    lengths = [0 if old is None else old + new for old, new in zip(case.old_lens, case.query_lens, strict=True)]
    width = max(-(-max(lengths) // page_size), 1)
    table_RN = torch.arange(rows * width, 0, -1, dtype=torch.int32).view(rows, width)
    positions, slots = [], []
    for row, (old, count) in enumerate(zip(case.old_lens, case.query_lens, strict=True)):
        for position in range(old or 0, (old or 0) + count):
            page = 0 if old is None else int(table_RN[row, position // page_size])
            positions.append(position)
            slots.append(page * page_size + position % page_size)
    positions, slots = positions + [0] * case.padding, slots + [0] * case.padding
    starts = torch.tensor([0, *case.query_lens]).cumsum(0)
    batch = AttentionBatch(
        rows_R=torch.arange(rows, dtype=torch.int32),
        query_starts_R1=starts.int(),
        kv_lens_R=torch.tensor(lengths, dtype=torch.int32),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        page_table_MN=table_RN,
        max_query_len=max(case.query_lens),
        uniform=case.uniform,
    )
    tensors = {name: one.to(device) for name, one in vars(batch).items() if isinstance(one, Tensor)}
    return replace(batch, **tensors)


def make_cache(case: Case, batch: AttentionBatch, device: torch.device) -> Tensor:
    """What stands behind the old keys is no number."""
    spec = cache_spec(make_config(case), torch.bfloat16)
    num_pages = batch.page_table_MN.numel() + 1
    sizes = (spec.num_layers, 2, num_pages, case.page_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.full(sizes, torch.nan, dtype=torch.bfloat16)
    for row, old in enumerate(case.old_lens):
        position = torch.arange(old or 0)
        pages = batch.page_table_MN.cpu()[row, position // case.page_size].long()
        cache[:, :, pages, position % case.page_size] = torch.randn(
            spec.num_layers, 2, len(position), spec.num_kv_heads, spec.head_dim
        ).bfloat16()
    return cache.to(device)


def make_config(case: Case):
    return replace(
        PRESETS["tiny"], num_layers=case.num_layers, num_heads=case.shape.num_heads,
        num_kv_heads=case.shape.num_kv_heads, head_dim=case.shape.head_dim, hidden_size=case.shape.hidden,
    )  # fmt: skip


def run_pass(model: DenseDecoder, batch: AttentionBatch, cache: Tensor) -> list[Tensor]:
    """The hidden states, and the residual stream in front of each layer and behind the last."""
    token_ids_T = torch.arange(len(batch.positions_T), device=cache.device) + 7
    layers = (*range(model.config.num_layers + 1), FINAL_HIDDEN)
    hidden_TC, aux = model.forward(token_ids_T, model.layer_caches((cache,)), batch, aux_layers=layers)
    assert torch.equal(aux.pop(), hidden_TC)
    return [hidden_TC, *aux]


def find_weights(model: DenseDecoder, batch: AttentionBatch) -> PassWeights | None:
    """What the kernel would read, had the decoder the backend that GPUs have."""
    embedded_TC = torch.zeros(len(batch.positions_T), model.config.hidden_size, dtype=torch.bfloat16)
    backend = TritonBackend(model.backend.shape, torch.device("cpu"))
    return streamed.streamed_weights(
        model.decoder_layers, model.final_norm, model.cos_sin_tables, embedded_TC, batch, backend
    )


def stand_in_map(matrix_HRC: Tensor, rows: int, chunks: int) -> bytes:
    numbers = (matrix_HRC.data_ptr(), *matrix_HRC.shape, rows, chunks)
    return b"".join(n.to_bytes(8, "little") for n in numbers).ljust(128, b"\0")


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def check(case: Case, found: Sequence[Tensor], expected: Sequence[Tensor], cache: Tensor, plain_cache: Tensor) -> None:
    """All but the results of padding, which are anything."""
    rows = torch.arange(len(case.query_lens)).repeat_interleave(torch.tensor(case.query_lens)).tolist()
    live = [token for token, row in enumerate(rows) if case.old_lens[row] is not None]
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert distance(one[live], other[live]) < 5e-3 * (2 + case.num_layers), f"tensor {index} of {len(found)}"
    for layer in range(case.num_layers):
        for side in range(2):
            # page 0 is nobody's
            one, other = (tensor[layer, side, 1:].nan_to_num(7) for tensor in (cache, plain_cache))
            assert distance(one, other) < 1e-2, f"{('keys', 'values')[side]} of layer {layer}"


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.shape)))
@torch.inference_mode()
def test_it_computes_the_same_as_fibers_on_the_host(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the instructions themselves, which have stand-ins, and their timing."""
    device = torch.device("cpu")
    model, batch = make_decoder(case, device), make_batch(case, device)
    plan = make_plan(case.shape, case.num_sms)
    assert plan is not None
    here, library = Path(__file__).parent, tmp_path / "streamed_pass.so"
    sizes = definitions(case.shape, plan, max_query_len=batch.max_query_len, page_size=case.page_size)
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I", str(SOURCE.parent), "-I", str(here)]
    options += [f"-D{name}={value}" for name, value in sizes.items()]
    subprocess.run(["c++", *options, str(here / "streamed_pass_host.cpp"), "-o", str(library)], check=True)
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_bool

    plain_cache = make_cache(case, batch, device)
    cache = plain_cache.clone()
    expected = run_pass(model, batch, plain_cache)
    monkeypatch.setattr(streamed, "sm_count", lambda _: case.num_sms)
    with trying(MAX_TOKENS):
        weights = find_weights(model, batch)
    assert weights is not None
    scratch, table = Scratch(case.shape, plan, device), b""
    for layer, kv_2PSGD in zip(weights.layers, cache, strict=True):
        table += b"".join(stand_in_map(*box) for box in boxes(layer, plan))
        table += b"".join(n.to_bytes(8, "little") for n in layer_addresses(layer, kv_2PSGD)).ljust(TENSORS_BYTES, b"\0")
    table += bytes(MAPS_BYTES)
    table += weights.final_norm_C.data_ptr().to_bytes(TENSORS_BYTES, "little")
    aligned = torch.zeros(len(table) + 64, dtype=torch.uint8)
    start = -aligned.data_ptr() % 64
    aligned[start:][: len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)

    out, residuals = (
        torch.full_like(expected[0], torch.nan),
        torch.full((case.num_layers, *expected[0].shape), torch.nan),
    )
    residuals = residuals.bfloat16()
    tables = PassBatch(**{name: getattr(batch, name) for name in PassBatch._fields})
    for _ in range(2):  # counters go on from where they were
        place = aligned.data_ptr() + start
        one = fill_in(weights, place, scratch, expected[1], out, residuals, tables, plan.num_blocks)
        before = out.clone()
        assert launch(plan.num_blocks, ctypes.byref(one)), "blocks wait for ever"
    assert torch.equal(bits(out), bits(before)), "who is faster changes results"
    check(case, [out, expected[1], *residuals], expected, cache, plain_cache)


REAL_SHAPES = [
    Case(LLAMA_8B, 2, 16, [6], [640]),
    Case(LLAMA_8B, 2, 16, [1], [8123]),
    Case(LLAMA_8B, 2, 16, [1] * 8, [640, 1, 300, 17, None, 2500, 16, 640]),
    Case(LLAMA_1B, 3, 16, [1], [513]),
    Case(LLAMA_1B, 3, 32, [4, 4], [513, 90]),
    Case(SMOLLM2, 4, 16, [6], [640]),
]


def name(case: Case) -> str:
    return f"{'real_shapes-' * (case in REAL_SHAPES)}{'-'.join(map(str, case.shape))}-{case.query_lens}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *REAL_SHAPES], ids=name)
@torch.inference_mode()
def test_it_is_the_pass_of_many_kernels_and_the_same_bits_each_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs and out of them; weights that overtake loads of those before them would show here."""
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
        first = run_pass(model, batch, cache)
        assert len(calls) == 1
        check(case, first, expected, cache, plain_cache)
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
)
def test_plans_divide_rows_and_columns_and_fit(
    hidden: int, inner: int, group: int, num_kv_heads: int, head_dim: int, num_sms: int
) -> None:
    shape = Shape(hidden, inner, group * num_kv_heads, num_kv_heads, head_dim)
    plan = make_plan(shape, num_sms)
    if plan is None:
        return
    assert plan.num_blocks <= num_sms
    assert MEMORY_BYTES <= 227 << 10
    for size, tiles in ((hidden, plan.hidden_tiles), (inner, plan.inner_tiles), (shape.qkv, plan.qkv_tiles)):
        assert size % (8 * tiles) == 0
    assert plan.inner_tiles % plan.passes == 0
    for size, tiles, chunks in (
        (shape.query, plan.hidden_tiles, plan.o_chunks),
        (hidden, 2 * plan.inner_tiles // plan.passes, plan.gate_up_chunks),
        (inner, plan.hidden_tiles, plan.down_chunks),
        (hidden, plan.qkv_tiles, plan.qkv_chunks),
    ):
        assert size % (64 * chunks) == 0
        assert tiles * chunks * TILE_BYTES <= SLOT_BYTES
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


@pytest.mark.parametrize(("shape", "max_query_len"), [(LLAMA_8B, 8), (SMOLLM2, 6)])
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
