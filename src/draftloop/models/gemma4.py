"""The Gemma 4 text decoder, dense.

Two kinds of layers, sliding and full, differ in head size and rotation and have a cache each; the last layers may
have no keys and values of their own and read those of a layer before them. Norms stand before and after attention
and MLP, values have a norm without weights, and small models give every layer an embedding of the token.

Shape suffixes: T tokens in the pass, C hidden size, V vocabulary, H query heads, G key/value heads, D head size,
E = (H + 2G) * D, I inner size of the MLP, J size of a layer's own embedding, N layers, L positions, P pages,
S tokens per page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.kernels.gated_linear import gated_linear
from draftloop.kernels.linear import linear
from draftloop.kernels.rms_norm import add_rms_norm, rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.kernels.widened import embedding
from draftloop.models.config import LayerType
from draftloop.models.decoder import FINAL_HIDDEN, Decoder, LayerCaches, attention_shapes, capped
from draftloop.models.gemma4_config import Gemma4Config
from draftloop.models.layers import parameter
from draftloop.models.rope import cos_sin_table, rotate
from draftloop.models.weights import Destination, Memory, linear_weight, split_rows


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What all layers of one kind share."""

    backend: AttentionBackend
    cos_sin_LD: Tensor
    window: int | None


def make_kinds(
    config: Gemma4Config,
    backends: Mapping[LayerType, AttentionBackend],
    *,
    max_positions: int,
    device: torch.device,
) -> dict[LayerType, Kind]:
    """One for each kind of layer that has a backend."""
    ropes = {"sliding_attention": config.rope, "full_attention": config.full_rope}
    return {
        kind: Kind(
            backend=backend,
            cos_sin_LD=cos_sin_table(
                ropes[kind], head_dim=config.head_size(kind), max_positions=max_positions, device=device
            ),
            window=config.sliding_window if kind == "sliding_attention" else None,
        )
        for kind, backend in backends.items()
    }


