"""Linear layers of some ten or hundred tokens in CUDA C++: one wave of large tiles, tokens multicast within clusters.

`linear_wide` is limited by what crosses L2, and by multiprocessors that are idle in its last wave. Here a layer is as
many tiles (by as many splits of K) as there are multiprocessors, or a few less: 128 tiles of 224 weights by 192 tokens
for the 8B shape's gate_up. Blocks of a cluster bring each other the tokens, and weights are asked for before the kernel
in front has drained: with few tokens nearly all of shared memory can be full of them by then.
`cuda/multicast_linear.cu` says how.

Shape suffixes: T tokens, N output columns, K input columns, X splits of K, I = N / 2 columns of a gate.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.launch import find_kernel, launch
from draftloop.kernels.tensor_map import MAP_BYTES, Box, tensor_map

SOURCE = Path(__file__).parent / "cuda" / "multicast_linear.cu"
THREADS = 384
COLUMNS = 64
"""Of the input, in a stage."""
KINDS = ("plain", "sums", "gated")
"""`linear_wide.Kind`, in the order of the source's."""


class MulticastTiles(NamedTuple):
    """Launch parameters."""

    rows: int
    """Of weights in a tile; of a gated layer, half of them gates."""
    splits: int
    cluster: int
    weights_first: bool
    """Weights are the M side of products, tokens the N side, which comes in finer steps."""
    token_slots: int
    max_tokens: int = 256
    """Of a tile; more are shared out evenly, and then blocks of a cluster share weights."""
    shared_kb: int = 227
    """Of a multiprocessor's shared memory. What is left lets programs of the kernel in front run beside the block."""

    def blocks(self, num_tokens: int) -> int:
        """Tiles of tokens: whole clusters of them, if there are several."""
        blocks = -(-num_tokens // self.max_tokens)
        return 1 if blocks == 1 else -(-blocks // self.cluster) * self.cluster

    def padded(self, num_tokens: int) -> int:
        """Tokens of a tile."""
        sizes = WEIGHTS_FIRST_TOKENS if self.weights_first else (64, 128, 192)
        blocks = self.blocks(num_tokens)
        share = -(-num_tokens // blocks)
        # boxes are of eights; rows that are no multiple of 128 leave each group half of the tokens
        step = max(8 * (self.cluster if blocks == 1 else 1), 16 if self.rows % 128 else 8)
        return next(size for size in sizes if share <= size and size % step == 0)

    def token_bytes(self, num_tokens: int) -> int:
        """Of a slot."""
        return self.padded(num_tokens) * COLUMNS * 2

    def weight_slots(self, num_tokens: int) -> int:
        """As many as shared memory has room for beside the tokens'."""
        room = (self.shared_kb << 10) - BARRIER_BYTES - self.token_slots * self.token_bytes(num_tokens)
        return room // (self.rows * COLUMNS * 2)

    def memory_bytes(self, num_tokens: int) -> int:
        """Of shared memory, four barriers included."""
        slots = self.weight_slots(num_tokens)
        rings = slots * self.rows * COLUMNS * 2 + self.token_slots * self.token_bytes(num_tokens)
        return rings + 16 * (slots + self.token_slots)

    def definitions(self, num_tokens: int, kind: str) -> dict[str, int]:
        """The kernel's macros."""
        return {
            "TILE": self.rows,
            "TOKENS": self.padded(num_tokens),
            "WEIGHTS_FIRST": int(self.weights_first),
            "WEIGHT_SLOTS": self.weight_slots(num_tokens),
            "TOKEN_SLOTS": self.token_slots,
            "CLUSTER": self.cluster,
            "WEIGHTS_SHARED": int(self.blocks(num_tokens) > 1),
            "KIND": KINDS.index(kind),
        }

    def _has_products(self, tokens: int, kind: str) -> bool:
        """Whether two groups can share out a tile: 64 rows of the M side each, or half of the N side by the same 64."""
        m_side, n_side = (self.rows, tokens) if self.weights_first else (tokens, self.rows)
        if m_side not in (64, 128, 192) or (m_side > 64 and n_side not in PRODUCT_COLUMNS):
            return False
        gates_beside = kind == "gated" and not self.weights_first
        return m_side == 128 or (n_side % (32 if gates_beside else 16) == 0 and n_side // 2 in PRODUCT_COLUMNS)

    def fits(self, num_tokens: int, columns: int, size: int, kind: str) -> bool:
        """Whether whole tiles and clusters make a layer, with enough stages to read ahead."""
        blocks, eights = self.blocks(num_tokens), 8 * (1 + (kind == "gated")) * self.cluster
        widest = 256 if self.weights_first else 192
        if -(-num_tokens // blocks) > widest:
            return False
        return (
            self._has_products(self.padded(num_tokens), kind)
            and columns % (self.rows * (self.cluster if blocks == 1 else 1)) == 0
            and self.rows % eights == 0
            and size % COLUMNS == 0
            and self.splits <= size // COLUMNS
            and self.rows * self.padded(num_tokens) <= MAX_SUMS
            and self.weight_slots(num_tokens) >= 3
            and (kind == "sums" or self.splits == 1)
        )


BARRIER_BYTES = 512
"""Of shared memory, at most."""
WEIGHTS_FIRST_TOKENS = (16, 24, 32, 40, 48, 64, 96, 128, 160, 192, 256)
"""Of a tile."""
PRODUCT_COLUMNS = (8, 16, 24, 32, 40, 48, 64, 96, 112, 128, 160, 192, 224, 256)
"""Of the N side of products, as the source has them."""
MAX_SUMS = 192 * (THREADS - 128)
"""Of a tile, in registers."""


class Product(ctypes.Structure):
    """`Product` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "bias")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_columns", "size")),
    ]


def multicast_kernel(tiles: MulticastTiles, num_tokens: int, kind: str, device: torch.device) -> Any:
    """The kernel (`find_kernel`)."""
    definitions = tiles.definitions(num_tokens, kind)
    return find_kernel(SOURCE, definitions, device, memory_bytes=tiles.memory_bytes(num_tokens))


def linear_multicast(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor, *, kind: str, tiles: MulticastTiles
) -> Tensor:
    """`linear_wide_torch` of bf16 on a GPU of compute capability 9.0, written to `out`: [T, N], [X, T, N] or [T, I]."""
    num_tokens, size = x_TK.shape
    gated = kind == "gated"
    num_columns = weight_NK.shape[0] // (1 + gated)
    rows = tiles.rows // (1 + gated)
    assert tiles.fits(num_tokens, weight_NK.shape[0], size, kind)
    assert out.is_contiguous()
    assert bias_N is None or bias_N.dtype is x_TK.dtype is torch.bfloat16
    device = x_TK.device
    kernel = multicast_kernel(tiles, num_tokens, kind, device)
    product = Product(out.data_ptr(), None if bias_N is None else bias_N.data_ptr(), num_tokens, num_columns, size)
    blocks = tiles.blocks(num_tokens)
    weight_sharers, token_sharers = (1, tiles.cluster) if blocks == 1 else (tiles.cluster, 1)
    # rows in eights: gates and what they multiply take turns in a tile
    weights = Box(
        weight_NK,
        (size, 8, 1 + gated, num_columns // 8),
        (size, num_columns * size, 8 * size),
        (COLUMNS, 8, 1 + gated, rows // 8 // weight_sharers),
    )
    tokens = Box(x_TK, (size, num_tokens), (size,), (COLUMNS, tiles.padded(num_tokens) // token_sharers))
    maps = [ctypes.create_string_buffer(tensor_map(box), MAP_BYTES) for box in (weights, tokens)]
    launch(
        kernel,
        (num_columns // rows, tiles.splits, blocks),
        THREADS,
        (*maps, product),
        device,
        memory_bytes=tiles.memory_bytes(num_tokens),
        cluster=(token_sharers, 1, weight_sharers),
        is_early=True,
    )
    return out
