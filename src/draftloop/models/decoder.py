"""What every decoder can do, whatever its layers are; the engine and drafters know no more of one.

Shape suffixes: T tokens in the pass, C hidden size, V vocabulary, W its entries on one rank, L layers, P pages,
S tokens per page, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from draftloop.distributed.group import ALONE, Group
from draftloop.graphs.phase import Cost
from draftloop.kernels.widened import embedding
from draftloop.kvcache.pool import CacheSpec
from draftloop.models.config import CacheGroup, ModelConfig
from draftloop.models.output_head import Vocabulary
from draftloop.models.shards import share
from draftloop.models.weights import Destination, named_weights

FINAL_HIDDEN = -1
"""Among `aux_layers`: the states after the final norm, which the output head reads."""

LayerCaches = Sequence[Tensor] | Tensor
"""Each layer's cache, [2, P, S, G, D]; a tensor [L, 2, P, S, G, D] is as good where layers are alike."""


def attention_shapes(
    config: ModelConfig, *, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[AttentionShape]:
    """What a backend must know of each group of layers; `page_size` in tokens, `kv_dtype` defaults to `dtype`."""
    return [
        AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            scale=config.attention_scale,
            page_size=page_size,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            soft_cap=config.attention_cap,
            sinks=any(config.sinks),
        )
        for group in config.cache_groups
    ]


def cache_specs(config: ModelConfig, dtype: torch.dtype, *, windows: Collection[int] = ()) -> list[CacheSpec]:
    """What each group of layers keeps per token. Layers with one of these `windows` let go of what is behind it."""
    return [
        CacheSpec(
            num_layers=group.num_layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            dtype=dtype,
            window=window,
        )
        for group, window in _cache_parts(config, windows)
    ]


def _cache_parts(config: ModelConfig, windows: Collection[int]) -> list[tuple[CacheGroup, int | None]]:
    """Groups of layers, and the window behind which they let go, if it is one of these."""
    parts = []
    for group in config.cache_groups:
        own = {layer: window if (window := config.window(layer)) in windows else None for layer in group.layers}
        for window in dict.fromkeys(own.values()):
            layers = tuple(layer for layer in group.layers if own[layer] == window)
            parts.append((replace(group, layers=layers), window))
    return parts


def capped(logits_TW: Tensor, cap: float | None, out_TW: Tensor | None) -> Tensor:
    """Logits squeezed between minus and plus `cap`, written to `out_TW` if given."""
    if cap is not None:
        logits_TW = (logits_TW / cap).tanh() * cap
    return logits_TW if out_TW is None or out_TW is logits_TW else out_TW.copy_(logits_TW)


class Decoder(torch.nn.Module, ABC):
    """A decoder without a batch or caches of its own: both are passed.

    Nothing in a pass depends on the values of a tensor, so a pass can be captured. Weights are
    uninitialised until `loader.load_model` fills them. Made with `max_positions`, the number of positions
    that can be rotated; positions must stay below it.
    """

    config: ModelConfig
    group: Group = ALONE
    """Ranks among which the layers and the output head are divided."""
    backend: AttentionBackend
    """Of the first group of layers."""
    embed_tokens: Tensor
    final_norm: Tensor
    lm_head: Tensor

    def layer_caches(self, caches: Sequence[Tensor], *, windows: Collection[int] = ()) -> LayerCaches:
        """The cache that each layer reads, from those of `cache_specs` for the same `windows`, in order."""
        found: dict[int, Tensor] = {}
        for (group, _), cache in zip(_cache_parts(self.config, windows), caches, strict=True):
            found |= zip(group.layers, cache.unbind(0), strict=True)
        return [found[self.config.kv_layer(layer)] for layer in range(self.config.num_layers)]

    @abstractmethod
    def forward(
        self, token_ids_T: Tensor, caches: LayerCaches, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one pass; token ids are int32 or int64 and inside the vocabulary.

        Returns the hidden states after the final norm, [T, C], and for each layer in `aux_layers` the
        residual stream that enters it, [T, C]; `num_layers` means what leaves the last one, and
        `FINAL_HIDDEN` the hidden states after the final norm.
        """

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T] -> [T, C], as it enters the first layer."""
        return embedding(token_ids_T, self.embed_tokens, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations. Matrices may be kept narrower, see kernels/widened.py."""
        return self.backend.shape.dtype

    @property
    def vocabulary(self) -> Vocabulary:
        """What logits stand for."""
        return Vocabulary(self.config.vocab_size, self.group)

    @abstractmethod
    def logits(self, hidden_TC: Tensor, *, out_TW: Tensor | None = None) -> Tensor:
        """[T, C] after the final norm -> this rank's logits in the model's dtype, [T, W] of `vocabulary`; written to
        `out_TW` if given."""

    def cost(self) -> Cost:
        """What one pass with logits must read and compute; of tables that are embeddings alone only a few rows are."""
        cache_elements = share(self.config, self.group.size).kv_elements_per_token
        weights = [weight for _, weight in named_weights(self)]
        num_weights = sum(weight.numel() for weight in weights) - self.num_looked_up
        looked_up_bytes = self.num_looked_up * self.embed_tokens.dtype.itemsize
        return Cost(
            weight_bytes=sum(weight.nbytes for weight in weights) - looked_up_bytes,
            cache_bytes=cache_elements * self.backend.shape.kv_dtype.itemsize,
            flops=2 * num_weights,
        )

    @property
    def num_looked_up(self) -> int:
        """Weights of tables from which only a few rows are read."""
        return self.embed_tokens.numel() - (self.lm_head.numel() if self.config.tie_word_embeddings else 0)

    def whole_lm_head(self) -> Tensor:
        """[V, C] on every rank."""
        if self.config.tie_word_embeddings or self.group.size == 1:
            return self.embed_tokens[: self.config.vocab_size] if self.config.tie_word_embeddings else self.lm_head
        return self.group.all_gather(self.lm_head.detach())[: self.config.vocab_size]

    def settle(self) -> None:
        """Called once a checkpoint's weights are in their places."""

    @abstractmethod
    def destinations(self, names: Iterable[str] = ()) -> dict[str, Destination]:
        """Hugging Face tensor name -> the weight, or part of a fused one, that it fills.

        `names` are those that a checkpoint has, for weights that are stored in more than one way.
        """

    def needless(self, names: Iterable[str]) -> set[str]:
        """Those of a checkpoint's tensors that the decoder does well without."""
        return {"lm_head.weight"} if self.config.tie_word_embeddings else set()
