"""Passes of few tokens that one kernel computes (kernels/streamed_pass.py): which ones, and of what weights.

Shape suffixes: T tokens in the pass, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.graphs.program import in_place
from draftloop.kernels import batch_invariance
from draftloop.kernels.linear import sm_count
from draftloop.kernels.packed_values import BLOCK
from draftloop.kernels.streamed_pass import (
    LayerWeights,
    Matrix,
    PassBatch,
    PassWeights,
    format_of,
    shape_of,
    streamed_pass,
)
from draftloop.kernels.streamed_plan import can_attend, token_limit
from draftloop.models.decoder import LayerCaches
from draftloop.models.layers import DecoderLayer, GatedMLP
from draftloop.models.weights import Memory


def streamed_weights(
    layers: Sequence[DecoderLayer],
    final_norm_C: Tensor,
    cos_sin_tables: Sequence[Tensor],
    embedded_TC: Tensor,
    batch: AttentionBatch,
    backend: AttentionBackend,
) -> PassWeights | None:
    """What the kernel reads of a decoder, if it should compute the pass.

    Of what the pass is, its shape alone decides. Layers must be alike and plain: no experts, biases, adapters or
    divided weights; matrices all in bf16, all in 8 bits with scales of rows, or all in 4 bits with groups of 128; norms
    in front of their parts alone, and the silu gate; attention to all keys, without norms or caps, over a cache of the
    model's type.
    """
    first, num_tokens = _own(layers[0]), embedded_TC.shape[0]
    if first is None or not num_tokens:
        return None
    found = PassWeights(
        [first],
        final_norm_C,
        cos_sin_tables[0],
        num_kv_heads=backend.shape.num_kv_heads,
        head_dim=backend.shape.head_dim,
        eps=layers[0].eps,
        scale=backend.shape.scale,
    )
    limit = token_limit(found.shape, embedded_TC.device)
    if num_tokens > limit or not _is_plain_attention(found, cos_sin_tables, batch, backend):
        return None
    fits = can_attend(
        found.shape,
        num_rows=batch.rows_R.shape[0],
        max_query_len=_longest(batch, num_tokens),
        page_size=backend.shape.page_size,
        num_sms=sm_count(embedded_TC.device),
    )
    if not fits:
        return None
    weights = found.shape.weights
    alike = [own for layer in layers if (own := _own(layer)) is not None and format_of(own.qkv_EC) == weights]
    return found._replace(layers=alike) if len(alike) == len(layers) else None


def stream(
    weights: PassWeights, embedded_TC: Tensor, caches: LayerCaches, batch: AttentionBatch
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states behind the final norm, and the residual stream where it enters each layer and leaves the last."""
    tables = PassBatch(**{name: getattr(batch, name) for name in PassBatch._fields})
    hidden_TC, residuals_LTC = streamed_pass(
        weights, embedded_TC, list(caches), tables, max_query_len=_longest(batch, embedded_TC.shape[0])
    )
    return hidden_TC, [embedded_TC, *residuals_LTC]


def describe(layers: Sequence[DecoderLayer], backend: AttentionBackend, device: torch.device) -> str:
    """How passes of few tokens are computed, as a start says it."""
    first, *others = [_own(layer) for layer in layers]
    if first is None or any(one is None or format_of(one.qkv_EC) != format_of(first.qkv_EC) for one in others):
        return "many kernels, since not all layers are plain with matrices in one format that a single kernel takes"
    shape = shape_of(first, backend.shape.num_kv_heads, backend.shape.head_dim)
    limit = token_limit(shape, device)
    if not limit:
        return f"many kernels, since layers of this shape in {shape.weights.name} were not measured on this device"
    return f"one kernel up to {limit} tokens ({shape.weights.name})"


def _longest(batch: AttentionBatch, num_tokens: int) -> int:
    """Tokens that a row may have."""
    return min(batch.max_query_len, num_tokens)


def _is_plain_attention(
    weights: PassWeights, cos_sin_tables: Sequence[Tensor], batch: AttentionBatch, backend: AttentionBackend
) -> bool:
    if batch_invariance.is_wanted() or batch.invariant or not batch.causal or batch.tree is not None:
        return False
    if batch.attend is not in_place or batch.adapters_T is not None:
        return False
    if any(table is not weights.cos_sin_XD for table in cos_sin_tables):
        return False
    heads = backend.shape
    kinds = {heads.dtype, heads.kv_dtype, weights.final_norm_C.dtype}
    is_whole = weights.cos_sin_XD.shape[1] == heads.head_dim
    return backend.name == "triton" and is_whole and not heads.soft_cap and kinds == {torch.bfloat16}


def _own(layer: DecoderLayer) -> LayerWeights | None:
    """A layer's weights; None if it is not plain."""
    attention, mlp, norms = layer.attention, layer.mlp, layer.norms
    if not isinstance(mlp, GatedMLP) or attention.group.size > 1 or mlp.activation != "silu":
        return None
    extras = (attention.qkv_bias, attention.o_bias, attention.q_norm, attention.k_norm, attention.sinks)
    extras = (*extras, attention.window, mlp.gate_up_bias, mlp.down_bias)
    extras = (*extras, attention.qkv_lora, attention.o_lora, mlp.gate_up_lora, mlp.down_lora)
    if any(extra is not None for extra in extras) or norms.after_attention or norms.after_mlp or layer.multiplier != 1:
        return None
    norms_C = [
        norm for norm in (layer.input_norm, layer.post_norm) if norm is not None and norm.dtype is torch.bfloat16
    ]
    matrices = [_matrix(one) for one in (attention.qkv_weight, attention.o_weight, mlp.gate_up_weight, mlp.down_weight)]
    formats = {None if one is None else format_of(one) for one in matrices}
    if len(norms_C) < 2 or len(formats) > 1 or None in formats:
        return None
    qkv, o, gate_up, down = (one for one in matrices if one is not None)
    return LayerWeights(norms_C[0], qkv, o, norms_C[1], gate_up, down)


def _matrix(weight: Memory) -> Matrix | None:
    """As the kernel reads it; None: it cannot."""
    if isinstance(weight, Tensor):
        return weight
    is_whole = weight.shape[1] % BLOCK == 0  # else columns stand for nothing
    return weight.planes() if weight.takes() and weight.is_arranged and is_whole else None
