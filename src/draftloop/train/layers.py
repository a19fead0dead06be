"""The parts of a decoder layer for training: plain modules, named as checkpoints name them, with autograd.

The serving layers fuse weights and write to a paged cache; these hold the same arithmetic, and a test per
method says so. Shape suffixes: B rows, L tokens, C width, H query heads, G key/value heads, D head size,
P positions; `...` any leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftloop.models.config import ModelConfig
from draftloop.models.rope import cos_sin_table

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """In fp32, whatever autocast says; the result has the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]"""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Without bias, small random weights."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=INITIAL_STD)
    return made


class Rotary(nn.Module):
    """Rotates heads by their position; positions must stay below `max_positions`."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        table = cos_sin_table(
            config.rope, head_dim=config.head_dim, max_positions=max_positions, device=torch.device("cpu")
        )
        self.register_buffer("cos_sin_PD", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., heads, D], positions int64 [...] -> as x."""
        cos, sin = self.get_buffer("cos_sin_PD")[positions].unsqueeze(-2).chunk(2, -1)
        low, high = x.float().chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class Projections(nn.Module):
    """The weights of attention: to query, key and value, rotated, and back."""

    def __init__(self, config: ModelConfig, *, input_size: int | None = None) -> None:
        """`input_size`: width of what is projected to q, k and v, where that is not the hidden size."""
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        inputs = input_size or width
        self.head_dim = size
        self.q_proj = linear(inputs, config.num_heads * size)
        self.k_proj = linear(inputs, config.num_kv_heads * size)
        self.v_proj = linear(inputs, config.num_kv_heads * size)
        self.o_proj = linear(config.num_heads * size, width)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
        """[..., C] -> [..., H, D]"""
        q = self._heads(self.q_proj(x))
        return rotary(q if self.q_norm is None else self.q_norm(q), positions)

    def keys_values(self, x: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., C] -> twice [..., G, D]"""
        k = self._heads(self.k_proj(x))
        return rotary(k if self.k_norm is None else self.k_norm(k), positions), self._heads(self.v_proj(x))

    def output(self, attended: Tensor) -> Tensor:
        """[..., H, D] -> [..., C]"""
        return self.o_proj(attended.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
