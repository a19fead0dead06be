"""One decoder layer. Weights are fused: q, k and v in one matrix, gate and up in another.

Shape suffixes: T tokens in the pass, H query heads, G key/value heads, D head size, E = (H + 2G) * D,
C hidden size, I inner size of the MLP, L positions, P pages, S tokens per page, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.kernels.gated_linear import gated_linear
from draftloop.kernels.linear import linear, residual_linear
from draftloop.kernels.rms_norm import add_rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.models.config import ModelConfig
from draftloop.models.weights import Destination, Memory, linear_weight, parameter, split_rows


class Attention(torch.nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        input_size: int | None = None,
    ) -> None:
        """`input_size` is the width of what is projected to q, k and v, where that is not the hidden size."""
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        hidden, head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.query_size, self.kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.eps = config.rms_norm_eps
        self.window = config.window(layer)
        self.qkv_sizes = (self.query_size, self.kv_size, self.kv_size)

        def weight(parts: dict[str, int], size: int) -> Memory:
            names = {f"model.layers.{layer}.self_attn.{name}_proj": rows for name, rows in parts.items()}
            return linear_weight(names, size, config.quantisation, device=device, dtype=dtype)

        self.qkv_weight = weight(dict(zip("qkv", self.qkv_sizes, strict=True)), input_size or hidden)
        self.qkv_bias = make(sum(self.qkv_sizes)) if config.qkv_bias else None
        self.o_weight = weight({"o": hidden}, self.query_size)
        self.o_bias = make(hidden) if config.o_bias else None
        self.q_norm = make(head_dim) if config.qk_norm else None
        self.k_norm = make(head_dim) if config.qk_norm else None

    def forward(
        self, x_TC: Tensor, kv_2PSGD: Tensor, cos_sin_LD: Tensor, batch: AttentionBatch, backend: AttentionBackend
    ) -> Tensor:
        """Write this pass's keys and values to the cache, attend, and project; as `residual_linear` returns it."""
        qkv_TE = linear(x_TC, self.qkv_weight, self.qkv_bias)
        q_THD = rope_write(
            qkv_TE,
            batch.positions_T,
            batch.slots_T,
            cos_sin_LD,
            kv_2PSGD,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_norm_D=self.q_norm,
            k_norm_D=self.k_norm,
            eps=self.eps,
        )
        # allocated here: a piecewise graph breaks at the call, and its next segment reads this memory
        out_THD = torch.empty_like(q_THD)
        batch.attend(lambda: backend.attend(q_THD, kv_2PSGD, batch, out_THD, sliding_window=self.window))
        return residual_linear(out_THD.view(-1, self.query_size), self.o_weight, self.o_bias)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        (o_weight,) = split_rows(self.o_weight, (self.o_weight.shape[0],))
        found: dict[str, Destination] = {f"{prefix}.o_proj.weight": o_weight}
        if self.o_bias is not None:
            found[f"{prefix}.o_proj.bias"] = self.o_bias
        if self.q_norm is not None and self.k_norm is not None:
            found |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        for kind, fused in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
            if fused is not None:
                parts = split_rows(fused, self.qkv_sizes)
                found |= {f"{prefix}.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        return found


class GatedMLP(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        def weight(parts: dict[str, int], size: int) -> Memory:
            names = {f"model.layers.{layer}.mlp.{name}_proj": rows for name, rows in parts.items()}
            return linear_weight(names, size, config.quantisation, device=device, dtype=dtype)

        hidden, inner = config.hidden_size, config.intermediate_size
        self.inner_size = inner
        self.gate_up_weight = weight({"gate": inner, "up": inner}, hidden)
        self.gate_up_bias = make(2 * inner) if config.mlp_bias else None
        self.down_weight = weight({"down": hidden}, inner)
        self.down_bias = make(hidden) if config.mlp_bias else None

    def forward(self, x_TC: Tensor) -> Tensor:
        """[T, C] -> what `residual_linear` returns."""
        inner_TI = gated_linear(x_TC, self.gate_up_weight, self.gate_up_bias)
        return residual_linear(inner_TI, self.down_weight, self.down_bias)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        (down_weight,) = split_rows(self.down_weight, (self.down_weight.shape[0],))
        found: dict[str, Destination] = {f"{prefix}.down_proj.weight": down_weight}
        if self.down_bias is not None:
            found[f"{prefix}.down_proj.bias"] = self.down_bias
        for kind, fused in (("weight", self.gate_up_weight), ("bias", self.gate_up_bias)):
            if fused is not None:
                gate, up = split_rows(fused, (self.inner_size, self.inner_size))
                found |= {f"{prefix}.gate_proj.{kind}": gate, f"{prefix}.up_proj.{kind}": up}
        return found


class DecoderLayer(torch.nn.Module):
    """Attention and MLP, each behind an RMSNorm that also adds to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = parameter(config.hidden_size, device=device, dtype=dtype)
        self.post_norm = parameter(config.hidden_size, device=device, dtype=dtype)
        self.attention = Attention(config, layer, device=device, dtype=dtype)
        self.mlp = GatedMLP(config, layer, device=device, dtype=dtype)

    def forward(
        self,
        x_TC: Tensor,
        residual_TC: Tensor,
        kv_2PSGD: Tensor,
        cos_sin_LD: Tensor,
        batch: AttentionBatch,
        backend: AttentionBackend,
        keep_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take the normed input and the residual stream; give the MLP's output and the stream before it is added.

        The output is as `residual_linear` returns it: `add_rms_norm` takes it, other code must not. With `keep_R`
        (int64) only those tokens go on after attention, whose keys and values all of them leave.
        """
        attended = self.attention(x_TC, kv_2PSGD, cos_sin_LD, batch, backend)
        if keep_R is not None:
            attended, residual_TC = attended.index_select(-2, keep_R), residual_TC.index_select(0, keep_R)
        x_TC, residual_TC = add_rms_norm(attended, residual_TC, self.post_norm, self.eps)
        return self.mlp(x_TC), residual_TC

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the weight, or part of one, that it fills."""
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_norm,
            **self.attention.destinations(f"{prefix}.self_attn"),
            **self.mlp.destinations(f"{prefix}.mlp"),
        }
