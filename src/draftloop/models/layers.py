"""One decoder layer. Weights are fused: q, k and v in one matrix, gate and up in another.

Shape suffixes: T tokens in the pass, H query heads, G key/value heads, D head size, E = (H + 2G) * D,
C hidden size, I inner size of the MLP, L positions, P pages, S tokens per page, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.distributed.group import ALONE, Group
from draftloop.errors import ConfigError
from draftloop.kernels.gated_linear import gated, gated_linear
from draftloop.kernels.linear import linear, qkv_linear
from draftloop.kernels.lora import LoraStack, adapted
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.kernels.rms_norm import add_rms_norm, rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.models.config import ModelConfig
from draftloop.models.moe import MixtureOfExperts
from draftloop.models.shards import Division, Slices, joined, shard, share, summed_linear
from draftloop.models.weights import Destination, Memory, linear_weight, parameter, sharded, split_rows


class Attention(torch.nn.Module):
    """Grouped-query attention over the paged cache."""

    qkv_lora: LoraStack | None = None
    o_lora: LoraStack | None = None
    """See models/lora.py."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
        input_size: int | None = None,
    ) -> None:
        """`group`: ranks among which heads are divided.

        `input_size` is the width of what is projected to q, k and v, where that is not the hidden size.
        """
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        self.group, division, config = group, Division(config, group), share(config, group.size)
        hidden, head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.query_size, self.kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.eps = config.rms_norm_eps
        self.window = config.window(layer)
        self.qkv_sizes = (self.query_size, self.kv_size, self.kv_size)

        def weight(parts: dict[str, int], size: int) -> Memory:
            names = {f"model.layers.{layer}.self_attn.{name}_proj": rows for name, rows in parts.items()}
            return linear_weight(names, size, config.quantisation, device=device, dtype=dtype)

        self.qkv_parts: dict[str, int] = dict(zip("qkv", self.qkv_sizes, strict=True))
        if config.fused_qkv:
            self.qkv_parts = {"qkv": sum(self.qkv_sizes)}
        self.qkv_slices, o_slices, sink_slices = division.qkv(), division.queries(), division.heads()
        self.slices: dict[str, Slices] = {}
        if self.qkv_slices is not None and o_slices is not None and sink_slices is not None:
            whole = joined(self.qkv_slices)
            self.slices = {"qkv_weight": whole, "qkv_bias": whole, "o_weight": o_slices, "sinks": sink_slices}
            self.qkv_slices = [whole] if config.fused_qkv else self.qkv_slices
        self.qkv_weight = weight(self.qkv_parts, input_size or hidden)
        self.qkv_bias = make(sum(self.qkv_sizes)) if config.qkv_bias else None
        self.o_weight = weight({"o": hidden}, self.query_size)
        self.o_bias = make(hidden) if config.o_bias else None
        self.whole_norm = config.whole_qk_norm
        q_size, k_size = (self.query_size, self.kv_size) if self.whole_norm else (head_dim, head_dim)
        kind = norm_dtype(config, dtype)
        self.q_norm = parameter(q_size, device=device, dtype=kind) if config.qk_norm else None
        self.k_norm = parameter(k_size, device=device, dtype=kind) if config.qk_norm else None
        self.sinks = None
        if config.sinks and config.sinks[layer]:
            self.sinks = parameter(config.num_heads, device=device, dtype=torch.float32)
        self.before_norm = not config.norms.after_attention

    def forward(
        self, x_TC: Tensor, kv_2PSGD: Tensor, cos_sin_LD: Tensor, batch: AttentionBatch, backend: AttentionBackend
    ) -> Tensor:
        """Write this pass's keys and values to the cache, attend, and project.

        The output is as `residual_linear` returns it, unless a norm follows.
        """
        out_TE = self.attend(self.write(x_TC, kv_2PSGD, cos_sin_LD, batch), kv_2PSGD, batch, backend)
        out = summed_linear(out_TE, self.o_weight, self.o_bias, self.group, before_norm=self.before_norm)
        return adapted(out, out_TE, batch.adapters_T, self.o_lora)

    def attend(self, q_THD: Tensor, kv_2PSGD: Tensor, batch: AttentionBatch, backend: AttentionBackend) -> Tensor:
        """What `write` returns -> what the output projection reads, [T, heads * head size]."""
        # allocated here: a piecewise graph breaks at the call, and its next segment reads this memory
        out_THD, batch = torch.empty_like(q_THD), batch.of(self.window)
        batch.attend(
            lambda: backend.attend(q_THD, kv_2PSGD, batch, out_THD, sliding_window=self.window, sinks_H=self.sinks)
        )
        return out_THD.view(-1, self.query_size)

    def write(self, x_TC: Tensor, kv_2PSGD: Tensor, cos_sin_LD: Tensor, batch: AttentionBatch) -> Tensor:
        """Write this pass's keys and values to the cache, and return its queries, [T, heads, head size]."""
        project = linear if self.whole_norm else qkv_linear
        qkv = adapted(project(x_TC, self.qkv_weight, self.qkv_bias), x_TC, batch.adapters_T, self.qkv_lora)
        if self.whole_norm:
            qkv = self._normed(qkv)
        return self.rotate(qkv, kv_2PSGD, cos_sin_LD, batch, x_TC.dtype)

    def rotate(
        self, qkv: Tensor, kv_2PSGD: Tensor, cos_sin_LD: Tensor, batch: AttentionBatch, dtype: torch.dtype
    ) -> Tensor:
        """The rest of `write`, of what is projected: [T, E], or sums of it as `qkv_linear` returns them."""
        return rope_write(
            qkv,
            batch.positions_T,
            batch.of(self.window).slots_T,
            cos_sin_LD,
            kv_2PSGD,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_norm_D=None if self.whole_norm else self.q_norm,
            k_norm_D=None if self.whole_norm else self.k_norm,
            eps=self.eps,
            dtype=dtype,
        )

    def _normed(self, qkv_TE: Tensor) -> Tensor:
        """Queries and keys normed over all of their heads."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = qkv_TE.split(self.qkv_sizes, 1)
        return torch.cat((rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps), v), 1)

    def turn_halves(self, num_turning: int) -> None:
        """Reorder the first dimensions of each query and key head, whose neighbours turn together, for halves to do so.

        Scores are the same in any order. Raises ConfigError for quantised weights.
        """
        if isinstance(self.qkv_weight, QuantisedWeight):
            raise ConfigError(
                "rows of a quantised q, k and v cannot be reordered, as this model's rotation needs; leave "
                "quantization out, or take plain weights"
            )
        head = torch.arange(self.head_dim)
        head[:num_turning] = head[:num_turning].view(-1, 2).t().flatten()
        starts = torch.arange(self.num_heads + self.num_kv_heads)[:, None] * self.head_dim
        rows = torch.cat(((starts + head).flatten(), torch.arange(starts.numel() * self.head_dim, sum(self.qkv_sizes))))
        for fused in (self.qkv_weight, self.qkv_bias):
            if fused is not None:
                fused.data.copy_(fused.data[rows.to(fused.device)])

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        slices = [self.slices["o_weight"]] if self.slices else None
        (o_weight,) = sharded(split_rows(self.o_weight, (self.o_weight.shape[0],)), slices)
        found: dict[str, Destination] = {f"{prefix}.o_proj.weight": o_weight}
        if self.o_bias is not None:
            found[f"{prefix}.o_proj.bias"] = self.o_bias
        if self.q_norm is not None and self.k_norm is not None:
            found |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        if self.sinks is not None:
            found[f"{prefix}.attention_sink_bias"] = shard(self.sinks.data, self.slices.get("sinks"))
        for kind, fused in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
            if fused is not None:
                parts = sharded(split_rows(fused, tuple(self.qkv_parts.values())), self.qkv_slices)
                found |= {
                    f"{prefix}.{name}_proj.{kind}": part for name, part in zip(self.qkv_parts, parts, strict=True)
                }
        return found


class GatedMLP(torch.nn.Module):
    """`down(activation(gate(x)) * up(x))`."""

    gate_up_lora: LoraStack | None = None
    down_lora: LoraStack | None = None

    def __init__(
        self, config: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype, group: Group = ALONE
    ) -> None:
        """`group`: ranks among which the inner columns are divided."""
        super().__init__()

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        def weight(parts: dict[str, int], size: int) -> Memory:
            names = {f"model.layers.{layer}.mlp.{name}_proj": rows for name, rows in parts.items()}
            return linear_weight(names, size, config.quantisation, device=device, dtype=dtype)

        self.group, division, config = group, Division(config, group), share(config, group.size)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.inner_size = inner
        gate_up, down = division.gate_up(), division.inner()
        self.slices: dict[str, Slices] = {}
        if gate_up is not None and down is not None:
            whole = joined(gate_up)
            self.slices = {"gate_up_weight": whole, "gate_up_bias": whole, "down_weight": down}
            gate_up = [whole] if config.fused_gate_up else gate_up
        self.gate_up_slices = gate_up
        self.activation = config.activation
        self.before_norm = not config.norms.after_mlp
        self.gate_up_parts = {"gate_up": 2 * inner} if config.fused_gate_up else {"gate": inner, "up": inner}
        self.gate_up_weight = weight(self.gate_up_parts, hidden)
        self.gate_up_bias = make(2 * inner) if config.mlp_bias else None
        self.down_weight = weight({"down": hidden}, inner)
        self.down_bias = make(hidden) if config.mlp_bias else None

    def forward(self, x_TC: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        """[T, C] -> what `residual_linear` returns, unless a norm follows. `adapters_T`: see `AttentionBatch`."""
        if self.gate_up_lora is None:
            inner_TI = gated_linear(x_TC, self.gate_up_weight, self.gate_up_bias, activation=self.activation)
        else:  # what an adapter adds comes before the activation
            gate_up_T2I = linear(x_TC, self.gate_up_weight, self.gate_up_bias)
            inner_TI = gated(adapted(gate_up_T2I, x_TC, adapters_T, self.gate_up_lora), activation=self.activation)
        out = summed_linear(inner_TI, self.down_weight, self.down_bias, self.group, before_norm=self.before_norm)
        return adapted(out, inner_TI, adapters_T, self.down_lora)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the part of a fused weight that it fills."""
        slices = self.slices.get("down_weight")
        (down_weight,) = sharded(
            split_rows(self.down_weight, (self.down_weight.shape[0],)), [slices] if slices else None
        )
        found: dict[str, Destination] = {f"{prefix}.down_proj.weight": down_weight}
        if self.down_bias is not None:
            found[f"{prefix}.down_proj.bias"] = self.down_bias
        for kind, fused in (("weight", self.gate_up_weight), ("bias", self.gate_up_bias)):
            if fused is not None:
                parts = sharded(split_rows(fused, tuple(self.gate_up_parts.values())), self.gate_up_slices)
                found |= {
                    f"{prefix}.{name}_proj.{kind}": part for name, part in zip(self.gate_up_parts, parts, strict=True)
                }
        return found


def norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """What a norm's weights are kept in: with an offset added they would lose what the model's type has no bits for."""
    return torch.float32 if config.norm_offset else dtype


class DecoderLayer(torch.nn.Module):
    """Attention and MLP (or a mixture of those), with norms before or after them.

    Norms before them also add to the residual stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
        engines: Group = ALONE,
    ) -> None:
        """`group`: ranks among which the layer is divided; `engines`: those that share its experts."""
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norms, self.multiplier = config.norms, config.residual_multiplier

        def norm(name: str | None) -> torch.nn.Parameter | None:
            return parameter(config.hidden_size, device=device, dtype=norm_dtype(config, dtype)) if name else None

        self.input_norm, self.attended_norm = norm(self.norms.before_attention), norm(self.norms.after_attention)
        self.post_norm, self.output_norm = norm(self.norms.before_mlp), norm(self.norms.after_mlp)
        self.attention = Attention(config, layer, device=device, dtype=dtype, group=group)
        self.mlp: GatedMLP | MixtureOfExperts
        if config.has_experts(layer):
            self.mlp = MixtureOfExperts(config, device=device, dtype=dtype, group=group, engines=engines)
        else:
            self.mlp = GatedMLP(config, layer, device=device, dtype=dtype, group=group)

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
        """Take what `enter` gives; give the MLP's output and the residual stream before it is added.

        The output is as `residual_linear` returns it: `add_rms_norm` takes it, other code must not. With `keep_R`
        (int64) only those tokens go on after attention, whose keys and values all of them leave.
        """
        attended = self.attention(x_TC, kv_2PSGD, cos_sin_LD, batch, backend)
        if keep_R is not None:
            attended, residual_TC = attended.index_select(-2, keep_R), residual_TC.index_select(0, keep_R)
        x_TC, residual_TC = self._added(self._left(attended, self.attended_norm), residual_TC, self.post_norm)
        return self._left(self.mlp(x_TC, batch.adapters_T), self.output_norm), residual_TC

    def enter(self, out: Tensor | None, residual_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output of the layer before, if there is one: the layer's input, and the residual stream."""
        if out is not None:
            return self._added(out, residual_TC, self.input_norm)
        return residual_TC if self.input_norm is None else rms_norm(residual_TC, self.input_norm, self.eps), residual_TC

    def _added(self, out: Tensor, residual_TC: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        if norm is not None:
            return add_rms_norm(out, residual_TC, norm, self.eps)
        sum_TC = residual_TC + out
        return sum_TC, sum_TC

    def _left(self, out: Tensor, norm: Tensor | None) -> Tensor:
        """An output as it is added to the residual stream."""
        if norm is not None:
            out = rms_norm(out, norm, self.eps)
        return out if self.multiplier == 1 else out * self.multiplier

    def destinations(self, prefix: str, *, fused_experts: bool = False) -> dict[str, Destination]:
        """Checkpoint tensor name -> the weight, or part of one, that it fills; `fused_experts`: see models/moe.py."""
        mlp = self.mlp
        norms = {
            self.norms.before_attention: self.input_norm,
            self.norms.after_attention: self.attended_norm,
            self.norms.before_mlp: self.post_norm,
            self.norms.after_mlp: self.output_norm,
        }
        return {
            **{f"{prefix}.{name}.weight": norm for name, norm in norms.items() if norm is not None},
            **self.attention.destinations(f"{prefix}.self_attn"),
            **(
                mlp.destinations(prefix, fused=fused_experts)
                if isinstance(mlp, MixtureOfExperts)
                else mlp.destinations(f"{prefix}.mlp")
            ),
        }
