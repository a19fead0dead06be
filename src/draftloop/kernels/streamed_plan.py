"""Which passes `streamed_pass` computes, and how a decoder's matrices are divided among its blocks."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from draftloop.kernels.triton_import import gpu_name

MAX_TOKENS, MAX_ROW_TOKENS, MAX_QUERIES = 8, 8, 32
"""Of a pass; of a row, and times query heads that share a key/value head."""
MAX_SPLITS = 16
SETS = 4
"""Of what blocks hand on: layers take turns with them."""
THREADS, SLOTS, SCRATCH_BYTES, SHARED_BYTES = 384, 5, 32 << 10, 34 << 10
"""Of a block."""
MAX_SUMS = MAX_HIDDEN_TILES = 16
"""Tiles of 8 rows that registers hold the sums of, and that `SHARED_BYTES` hold the residual stream of."""


class Format(NamedTuple):
    """How all matrices of a decoder's layers are kept (cuda/packed.cuh)."""

    name: str
    planes: int
    """Weights in a word of 16 bits."""
    group_bytes: int = 0
    """Of what a row's columns of a chunk have of their own: a scale, and perhaps a zero point."""

    @property
    def chunk_columns(self) -> int:
        """That come at once, or a multiple of them."""
        return 64 if self.planes == 1 else 128

    @property
    def row_bytes(self) -> int:
        """Of the words of a row in a chunk."""
        return self.chunk_columns * 2 // self.planes

    @property
    def kinds(self) -> int:
        """Of what a matrix consists of."""
        return 1 + self.group_bytes // 2

    @property
    def units(self) -> int:
        """Parts of a chunk, each of which is for one warp."""
        return self.row_bytes // 32

    def stage_bytes(self, tiles: int, chunks: int) -> int:
        """Of so many tiles of 8 rows, and chunks: `StageOf` of packed.cuh."""
        return chunks * tiles * 8 * self.row_bytes + (self.kinds - 1) * -(-chunks * tiles * 16 // 128) * 128

    @property
    def slot_bytes(self) -> int:
        """For weights on their way."""
        return (30 if self.planes == 4 else 32) << 10

    @property
    def memory_bytes(self) -> int:
        """Of 227 KB that a block may have."""
        return SLOTS * self.slot_bytes + SCRATCH_BYTES + SHARED_BYTES


BF16, FP8 = Format("bf16", 1), Format("fp8", 2)
INT4, INT4_ZEROS = Format("int4", 4, 2), Format("int4_zeros", 4, 4)
"""In groups of 128, with a zero point for all or for each."""


class Shape(NamedTuple):
    """Sizes of a decoder's layers, and how their matrices are kept."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weights: Format = BF16

    @property
    def query(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


_LLAMA_8B, _LLAMA_1B = Shape(4096, 14336, 32, 8, 128), Shape(2048, 8192, 32, 8, 64)
MEASURED: dict[str, dict[Shape, int]] = {
    "NVIDIA H200": {
        _LLAMA_8B: 8,
        _LLAMA_8B._replace(weights=FP8): 8,
        _LLAMA_8B._replace(weights=INT4): 8,
        _LLAMA_1B: 8,
        _LLAMA_1B._replace(weights=FP8): 1,
        _LLAMA_1B._replace(weights=INT4): 1,
        Shape(576, 1536, 9, 3, 64): 8,
    }
}
"""GPU -> shape -> up to how many tokens the kernel is faster than a pass of many: `draftloop.bench.sweep_streamed`."""


_tried: int | None = None


@contextmanager
def trying(limit: int) -> Generator[None]:
    """Passes are streamed up to so many tokens meanwhile, whatever was measured: for sweeps and tests."""
    global _tried
    assert limit <= MAX_TOKENS, limit
    before, _tried = _tried, limit
    try:
        yield
    finally:
        _tried = before


def token_limit(shape: Shape, device: torch.device) -> int:
    """Up to how many tokens passes of this shape should be streamed; 0: never."""
    if _tried is not None:
        return _tried
    return MEASURED.get(gpu_name(device), {}).get(shape, 0) if device.type == "cuda" else 0


class Plan(NamedTuple):
    """How the matrices of a shape are divided among blocks, and a block's rows among stages."""

    hidden_tiles: int
    """Tiles of 8 rows that a block owns of o and down."""
    inner_tiles: int
    """Of the gate's rows, and as many of those that it multiplies."""
    qkv_tiles: int
    passes: int
    """Over the columns of gate_up, each with a part of the rows."""
    o_chunks: int
    """Chunks of columns in a stage."""
    gate_up_chunks: int
    down_chunks: int
    qkv_chunks: int
    num_blocks: int


@functools.cache
def make_plan(shape: Shape, num_sms: int) -> Plan | None:
    """None: heads have another size than the kernel's, or rows cannot be divided evenly among at most so many blocks,
    or columns among stages."""
    sizes = (shape.query, shape.hidden, shape.inner, shape.hidden)
    if shape.head_dim not in (64, 128) or any(size % shape.weights.chunk_columns for size in sizes):
        return None
    rows = (shape.hidden // 8, shape.inner // 8, shape.qkv // 8)
    hidden, inner, qkv = shares = [_share(tiles, num_sms) for tiles in rows]
    passes = next(n for n in range(1, inner + 1) if inner % n == 0 and 2 * inner // n <= MAX_SUMS)
    tiles = (hidden, 2 * inner // passes, hidden, qkv)
    o, gate_up, down, last = chunks = [_chunks(*one, shape.weights) for one in zip(sizes, tiles, strict=True)]
    if not all(chunks) or hidden > MAX_HIDDEN_TILES or qkv > MAX_SUMS:
        return None
    num_blocks = max(tiles // share for tiles, share in zip(rows, shares, strict=True))
    return Plan(hidden, inner, qkv, passes, o, gate_up, down, last, num_blocks)


def _share(tiles: int, num_sms: int) -> int:
    """Tiles of each block: as few as every block has alike."""
    return next(n for n in range(1, tiles + 1) if tiles % n == 0 and tiles // n <= num_sms)


def _chunks(size: int, tiles: int, weights: Format) -> int:
    """As many as fit in a slot, better those that keep all eight warps at work. 0: not even one."""
    whole, room = size // weights.chunk_columns, weights.slot_bytes
    fitting = [n for n in range(1, whole + 1) if whole % n == 0 and weights.stage_bytes(tiles, n) <= room]
    return max(fitting, key=lambda n: (n * weights.units % 8 == 0, n), default=0)


def can_attend(shape: Shape, *, num_rows: int, max_query_len: int, page_size: int, num_sms: int) -> bool:
    """Whether each row and key/value head finds a block, and each row's queries room in it."""
    plan = make_plan(shape, num_sms)
    return (
        plan is not None
        and num_rows * shape.num_kv_heads <= plan.num_blocks
        and max_query_len <= MAX_ROW_TOKENS
        and max_query_len * shape.group <= MAX_QUERIES
        and page_size % 16 == 0
    )


def definitions(shape: Shape, plan: Plan, *, max_query_len: int, page_size: int) -> dict[str, int]:
    """The macros of streamed_pass.cu."""
    sizes = {"hidden": shape.hidden, "query": shape.query, "inner": shape.inner, "qkv": shape.qkv}
    heads = {"kv_heads": shape.num_kv_heads, "group": shape.group, "head_dim": shape.head_dim}
    attention = {**heads, "page_size": page_size, "query_tiles": -(-max_query_len * shape.group // 8)}
    memory = {"slots": SLOTS, "scratch_bytes": SCRATCH_BYTES, "shared_bytes": SHARED_BYTES, "tokens": MAX_TOKENS}
    kept = shape.weights
    weights = {"slot_bytes": kept.slot_bytes, "planes": kept.planes, "zeros": int(kept.kinds == 3)}
    found = {**sizes, **attention, **plan._asdict(), **memory, **weights}
    return {name.upper(): value for name, value in found.items() if name != "num_blocks"}
