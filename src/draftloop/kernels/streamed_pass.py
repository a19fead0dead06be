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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.launch import find_kernel, launch
from draftloop.kernels.linear import sm_count
from draftloop.kernels.linear_planes import Planes
from draftloop.kernels.streamed_plan import (
    BF16,
    FP8,
    INT4,
    INT4_ZEROS,
    MAX_QUERIES,
    MAX_SPLITS,
    MAX_TOKENS,
    SETS,
    THREADS,
    Format,
    Plan,
    Shape,
    definitions,
    make_plan,
)
from draftloop.kernels.tensor_map import MAP_BYTES, Box, tensor_map

SOURCE = Path(__file__).parent / "cuda" / "streamed_pass.cu"
TENSORS_BYTES = 64
"""Of the kernel's `Tensors`."""


Matrix = Tensor | Planes
"""bf16 and contiguous, or packed."""


class LayerWeights(NamedTuple):
    """Of a layer. Norms are bf16 and contiguous."""

    attention_norm_C: Tensor
    qkv_EC: Matrix
    o_CQ: Matrix
    mlp_norm_C: Tensor
    gate_up_2IC: Matrix
    """The gate's rows, then those that it multiplies."""
    down_CI: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order of layers.cuh."""
        return self.qkv_EC, self.o_CQ, self.gate_up_2IC, self.down_CI

    @property
    def tensors(self) -> list[Tensor]:
        """All that the kernel reads."""
        parts = [
            (one,) if isinstance(one, Tensor) else (one.packed_BNJ, one.scale, one.zero_GN, one.row_scale_N)
            for one in self.matrices
        ]
        found = (self.attention_norm_C, self.mlp_norm_C, *(part for one in parts for part in one))
        return [tensor for tensor in found if tensor is not None]


def format_of(matrix: Matrix) -> Format | None:
    """None: the kernel does not know it."""
    if isinstance(matrix, Tensor):
        return BF16 if matrix.dtype is torch.bfloat16 else None
    if matrix.row_scale_N is None or matrix.packed_BNJ.dtype is not torch.int16:
        return None  # scales of blocks; or columns that are not packed
    if matrix.num_planes == FP8.planes:
        return FP8 if matrix.group == 0 else None
    if matrix.group != INT4.chunk_columns or matrix.scale.dtype is not torch.float16:
        return None
    return INT4 if matrix.zero_GN is None else INT4_ZEROS


def size_of(matrix: Matrix) -> tuple[int, int]:
    """Rows and columns."""
    if isinstance(matrix, Tensor):
        return matrix.shape[0], matrix.shape[1]
    blocks, rows, _ = matrix.packed_BNJ.shape
    return rows, blocks * INT4.chunk_columns


def shape_of(layer: LayerWeights, num_kv_heads: int, head_dim: int) -> Shape:
    """Of a layer whose matrices are all in one known format."""
    (hidden, query), (_, inner) = size_of(layer.o_CQ), size_of(layer.down_CI)
    weights = format_of(layer.o_CQ)
    assert weights is not None
    return Shape(hidden, inner, query // head_dim, num_kv_heads, head_dim, weights)


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
        return shape_of(self.layers[0], self.num_kv_heads, self.head_dim)


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
        *((name, ctypes.c_void_p) for name in ("partial_results", "partial_sums", "counter")),
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
    scales = [None if isinstance(one, Tensor) else one.row_scale_N for one in layer.matrices]
    tensors = (layer.attention_norm_C, layer.mlp_norm_C, *kv_2PSGD, *scales)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def boxes(layer: LayerWeights, plan: Plan) -> list[Box]:
    """Of the matrices of a layer and what they consist of, in the order of layers.cuh."""
    qkv, o, gate_up, down = layer.matrices
    return [
        *_boxes(qkv, 1, plan.qkv_tiles, plan.qkv_chunks),
        *_boxes(o, 1, plan.hidden_tiles, plan.o_chunks),
        *_boxes(gate_up, 2, plan.inner_tiles // plan.passes, plan.gate_up_chunks),
        *_boxes(down, 1, plan.hidden_tiles, plan.down_chunks),
    ]


def _boxes(matrix: Matrix, halves: int, tiles: int, chunks: int) -> list[Box]:
    """Of the same rows of each half."""
    rows, columns = size_of(matrix)[0] // halves, size_of(matrix)[1]
    if isinstance(matrix, Tensor):
        sizes, strides = (64, rows, halves, columns // 64), (columns, rows * columns, 64)
        return [Box(matrix, sizes, strides, (64, 8 * tiles, halves, chunks))]
    blocks, _, words = matrix.packed_BNJ.shape
    lines = rows * words // 64
    sizes, strides = (64, lines, halves, blocks), (64, lines * 64, halves * lines * 64)
    found = [Box(matrix.packed_BNJ, sizes, strides, (64, 8 * tiles * words // 64, halves, chunks))]
    sizes, strides = (8, rows // 8, halves, blocks), (8, rows, halves * rows)
    groups = (matrix.scale, matrix.zero_GN) if matrix.group else ()
    found += [Box(one, sizes, strides, (8, tiles, halves, chunks), False) for one in groups if one is not None]
    return found


def kernel_layers(
    weights: PassWeights, caches: Sequence[Tensor], plan: Plan, make_map: Callable[[Box], bytes]
) -> bytes:
    """`Layer`s of layers.cuh; in the place of one more the model's norm."""
    layers = []
    for layer, kv_2PSGD in zip(weights.layers, caches, strict=True):
        addresses = b"".join(address.to_bytes(8, "little") for address in layer_addresses(layer, kv_2PSGD))
        layers.append(b"".join(make_map(box) for box in boxes(layer, plan)) + addresses.ljust(TENSORS_BYTES, b"\0"))
    layers.append(bytes(4 * weights.shape.weights.kinds * MAP_BYTES))
    return b"".join(layers) + weights.final_norm_C.data_ptr().to_bytes(TENSORS_BYTES, "little")


