"""Paged attention on the GPU: split-KV flash attention that takes every length from device memory.

The grid depends only on captured shapes, so one captured launch serves all lengths. The query
heads that share a key/value head are packed with the query tokens into the M dimension of the
dots, so keys and values are read once per group. The keys of a row are shared out evenly between
`num_splits` programs; a second kernel combines what they found. No atomics: results repeat bit
for bit. The torch twin is `draftloop.attention.sdpa`.

Shape suffixes: T tokens, R rows, H query heads, G key/value heads, D head size, P pages, S tokens
per page, M rows of the engine, N pages per row, X splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.attention_tiles import Tiles, choose_tiles
from draftloop.kernels.triton_import import INTERPRETED, jit, next_power_of_2, tl


@jit("num_rows", "num_tokens", "table_width", "query_len", "num_splits", "split_blocks", "tree_keys")
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    rows_ptr,
    starts_ptr,
    kv_lens_ptr,
    table_ptr,
    ancestors_ptr,
    positions_ptr,
    sinks_ptr,
    num_rows,
    num_tokens,
    table_width,
    query_len,  # of every row, if UNIFORM
    num_splits,
    split_blocks,  # of every split, if FIXED
    tree_keys,  # the last keys of a row, if TREE
    scale_log2,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    kv_stride_page,
    kv_stride_token,
    kv_stride_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key/value head
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIFORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,  # of the last keys each token sees its ancestors; UNIFORM and CAUSAL
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # of scores as powers of 2; 0: none
    SINKS: tl.constexpr,  # one per head
    SPLIT: tl.constexpr,  # num_splits > 1
    FIXED: tl.constexpr,  # splits begin at the same keys whatever a row's length
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of query tokens of one row, one key/value head, one split of the row's keys."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()

    if UNIFORM:
        blocks_per_row = tl.cdiv(query_len, BLOCK_Q)
        entry = block // blocks_per_row
        block_in_row = block % blocks_per_row
        start = entry * query_len
        num_queries = query_len
    else:
        # find the row by counting blocks; tokens past the last row form one more row, without keys
        entries = tl.arange(0, BLOCK_R)
        starts = tl.load(starts_ptr + entries, mask=entries <= num_rows, other=num_tokens)
        ends = tl.load(starts_ptr + entries + 1, mask=entries < num_rows, other=num_tokens)
        blocks = tl.where(entries <= num_rows, (ends - starts + BLOCK_Q - 1) // BLOCK_Q, 0)
        before = tl.cumsum(blocks, 0) <= block
        entry = tl.sum(before.to(tl.int32), 0)
        block_in_row = block - tl.sum(tl.where(before, blocks, 0), 0)
        # programs past the last block match no entry and come out with no queries
        start = tl.sum(tl.where(entries == entry, starts, 0), 0)
        num_queries = tl.sum(tl.where(entries == entry, ends, 0), 0) - start

    live = entry < num_rows
    kv_len = tl.load(kv_lens_ptr + entry, mask=live, other=0)
    row = tl.load(rows_ptr + entry, mask=live, other=0)
    first_query = block_in_row * BLOCK_Q
    first_position = kv_len - num_queries + first_query

    # packed rows: token-major, then the heads of the group
    m = tl.arange(0, BLOCK_M)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    m_live = (query < num_queries) & (m < BLOCK_Q * GROUP)
    position = kv_len - num_queries + query
    token = start + query
    lowest_position = first_position
    first_tree_key, ancestors = kv_len, query
    if TREE:
        first_tree_key = kv_len - tree_keys
        lowest_position = first_tree_key
        ancestors = tl.load(ancestors_ptr + query, mask=m_live, other=0)
        position = tl.load(positions_ptr + token, mask=m_live, other=0)

    # keys that some token of this block sees, in blocks, and this split's share of them
    end_key = kv_len
    if CAUSAL:
        end_key = tl.maximum(tl.minimum(kv_len, first_position + BLOCK_Q), 0)
    first_block, first_key = 0, 0
    if WINDOW > 0:
        first_key = tl.maximum(lowest_position - WINDOW + 1, 0)
        first_block = first_key // BLOCK_N
    num_blocks = tl.maximum(tl.cdiv(end_key, BLOCK_N) - first_block, 0)
    begin = first_block + num_blocks * split // num_splits
    end = first_block + num_blocks * (split + 1) // num_splits
    if FIXED:
        begin = tl.maximum(first_block, split * split_blocks)
        end = tl.minimum(first_block + num_blocks, (split + 1) * split_blocks)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # as a key without a value that was seen before all others; of the splits, by the first
        has_sink = m < tl.where(split == 0, BLOCK_M, 0)
        peak = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf")) * 1.4426950408889634
        total = tl.where(has_sink, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_row_ptr = table_ptr + row.to(tl.int64) * table_width
    kv_head_offset = kv_head * kv_stride_head
    key = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=key < end_key, other=0)
    d = tl.arange(0, BLOCK_D)
    d_live = d < HEAD_DIM
    q = tl.load(
        q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :],
        mask=m_live[:, None] & d_live[None, :],
        other=0.0,
    )
    if k_ptr.dtype.element_ty == tl.float8e4nv and q_ptr.dtype.element_ty == tl.bfloat16:
        # one instruction makes two of a cache's values float16, exactly; bfloat16 takes four
        q = q.to(tl.float16)
    for _ in tl.range(begin, end):
        key_live = key < end_key
        if WINDOW > 0:
            key_live = key_live & (key >= first_key)  # before it pages may be another row's
        # Pages are fetched one block ahead by hand. Left to the pipeliner, that load takes the stages
        # that should keep more keys and values in flight.
        next_key = key + BLOCK_N
        next_page = tl.load(table_row_ptr + next_key // PAGE_SIZE, mask=next_key < end_key, other=0)
        offset = page.to(tl.int64) * kv_stride_page + key % PAGE_SIZE * kv_stride_token + kv_head_offset
        kv_offset = offset[:, None] + d[None, :]
        # what is masked reads as 0, not as what the page holds: 0 * NaN would be NaN
        kv_live = key_live[:, None] & d_live[None, :]
        k = tl.load(k_ptr + kv_offset, mask=kv_live, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + kv_offset, mask=kv_live, other=0.0).to(q.dtype)

        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if SOFT_CAP > 0:
            # tanh(x) is 1 - 2 / (exp(2x) + 1), and log2(e) is 1.4427
            score = SOFT_CAP - 2 * SOFT_CAP / (tl.exp2(score * (2 * 1.4426950408889634 / SOFT_CAP)) + 1)
        seen = key_live[None, :]
        if TREE:
            place = key - first_tree_key
            bit = tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)
            is_ancestor = ((ancestors[:, None] >> bit[None, :]) & 1) != 0
            seen = seen & (is_ancestor | (place < 0)[None, :])
        elif CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(score, 1))
        # a token that has seen no key yet has no peak; -inf - -inf would be NaN
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
        key = next_key
        page = next_page

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    divisor = tl.where(total == 0.0, 1.0, total)
    result = acc / divisor[:, None]
    if not SPLIT:
        out_offset = (token * out_stride_t + head * out_stride_h)[:, None] + d[None, :]
        tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=m_live[:, None] & d_live[None, :])
    else:
        # an empty split has a log-sum-exp of -inf and a result of 0
        index = (token * NUM_HEADS + head) * num_splits + split
        tl.store(lse_ptr + index, peak + tl.log2(divisor), mask=m_live)
        tl.store(partial_ptr + index[:, None] * HEAD_DIM + d[None, :], result, mask=m_live[:, None] & d_live[None, :])


@jit("num_splits")
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_stride_t,
    out_stride_h,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one head: weigh the splits' results by their log-sum-exp."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # split by split: nothing crosses threads, so no value is stored by two of them
    d = tl.arange(0, BLOCK_D)
    index = (token * NUM_HEADS + head) * num_splits
    peak = float("-inf")
    lses, partials = (), ()
    for split in tl.static_range(BLOCK_X):
        lse = tl.load(lse_ptr + index + split, mask=split < num_splits, other=float("-inf"))
        end = tl.where(split < num_splits, HEAD_DIM, 0)
        partial = tl.load(partial_ptr + (index + split) * HEAD_DIM + d, mask=d < end, other=0.0)
        lses += (lse,)
        partials += (partial,)
        peak = tl.maximum(peak, lse)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = 0.0
    result = tl.zeros([BLOCK_D], tl.float32)
    for split in tl.static_range(BLOCK_X):
        weight = tl.exp2(lses[split] - shift)
        total += weight
        result += weight * partials[split]
    result = result / tl.where(total == 0.0, 1.0, total)
    out_offset = token * out_stride_t + head * out_stride_h + d
    tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


class PagedTree(NamedTuple):
    """`attention.base.TreeMask` of a uniform batch, and its positions, which are not those of the keys."""

    ancestors_Q: Tensor
    num_keys: int
    positions_T: Tensor
    """int64"""


def paged_attention_triton(
    q_THD: Tensor,
    kv_2PSGD: Tensor,
    rows_R: Tensor,
    query_starts_R1: Tensor,
    kv_lens_R: Tensor,
    page_table_MN: Tensor,
    out_THD: Tensor,
    *,
    query_len: int,
    causal: bool,
    window: int,
    scale: float,
    num_sms: int,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    tree: PagedTree | None = None,
    pdl: bool = False,
    invariant: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Write `out_THD`. `query_len` > 0: every row has that many tokens; 0: ragged. `window` 0: none.

    `soft_cap` c > 0: a score s, scaled, counts as `c * tanh(s / c)`. `sinks_H` (float32): a score for each head that
    joins the softmax, and stands for no value.

    `invariant`: a token's result depends on its row alone, however many tokens it came with.

    `tiles` None: as `choose_tiles` says; given by tests and by the sweep that the choice comes from.

    `pdl` launches the kernels before what runs in front of them has drained (compute capability 9.0 on).
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    page_size, num_kv_heads = kv_2PSGD.shape[2:4]
    num_rows = rows_R.shape[0]
    if not num_tokens:
        return
    assert tree is None or (query_len and causal and tree.ancestors_Q.shape[0] == query_len)
    keys, values = kv_2PSGD.unbind(0)
    assert q_THD.stride(2) == out_THD.stride(2) == keys.stride(3) == page_table_MN.stride(1) == 1
    group = num_heads // num_kv_heads
    max_keys = page_table_MN.shape[1] * page_size
    tiles = tiles or choose_tiles(
        num_tokens=num_tokens,
        num_rows=num_rows,
        query_len=query_len,
        group=group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=q_THD.element_size(),
        kv_itemsize=keys.element_size(),
        max_keys=max_keys,
        num_sms=num_sms,
        invariant=invariant,
    )
    assert not tiles.split_blocks or tiles.num_splits * tiles.split_blocks * tiles.block_n >= max_keys
    splits = tiles.num_splits
    partial = lse = out_THD
    if splits > 1:
        partial = torch.empty(num_tokens, num_heads, splits, head_dim, dtype=torch.float32, device=q_THD.device)
        lse = torch.empty(num_tokens, num_heads, splits, dtype=torch.float32, device=q_THD.device)
    block_d = next_power_of_2(head_dim)
    options = {"launch_pdl": True} if pdl and not INTERPRETED else {}
    _attend_kernel[(tiles.num_blocks, num_kv_heads, splits)](
        q_THD,
        keys,
        values,
        out_THD,
        partial,
        lse,
        rows_R,
        query_starts_R1,
        kv_lens_R,
        page_table_MN,
        rows_R if tree is None else tree.ancestors_Q,
        rows_R if tree is None else tree.positions_T,
        rows_R if sinks_H is None else sinks_H,
        num_rows,
        num_tokens,
        page_table_MN.stride(0),
        query_len,
        splits,
        tiles.split_blocks,
        0 if tree is None else tree.num_keys,
        scale * 1.4426950408889634,  # log2(e): the kernel works with powers of 2
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        UNIFORM=query_len > 0,
        CAUSAL=causal,
        TREE=tree is not None,
        WINDOW=window,
        SOFT_CAP=soft_cap * 1.4426950408889634,
        SINKS=sinks_H is not None,
        SPLIT=splits > 1,
        FIXED=tiles.split_blocks > 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        BLOCK_R=16 if query_len else next_power_of_2(max(16, num_rows + 1)),
        PDL=bool(options),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if splits == 1:
        return
    block_x = next_power_of_2(splits)
    _combine_kernel[(num_tokens, num_heads)](
        partial,
        lse,
        out_THD,
        out_THD.stride(0),
        out_THD.stride(1),
        splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_X=block_x,
        PDL=bool(options),
        num_warps=max(1, min(4, block_d // 128)),  # side by side along d: no sum crosses warps
        **options,
    )
