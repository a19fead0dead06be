"""Between the qkv projection and attention: head norms, rotary embedding, keys and values into the pages.

Shape suffixes: T tokens, E = (H + 2G) * D columns of the fused projection (q, then k, then v), H query
heads, G key/value heads, D head size, L positions, P pages, S tokens per page, X splits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.kernels.fp8_cache import FP8, as_bytes, stored
from draftloop.kernels.native import ops as native
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

FEW_TOKENS = 64
"""Up to this, programs are small, so that there are many; above, launching them would take the longest."""


def rope_write_torch(
    qkv: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_LD: Tensor,
    kv_2PSGD: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reference of `rope_write`. Six aten calls that are not views in the plain fp32 case."""
    qkv_TE = qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv
    num_rotated = num_heads + num_kv_heads
    heads = qkv_TE.view(-1, num_rotated + num_kv_heads, head_dim)
    qk = heads[:, :num_rotated]
    if q_norm_D is not None and k_norm_D is not None:
        weights = torch.cat((q_norm_D.expand(num_heads, -1), k_norm_D.expand(num_kv_heads, -1)))
        # in fp32 throughout, then rounded once
        qk = (torch.rms_norm(qk.float(), (head_dim,), None, eps) * weights).to(qkv_TE.dtype)

    rotary_dim = cos_sin_LD.shape[1]
    half = rotary_dim // 2
    cos, sin = cos_sin_LD.index_select(0, positions_T).view(-1, 1, 2, half).unbind(2)
    halves = qk[..., :rotary_dim].unflatten(-1, (2, half))
    first, second = halves.unbind(2)
    # type promotion makes this fp32, whatever the model's dtype
    rotated = halves * cos.unsqueeze(2)
    rotated_first, rotated_second = rotated.unbind(2)
    rotated_first.addcmul_(second, sin, value=-1)
    rotated_second.addcmul_(first, sin)
    qk_rotated = rotated.flatten(-2)
    if qk_rotated.dtype != qkv_TE.dtype:
        qk_rotated = qk_rotated.to(qkv_TE.dtype)
    if rotary_dim < head_dim:
        qk_rotated = torch.cat((qk_rotated, qk[..., rotary_dim:]), -1)

    keys, values = as_bytes(kv_2PSGD).flatten(1, 2)
    keys.index_copy_(0, slots_T, stored(qk_rotated[:, num_heads:], kv_2PSGD))
    values.index_copy_(0, slots_T, stored(heads[:, num_rotated:], kv_2PSGD))
    return qk_rotated[:, :num_heads]


@jit()
def _rope_write_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    kv_ptr,
    qkv_stride,
    split_stride,
    cos_sin_stride,
    side_stride,
    page_stride,
    token_stride,
    head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the rotated dimensions
    SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0: every dimension is rotated
    FP8: tl.constexpr,  # the cache holds e4m3
    PDL: tl.constexpr,
):
    """One token, some heads. A value is a head with nothing to norm and an angle of 0."""
    dtype = q_out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    head_live = head < NUM_HEADS + 2 * NUM_KV_HEADS
    d = tl.arange(0, BLOCK_HALF)
    live = head_live[:, None] & (d < HALF)[None, :]

    if PDL:
        tl.extra.cuda.gdc_wait()
    head_ptr = qkv_ptr + token * qkv_stride + (head * HEAD_DIM)[:, None]
    first = _added_up(head_ptr + d[None, :], live, split_stride, SPLITS, dtype)
    second = _added_up(head_ptr + HALF + d[None, :], live, split_stride, SPLITS, dtype)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    angle_ptr = cos_sin_ptr + position * cos_sin_stride + d
    cos = tl.load(angle_ptr, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=d < HALF, other=0.0)[None, :]
    cos = tl.where(is_value[:, None], 1.0, cos)
    sin = tl.where(is_value[:, None], 0.0, sin)
    r, rest, rest_live = d, first, live  # unused unless BLOCK_REST
    if BLOCK_REST > 0:
        r = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest_live = head_live[:, None] & (r < HEAD_DIM)[None, :]
        rest = _added_up(head_ptr + r[None, :], rest_live, split_stride, SPLITS, dtype)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD_DIM + eps))[:, None]
        # rounded to the model's dtype between norm and rotation, as the model was trained
        weight = _head_weight(q_norm_ptr, k_norm_ptr, d, d < HALF, is_query, is_value)
        first = (first * scale * weight).to(dtype).to(tl.float32)
        weight = _head_weight(q_norm_ptr, k_norm_ptr, HALF + d, d < HALF, is_query, is_value)
        second = (second * scale * weight).to(dtype).to(tl.float32)
        if BLOCK_REST > 0:
            rest = rest * scale * _head_weight(q_norm_ptr, k_norm_ptr, r, r < HEAD_DIM, is_query, is_value)

    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)

    q_row_ptr = q_out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM
    side = is_value.to(tl.int64)
    kv_head = head - NUM_HEADS - side * NUM_KV_HEADS
    slot_offset = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * token_stride
    kv_row_ptr = kv_ptr + (slot_offset + side * side_stride + kv_head * head_stride)[:, None]
    to_q = live & is_query[:, None]
    to_kv = live & (head >= NUM_HEADS)[:, None]
    tl.store(q_row_ptr + d[None, :], rotated_first, mask=to_q)
    tl.store(q_row_ptr + HALF + d[None, :], rotated_second, mask=to_q)
    tl.store(kv_row_ptr + d[None, :], _to_cache(rotated_first, kv_ptr, FP8), mask=to_kv)
    tl.store(kv_row_ptr + HALF + d[None, :], _to_cache(rotated_second, kv_ptr, FP8), mask=to_kv)
    if BLOCK_REST > 0:
        tl.store(q_row_ptr + r[None, :], rest.to(dtype), mask=rest_live & is_query[:, None])
        rest = _to_cache(rest.to(dtype), kv_ptr, FP8)
        tl.store(kv_row_ptr + r[None, :], rest, mask=rest_live & (head >= NUM_HEADS)[:, None])


