"""From one attention to the next in one kernel, for passes of few tokens: what is read without a pause are weights.

Between two attentions stand four linear layers, two norms and a gate: seven kernels, each of which memory waits for to
start and to end. `streamed_layer.cu` is one for all of them, whose blocks keep their next weights on the way while they
wait for each other's results.

Shape suffixes: T tokens, C hidden size, Q columns of the queries, I inner size of the MLP, E columns of q, k and v.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.cuda_source import load_kernel
from draftloop.kernels.driver import ask, bindings
from draftloop.kernels.linear import sm_count
from draftloop.kernels.rms_norm import add_rms_norm_torch
from draftloop.kernels.silu_mul import silu_mul_torch
from draftloop.kernels.triton_import import gpu_name

SOURCE = Path(__file__).with_name("streamed_layer.cu")
MAX_TOKENS = 8
THREADS = 288
SLOTS, SLOT_BYTES = 4, 32 << 10
"""More slots were no faster; with fewer bytes a block finds room beside one of attention, and begins to read."""
SCRATCH_BYTES, SHARED_BYTES = 32 << 10, 4 << 10
TILE_BYTES = 8 * 64 * 2
"""Of 8 rows of weights and 64 columns."""


class Shape(NamedTuple):
    """Sizes of a layer, as in the suffixes."""

    hidden: int
    query: int
    inner: int
    qkv: int


MEASURED: dict[str, dict[Shape, int]] = {}
"""GPU -> shape -> up to how many tokens the kernel is faster than the seven: see `draftloop.bench.sweep_streamed`."""


class LayerWeights(NamedTuple):
    """What stands between two attentions. bf16 and contiguous."""

    o_CQ: Tensor
    mlp_norm_C: Tensor
    gate_up_2IC: Tensor
    """The gate's rows, then those that it multiplies."""
    down_CI: Tensor
    next_norm_C: Tensor
    qkv_EC: Tensor | None
    """Of the next layer; None behind the last one, whose `next_norm_C` is the model's."""

    @property
    def shape(self) -> Shape:
        """Behind the last layer `qkv` is as wide as the hidden states, which no tile is made for."""
        (hidden, query), inner = self.o_CQ.shape, self.down_CI.shape[1]
        return Shape(hidden, query, inner, hidden if self.qkv_EC is None else self.qkv_EC.shape[0])


_tried: int | None = None


@contextmanager
def trying(limit: int) -> Iterator[None]:
    """Layers are streamed up to so many tokens meanwhile, whatever was measured: for sweeps and tests."""
    global _tried
    before, _tried = _tried, limit
    try:
        yield
    finally:
        _tried = before


def token_limit(shape: Shape, device: torch.device) -> int:
    """Up to how many tokens layers of this shape should be streamed; 0: never."""
    if _tried is not None:
        return _tried
    return MEASURED.get(gpu_name(device), {}).get(shape, 0) if device.type == "cuda" else 0


def streamed_layer_torch(
    attended_TQ: Tensor, residual_TC: Tensor, weights: LayerWeights, eps: float
) -> tuple[Tensor, Tensor]:
    """Reference of `streamed_layer`."""
    attended_TC = F.linear(attended_TQ, weights.o_CQ)
    x_TC, residual_TC = add_rms_norm_torch(attended_TC, residual_TC, weights.mlp_norm_C, eps)
    down_TC = F.linear(silu_mul_torch(F.linear(x_TC, weights.gate_up_2IC)), weights.down_CI)
    x_TC, residual_TC = add_rms_norm_torch(down_TC, residual_TC, weights.next_norm_C, eps)
    return x_TC if weights.qkv_EC is None else F.linear(x_TC, weights.qkv_EC), residual_TC


class Plan(NamedTuple):
    """How the matrices of a shape are divided among blocks, and a block's rows among stages."""

    hidden_tiles: int
    """Tiles of 8 rows that a block owns of o and down."""
    inner_tiles: int
    """Of the gate's rows, and as many of those that it multiplies."""
    qkv_tiles: int
    passes: int
    """Over the columns of gate_up, each with a part of the rows: registers hold the sums of 16 tiles."""
    o_chunks: int
    """Chunks of 64 columns in a stage."""
    gate_up_chunks: int
    down_chunks: int
    qkv_chunks: int
    num_blocks: int


