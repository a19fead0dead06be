"""A pass of few tokens through all layers of a decoder in one kernel, which reads weights without a pause.

A layer is nine kernels otherwise, each of which memory waits for to start and to end. `cuda/streamed_pass.cu` is one
for all layers, whose blocks keep their next weights on the way while they attend and wait for each other's results.

Shape suffixes: L layers, T tokens, R rows, C hidden size, Q columns of the queries, I inner size of the MLP, E columns
of q, k and v, P pages, S tokens per page, G key/value heads, D head size, X positions.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.cuda_source import load_kernel
from draftloop.kernels.driver import ask, bindings
from draftloop.kernels.linear import sm_count
from draftloop.kernels.streamed_plan import (
    MAX_QUERIES,
    MAX_SPLITS,
    MAX_TOKENS,
    MEMORY_BYTES,
    SETS,
    THREADS,
    Plan,
    Shape,
    definitions,
    make_plan,
)

SOURCE = Path(__file__).parent / "cuda" / "streamed_pass.cu"
MAPS_BYTES, TENSORS_BYTES = 4 * 128, 64
"""Of the kernel's `Layer`: maps of matrices, and `Tensors` with the padding behind them."""


class LayerWeights(NamedTuple):
    """Of a layer. bf16 and contiguous."""

    attention_norm_C: Tensor
    qkv_EC: Tensor
    o_CQ: Tensor
    mlp_norm_C: Tensor
    gate_up_2IC: Tensor
    """The gate's rows, then those that it multiplies."""
    down_CI: Tensor


class PassWeights(NamedTuple):
    """Of a decoder whose layers are alike and plain."""

    layers: Sequence[LayerWeights]
    final_norm_C: Tensor
    cos_sin_XD: Tensor
    """fp32: cosines, then sines."""
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Of scores."""

    @property
    def shape(self) -> Shape:
        first = self.layers[0]
        (hidden, query), inner = first.o_CQ.shape, first.down_CI.shape[1]
        return Shape(hidden, inner, query // self.head_dim, self.num_kv_heads, self.head_dim)


class PassBatch(NamedTuple):
    """Which tokens attend to what: the part of `attention.base.AttentionBatch` that is needed here."""

    rows_R: Tensor
    query_starts_R1: Tensor
    kv_lens_R: Tensor
    page_table_MN: Tensor
    positions_T: Tensor
    slots_T: Tensor


class KernelPass(ctypes.Structure):
    """`Pass` of layers.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "embedded", "residuals", "out")),
        *((name, ctypes.c_void_p) for name in ("hidden", "qkv", "attended", "inner", "squares")),
        *((name, ctypes.c_void_p) for name in ("partial_results", "partial_sums", "row_counters", "counter")),
        *((name, ctypes.c_void_p) for name in (*PassBatch._fields, "cos_sin")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_width", "num_splits")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_layers", "num_tokens")),
        ("eps", ctypes.c_float),
        ("set_words", ctypes.c_int),
    ]