@jit()
def _added_up(pointers, live, split_stride, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """In fp32, rounded to the model's dtype as a layer that is not split rounds."""
    x = tl.load(pointers, mask=live, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(pointers + split * split_stride, mask=live, other=0.0)
    if SPLITS > 1:
        x = x.to(dtype).to(tl.float32)
    return x


@jit()
def _to_cache(x, kv_ptr, FP8: tl.constexpr):
    """What the cache holds of it."""
    if FP8:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(kv_ptr.dtype.element_ty)


@jit()
def _head_weight(q_norm_ptr, k_norm_ptr, column, live, is_query, is_value):
    """Norm weights of some columns for each head: the query's, the key's, or 1 for values."""
    q_weight = tl.load(q_norm_ptr + column, mask=live, other=0.0).to(tl.float32)[None, :]
    k_weight = tl.load(k_norm_ptr + column, mask=live, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_value[:, None], 1.0, tl.where(is_query[:, None], q_weight, k_weight))


def rope_write_triton(
    qkv: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_LD: Tensor,
    kv_2PSGD: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of `rope_write_torch`, one launch."""
    qkv_XTE = qkv if qkv.dim() == 3 else qkv.unsqueeze(0)
    splits, num_tokens, _ = qkv_XTE.shape
    side_stride, page_stride, token_stride, head_stride, last_stride = kv_2PSGD.stride()
    assert qkv_XTE.stride(2) == cos_sin_LD.stride(1) == last_stride == 1
    assert splits == 1 or dtype is not None
    norm = q_norm_D is not None and k_norm_D is not None
    dtype = dtype if qkv.dim() == 3 else qkv.dtype
    q_THD = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=qkv.device)
    half = cos_sin_LD.shape[1] // 2
    rest = head_dim - 2 * half
    block_heads, num_warps = (4, 1) if num_tokens <= FEW_TOKENS else (16, 4)
    if num_tokens:
        _rope_write_kernel[(num_tokens, -(-(num_heads + 2 * num_kv_heads) // block_heads))](
            qkv,
            positions_T,
            slots_T,
            cos_sin_LD,
            q_norm_D if norm else qkv,
            k_norm_D if norm else qkv,
            q_THD,
            kv_2PSGD,
            qkv_XTE.stride(1),
            qkv_XTE.stride(0),
            cos_sin_LD.stride(0),
            side_stride,
            page_stride,
            token_stride,
            head_stride,
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            SPLITS=splits,
            PAGE_SIZE=kv_2PSGD.shape[2],
            NORM=norm,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=next_power_of_2(half),
            BLOCK_REST=next_power_of_2(rest) if rest else 0,
            FP8=kv_2PSGD.dtype is FP8,
            num_warps=num_warps,
            **pdl_options(qkv.device),
        )
    return q_THD


def rope_write(
    qkv: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_LD: Tensor,
    kv_2PSGD: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Write this pass's keys and values to their slots; return the rotated queries, [T, H, D].

    `qkv` is [T, E], or fp32 [X, T, E]: sums that a linear layer split along K left to be added up, which is done in
    order, in fp32, and rounded to `dtype`, the model's.

    `cos_sin_LD` is fp32 [L, rotary_dim], cosines in the first half; dimensions past rotary_dim pass
    through. Halves are rotated, not neighbours. `q_norm_D` and `k_norm_D`, both or neither, are the
    weights of an RMS norm over each head before the rotation. Padding tokens carry slots of page 0,
    where writes may collide. The cache may be of the model's dtype, or of e4m3.
    """
    if qkv.dim() == 2 and native.takes_rope_write(qkv, positions_T, slots_T, cos_sin_LD, kv_2PSGD, q_norm_D, k_norm_D):
        q_TQD = torch.empty(qkv.shape[0], num_heads, head_dim)
        native.rope_write(qkv, positions_T, slots_T, cos_sin_LD, q_norm_D, k_norm_D, q_TQD, kv_2PSGD, eps)
        return q_TQD
    run = rope_write_triton if qkv.is_cuda else rope_write_torch
    return run(
        qkv,
        positions_T,
        slots_T,
        cos_sin_LD,
        kv_2PSGD,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        eps=eps,
        dtype=dtype,
    )