class Gemma4Attention(torch.nn.Module):
    """Grouped-query attention; where a layer has no keys and values it is given another's cache."""

    def __init__(self, config: Gemma4Config, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        kind = config.layer_types[layer]
        self.num_heads, self.num_kv_heads = config.num_heads, config.kv_heads(kind)
        self.head_dim = config.head_size(kind)
        self.eps, self.has_kv = config.rms_norm_eps, layer < config.num_own_layers
        self.has_values = self.has_kv and not (config.shared_projection and kind == "full_attention")
        self.query_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        names = "qkv"[: 1 + self.has_kv + self.has_values]
        self.qkv_parts: dict[str, int] = dict(zip(names, (self.query_size, self.kv_size, self.kv_size), strict=False))

        def weight(parts: dict[str, int], size: int) -> Memory:
            module = f"{config.tensor_prefix}layers.{layer}.self_attn"
            full = {f"{module}.{name}_proj": rows for name, rows in parts.items()}
            return linear_weight(full, size, config.quantisation, device=device, dtype=dtype)

        self.qkv_weight = weight(self.qkv_parts, config.hidden_size)
        self.qkv_bias = make(sum(self.qkv_parts.values())) if config.qkv_bias else None
        self.o_weight = weight({"o": config.hidden_size}, self.query_size)
        self.o_bias = make(config.hidden_size) if config.o_bias else None
        self.q_norm = make(self.head_dim)
        self.k_norm = make(self.head_dim) if self.has_kv else None
        self.unit_D = torch.ones(self.head_dim, device=device, dtype=dtype)

    def forward(self, x_TC: Tensor, kv_2PSGD: Tensor, positions_T: Tensor, kind: Kind, batch: AttentionBatch) -> Tensor:
        """[T, C] -> [T, C]. Keys and values of this pass, where there are any, are written to the cache first."""
        batch = batch.of(kind.window)
        qkv_TE = linear(x_TC, self.qkv_weight, self.qkv_bias)
        if self.has_kv:
            q_THD = rope_write(
                self._with_values(qkv_TE),
                positions_T,
                batch.slots_T,
                kind.cos_sin_LD,
                kv_2PSGD,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                q_norm_D=self.q_norm,
                k_norm_D=self.k_norm,
                eps=self.eps,
            )
        else:
            normed_TE = rms_norm(qkv_TE.view(-1, self.head_dim), self.q_norm, self.eps)
            q_THD = rotate(normed_TE.view(-1, self.num_heads, self.head_dim), positions_T, kind.cos_sin_LD)
        # allocated here: a piecewise graph breaks at the call, and its next segment reads this memory
        out_THD = torch.empty_like(q_THD)
        batch.attend(lambda: kind.backend.attend(q_THD, kv_2PSGD, batch, out_THD, sliding_window=kind.window))
        return linear(out_THD.view(-1, self.query_size), self.o_weight, self.o_bias)

    def _with_values(self, qkv_TE: Tensor) -> Tensor:
        """Queries, keys and normed values, side by side."""
        values = qkv_TE[:, -self.kv_size :].reshape(-1, self.head_dim)
        normed = rms_norm(values, self.unit_D, self.eps).view(-1, self.kv_size)
        return torch.cat((qkv_TE[:, : self.query_size + self.kv_size], normed), 1)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        (o_weight,) = split_rows(self.o_weight, (self.o_weight.shape[0],))
        found: dict[str, Destination] = {f"{prefix}.o_proj.weight": o_weight, f"{prefix}.q_norm.weight": self.q_norm}
        if self.o_bias is not None:
            found[f"{prefix}.o_proj.bias"] = self.o_bias
        if self.k_norm is not None:
            found[f"{prefix}.k_norm.weight"] = self.k_norm
        for what, fused in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
            if fused is not None:
                parts = split_rows(fused, tuple(self.qkv_parts.values()))
                found |= {f"{prefix}.{name}_proj.{what}": p for name, p in zip(self.qkv_parts, parts, strict=True)}
        return found


class Gemma4Layer(torch.nn.Module):
    """Attention and MLP between two norms each; then, in small models, the layer's own embedding of the token."""

    def __init__(self, config: Gemma4Config, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        hidden, inner, own = config.hidden_size, config.inner_size(layer), config.layer_embedding_size
        self.eps = config.rms_norm_eps
        self.attention = Gemma4Attention(config, layer, device=device, dtype=dtype)

        def weight(parts: dict[str, int], size: int) -> Memory:
            module = f"{config.tensor_prefix}layers.{layer}.mlp"
            full = {f"{module}.{name}_proj": rows for name, rows in parts.items()}
            return linear_weight(full, size, config.quantisation, device=device, dtype=dtype)

        self.inner_size = inner
        self.gate_up_weight, self.down_weight = (
            weight({"gate": inner, "up": inner}, hidden),
            weight({"down": hidden}, inner),
        )
        self.input_norm, self.post_attention_norm = make(hidden), make(hidden)
        self.pre_mlp_norm, self.post_mlp_norm = make(hidden), make(hidden)
        self.scalar = make(1)
        self.own_gate_weight = make(own, hidden) if own else None
        self.own_projection_weight = make(hidden, own) if own else None
        self.own_norm = make(hidden) if own else None

    def forward(
        self,
        hidden_TC: Tensor,
        own_TJ: Tensor | None,
        kv_2PSGD: Tensor,
        positions_T: Tensor,
        kind: Kind,
        batch: AttentionBatch,
    ) -> Tensor:
        """[T, C] -> [T, C], the residual stream."""
        attended_TC = self.attention(rms_norm(hidden_TC, self.input_norm, self.eps), kv_2PSGD, positions_T, kind, batch)
        attended_TC = rms_norm(attended_TC, self.post_attention_norm, self.eps)
        x_TC, hidden_TC = add_rms_norm(attended_TC, hidden_TC, self.pre_mlp_norm, self.eps)
        inner_TI = gated_linear(x_TC, self.gate_up_weight, activation="gelu_tanh")
        hidden_TC = hidden_TC + rms_norm(linear(inner_TI, self.down_weight), self.post_mlp_norm, self.eps)
        if own_TJ is not None:
            assert self.own_gate_weight is not None
            assert self.own_projection_weight is not None
            assert self.own_norm is not None
            own_TJ = F.gelu(linear(hidden_TC, self.own_gate_weight), approximate="tanh") * own_TJ
            hidden_TC = hidden_TC + rms_norm(linear(own_TJ, self.own_projection_weight), self.own_norm, self.eps)
        return hidden_TC * self.scalar

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the weight, or part of a fused one, that it fills."""
        gate, up = split_rows(self.gate_up_weight, (self.inner_size, self.inner_size))
        (down,) = split_rows(self.down_weight, (self.down_weight.shape[0],))
        own = {
            "per_layer_input_gate.weight": self.own_gate_weight,
            "per_layer_projection.weight": self.own_projection_weight,
            "post_per_layer_input_norm.weight": self.own_norm,
        }
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_attention_norm,
            f"{prefix}.pre_feedforward_layernorm.weight": self.pre_mlp_norm,
            f"{prefix}.post_feedforward_layernorm.weight": self.post_mlp_norm,
            f"{prefix}.layer_scalar": self.scalar,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": down,
            **self.attention.destinations(f"{prefix}.self_attn"),
            **{f"{prefix}.{name}": weight for name, weight in own.items() if weight is not None},
        }


class Gemma4Decoder(Decoder):
    """A text model of the Gemma 4 family; `backend` is of its first cache, others like it are made."""

    gemma: Gemma4Config

    def __init__(
        self,
        config: Gemma4Config,
        backend: AttentionBackend,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.config, self.gemma, self.backend = config, config, backend

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        hidden, own = config.hidden_size, config.layer_embedding_size
        shapes = attention_shapes(
            config, page_size=backend.shape.page_size, dtype=dtype, kv_dtype=backend.shape.kv_dtype
        )
        backends = {
            kind: backend if shape == backend.shape else type(backend)(shape, device)
            for kind, shape in zip(config.cache_kinds, shapes, strict=True)
        }
        self.kinds = make_kinds(config, backends, max_positions=max_positions, device=device)
        self.embed_tokens = make(config.vocab_size, hidden)
        # rounded to the weights' type, as the model was trained
        self.embed_scale = torch.tensor(hidden**0.5, dtype=dtype).item()
        self.gemma_layers = tuple(Gemma4Layer(config, i, device=device, dtype=dtype) for i in range(config.num_layers))
        self.layers = torch.nn.ModuleList(self.gemma_layers)
        self.final_norm = make(hidden)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else make(config.vocab_size, hidden)
        packed = config.num_layers * own
        self.own_embed_tokens = make(config.layer_vocab_size, packed) if own else None
        self.own_projection_weight = make(packed, hidden) if own else None
        self.own_norm = make(own) if own else None
        self.own_scale = torch.tensor(own**0.5, dtype=dtype).item()

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return embedding(token_ids_T, self.embed_tokens, self.dtype) * self.embed_scale

    def forward(
        self, token_ids_T: Tensor, caches: LayerCaches, batch: AttentionBatch, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        hidden_TC = self.embed(token_ids_T)
        own_NTJ = self._own_embeddings(token_ids_T, hidden_TC)
        aux: dict[int, Tensor] = {}
        for index, (layer, kv_2PSGD) in enumerate(zip(self.gemma_layers, caches, strict=True)):
            if index in aux_layers:
                aux[index] = hidden_TC
            kind = self.kinds[self.gemma.layer_types[index]]
            own_TJ = None if own_NTJ is None else own_NTJ[index]
            hidden_TC = layer(hidden_TC, own_TJ, kv_2PSGD, batch.positions_T, kind, batch)
        normed_TC = rms_norm(hidden_TC, self.final_norm, self.gemma.rms_norm_eps)
        aux |= {self.gemma.num_layers: hidden_TC, FINAL_HIDDEN: normed_TC}
        return normed_TC, [aux[index] for index in aux_layers]

    def _own_embeddings(self, token_ids_T: Tensor, hidden_TC: Tensor) -> Tensor | None:
        """[N, T, J]: what each layer is told of each token, from the token and its first hidden state."""
        if self.own_embed_tokens is None:
            return None
        assert self.own_projection_weight is not None
        assert self.own_norm is not None
        size, count = self.gemma.layer_embedding_size, self.gemma.num_layers
        told_TE = linear(hidden_TC, self.own_projection_weight) * self.gemma.hidden_size**-0.5
        told = rms_norm(told_TE.view(-1, size), self.own_norm, self.gemma.rms_norm_eps)
        token = embedding(token_ids_T, self.own_embed_tokens, self.dtype) * self.own_scale
        both = (told.view(-1, count, size) + token.view(-1, count, size)) * 2**-0.5
        return both.transpose(0, 1).contiguous()

    def logits(self, hidden_TC: Tensor, *, out_TW: Tensor | None = None) -> Tensor:
        cap = self.gemma.logit_cap
        return capped(linear(hidden_TC, self.lm_head, out_TN=None if cap else out_TW), cap, out_TW)

    @property
    def num_looked_up(self) -> int:
        own = 0 if self.own_embed_tokens is None else self.own_embed_tokens.numel()
        return super().num_looked_up + own

    def destinations(self, names: Iterable[str] = ()) -> dict[str, Destination]:
        prefix = self.gemma.tensor_prefix
        found: dict[str, Destination] = {
            f"{prefix}embed_tokens.weight": self.embed_tokens.data,
            f"{prefix}norm.weight": self.final_norm.data,
        }
        if not self.gemma.tie_word_embeddings:
            found["lm_head.weight"] = self.lm_head.data
        own = {
            "embed_tokens_per_layer.weight": self.own_embed_tokens,
            "per_layer_model_projection.weight": self.own_projection_weight,
            "per_layer_projection_norm.weight": self.own_norm,
        }
        found |= {f"{prefix}{name}": weight.data for name, weight in own.items() if weight is not None}
        for index, layer in enumerate(self.gemma_layers):
            found |= layer.destinations(f"{prefix}layers.{index}")
        return found

    def needless(self, names: Iterable[str]) -> set[str]:
        """Towers for images and sound, and keys and values of layers that read another's."""
        names, prefix = list(names), self.gemma.tensor_prefix
        shared = range(self.gemma.num_own_layers, self.gemma.num_layers)
        kv = tuple(
            f"{prefix}layers.{i}.self_attn.{n}" for i in shared for n in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        others = () if prefix == "model." else ("model.",)
        return super().needless(names) | {
            name for name in names if name.startswith(kv) or (name.startswith(others) and not name.startswith(prefix))
        }
