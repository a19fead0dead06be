"""The block drafter as a module: decoder layers over a block of masks, with the target's states as context.

Shape suffixes: T tokens, R rows, Q slots of a block, C width of the drafter, X numbers per token that the
target hands over, W draft vocabulary, L positions or layers (`kv_L2PSGD`), P pages, S tokens per page,
G key/value heads, D head size, E = 2G * D.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.drafters.aux_model import AuxModel, Place
from draftloop.drafters.dflash_config import DFlashConfig
from draftloop.drafters.dflash_files import MASK_EMBEDDING
from draftloop.drafters.dspark_model import DSparkHeads
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Cost
from draftloop.kernels.linear import linear
from draftloop.kernels.rms_norm import add_rms_norm, rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.kernels.widened import embedding
from draftloop.models.layers import Attention, DecoderLayer
from draftloop.models.shards import Plain, shard, share
from draftloop.models.weights import plain


class DFlashModel(AuxModel[DFlashConfig]):
    """Fills the masks behind a token, all at once."""

    def __init__(self, config: DFlashConfig, backend: AttentionBackend, **place: Unpack[Place]) -> None:
        super().__init__(config, backend, **place)
        model, width, device, dtype = config.model, config.model.hidden_size, self.device, self.dtype
        self.fc = self.make(width, config.aux_width)
        self.hidden_norm = self.make(width)
        self.decoder_layers = tuple(
            DecoderLayer(model, i, device=device, dtype=dtype, group=self.group) for i in range(model.num_layers)
        )
        self.layers = torch.nn.ModuleList(self.decoder_layers)
        self.final_norm = self.make(width)
        self.heads: DSparkHeads | None = None
        if config.heads:
            self.heads = DSparkHeads(
                config.heads, width=width, draft_vocab_size=config.draft_vocab_size, device=device, dtype=dtype
            )
        self.mask_C = torch.zeros(width, device=device, dtype=dtype)
        """What a mask is embedded as; set once the weights are there."""

    def settle(self, mask_C: Tensor | None) -> None:
        """Once the weights are there: what a mask is embedded as, by default its token; the target's rows of a head.

        Raises ConfigError for an embedding of another width.
        """
        self.settle_head()
        if mask_C is None:
            assert self.config.mask_token_id is not None
            mask_C = self.embed_tokens[self.config.mask_token_id]
        if mask_C.shape != self.mask_C.shape:
            raise ConfigError(
                f"{MASK_EMBEDDING} holds {mask_C.shape[0]} numbers, but the drafter is {self.mask_C.shape[0]} wide"
            )
        self.mask_C.copy_(mask_C)

    def write_context(self, aux_TX: Tensor, positions_T: Tensor, slots_T: Tensor, kv_L2PSGD: Tensor) -> None:
        """Write keys and values of each layer for tokens that the target has seen, at their positions."""
        eps = self.config.model.rms_norm_eps
        context_TC = rms_norm(linear(aux_TX, self.fc), self.hidden_norm, eps)
        for layer, kv_2PSGD in zip(self.decoder_layers, kv_L2PSGD.unbind(0), strict=True):
            attention = layer.attention
            weight_EC, bias_E = _keys_values(attention)
            rope_write(
                linear(context_TC, weight_EC, bias_E),
                positions_T,
                slots_T,
                self.cos_sin_LD,
                kv_2PSGD,
                num_heads=0,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                q_norm_D=attention.q_norm,
                k_norm_D=attention.k_norm,
                eps=eps,
            )

    def forward(self, token_ids_R: Tensor, kv_L2PSGD: Tensor, batch: AttentionBatch) -> Tensor:
        """Run one block per row: a token, and masks after it. Returns [R, Q, C], which the output head reads."""
        eps, num_slots = self.config.model.rms_norm_eps, batch.max_query_len
        embedded_R1C = embedding(token_ids_R, self.embed_tokens, self.dtype)[:, None]
        masks_RKC = self.mask_C.expand(token_ids_R.shape[0], num_slots - 1, -1)
        residual_TC, out = torch.cat([embedded_R1C, masks_RKC], 1).flatten(0, 1), None
        by_causality = {causal: replace(batch, causal=causal) for causal in set(self.config.causal_layers)}
        for layer, causal, kv_2PSGD in zip(
            self.decoder_layers, self.config.causal_layers, kv_L2PSGD.unbind(0), strict=True
        ):
            x_TC, residual_TC = layer.enter(out, residual_TC)
            out, residual_TC = layer(x_TC, residual_TC, kv_2PSGD, self.cos_sin_LD, by_causality[causal], self.backend)
        assert out is not None
        hidden_TC, _ = add_rms_norm(out, residual_TC, self.final_norm, eps)
        return hidden_TC.view(-1, num_slots, hidden_TC.shape[-1])

    def context_cost(self) -> Cost:
        """What `write_context` must read and compute."""
        num_weights = self.fc.numel()
        num_weights += sum(_keys_values(layer.attention)[0].numel() for layer in self.decoder_layers)
        return Cost(weight_bytes=num_weights * self.fc.dtype.itemsize, flops=2 * num_weights)

    def block_cost(self) -> Cost:
        """What one pass over a block with its logits must read and compute."""
        model = self.config.model
        num_weights = sum(p.numel() for p in self.layers.parameters()) + self.lm_head.numel()
        cache = share(model, self.group.size).kv_elements_per_token
        return Cost(
            weight_bytes=num_weights * self.fc.dtype.itemsize,
            cache_bytes=cache * self.backend.shape.kv_dtype.itemsize,
            flops=2 * num_weights,
        )

    def destinations(self) -> dict[str, Plain]:
        """Plain tensor name -> the weight, or part of a fused one, that it fills; `d2t` is not among them."""
        config = self.config
        found: dict[str, Plain] = {
            "fc.weight": self.fc,
            "hidden_norm.weight": self.hidden_norm,
            "norm.weight": self.final_norm,
            **self.table_destinations(),
        }
        if self.heads:
            found |= self.heads.destinations()
        for index, layer in enumerate(self.decoder_layers):
            parts = plain(layer.destinations(f"layers.{index}"))
            if config.fused_qkv:
                parts = {
                    name: part
                    for name, part in parts.items()
                    if not name.split("_proj")[0].endswith((".q", ".k", ".v"))
                }
                attention = layer.attention
                for kind, fused in (("weight", attention.qkv_weight), ("bias", attention.qkv_bias)):
                    if isinstance(fused, Tensor):
                        whole = attention.slices.get("qkv_weight")
                        parts[f"layers.{index}.self_attn.qkv_proj.{kind}"] = shard(fused, whole)
            found |= parts
        return found


def _keys_values(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the fused projection's part that gives keys and values."""
    start, bias = attention.query_size, attention.qkv_bias
    assert isinstance(attention.qkv_weight, Tensor)
    return attention.qkv_weight[start:], None if bias is None else bias[start:]
