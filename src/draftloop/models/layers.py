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


def parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Parameter:
    """Uninitialised weights: the loader fills every element, or fails."""
    return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


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
        heads = self.query_size + 2 * self.kv_size
        self.qkv_weight = make(heads, input_size or hidden)
        self.qkv_bias = make(heads) if config.qkv_bias else None
        self.o_weight = make(hidden, self.query_size)
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

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        found: dict[str, Tensor] = {f"{prefix}.o_proj.weight": self.o_weight}
        if self.o_bias is not None:
            found[f"{prefix}.o_proj.bias"] = self.o_bias
        if self.q_norm is not None and self.k_norm is not None:
            found |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        sizes = (self.query_size, self.kv_size, self.kv_size)
        for kind, fused in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
            if fused is not None:
                parts = fused.data.split(sizes)
                found |= {f"{prefix}.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        return found


class GatedMLP(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_weight = make(2 * inner, hidden)
        self.gate_up_bias = make(2 * inner) if config.mlp_bias else None
        self.down_weight = make(hidden, inner)
        self.down_bias = make(hidden) if config.mlp_bias else None

    def forward(self, x_TC: Tensor) -> Tensor:
        """[T, C] -> what `residual_linear` returns."""
        inner_TI = gated_linear(x_TC, self.gate_up_weight, self.gate_up_bias)
        return residual_linear(inner_TI, self.down_weight, self.down_bias)

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        found: dict[str, Tensor] = {f"{prefix}.down_proj.weight": self.down_weight}
        if self.down_bias is not None:
            found[f"{prefix}.down_proj.bias"] = self.down_bias
        for kind, fused in (("weight", self.gate_up_weight), ("bias", self.gate_up_bias)):
            if fused is not None:
                gate, up = fused.data.chunk(2)
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
        self.mlp = GatedMLP(config, device=device, dtype=dtype)

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

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the weight, or part of one, that it fills."""
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_norm,
            **self.attention.destinations(f"{prefix}.self_attn"),
            **self.mlp.destinations(f"{prefix}.mlp"),
        }
