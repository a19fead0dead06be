"""Attention over packed documents, for the target's pass and for training. No cache, nothing paged.

Shape suffixes: B rows, L tokens of a row, H query heads, G key/value heads, D head size, J later steps, R = H / G.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def document_mask(document_BL: Tensor, window: int | None = None) -> Tensor:
    """bool [B, L, L]: a token sees its own document up to itself, at most `window` tokens back."""
    length = document_BL.shape[1]
    place_L = torch.arange(length, device=document_BL.device)
    seen_LL = place_L[:, None] >= place_L
    if window is not None:
        seen_LL &= place_L[:, None] - place_L < window
    return seen_LL & (document_BL[:, :, None] == document_BL[:, None, :])


def document_blocks(document_BL: Tensor, window: int | None = None) -> Any:
    """The same as a block mask of flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (q >= k) & (document_BL[b, q] == document_BL[b, k])
        return same if window is None else same & (q - k < window)

    rows, length = document_BL.shape
    return create_block_mask(seen, rows, None, length, length, device=document_BL.device)


@functools.cache
def flex_function(compiled: bool) -> Callable[..., Any]:
    """flex_attention; it is made to be compiled, and without that computes every score."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def chain_attention_dense(
    q_BLHD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask_BLL: Tensor, scale: float
) -> Tensor:
    """Causal over the first step's keys, and each token's own key of every later step (training-time test).

    `keys` and `values`: one [B, L, G, D] per step up to now. Returns [B, L, H, D].
    """
    group = q_BLHD.shape[2] // keys[0].shape[2]
    first_k, first_v = (x.repeat_interleave(group, 2) for x in (keys[0], values[0]))
    scores = torch.einsum("blhd,bmhd->bhlm", q_BLHD, first_k).float() * scale
    scores = scores.masked_fill(~mask_BLL[:, None], float("-inf"))
    own_BLHJ = _own_scores(q_BLHD, keys[1:], scale)
    weights = torch.cat((scores, own_BLHJ.transpose(1, 2)), -1).softmax(-1).to(q_BLHD.dtype)
    length = q_BLHD.shape[1]
    out = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], first_v)
    return _add_own(out, weights[..., length:].transpose(1, 2), values[1:])


def chain_attention_flex(
    q_BLHD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    blocks: Any,
    scale: float,
    *,
    compiled: bool,
) -> Tensor:
    """The same by flex_attention over the first step's keys, joined with the later ones by their log-sums."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, first_k, first_v = (x.transpose(1, 2) for x in (q_BLHD, keys[0], values[0]))
    out_BHLD, aux = flex_function(compiled)(
        q, first_k, first_v, block_mask=blocks, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    out = out_BHLD.transpose(1, 2)
    if len(keys) == 1:
        return out
    lse_BLH1 = aux.lse.transpose(1, 2).unsqueeze(-1)
    weights = torch.cat((lse_BLH1, _own_scores(q_BLHD, keys[1:], scale)), -1).softmax(-1).to(q_BLHD.dtype)
    return _add_own(out * weights[..., :1], weights[..., 1:], values[1:])


def _own_scores(q_BLHD: Tensor, keys: Sequence[Tensor], scale: float) -> Tensor:
    """fp32 [B, L, H, J]: each token's query with its own key of each later step."""
    if not keys:
        return q_BLHD.new_empty((*q_BLHD.shape[:3], 0), dtype=torch.float32)
    q_BLGRD = q_BLHD.unflatten(2, (keys[0].shape[2], -1))
    scores = [(q_BLGRD * key.unsqueeze(3)).sum(-1, dtype=torch.float32).flatten(2) for key in keys]
    return torch.stack(scores, -1) * scale


def _add_own(out_BLHD: Tensor, weights_BLHJ: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Add each token's own value of each later step, weighted."""
    if not values:
        return out_BLHD
    groups = (values[0].shape[2], -1)
    out_BLGRD, weights_BLGRJ = out_BLHD.unflatten(2, groups), weights_BLHJ.unflatten(2, groups)
    for weight_BLGR, value in zip(weights_BLGRJ.unbind(-1), values, strict=True):
        out_BLGRD = torch.addcmul(out_BLGRD, weight_BLGR.unsqueeze(-1), value.unsqueeze(3))
    return out_BLGRD.flatten(2, 3)


def attend_dense(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BLL: Tensor, scale: float) -> Tensor:
    """Attention under a mask, [B, L, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BLL[:, None], scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def attend_flex(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, blocks: Any, scale: float, *, compiled: bool) -> Tensor:
    """The same under a block mask."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    return flex_function(compiled)(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True).transpose(1, 2)
