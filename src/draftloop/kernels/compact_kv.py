"""The keys and values of an accepted branch, moved to where a chain of its length would have left them.

A branch lies scattered over the keys of its tree; what follows the accepted tokens expects them one behind the other.
All layers, keys and values, in one launch. A source never lies before its destination, but it may well be another
one's destination, so everything of a row is read before anything is written.

Shape suffixes: L layers, P pages, S tokens per page, G key/value heads, D head size, R rows of the pass, M engine
rows, N pages per row, J places of the longest branch, the bonus token's included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.fp8_cache import as_bytes
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

_BLOCK = 8192
"""Elements that one program holds."""


def compact_kv_torch(
    kv_L2PSGD: Tensor,
    rows_R: Tensor,
    path_RJ: Tensor,
    num_emitted_R: Tensor,
    num_tokens_M: Tensor,
    page_table_MN: Tensor,
) -> None:
    """Reference of `compact_kv`."""
    page_size = kv_L2PSGD.shape[3]
    rows_R1 = rows_R.long()[:, None]
    index_J = torch.arange(path_RJ.shape[1], device=rows_R.device)
    is_padding_R1 = rows_R1 == num_tokens_M.shape[0] - 1
    moves_RJ = (index_J < num_emitted_R[:, None]) & (path_RJ > index_J) & ~is_padding_R1
    first_R1 = num_tokens_M[rows_R1].long() - num_emitted_R[:, None] - 1

    def slots(places_RJ: Tensor) -> Tensor:
        # what does not move is read from and written to the null page
        keys_RJ = (first_R1 + places_RJ).masked_fill(~moves_RJ, 0)
        pages_RJ = page_table_MN[rows_R1, keys_RJ // page_size].long()
        return (pages_RJ * page_size + keys_RJ % page_size).masked_fill(~moves_RJ, 0).flatten()

    kv_LXE = kv_L2PSGD.flatten(0, 1).flatten(1, 2).flatten(2)
    moved_LTE = kv_LXE.index_select(1, slots(path_RJ))
    kv_LXE.index_copy_(1, slots(index_J.expand_as(path_RJ)), moved_LTE)


@jit("path_width", "table_width", "padding_row")
def _compact_kernel(
    kv_ptr,
    rows_ptr,
    path_ptr,
    num_emitted_ptr,
    num_tokens_ptr,
    table_ptr,
    path_width,
    table_width,
    padding_row,
    side_stride,  # of the keys or values of a layer
    SIZE: tl.constexpr,  # elements of a token
    PAGE_SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, the keys or values of one layer, some elements of every token."""
    entry = tl.program_id(0)
    side = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    num_emitted = tl.where(row == padding_row, 0, tl.load(num_emitted_ptr + entry))
    place = tl.load(path_ptr + entry * path_width + j, mask=j < path_width, other=0)
    moves = (j < num_emitted) & (place > j)
    first = tl.load(num_tokens_ptr + row) - num_emitted - 1
    source = first + place
    target = first + j
    table_row_ptr = table_ptr + row * table_width
    source_page = tl.load(table_row_ptr + source // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
    target_page = tl.load(table_row_ptr + target // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    live = moves[:, None] & (e < SIZE)[None, :]
    side_ptr = kv_ptr + side * side_stride
    source_slot = source_page * PAGE_SIZE + source % PAGE_SIZE
    target_slot = target_page * PAGE_SIZE + target % PAGE_SIZE
    kept = tl.load(side_ptr + source_slot[:, None] * SIZE + e[None, :], mask=live, other=0)
    # a slot may be one thread's source and another's destination
    tl.debug_barrier()
    tl.store(side_ptr + target_slot[:, None] * SIZE + e[None, :], kept, mask=live)


def compact_kv_triton(
    kv_L2PSGD: Tensor,
    rows_R: Tensor,
    path_RJ: Tensor,
    num_emitted_R: Tensor,
    num_tokens_M: Tensor,
    page_table_MN: Tensor,
) -> None:
    """Twin of `compact_kv_torch`, one launch."""
    num_layers, _, _, page_size, num_heads, head_dim = kv_L2PSGD.shape
    assert kv_L2PSGD.is_contiguous()
    assert path_RJ.is_contiguous()
    size, block_j = num_heads * head_dim, next_power_of_2(path_RJ.shape[1])
    block_e = min(next_power_of_2(size), _BLOCK // block_j)
    if not rows_R.shape[0]:
        return
    _compact_kernel[(rows_R.shape[0], 2 * num_layers, -(-size // block_e))](
        kv_L2PSGD,
        rows_R,
        path_RJ,
        num_emitted_R,
        num_tokens_M,
        page_table_MN,
        path_RJ.shape[1],
        page_table_MN.shape[1],
        num_tokens_M.shape[0] - 1,
        kv_L2PSGD.stride(1),
        SIZE=size,
        PAGE_SIZE=page_size,
        BLOCK_J=block_j,
        BLOCK_E=block_e,
        num_warps=4,
        **pdl_options(rows_R.device),
    )


def compact_kv(
    kv_L2PSGD: Tensor,
    rows_R: Tensor,
    path_RJ: Tensor,
    num_emitted_R: Tensor,
    num_tokens_M: Tensor,
    page_table_MN: Tensor,
) -> None:
    """Move key `path_RJ[r, j]` (int32) of each row's tree to place j, for each j below `num_emitted_R[r]`.

    Places are counted from the bonus token of the block that was verified; `num_tokens_M` counts what came of it
    too. Paths rise, and `path_RJ[r, j] >= j`. The last of the M rows is the padding row, of which nothing moves.
    """
    run = compact_kv_triton if kv_L2PSGD.is_cuda else compact_kv_torch
    run(as_bytes(kv_L2PSGD), rows_R, path_RJ, num_emitted_R, num_tokens_M, page_table_MN)