@functools.cache
def make_plan(shape: Shape, num_sms: int) -> Plan | None:
    """None: rows cannot be divided evenly among at most so many blocks, or columns among stages."""
    if any(size % 64 for size in shape):
        return None
    rows = (shape.hidden // 8, shape.inner // 8, shape.qkv // 8)
    hidden, inner, qkv = shares = [_share(tiles, num_sms) for tiles in rows]
    passes = next(n for n in range(1, inner + 1) if inner % n == 0 and inner // n <= 8)
    sizes = (shape.query, shape.hidden, shape.inner, shape.hidden)
    tiles = (hidden, 2 * inner // passes, hidden, qkv)
    o, gate_up, down, last = chunks = [_chunks(size, num_tiles) for size, num_tiles in zip(sizes, tiles, strict=True)]
    num_blocks = max(tiles // share for tiles, share in zip(rows, shares, strict=True))
    if not all(chunks) or max(hidden, qkv) > 16:
        return None
    return Plan(hidden, inner, qkv, passes, o, gate_up, down, last, num_blocks)


def _share(tiles: int, num_sms: int) -> int:
    """Tiles of each block: as few as every block has alike."""
    return next(n for n in range(1, tiles + 1) if tiles % n == 0 and tiles // n <= num_sms)


def _chunks(size: int, tiles: int) -> int:
    """As many as fit in a slot; even numbers keep all eight warps at work. 0: not even one."""
    fitting = [n for n in range(1, size // 64 + 1) if size // 64 % n == 0 and n * tiles * TILE_BYTES <= SLOT_BYTES]
    return max(fitting, key=lambda n: (n % 2 == 0, n), default=0)


def definitions(shape: Shape, plan: Plan, *, with_qkv: bool) -> dict[str, int]:
    """The macros of streamed_layer.cu."""
    sizes = {**shape._asdict(), **plan._asdict(), "with_qkv": int(with_qkv)}
    memory = {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "scratch_bytes": SCRATCH_BYTES, "shared_bytes": SHARED_BYTES}
    return {name.upper(): value for name, value in {**sizes, **memory}.items() if name != "num_blocks"}


class _Turns:
    """Kernels whose blocks wait for each other must not share a GPU: outside of a capture, where phases may run side by
    side while they are warmed up, each waits for the one before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._done: torch.cuda.Event | None = None

    def begin(self, stream: torch.cuda.Stream) -> None:
        if self._done is not None:
            stream.wait_event(self._done)

    def end(self, stream: torch.cuda.Stream) -> None:
        self._done = self._done or torch.cuda.Event()
        self._done.record(stream)


class _Streamer:
    """Kernels and memory of one shape on one device. One at a time uses the memory: see `_Turns`."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        plan = make_plan(shape, sm_count(device))
        assert plan is not None, shape
        assert not torch.cuda.is_current_stream_capturing(), "run once before it is captured"
        self.shape, self.plan = shape, plan
        self._kernels: dict[bool, Any] = {}
        self._device = device
        self._hidden = torch.empty(MAX_TOKENS * shape.hidden, dtype=torch.bfloat16, device=device)
        self._inner = torch.empty(MAX_TOKENS * shape.inner, dtype=torch.bfloat16, device=device)
        num_blocks = shape.hidden // 8 // plan.hidden_tiles
        self._squares = torch.empty(2 * num_blocks * MAX_TOKENS, dtype=torch.float32, device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams use it next

    def kernel(self, *, with_qkv: bool) -> Any:
        if with_qkv not in self._kernels:
            found = load_kernel(
                SOURCE, definitions(self.shape, self.plan, with_qkv=with_qkv), SOURCE.stem, self._device
            )
            limit = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            ask("cuFuncSetAttribute", found, limit, _shared_bytes())
            self._kernels[with_qkv] = found
        return self._kernels[with_qkv]

    def launch(
        self, attended_TQ: Tensor, residual_TC: Tensor, weights: LayerWeights, out: Tensor, sum_TC: Tensor, eps: float
    ) -> None:
        plan, qkv = self.plan, weights.qkv_EC
        maps = [
            _tensor_map(matrix.data_ptr(), *matrix.shape, 8 * tiles)
            for matrix, tiles in (
                (weights.o_CQ, plan.hidden_tiles),
                (weights.gate_up_2IC, plan.inner_tiles // plan.passes),
                (weights.down_CI, plan.hidden_tiles),
                (weights.o_CQ, plan.hidden_tiles) if qkv is None else (qkv, plan.qkv_tiles),
            )
        ]
        tensors = (attended_TQ, residual_TC, weights.mlp_norm_C, weights.next_norm_C, out, sum_TC)
        tensors = (*tensors, self._hidden, self._inner, self._squares, self._counter)
        values: list[Any] = [ctypes.create_string_buffer(one, len(one)) for one in maps]
        values += [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        values += [ctypes.c_int(attended_TQ.shape[0]), ctypes.c_float(eps)]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = _launch_config(plan.num_blocks, torch.cuda.current_stream(self._device).cuda_stream)
        ask("cuLaunchKernelEx", config, self.kernel(with_qkv=qkv is not None), ctypes.addressof(addresses), 0)


_turns = _Turns()
_streamers: dict[tuple[Shape, torch.device], _Streamer] = {}


def _shared_bytes() -> int:
    return SLOTS * SLOT_BYTES + SCRATCH_BYTES + SHARED_BYTES


def _launch_config(num_blocks: int, stream: int) -> Any:
    """It may start before the kernel in front has ended, of which it waits for the results itself."""
    driver = bindings()
    config, early = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = num_blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes, config.hStream = _shared_bytes(), stream
    config.attrs, config.numAttrs = [early], 1
    return config


@functools.lru_cache(maxsize=4096)
def _tensor_map(address: int, rows: int, columns: int, box_rows: int) -> bytes:
    """How the copy engine finds boxes of a bf16 matrix: some rows, 64 columns, swizzled by 128 bytes."""
    driver = bindings()
    small, large = driver.cuuint32_t, driver.cuuint64_t
    found = ask(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [large(columns), large(rows)],
        [large(2 * columns)],
        [small(64), small(box_rows)],
        [small(1), small(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(found.getPtr()), 128)


def streamed_layer_cuda(
    attended_TQ: Tensor, residual_TC: Tensor, weights: LayerWeights, eps: float
) -> tuple[Tensor, Tensor]:
    """Twin of `streamed_layer_torch`, for bf16 and up to `MAX_TOKENS` tokens, on compute capability 9.0.

    Sums do not depend on the number of tokens.
    """
    device, num_tokens = attended_TQ.device, attended_TQ.shape[0]
    assert num_tokens <= MAX_TOKENS
    for tensor in (attended_TQ, residual_TC, *weights):
        assert tensor is None or (tensor.dtype is torch.bfloat16 and tensor.is_contiguous())
    shape = weights.shape
    sum_TC = torch.empty_like(residual_TC)
    out = torch.empty(num_tokens, shape.qkv, dtype=torch.bfloat16, device=device)
    if not num_tokens:
        return out, sum_TC
    with _turns.lock:
        if (shape, device) not in _streamers:
            _streamers[shape, device] = _Streamer(shape, device)
        captured, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(device)
        if not captured:
            _turns.begin(stream)
        _streamers[shape, device].launch(attended_TQ, residual_TC, weights, out, sum_TC, eps)
        if not captured:
            _turns.end(stream)
    return out, sum_TC


def streamed_layer(
    attended_TQ: Tensor, residual_TC: Tensor, weights: LayerWeights, eps: float
) -> tuple[Tensor, Tensor]:
    """What attention gave and the residual stream -> the next layer's q, k and v, [T, E], and the stream there, [T, C].

    That is `linear`, `add_rms_norm`, `gated_linear` with silu, `linear`, `add_rms_norm` and `linear`, one after the
    other; behind the last layer, the normed hidden states, [T, C]. Linear layers have no biases.
    """
    run = streamed_layer_cuda if attended_TQ.is_cuda else streamed_layer_torch
    return run(attended_TQ, residual_TC, weights, eps)
