"""A mixture of experts in the place of a layer's MLP.

Shape suffixes: T tokens in the pass, C hidden size, E experts, I inner size of one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftloop.kernels.moe_experts import experts
from draftloop.kernels.moe_route import Router, router_logits
from draftloop.models.config import ModelConfig
from draftloop.models.weights import Destination, parameter


class MixtureOfExperts(torch.nn.Module):
    """A router, and gated MLPs of which each token goes through the likeliest few."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.experts is not None
        assert config.norms.after_mlp is None, "a norm does not take outputs by rank"
        self.config = config.experts
        hidden, inner, num_here = config.hidden_size, self.config.inner_size, self.config.num_experts

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        self.router = Router(self.config.num_per_token, self.config.normalise, first=0, num_here=num_here)
        self.router_weight = make(self.config.num_experts, hidden)
        self.gate_up_weight = make(num_here, 2 * inner, hidden)
        self.down_weight = make(num_here, hidden, inner)

    def forward(self, x_TC: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        """[T, C] -> what `residual_linear` returns. Adapters have no part in experts."""
        logits = router_logits(x_TC, self.router_weight)
        return experts(x_TC, logits, self.gate_up_weight, self.down_weight, self.router)

    @property
    def expert_size(self) -> int:
        """Weights of one expert."""
        return (self.gate_up_weight.numel() + self.down_weight.numel()) // self.router.num_here

    def destinations(self, layer: str, *, fused: bool) -> dict[str, Destination]:
        """Checkpoint tensor name -> the weight, or part of one, that it fills; `layer` is what stands before them.

        `fused`: all experts of a layer are in one tensor, as transformers 5 holds them; else each has its own.
        """
        names, inner = self.config.names, self.config.inner_size
        block = f"{layer}.mlp" if fused else f"{layer}.{names.block}"
        found: dict[str, Destination] = {f"{block}.gate.weight": self.router_weight.data}
        if fused:
            return found | {
                f"{block}.experts.gate_up_proj": self.gate_up_weight.data,
                f"{block}.experts.down_proj": self.down_weight.data,
            }
        for expert in range(self.config.num_experts):
            gate, up = self.gate_up_weight.data[expert].split(inner)
            parts = {names.gate: gate, names.up: up, names.down: self.down_weight.data[expert]}
            found |= {f"{block}.experts.{expert}.{name}.weight": part for name, part in parts.items()}
        return found


def are_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has all experts of a layer in one."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)
