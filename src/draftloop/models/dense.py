"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 by configuration.

Shape suffixes: T tokens in the pass, C hidden size, V vocabulary, L positions or layers (`kv_L2PSGD`),
P pages, S tokens per page, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from draftloop.graphs.phase import Cost
from draftloop.kernels.linear import linear
from draftloop.kernels.rms_norm import add_rms_norm, rms_norm
from draftloop.kvcache.pool import CacheSpec
from draftloop.models.config import ModelConfig
from draftloop.models.layers import DecoderLayer, parameter
from draftloop.models.rope import cos_sin_table

FINAL_HIDDEN = -1
"""Among `aux_layers`: the states after the final norm, which the output head reads."""


def attention_shape(
    config: ModelConfig, *, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionShape:
    """What a backend must know of this model; `page_size` in tokens, `kv_dtype` defaults to `dtype`."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
    )


def cache_spec(config: ModelConfig, dtype: torch.dtype) -> CacheSpec:
    """What this model keeps per token."""
    return CacheSpec(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype
    )


class DenseDecoder(torch.nn.Module):
    """A decoder without a batch or cache of its own: both are passed.

    Nothing in a pass depends on the values of a tensor, so a pass can be captured. Weights are
    uninitialised until `loader.load_model` fills them. `max_positions` is the number of positions
    that can be rotated; positions must stay below it.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.embed_tokens = parameter(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        # the tuple is what passes walk: a ModuleList registers the layers but does not know their type
        self.decoder_layers = tuple(
            DecoderLayer(config, layer, device=device, dtype=dtype) for layer in range(config.num_layers)
        )
        self.layers = torch.nn.ModuleList(self.decoder_layers)
        self.final_norm = parameter(config.hidden_size, device=device, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head = self.embed_tokens
        else:
            self.lm_head = parameter(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.cos_sin_LD = cos_sin_table(
            config.rope, head_dim=config.head_dim, max_positions=max_positions, device=device
        )

    def forward(
        self, token_ids_T: Tensor, kv_L2PSGD: Tensor, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one pass; token ids are int32 or int64 and inside the vocabulary.

        Returns the hidden states after the final norm, [T, C], and for each layer in `aux_layers` the
        residual stream that enters it, [T, C]; `num_layers` means what leaves the last one, and
        `FINAL_HIDDEN` the hidden states after the final norm.
        """
        return self.forward_embedded(
            F.embedding(token_ids_T, self.embed_tokens), kv_L2PSGD, batch, aux_layers=aux_layers
        )

    def forward_embedded(
        self, embedded_TC: Tensor, kv_L2PSGD: Tensor, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward` for tokens that are embedded already."""
        eps, cos_sin_LD, backend = self.config.rms_norm_eps, self.cos_sin_LD, self.backend
        residual_TC, out = embedded_TC, None
        aux: dict[int, Tensor] = {}
        for index, (layer, kv_2PSGD) in enumerate(zip(self.decoder_layers, kv_L2PSGD.unbind(0), strict=True)):
            if out is None:
                x_TC = rms_norm(residual_TC, layer.input_norm, eps)
            else:
                x_TC, residual_TC = add_rms_norm(out, residual_TC, layer.input_norm, eps)
            if index in aux_layers:
                aux[index] = residual_TC
            out, residual_TC = layer(x_TC, residual_TC, kv_2PSGD, cos_sin_LD, batch, backend)
        assert out is not None
        hidden_TC, residual_TC = add_rms_norm(out, residual_TC, self.final_norm, eps)
        aux |= {self.config.num_layers: residual_TC, FINAL_HIDDEN: hidden_TC}
        return hidden_TC, [aux[index] for index in aux_layers]

    def logits(self, hidden_TC: Tensor, *, out_TV: Tensor | None = None) -> Tensor:
        """[T, C] after the final norm -> [T, V], in the model's dtype; written to `out_TV` if given."""
        return linear(hidden_TC, self.lm_head, out_TN=out_TV)

    def cost(self) -> Cost:
        """What one pass with logits must read and compute; of the embedding only a few rows are read."""
        config, weight = self.config, self.embed_tokens
        untied = 0 if config.tie_word_embeddings else weight.numel()
        num_weights = sum(p.numel() for p in self.parameters()) - untied
        cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return Cost(
            weight_bytes=num_weights * weight.dtype.itemsize,
            cache_bytes=cache * self.backend.shape.kv_dtype.itemsize,
            flops=2 * num_weights,
        )

    def destinations(self) -> dict[str, Tensor]:
        """Hugging Face tensor name -> the weight, or part of a fused one, that it fills."""
        found = {"model.embed_tokens.weight": self.embed_tokens.data, "model.norm.weight": self.final_norm.data}
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = self.lm_head.data
        for index, layer in enumerate(self.decoder_layers):
            found |= layer.destinations(f"model.layers.{index}")
        return found
