"""Attention of few tokens a row in CUDA C++: the keys of a row are shared out among the blocks of a cluster.

`paged_attention` takes two kernels where keys are split, and waits for the kernel in front before it knows which keys
it reads. Here splits weigh each other's results in shared memory, and lengths, page numbers and the first keys of
earlier passes are read before the kernel in front has ended: it writes this pass's queries, keys and values alone, and
has waited for all that ran before it when it lets this one start (`triton_import.pdl_options`).
`cuda/cluster_attention.cu` says how.

Shape suffixes: T tokens, R rows, H query heads, G key/value heads, D head size, P pages, S tokens per page, M rows of
the engine, N pages per row.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.launch import find_kernel, launch

SOURCE = Path(__file__).parent / "cuda" / "cluster_attention.cu"
STAGE_KEYS = 64
MAX_QUERIES = 64
"""Of a block: tokens of a row times query heads of a key/value head."""
HEAD_DIMS = (64, 128)
MAX_SPLITS = 8
"""Blocks of a cluster, on any GPU of this kind."""
MEMORY_BYTES = 227 << 10
"""Of shared memory, that a block may have."""


class Clusters(NamedTuple):
    """Launch parameters."""

    splits: int
    """Of a row's keys: blocks of a cluster."""
    stages: int = 2
    """Of 64 keys that a block has room for."""
    warps: int = 4


class Shape(NamedTuple):
    """What kernels are compiled for, beside launch parameters."""

    query_len: int
    """Tokens of each row."""
    group: int
    """Query heads of a key/value head."""
    head_dim: int
    page_size: int

    @property
    def row_tiles(self) -> int:
        """Of 16 queries, a power of two."""
        return next(tiles for tiles in (1, 2, 4) if self.query_len * self.group <= 16 * tiles)

    @property
    def is_served(self) -> bool:
        """Whether there are kernels for it."""
        few_queries = 0 < self.query_len * self.group <= MAX_QUERIES
        return few_queries and self.head_dim in HEAD_DIMS and self.page_size % 16 == 0

    def fits(self, clusters: Clusters) -> bool:
        """Whether each warp has 16 queries, and 16 keys of a stage or more, and all fits into shared memory."""
        key_warps, rest = divmod(clusters.warps, self.row_tiles)
        results_bytes = clusters.warps * 16 * self.head_dim * 4
        has_room = results_bytes <= clusters.stages * self.stage_bytes and self.memory_bytes(clusters) <= MEMORY_BYTES
        return not rest and 1 <= key_warps <= STAGE_KEYS // 16 and has_room

    @property
    def stage_bytes(self) -> int:
        """Of keys and values."""
        return 2 * STAGE_KEYS * self.head_dim * 2

    def memory_bytes(self, clusters: Clusters) -> int:
        """Of shared memory: stages, queries, and two sums of 16 rows of each warp."""
        queries = 16 * self.row_tiles * self.head_dim * 2
        return clusters.stages * self.stage_bytes + queries + clusters.warps * 16 * 8

    def definitions(self, clusters: Clusters) -> dict[str, int]:
        """The kernel's macros."""
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "ROW_TILES": self.row_tiles,
            "WARPS": clusters.warps,
            "STAGES": clusters.stages,
            "CLUSTER": clusters.splits,
        }


MAX_KEYS = 2048 + 256
"""Of the longest row that there may be, its drafts and last page included. What a block has on its way at once is too
little for longer ones: 8 rows of 8192 keys take 106 us where their bytes need 63."""
CHOSEN: dict[int, dict[int, Clusters]] = {
    128: {32: Clusters(6), 128: Clusters(2), 512: Clusters(1, 3)},
    64: {32: Clusters(6), 128: Clusters(3), 256: Clusters(2)},
}
"""Head size -> up to so many rows times key/value heads -> what `bench/sweep_attention.py` found on an H200."""


def choose_clusters(shape: Shape, *, num_rows: int, num_kv_heads: int, max_keys: int) -> Clusters | None:
    """Whatever the lengths are. None: `paged_attention` is the better choice, or the only one."""
    if not shape.is_served or not num_rows or max_keys > MAX_KEYS:
        return None
    for most, clusters in CHOSEN[shape.head_dim].items():
        if num_rows * num_kv_heads <= most:
            return clusters
    return Clusters(1)


class Attention(ctypes.Structure):
    """`Attention` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "out", "rows", "kv_lens", "page_table")),
        *((name, ctypes.c_longlong) for name in ("page_stride", "token_stride", "head_stride")),
        *((name, ctypes.c_int) for name in ("table_width", "query_len")),
        ("scale", ctypes.c_float),
    ]


def fill_in(
    q_THD: Tensor,
    kv_2PSGD: Tensor,
    rows_R: Tensor,
    kv_lens_R: Tensor,
    page_table_MN: Tensor,
    out_THD: Tensor,
    *,
    scale: float,
) -> Attention:
    """The kernel's argument."""
    keys, values = kv_2PSGD.unbind(0)
    assert q_THD.is_contiguous()
    assert out_THD.is_contiguous()
    assert keys.stride(3) == page_table_MN.stride(1) == 1
    assert all(stride % 8 == 0 for stride in keys.stride()[:3])
    page_stride, token_stride, head_stride = (stride // 8 for stride in keys.stride()[:3])  # in pieces of 16 bytes
    return Attention(
        queries=q_THD.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out_THD.data_ptr(),
        rows=rows_R.data_ptr(),
        kv_lens=kv_lens_R.data_ptr(),
        page_table=page_table_MN.data_ptr(),
        page_stride=page_stride,
        token_stride=token_stride,
        head_stride=head_stride,
        table_width=page_table_MN.stride(0),
        query_len=q_THD.shape[0] // rows_R.shape[0],
        scale=scale * 1.4426950408889634,
    )


def cluster_attention(
    q_THD: Tensor,
    kv_2PSGD: Tensor,
    rows_R: Tensor,
    kv_lens_R: Tensor,
    page_table_MN: Tensor,
    out_THD: Tensor,
    *,
    scale: float,
    clusters: Clusters,
) -> None:
    """Write `out_THD`, causal attention of rows of the same number of tokens, where `Shape.is_served`. In bf16, on a
    GPU of compute capability 9.0.

    Results repeat bit for bit; they depend on the number of splits.
    """
    num_rows, (num_tokens, num_heads, head_dim) = rows_R.shape[0], q_THD.shape
    page_size, num_kv_heads = kv_2PSGD.shape[2:4]
    shape = Shape(num_tokens // num_rows, num_heads // num_kv_heads, head_dim, page_size)
    assert shape.is_served
    assert shape.fits(clusters)
    assert num_tokens == num_rows * shape.query_len
    assert q_THD.dtype is kv_2PSGD.dtype is out_THD.dtype is torch.bfloat16
    argument = fill_in(q_THD, kv_2PSGD, rows_R, kv_lens_R, page_table_MN, out_THD, scale=scale)
    memory_bytes = shape.memory_bytes(clusters)
    launch(
        find_kernel(SOURCE, shape.definitions(clusters), q_THD.device, memory_bytes=memory_bytes),
        (clusters.splits, num_kv_heads, num_rows),
        32 * clusters.warps,
        [argument],
        q_THD.device,
        memory_bytes=memory_bytes,
        cluster=(clusters.splits, 1, 1),
        is_early=True,
    )
