"""The plain decoder: Llama, and by configuration what differs from it little (see models/architectures.py).

Mixtures of experts are among that: their layers have a router and experts in the place of the MLP (models/moe.py).

Shape suffixes: T tokens in the pass, C hidden size, W vocabulary on one rank, L positions or layers (`kv_L2PSGD`),
P pages, S tokens per page, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from draftloop.distributed.group import ALONE, Group
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Cost
from draftloop.kernels.linear import linear
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kvcache.pool import CacheSpec
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import FINAL_HIDDEN, Decoder, LayerCaches, attention_shapes, cache_specs, capped
from draftloop.models.layers import DecoderLayer, norm_dtype, parameter
from draftloop.models.moe import MixtureOfExperts, are_fused
from draftloop.models.rope import cos_sin_table
from draftloop.models.shards import Slices, shard
from draftloop.models.streamed import stream, streamed_weights
from draftloop.models.weights import Destination


def attention_shape(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> AttentionShape:
    """`attention_shapes` of a model whose layers are all alike. Raises ConfigError for another."""
    shapes = attention_shapes(config, page_size=page_size, dtype=dtype)
    if len(shapes) > 1:
        raise ConfigError(
            f"{config.architecture} has layers of {len(shapes)} shapes, which is supported for generating alone; "
            "choose a model whose layers are all alike"
        )
    return shapes[0]


def cache_spec(config: ModelConfig, dtype: torch.dtype) -> CacheSpec:
    """`cache_specs` of a model whose layers are all alike."""
    (spec,) = cache_specs(config, dtype)
    return spec


class DenseDecoder(Decoder):
    """A decoder whose layers are all alike."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
        group: Group = ALONE,
        engines: Group = ALONE,
    ) -> None:
        """`backend` attends for the heads that one rank of `group` has; `engines` share the experts."""
        super().__init__()
        self.config = config
        self.backend = backend
        self.group = group
        rows = self.vocabulary.width
        num_embedded = rows * group.size if config.tie_word_embeddings else config.vocab_size
        self.embed_tokens = parameter(num_embedded, config.hidden_size, device=device, dtype=dtype)
        self.embed_tokens.data[config.vocab_size :].zero_()
        # the tuple is what passes walk: a ModuleList registers the layers but does not know their type
        self.decoder_layers = tuple(
            DecoderLayer(config, layer, device=device, dtype=dtype, group=group, engines=engines)
            for layer in range(config.num_layers)
        )
        self.layers = torch.nn.ModuleList(self.decoder_layers)
        self.final_norm = parameter(config.hidden_size, device=device, dtype=norm_dtype(config, dtype))
        self.slices: dict[str, Slices] = {}
        if not config.tie_word_embeddings:
            self.lm_head = parameter(rows, config.hidden_size, device=device, dtype=dtype)
            if (slices := self.vocabulary.slices) is not None:
                self.slices["lm_head"] = slices
        elif group.size == 1:
            self.lm_head = self.embed_tokens
        else:
            self.lm_head = self.embed_tokens.data[group.rank * rows :][:rows]
        ropes = [config.layer_rope(layer) for layer in range(config.num_layers)]
        tables = {
            rope: cos_sin_table(rope, head_dim=config.head_dim, max_positions=max_positions, device=device)
            for rope in set(ropes)
        }
        self.cos_sin_tables = tuple(tables[rope] for rope in ropes)
        # rounded to the weights' type, as the models were trained
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def embed(self, token_ids_T: Tensor) -> Tensor:
        embedded_TC = super().embed(token_ids_T)
        return embedded_TC if self.embedding_scale == 1 else embedded_TC * self.embedding_scale

    def forward(
        self, token_ids_T: Tensor, caches: LayerCaches, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        return self.forward_embedded(self.embed(token_ids_T), caches, batch, aux_layers=aux_layers)

    def forward_embedded(
        self, embedded_TC: Tensor, caches: LayerCaches, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward` for tokens that are embedded already."""
        weights = streamed_weights(
            self.decoder_layers, self.final_norm, self.cos_sin_tables, embedded_TC, batch, self.backend
        )
        if weights is not None:
            hidden_TC, residuals = stream(weights, embedded_TC, caches, batch)
            return hidden_TC, [hidden_TC if index == FINAL_HIDDEN else residuals[index] for index in aux_layers]
        residual_TC, out = embedded_TC, None
        aux: dict[int, Tensor] = {}
        for index, (layer, kv_2PSGD) in enumerate(zip(self.decoder_layers, caches, strict=True)):
            x_TC, residual_TC = layer.enter(out, residual_TC)
            if index in aux_layers:
                aux[index] = residual_TC
            out, residual_TC = layer(x_TC, residual_TC, kv_2PSGD, self.cos_sin_tables[index], batch, self.backend)
        assert out is not None
        hidden_TC, residual_TC = add_rms_norm(out, residual_TC, self.final_norm, self.config.rms_norm_eps)
        aux |= {self.config.num_layers: residual_TC, FINAL_HIDDEN: hidden_TC}
        return hidden_TC, [aux[index] for index in aux_layers]

    def logits(self, hidden_TC: Tensor, *, out_TW: Tensor | None = None) -> Tensor:
        cap, divisor = self.config.logit_cap, self.config.logit_divisor
        if divisor != 1:
            hidden_TC = hidden_TC / divisor
        return capped(linear(hidden_TC, self.lm_head, out_TN=None if cap else out_TW), cap, out_TW)

    def settle(self) -> None:
        """Bring weights into the form that passes read: norms with their offset, heads whose halves turn."""
        if self.config.norm_offset:
            for name, weight in self.named_parameters():
                if name.endswith("norm"):
                    weight.data += 1
        if self.config.interleaved_rope:
            for layer in self.decoder_layers:
                layer.attention.turn_halves(int(self.config.head_dim * self.config.rope.share))

    def cost(self) -> Cost:
        """Of experts, those that tokens go through: how many differ is for who knows the number of tokens."""
        cost = super().cost()
        mixtures = [layer.mlp for layer in self.decoder_layers if isinstance(layer.mlp, MixtureOfExperts)]
        if not mixtures:
            return cost
        one, per_expert = mixtures[0], sum(mixture.expert_size for mixture in mixtures)
        num_here, expert_bytes = one.router.num_here, per_expert * one.gate_up_weight.dtype.itemsize
        return replace(
            cost,
            weight_bytes=cost.weight_bytes - num_here * expert_bytes,
            flops=cost.flops - 2 * (num_here - one.router.num_per_token) * per_expert,
            expert_bytes=expert_bytes,
            num_experts=num_here,
            experts_per_token=one.hit_per_token,
        )

    def destinations(self, names: Iterable[str] = ()) -> dict[str, Destination]:
        prefix, fused = self.config.tensor_prefix, are_fused(names)
        found: dict[str, Destination] = {
            f"{prefix}embed_tokens.weight": self.embed_tokens.data[: self.config.vocab_size],
            f"{prefix}norm.weight": self.final_norm.data,
        }
        if not self.config.tie_word_embeddings:
            found[f"{prefix.removesuffix('model.')}lm_head.weight"] = shard(
                self.lm_head.data, self.slices.get("lm_head")
            )
        for index, layer in enumerate(self.decoder_layers):
            found |= layer.destinations(f"{prefix}layers.{index}", fused_experts=fused)
        return found

    def needless(self, names: Iterable[str]) -> set[str]:
        """Of a model for more than text, its other parts too; of experts, those that other engines have."""
        names, whole = list(names), self.config.tensor_prefix.removesuffix("model.")
        others = {name for name in names if not name.startswith(whole)}
        for index, layer in enumerate(self.decoder_layers):
            if isinstance(layer.mlp, MixtureOfExperts):
                others |= layer.mlp.needless(f"{self.config.tensor_prefix}layers.{index}")
        return super().needless(names) | others
