"""Passes of few tokens in which one kernel computes what stands between two attentions (kernels/streamed_layer.py).

Shape suffixes: T tokens in the pass, C hidden size, P pages, S tokens per page, G key/value heads, D head size,
L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.kernels import batch_invariance
from draftloop.kernels.streamed_layer import LayerWeights, streamed_layer, token_limit
from draftloop.models.decoder import LayerCaches
from draftloop.models.layers import DecoderLayer, GatedMLP


def behind_attentions(
    layers: Sequence[DecoderLayer], final_norm_C: Tensor, residual_TC: Tensor
) -> list[LayerWeights] | None:
    """What stands behind each layer's attention, if `stream` should compute the pass.

    Of what the pass is, only its number of tokens decides. Layers must be plain: no experts, biases, adapters,
    quantised or divided weights; norms in front of their parts alone, and the silu gate.
    """
    first = None if batch_invariance.is_wanted() else _own(layers[0])
    if first is None or not 0 < residual_TC.shape[0] <= token_limit(first.shape, residual_TC.device):
        return None
    found = []
    for layer in layers:
        if (own := _own(layer)) is None:
            return None
        found.append(own)
    behind = [one._replace(next_norm_C=two.next_norm_C, qkv_EC=two.qkv_EC) for one, two in pairwise(found)]
    return [*behind, found[-1]._replace(next_norm_C=final_norm_C, qkv_EC=None)]


def stream(
    layers: Sequence[DecoderLayer],
    behind: Sequence[LayerWeights],
    residual_TC: Tensor,
    caches: LayerCaches,
    cos_sin_tables: Sequence[Tensor],
    batch: AttentionBatch,
    backend: AttentionBackend,
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states behind the final norm, and the residual stream where it enters each layer and leaves the last."""
    x_TC, residual_TC = layers[0].enter(None, residual_TC)
    residuals, result = [residual_TC], x_TC
    for index, (layer, kv_2PSGD, cos_sin_LD) in enumerate(zip(layers, caches, cos_sin_tables, strict=True)):
        attention = layer.attention
        if index == 0:
            q_THD = attention.write(x_TC, kv_2PSGD, cos_sin_LD, batch)
        else:
            q_THD = attention.rotate(result, kv_2PSGD, cos_sin_LD, batch, residual_TC.dtype)
        attended = attention.attend(q_THD, kv_2PSGD, batch, backend)
        result, residual_TC = streamed_layer(attended, residual_TC, behind[index], layer.eps)
        residuals.append(residual_TC)
    return result, residuals


def _own(layer: DecoderLayer) -> LayerWeights | None:
    """A layer's weights, of which the last two are those in front of its own attention; None if it is not plain."""
    attention, mlp, norms = layer.attention, layer.mlp, layer.norms
    if not isinstance(mlp, GatedMLP) or attention.group.size > 1 or attention.whole_norm or mlp.activation != "silu":
        return None
    extras = (attention.qkv_bias, attention.o_bias, mlp.gate_up_bias, mlp.down_bias)
    extras = (*extras, attention.qkv_lora, attention.o_lora, mlp.gate_up_lora, mlp.down_lora)
    if any(extra is not None for extra in extras) or norms.after_attention or norms.after_mlp or layer.multiplier != 1:
        return None
    found = (attention.o_weight, layer.post_norm, mlp.gate_up_weight, mlp.down_weight, layer.input_norm)
    weights = [one for one in (*found, attention.qkv_weight) if isinstance(one, Tensor) and one.dtype is torch.bfloat16]
    return LayerWeights(*weights) if len(weights) == len(LayerWeights._fields) else None