class _Turns:
    """Passes share scratch memory: outside of a capture, where phases may run side by side while they are warmed up,
    each waits for the one before. Graphs of a decoder are replayed by one stream, and two of its passes could not run
    at once: a block takes a multiprocessor's shared memory, and shapes worth streaming have blocks for most of them.
    """

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
        self._plan, self._page_size = plan, caches[0].shape[2]
        self._scratch = Scratch(self._shape, plan, self._device)
        table = kernel_layers(weights, caches, plan, tensor_map)
        # maps must be aligned to 64 bytes; allocations are to 256
        self._layers = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(self._device)
        torch.cuda.current_stream(self._device).synchronize()  # other streams use it next

    def _kernel(self, max_query_len: int) -> Any:
        sizes = definitions(self._shape, self._plan, max_query_len=max_query_len, page_size=self._page_size)
        return find_kernel(SOURCE, sizes, self._device, memory_bytes=self._shape.weights.memory_bytes)

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
        memory_bytes = self._shape.weights.memory_bytes
        launch(kernel, (blocks, 1, 1), THREADS, [one], self._device, memory_bytes=memory_bytes, all_at_once=True)


_turns = _Turns()
_streamers: dict[tuple[object, ...], _Streamer] = {}


def streamed_pass(
    weights: PassWeights, embedded_TC: Tensor, caches: Sequence[Tensor], batch: PassBatch, *, max_query_len: int
) -> tuple[Tensor, Tensor]:
    """Hidden states behind the final norm, [T, C], and the residual stream behind each layer, [L, T, C].

    Up to `streamed_plan.MAX_TOKENS` tokens in bf16 on a GPU of compute capability 9.0, where `can_attend`; matrices are
    all in one format. Caches are [2, P, S, G, D], to which this pass's keys and values are written. Attention is
    causal. `max_query_len`: tokens of a row, at most.

    Results repeat bit for bit. Sums of linear layers do not depend on the number of tokens; those of attention depend
    on how keys are divided, as those of the kernels for many tokens do.
    """
    device, shape = embedded_TC.device, weights.shape
    read = [*(tensor for layer in weights.layers for tensor in layer.tensors), weights.final_norm_C, *caches]
    assert all(tensor.is_contiguous() for tensor in (embedded_TC, *read, *batch, weights.cos_sin_XD))
    assert all(tensor.dtype is torch.bfloat16 for tensor in (embedded_TC, weights.final_norm_C, *caches))
    assert all(format_of(matrix) == shape.weights for layer in weights.layers for matrix in layer.matrices)
    out_TC = torch.empty_like(embedded_TC)
    residuals_LTC = embedded_TC.new_empty(len(weights.layers), *embedded_TC.shape)
    with _turns.lock:
        key = (*shape, *caches[0].shape, *(tensor.data_ptr() for tensor in read))
        if key not in _streamers:
            _streamers[key] = _Streamer(weights, caches)
        captured, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(device)
        if not captured:
            _turns.begin(stream)
        _streamers[key].launch(weights, embedded_TC, out_TC, residuals_LTC, batch, max_query_len)
        if not captured:
            _turns.end(stream)
    return out_TC, residuals_LTC
