"""Which passes `streamed_pass` computes, and how a decoder's matrices are divided among its blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from draftloop.kernels.triton_import import gpu_name

MAX_TOKENS, MAX_ROW_TOKENS, MAX_QUERIES = 8, 8, 32
"""Of a pass; of a row, and times query heads that share a key/value head."""
MAX_SPLITS = 16
SETS = 4
"""Of what blocks hand on: layers take turns with them."""
SLOT_BYTES = 32 << 10
TILE_BYTES = 8 * 64 * 2
"""Of 8 rows of weights and 64 columns."""


THREADS, SLOTS, SCRATCH_BYTES, SHARED_BYTES = 288, 5, 32 << 10, 34 << 10
"""Of a block: slots are for weights on their way."""
MEMORY_BYTES = SLOTS * SLOT_BYTES + SCRATCH_BYTES + SHARED_BYTES
"""Of 227 KB that a block may have."""
MAX_SUMS = MAX_HIDDEN_TILES = 16
"""Tiles of 8 rows that registers hold the sums of, and that `SHARED_BYTES` hold the residual stream of."""


class Shape(NamedTuple):
    """Sizes of a decoder's layers."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

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


MEASURED: dict[str, dict[Shape, int]] = {
    "NVIDIA H200": {
        Shape(4096, 14336, 32, 8, 128): 8,
        Shape(2048, 8192, 32, 8, 64): 8,
        Shape(576, 1536, 9, 3, 64): 8,
    }
}
"""GPU -> shape -> up to how many tokens the kernel is faster than a pass of many: `draftloop.bench.sweep_streamed`."""


_tried: int | None = None


@contextmanager
def trying(limit: int) -> Iterator[None]:
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
    """Chunks of 64 columns in a stage."""
    gate_up_chunks: int
    down_chunks: int
    qkv_chunks: int
    num_blocks: int


@functools.cache
def make_plan(shape: Shape, num_sms: int) -> Plan | None:
    """None: heads have another size than the kernel's, or rows cannot be divided evenly among at most so many blocks,
    or columns among stages."""
    if shape.head_dim not in (64, 128) or any(size % 64 for size in (shape.hidden, shape.inner)):
        return None
    rows = (shape.hidden // 8, shape.inner // 8, shape.qkv // 8)
    hidden, inner, qkv = shares = [_share(tiles, num_sms) for tiles in rows]
    passes = next(n for n in range(1, inner + 1) if inner % n == 0 and 2 * inner // n <= MAX_SUMS)
    sizes = (shape.query, shape.hidden, shape.inner, shape.hidden)
    tiles = (hidden, 2 * inner // passes, hidden, qkv)
    o, gate_up, down, last = chunks = [_chunks(size, num_tiles) for size, num_tiles in zip(sizes, tiles, strict=True)]
    if not all(chunks) or hidden > MAX_HIDDEN_TILES or qkv > MAX_SUMS:
        return None
    num_blocks = max(tiles // share for tiles, share in zip(rows, shares, strict=True))
    return Plan(hidden, inner, qkv, passes, o, gate_up, down, last, num_blocks)


def _share(tiles: int, num_sms: int) -> int:
    """Tiles of each block: as few as every block has alike."""
    return next(n for n in range(1, tiles + 1) if tiles % n == 0 and tiles // n <= num_sms)


def _chunks(size: int, tiles: int) -> int:
    """As many as fit in a slot; even numbers keep all eight warps at work. 0: not even one."""
    fitting = [n for n in range(1, size // 64 + 1) if size // 64 % n == 0 and n * tiles * TILE_BYTES <= SLOT_BYTES]
    return max(fitting, key=lambda n: (n % 2 == 0, n), default=0)


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
    memory = {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "scratch_bytes": SCRATCH_BYTES, "shared_bytes": SHARED_BYTES}
    memory["tokens"] = MAX_TOKENS
    found = {**sizes, **attention, **plan._asdict(), **memory}
    return {name.upper(): value for name, value in found.items() if name != "num_blocks"}
