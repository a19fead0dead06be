"""The EAGLE head as a module: a decoder layer (or a few) fed with embeddings and hidden states.

Shape suffixes: T tokens, R rows, C width of the head, X numbers per token that the target hands over,
W draft vocabulary, L positions or layers (`kv_L2PSGD`), P pages, S tokens per page, G key/value heads,
D head size.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.distributed.group import Group
from draftloop.drafters.aux_model import AuxModel, Place
from draftloop.drafters.eagle_config import EagleConfig
from draftloop.graphs.phase import Cost
from draftloop.kernels.linear import linear
from draftloop.kernels.norm_concat import norm_concat
from draftloop.kernels.rms_norm import Store, add_rms_norm, rms_norm
from draftloop.kernels.widened import embedding
from draftloop.models.layers import Attention, GatedMLP, parameter
from draftloop.models.shards import Plain, share
from draftloop.models.weights import plain

Inputs = tuple[Tensor, Tensor]
"""What a layer's attention reads, [T, C] or [T, 2C], and the residual stream, [T, C]."""


class EagleLayer(torch.nn.Module):
    """A decoder layer; where it is wide, attention reads embedding and hidden state side by side."""

    def __init__(
        self, config: EagleConfig, layer: int, *, device: torch.device, dtype: torch.dtype, group: Group
    ) -> None:
        super().__init__()
        model, width = config.model, config.model.hidden_size

        def norm(wanted: bool) -> torch.nn.Parameter | None:
            return parameter(width, device=device, dtype=dtype) if wanted else None

        wide = config.wide_layers[layer]
        self.eps, self.norm_before_residual = model.rms_norm_eps, config.norm_before_residual
        self.hidden_norm, self.input_norm = norm(wide), norm(config.input_norms[layer])
        self.post_norm = parameter(width, device=device, dtype=dtype)
        inputs = 2 * width if wide else width
        self.attention = Attention(model, layer, device=device, dtype=dtype, group=group, input_size=inputs)
        self.mlp = GatedMLP(model, layer, device=device, dtype=dtype, group=group)

    @property
    def is_wide(self) -> bool:
        return self.hidden_norm is not None

    def forward(
        self,
        x_TC: Tensor,
        residual_TC: Tensor,
        kv_2PSGD: Tensor,
        cos_sin_LD: Tensor,
        batch: AttentionBatch,
        backend: AttentionBackend,
        keep_R: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Take what attention reads and the residual stream; give the stream and what is still to be added to it.

        With `keep_R` (int64) only those tokens go on after attention, whose keys and values all of them leave.
        """
        attended = self.attention(x_TC, kv_2PSGD, cos_sin_LD, batch, backend)
        if keep_R is not None:
            attended, residual_TC = attended.index_select(-2, keep_R), residual_TC.index_select(0, keep_R)
        x_TC, residual_TC = add_rms_norm(attended, residual_TC, self.post_norm, self.eps)
        return self.mlp(x_TC), residual_TC

    def first_inputs(self, ids_T: Tensor, table_VC: Tensor, hidden_XC: Tensor, rows_T: Tensor | None) -> Inputs:
        """Of the first layer; token t goes with `hidden_XC[rows_T[t]]`, or with `hidden_XC[t]`."""
        if self.is_wide:
            assert self.input_norm is not None
            assert self.hidden_norm is not None
            wide_TC, hidden_TC = norm_concat(
                table_VC, hidden_XC, self.input_norm, self.hidden_norm, self.eps, first_T=ids_T, second_T=rows_T
            )
            return self._wide(wide_TC, hidden_TC)
        hidden_TC = hidden_XC  # the embedding is in it
        return hidden_TC if self.input_norm is None else rms_norm(hidden_TC, self.input_norm, self.eps), hidden_TC

    def next_inputs(self, out: Tensor, hidden_TC: Tensor, ids_T: Tensor, table_VC: Tensor) -> Inputs:
        """Of a deeper layer, from the stream and what is still to be added to it."""
        assert self.input_norm is not None
        if self.hidden_norm is None:
            return add_rms_norm(out, hidden_TC, self.input_norm, self.eps)
        normed_TC, hidden_TC = add_rms_norm(out, hidden_TC, self.hidden_norm, self.eps)
        embedded_TC = embedding(ids_T, table_VC, hidden_TC.dtype)
        return self._wide(torch.cat([rms_norm(embedded_TC, self.input_norm, self.eps), normed_TC], -1), hidden_TC)

    def _wide(self, wide_TC: Tensor, hidden_TC: Tensor) -> Inputs:
        return wide_TC, wide_TC[:, hidden_TC.shape[1] :] if self.norm_before_residual else hidden_TC

    def destinations(self, prefix: str) -> dict[str, Plain]:
        """Plain tensor name -> the weight, or part of one, that it fills."""
        norms = {
            "hidden_norm": self.hidden_norm,
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.post_norm,
        }
        return {
            **{f"{prefix}.{name}.weight": weight for name, weight in norms.items() if weight is not None},
            **plain(self.attention.destinations(f"{prefix}.self_attn")),
            **plain(self.mlp.destinations(f"{prefix}.mlp")),
        }


class EagleHead(AuxModel[EagleConfig]):
    """Predicts the token after the next one from a token and the target's (or its own) hidden state before it."""

    def __init__(self, config: EagleConfig, backend: AttentionBackend, **place: Unpack[Place]) -> None:
        super().__init__(config, backend, **place)
        width, make, device, dtype = config.model.hidden_size, self.make, self.device, self.dtype
        self.fc = make(width, 2 * width if config.fuses_embedding else config.aux_width)
        self.fc_bias = make(width) if config.fc_bias else None
        self.fc_input_norm = make(config.aux_width) if config.norm_before_fc else None
        self.fc_norms = torch.nn.ParameterList(
            make(config.target_hidden_size) for _ in range(config.num_aux if config.fc_norm else 0)
        )
        self.eagle_layers = tuple(
            EagleLayer(config, i, device=device, dtype=dtype, group=self.group) for i in range(config.model.num_layers)
        )
        self.layers = torch.nn.ModuleList(self.eagle_layers)
        self.final_norm = make(width) if config.final_norm else None
        # without a final norm, the addition that comes with it is still to be done
        self.unit = torch.ones(width, device=device, dtype=dtype)

    def fuse(self, aux_TX: Tensor) -> Tensor:
        """[T, X] of the target -> [T, C], in the place of a hidden state of our own."""
        if self.config.fuses_embedding:
            return aux_TX
        eps = self.config.model.rms_norm_eps
        if self.fc_input_norm is not None:
            aux_TX = rms_norm(aux_TX, self.fc_input_norm, eps)
        if len(self.fc_norms):
            chunks = aux_TX.chunk(self.config.num_aux, -1)
            aux_TX = torch.cat([rms_norm(x, w, eps) for x, w in zip(chunks, self.fc_norms, strict=True)], -1)
        return linear(aux_TX, self.fc, self.fc_bias)

    def forward(
        self,
        ids_T: Tensor,
        hidden_XC: Tensor,
        kv_L2PSGD: Tensor,
        batch: AttentionBatch,
        *,
        hidden_rows_T: Tensor | None = None,
        keep_R: Tensor | None = None,
        store: Store | None = None,
    ) -> Tensor:
        """As `PairHead.__call__`."""
        config, layers = self.config, self.eagle_layers
        if config.fuses_embedding:
            hidden_TC = hidden_XC if hidden_rows_T is None else hidden_XC[hidden_rows_T]
            both_TC = torch.cat([embedding(ids_T, self.embed_tokens, self.dtype), hidden_TC], -1)
            hidden_XC, hidden_rows_T = linear(both_TC, self.fc, self.fc_bias), None
        x_TC, hidden_TC = layers[0].first_inputs(ids_T, self.embed_tokens, hidden_XC, hidden_rows_T)
        out = None
        for index, (layer, kv_2PSGD) in enumerate(zip(layers, kv_L2PSGD.unbind(0), strict=True)):
            if out is not None:
                x_TC, hidden_TC = layer.next_inputs(out, hidden_TC, ids_T, self.embed_tokens)
            keep = keep_R if index == len(layers) - 1 else None
            out, hidden_TC = layer(x_TC, hidden_TC, kv_2PSGD, self.cos_sin_LD, batch, self.backend, keep)
        assert out is not None
        norm = self.unit if self.final_norm is None else self.final_norm
        if store is not None:
            store = store._replace(normed=self.final_norm is not None and config.norm_output)
        normed_TC, hidden_TC = add_rms_norm(out, hidden_TC, norm, config.model.rms_norm_eps, store=store)
        return hidden_TC if self.final_norm is None else normed_TC

    def feed(self, ids_T: Tensor, hidden_TC: Tensor, kv_L2PSGD: Tensor, batch: AttentionBatch) -> None:
        """Leave the keys and values of such pairs in the caches of all layers, and compute nothing else."""
        if self.config.fuses_embedding:
            both_TC = torch.cat([embedding(ids_T, self.embed_tokens, self.dtype), hidden_TC], -1)
            hidden_TC = linear(both_TC, self.fc, self.fc_bias)
        *before, last = zip(self.eagle_layers, kv_L2PSGD.unbind(0), strict=True)
        x_TC, hidden_TC = self.eagle_layers[0].first_inputs(ids_T, self.embed_tokens, hidden_TC, None)
        for index, (layer, kv_2PSGD) in enumerate(before):
            out, hidden_TC = layer(x_TC, hidden_TC, kv_2PSGD, self.cos_sin_LD, batch, self.backend, None)
            x_TC, hidden_TC = self.eagle_layers[index + 1].next_inputs(out, hidden_TC, ids_T, self.embed_tokens)
        layer, kv_2PSGD = last
        layer.attention.write(x_TC, kv_2PSGD, self.cos_sin_LD, batch)

    def head_input(self, hidden_RC: Tensor) -> Tensor:
        """What the output head reads, from the hidden state that a pass gave to the next step."""
        if self.final_norm is None or self.config.norm_output:
            return hidden_RC
        return rms_norm(hidden_RC, self.final_norm, self.config.model.rms_norm_eps)

    def cost(self, *, fused: bool, tokens_per_row: int = 1) -> Cost:
        """What one pass must read and compute; `fused`: it starts with the target's states."""
        model = self.config.model
        layers, head = sum(p.numel() for p in self.layers.parameters()), self.lm_head.numel()
        fc = self.fc.numel() if fused or self.config.fuses_embedding else 0
        cache = share(model, self.group.size).kv_elements_per_token
        # all but fc and the projections to q, k and v run for one token of a row
        early = fc + sum(layer.attention.qkv_weight.numel() for layer in self.eagle_layers)
        late = layers + fc + head - early
        return Cost(
            weight_bytes=(layers + fc + head) * self.fc.dtype.itemsize,
            cache_bytes=cache * self.backend.shape.kv_dtype.itemsize,
            flops=2 * (early + late // tokens_per_row),
        )

    def destinations(self) -> dict[str, Plain]:
        """Plain tensor name -> the weight, or part of a fused one, that it fills; `d2t` is not among them."""
        optional: dict[str, Plain | None] = {
            "fc.bias": self.fc_bias,
            "input_norm.weight": self.fc_input_norm,
            "norm.weight": self.final_norm,
        }
        found: dict[str, Plain] = {"fc.weight": self.fc, **self.table_destinations()}
        found |= {name: weight for name, weight in optional.items() if weight is not None}
        found |= {f"fc_norm.{index}.weight": weight for index, weight in enumerate(self.fc_norms)}
        for index, layer in enumerate(self.eagle_layers):
            found |= layer.destinations(f"layers.{index}")
        return found
