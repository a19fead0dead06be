"""Where the tokens of a uniform pass are kept by another page table than the one that `row_tokens` reads.

Shape suffixes: R rows of the pass, T = R * Q tokens, Q tokens per row, M engine rows, N pages per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl


def page_slots_torch(
    rows_R: Tensor, kv_lens_R: Tensor, page_table_MN: Tensor, *, num_per_row: int, page_size: int
) -> Tensor:
    """Reference of `page_slots`."""
    index_Q = torch.arange(num_per_row, device=rows_R.device)
    keys_RQ = (kv_lens_R[:, None] - num_per_row + index_Q).clamp(min=0)
    pages_RQ = page_table_MN[rows_R.long()[:, None], keys_RQ // page_size].long()
    return (pages_RQ * page_size + keys_RQ % page_size).flatten()


@jit("table_width", "num_per_row")
def _page_slots_kernel(
    rows_ptr,
    kv_lens_ptr,
    table_ptr,
    slots_ptr,
    table_width,
    num_per_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    live = q < num_per_row
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    key = tl.maximum(tl.load(kv_lens_ptr + entry) - num_per_row + q, 0)
    page = tl.load(table_ptr + row * table_width + key // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(slots_ptr + entry * num_per_row + q, page * PAGE_SIZE + key % PAGE_SIZE, mask=live)


def page_slots_triton(
    rows_R: Tensor, kv_lens_R: Tensor, page_table_MN: Tensor, *, num_per_row: int, page_size: int
) -> Tensor:
    """Twin of `page_slots_torch`, one launch."""
    slots_T = torch.empty(rows_R.shape[0] * num_per_row, dtype=torch.int64, device=rows_R.device)
    _page_slots_kernel[(rows_R.shape[0],)](
        rows_R,
        kv_lens_R,
        page_table_MN,
        slots_T,
        page_table_MN.shape[1],
        num_per_row,
        PAGE_SIZE=page_size,
        BLOCK_Q=next_power_of_2(num_per_row),
        num_warps=1,
        **pdl_options(rows_R.device),
    )
    return slots_T


def page_slots(rows_R: Tensor, kv_lens_R: Tensor, page_table_MN: Tensor, *, num_per_row: int, page_size: int) -> Tensor:
    """int64 [T]: `page * page_size + offset` of each row's last `num_per_row` keys, of the `kv_lens_R` that it has.

    A row without keys, as the padding row, has them at its first place, which leads to the null page.
    """
    run = page_slots_triton if rows_R.is_cuda else page_slots_torch
    return run(rows_R, kv_lens_R, page_table_MN, num_per_row=num_per_row, page_size=page_size)