class Scratch:
    """What blocks hand on to each other. One pass at a time uses it."""

    def __init__(self, shape: Shape, plan: Plan, device: torch.device) -> None:
        sizes = {
            "hidden": (2, MAX_TOKENS, shape.hidden),
            "qkv": (MAX_TOKENS, shape.qkv),
            "attended": (MAX_TOKENS, shape.query),
            "inner": (MAX_TOKENS, shape.inner),
            "squares": (2, MAX_TOKENS, shape.hidden // 8, 2),
            "partial_sums": (plan.num_blocks, MAX_QUERIES, 2, 2),
            "partial_results": (plan.num_blocks, MAX_QUERIES, shape.head_dim, 2),
        }
        parts = {name: math.prod(size) for name, size in sizes.items()}
        assert all(count % 8 == 0 for count in parts.values()), "the kernel writes 16 bytes at once"
        sets_SN = torch.zeros(SETS, sum(parts.values()), dtype=torch.bfloat16, device=device)
        first = sets_SN[0].split(list(parts.values()))
        self.set_words = sets_SN.shape[1] // 2
        self.tensors = {name: part.view(size) for (name, size), part in zip(sizes.items(), first, strict=True)}
        self.tensors["row_counters"] = torch.zeros(plan.num_blocks, dtype=torch.int64, device=device)
        self.tensors["counter"] = torch.zeros(1, dtype=torch.int64, device=device)


def fill_in(
    weights: PassWeights,
    layers_address: int,
    scratch: Scratch,
    embedded_TC: Tensor,
    out_TC: Tensor,
    residuals_LTC: Tensor,
    batch: PassBatch,
    num_blocks: int,
) -> KernelPass:
    """The kernel's argument."""
    num_rows = batch.rows_R.shape[0]
    tensors = {"embedded": embedded_TC, "out": out_TC, "residuals": residuals_LTC, "cos_sin": weights.cos_sin_XD}
    tensors |= {**scratch.tensors, **batch._asdict()}
    return KernelPass(
        layers=layers_address,
        num_rows=num_rows,
        table_width=batch.page_table_MN.shape[1],
        num_splits=max(min(num_blocks // (num_rows * weights.num_kv_heads), MAX_SPLITS), 1),
        scale=weights.scale * 1.4426950408889634,
        num_layers=len(weights.layers),
        num_tokens=embedded_TC.shape[0],
        eps=weights.eps,
        set_words=scratch.set_words,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )


def layer_addresses(layer: LayerWeights, kv_2PSGD: Tensor) -> list[int]:
    """Of `Tensors` of layers.cuh."""
    return [tensor.data_ptr() for tensor in (layer.attention_norm_C, layer.mlp_norm_C, *kv_2PSGD)]


class Box(NamedTuple):
    """What is copied of a matrix at once."""

    matrix_HRC: Tensor
    """As halves, of which the same rows are copied."""
    rows: int
    chunks: int
    """Of 64 columns."""


def boxes(layer: LayerWeights, plan: Plan) -> list[Box]:
    """Of the matrices of a layer, in the order of layers.cuh."""
    gate_up_2IC = layer.gate_up_2IC.view(2, -1, layer.gate_up_2IC.shape[1])
    return [
        Box(layer.qkv_EC[None], 8 * plan.qkv_tiles, plan.qkv_chunks),
        Box(layer.o_CQ[None], 8 * plan.hidden_tiles, plan.o_chunks),
        Box(gate_up_2IC, 8 * plan.inner_tiles // plan.passes, plan.gate_up_chunks),
        Box(layer.down_CI[None], 8 * plan.hidden_tiles, plan.down_chunks),
    ]


class _Turns:
    """Passes share scratch memory: outside of a capture, where phases may run side by side while they are warmed up,
    each waits for the one before."""

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
    """A decoder's layers and caches as kernels find them, and their scratch memory."""

    def __init__(self, weights: PassWeights, caches: Sequence[Tensor]) -> None:
        self._device, self._shape = weights.final_norm_C.device, weights.shape
        plan = make_plan(self._shape, sm_count(self._device))
        assert plan is not None, self._shape
        assert not torch.cuda.is_current_stream_capturing(), "run once before it is captured"
        self._plan, self._kernels = plan, dict[int, Any]()
        self._page_size = caches[0].shape[2]
        table = b"".join(_packed_layer(layer, cache, plan) for layer, cache in zip(weights.layers, caches, strict=True))
        self._scratch = Scratch(self._shape, plan, self._device)
        table += bytes(MAPS_BYTES)  # behind the last layer comes the model's norm
        table += weights.final_norm_C.data_ptr().to_bytes(TENSORS_BYTES, "little")
        # maps must be aligned to 64 bytes; allocations are to 256
        self._layers = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(self._device)
        torch.cuda.current_stream(self._device).synchronize()  # other streams use it next

    def _kernel(self, max_query_len: int) -> Any:
        sizes = definitions(self._shape, self._plan, max_query_len=max_query_len, page_size=self._page_size)
        key = sizes["QUERY_TILES"]
        if key not in self._kernels:
            found = load_kernel(SOURCE, sizes, SOURCE.stem, self._device)
            limit = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            ask("cuFuncSetAttribute", found, limit, MEMORY_BYTES)
            self._kernels[key] = found
        return self._kernels[key]

    def launch(
        self,
        weights: PassWeights,
        embedded_TC: Tensor,
        out_TC: Tensor,
        residuals_LTC: Tensor,
        batch: PassBatch,
        max_query_len: int,
    ) -> None:
        kernel, blocks = self._kernel(max_query_len), self._plan.num_blocks
        one = fill_in(
            weights, self._layers.data_ptr(), self._scratch, embedded_TC, out_TC, residuals_LTC, batch, blocks
        )
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(one))
        config = _launch_config(self._plan, torch.cuda.current_stream(self._device).cuda_stream)
        ask("cuLaunchKernelEx", config, kernel, ctypes.addressof(addresses), 0)


_turns = _Turns()
_streamers: dict[tuple[int, ...], _Streamer] = {}


def _packed_layer(layer: LayerWeights, kv_2PSGD: Tensor, plan: Plan) -> bytes:
    """`Layer` of layers.cuh."""
    maps = [_box_map(box) for box in boxes(layer, plan)]
    addresses = b"".join(address.to_bytes(8, "little") for address in layer_addresses(layer, kv_2PSGD))
    return b"".join(maps) + addresses.ljust(TENSORS_BYTES, b"\0")


def _launch_config(plan: Plan, stream: int) -> Any:
    """All blocks run at once, or none: they wait for each other."""
    driver = bindings()
    config, together = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    together.value.cooperative = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.num_blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes, config.hStream = MEMORY_BYTES, stream
    config.attrs, config.numAttrs = [together], 1
    return config


def _box_map(box: Box) -> bytes:
    halves, rows, columns = box.matrix_HRC.shape
    sizes, strides = (64, rows, halves, columns // 64), (columns, rows * columns, 64)
    return _tensor_map(box.matrix_HRC, sizes, strides, (64, box.rows, halves, box.chunks))


def _tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """How the copy engine finds boxes of a bf16 tensor, swizzled by 128 bytes. The last dimension comes first, and has
    no stride."""
    driver = bindings()
    found = ask(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        tensor.data_ptr(),
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(2 * stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(found.getPtr()), 128)


def streamed_pass(
    weights: PassWeights, embedded_TC: Tensor, caches: Sequence[Tensor], batch: PassBatch, *, max_query_len: int
) -> tuple[Tensor, Tensor]:
    """Hidden states behind the final norm, [T, C], and the residual stream behind each layer, [L, T, C].

    Up to `streamed_plan.MAX_TOKENS` tokens in bf16 on a GPU of compute capability 9.0, where `can_attend`; caches are
    [2, P, S, G, D], to which this pass's keys and values are written. Attention is causal. `max_query_len`: tokens of a
    row, at most.

    Results repeat bit for bit. Sums of linear layers do not depend on the number of tokens; those of attention depend
    on how keys are divided, as those of the kernels for many tokens do.
    """
    device = embedded_TC.device
    for tensor in (embedded_TC, *caches, weights.final_norm_C, *(one for layer in weights.layers for one in layer)):
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in (*batch, weights.cos_sin_XD))
    out_TC = torch.empty_like(embedded_TC)
    residuals_LTC = embedded_TC.new_empty(len(weights.layers), *embedded_TC.shape)
    with _turns.lock:
        tensors = [*(tensor for layer in weights.layers for tensor in layer), weights.final_norm_C, *caches]
        key = (*weights.shape, *caches[0].shape, *(tensor.data_ptr() for tensor in tensors))
        if key not in _streamers:
            _streamers[key] = _Streamer(weights, caches)
        captured, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(device)
        if not captured:
            _turns.begin(stream)
        _streamers[key].launch(weights, embedded_TC, out_TC, residuals_LTC, batch, max_query_len)
        if not captured:
            _turns.end(stream)
    return out_TC, residuals_LTC
