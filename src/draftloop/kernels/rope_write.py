"""Between the qkv projection and attention: head norms, rotary embedding, keys and values into the pages.

Shape suffixes: T tokens, E = (H + 2G) * D columns of the fused projection (q, then k, then v), H query
heads, G key/value heads, D head size, L positions, P pages, S tokens per page.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_write_torch(
    qkv_TE: Tensor,
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
) -> Tensor:
    """Reference of `rope_write`. Six aten calls that are not views in the plain fp32 case."""
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

    keys, values = kv_2PSGD.flatten(1, 2)
    keys.index_copy_(0, slots_T, qk_rotated[:, num_heads:])
    values.index_copy_(0, slots_T, heads[:, num_rotated:])
    return qk_rotated[:, :num_heads]


def rope_write(
    qkv_TE: Tensor,
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
) -> Tensor:
    """Write this pass's keys and values to their slots; return the rotated queries, [T, H, D].

    `cos_sin_LD` is fp32 [L, rotary_dim], cosines in the first half; dimensions past rotary_dim pass
    through. Halves are rotated, not neighbours. `q_norm_D` and `k_norm_D`, both or neither, are the
    weights of an RMS norm over each head before the rotation. Padding tokens carry slots of page 0,
    where writes may collide.
    """
    return rope_write_torch(
        qkv_TE,
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
    )
