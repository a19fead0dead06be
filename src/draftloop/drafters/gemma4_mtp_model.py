"""The Gemma 4 assistant as a module: layers that ask the target's keys and values.

Shape suffixes: R rows, C width of the assistant, B width of the target, V vocabulary, N groups of J ids, Z ids that
are scored, L layers, P pages, S tokens per page, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.drafters.gemma4_mtp_config import Gemma4AssistantConfig
from draftloop.graphs.phase import Cost
from draftloop.kernels.linear import linear
from draftloop.kernels.rms_norm import rms_norm
from draftloop.kernels.widened import embedding
from draftloop.models.config import LayerType
from draftloop.models.gemma4 import Gemma4Layer, make_kinds
from draftloop.models.layers import parameter
from draftloop.models.weights import Plain, plain


class Gemma4Assistant(torch.nn.Module):
    """Predicts a token from the embedding of the one before it, a hidden state and what the target has seen."""

    target_ids_W: Tensor | None = None

    def __init__(
        self,
        config: Gemma4AssistantConfig,
        backends: Mapping[LayerType, AttentionBackend],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        self.config = config
        model, width, vocab = config.model, config.model.hidden_size, config.model.vocab_size
        self.kinds = make_kinds(model, backends, max_positions=max_positions, device=device)
        self.embed_tokens = make(vocab, width)
        self.pre_projection = make(width, 2 * config.target_hidden_size)
        self.post_projection = make(config.target_hidden_size, width)
        self.gemma_layers = tuple(Gemma4Layer(model, i, device=device, dtype=dtype) for i in range(model.num_layers))
        self.layers = torch.nn.ModuleList(self.gemma_layers)
        self.final_norm = make(width)
        self.centroids_NC = make(config.num_centroids, width) if config.num_centroids else None
        self.ids_NJ = torch.zeros(0, dtype=torch.int64, device=device)

    def settle(self, ordering_V: Tensor) -> None:
        """Once the weights are there: the ids, group after group."""
        self.ids_NJ = ordering_V.long().view(self.config.num_centroids, -1).to(self.embed_tokens.device)

    def forward(
        self,
        embedded_RB: Tensor,
        hidden_RB: Tensor,
        positions_R: Tensor,
        caches: Sequence[Tensor],
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """One token per row. `caches` [2, P, S, G, D] are the target's, one for each layer; nothing is written there.

        Returns what the output head reads, [R, C], and the hidden state for the next step, [R, B].
        """
        hidden_RC = linear(torch.cat((embedded_RB, hidden_RB), -1), self.pre_projection)
        for layer, kind, kv_2PSGD in zip(self.gemma_layers, self.config.model.layer_types, caches, strict=True):
            hidden_RC = layer(hidden_RC, None, kv_2PSGD, positions_R, self.kinds[kind], batch)
        normed_RC = rms_norm(hidden_RC, self.final_norm, self.config.model.rms_norm_eps)
        return normed_RC, linear(normed_RC, self.post_projection)

    def logits(self, normed_RC: Tensor) -> Tensor:
        """[R, C] -> [R, V]; minus infinity for ids that are not scored."""
        if self.centroids_NC is None:
            return linear(normed_RC, self.embed_tokens)
        nearest = linear(normed_RC, self.centroids_NC).topk(self.config.num_nearest, dim=-1, sorted=False).indices
        ids_RZ = self.ids_NJ[nearest].flatten(1)
        scores_RZ = (embedding(ids_RZ, self.embed_tokens, normed_RC.dtype) @ normed_RC.unsqueeze(-1)).squeeze(-1)
        nothing_RV = normed_RC.new_full((normed_RC.shape[0], self.embed_tokens.shape[0]), float("-inf"))
        return nothing_RV.scatter_(1, ids_RZ, scores_RZ)

    def cost(self, cache_bytes: int) -> Cost:
        """What one step must read and compute; `cache_bytes` of the target's, per token of context."""
        config, table = self.config, self.embed_tokens.numel()
        num_weights = sum(p.numel() for p in self.parameters())
        if config.num_centroids:
            num_weights -= table - table * config.num_nearest // config.num_centroids
        return Cost(
            weight_bytes=num_weights * self.embed_tokens.dtype.itemsize, cache_bytes=cache_bytes, flops=2 * num_weights
        )

    def destinations(self) -> dict[str, Plain]:
        """Plain tensor name -> the weight, or part of a fused one, that it fills; the ids' order is not among them."""
        found: dict[str, Plain] = {
            "embed_tokens.weight": self.embed_tokens,
            "norm.weight": self.final_norm,
            "pre_projection.weight": self.pre_projection,
            "post_projection.weight": self.post_projection,
        }
        if self.centroids_NC is not None:
            found["masked_embedding.centroids.weight"] = self.centroids_NC
        for index, layer in enumerate(self.gemma_layers):
            found |= plain(layer.destinations(f"layers.{index}"))
        return found
