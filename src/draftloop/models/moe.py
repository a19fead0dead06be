"""A mixture of experts in the place of a layer's MLP.

Shape suffixes: T tokens in the pass, C hidden size, E experts, I inner size of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.distributed.group import ALONE, Group
from draftloop.kernels.moe_experts import experts
from draftloop.kernels.moe_route import Router, router_logits
from draftloop.models.config import ModelConfig
from draftloop.models.shards import Slices, joined, shard
from draftloop.models.weights import Destination, parameter


class MixtureOfExperts(torch.nn.Module):
    """A router, and gated MLPs of which each token goes through the likeliest few."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
        engines: Group = ALONE,
    ) -> None:
        """`group`: ranks among which the inner columns of every expert are divided. `engines` that share the experts:
        each has as many, and computes them for the tokens of all.
        """
        super().__init__()
        assert config.experts is not None
        assert config.norms.after_mlp is None, "a norm does not take outputs by rank"
        self.config = config.experts
        self.group, self.engines = group, engines
        num_experts, whole_inner = self.config.num_experts, self.config.inner_size
        hidden, inner, num_here = config.hidden_size, whole_inner // group.size, num_experts // engines.size
        self.inner_size = inner
        first = engines.rank * num_here
        self.mine = range(first, first + num_here)
        self.columns: Slices | None = None
        """This rank's of the inner ones, along the rows of gate and up."""
        self.slices: dict[str, Slices] = {}
        if engines.size > 1:
            part = Slices(dim=0, size=num_experts, runs=((first, num_here),))
            self.slices = {"gate_up_weight": part, "down_weight": part}
        if group.size > 1:
            self.columns = Slices(dim=0, size=whole_inner, runs=((group.rank * inner, inner),))
            both = joined([self.columns, self.columns])
            self.slices = {"gate_up_weight": replace(both, dim=1), "down_weight": replace(self.columns, dim=2)}

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        self.router = Router(self.config.num_per_token, self.config.normalise, first=first, num_here=num_here)
        self.router_weight = make(num_experts, hidden)
        self.gate_up_weight = make(num_here, 2 * inner, hidden)
        self.down_weight = make(num_here, hidden, inner)

    def forward(self, x_TC: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        """[T, C] -> what `residual_linear` returns. Adapters have no part in experts."""
        x_TC = self.engines.all_gather(x_TC)  # as many of each: their steps have one shape
        logits, before_norm = router_logits(x_TC, self.router_weight), self.group.size == 1
        out = experts(x_TC, logits, self.gate_up_weight, self.down_weight, self.router, before_norm=before_norm)
        return self.group.all_reduce(self.engines.reduce_scatter(out))

    @property
    def expert_size(self) -> int:
        """Weights of one expert."""
        return (self.gate_up_weight.numel() + self.down_weight.numel()) // self.router.num_here

    @property
    def hit_per_token(self) -> float:
        """Of the experts here, those that one token of each engine is expected to go through, all being as likely."""
        missed = 1 - self.config.num_per_token / self.config.num_experts
        return self.router.num_here * (1 - missed**self.engines.size)

    def destinations(self, layer: str, *, fused: bool) -> dict[str, Destination]:
        """Checkpoint tensor name -> the weight, or part of one, that it fills; `layer` is what stands before them.

        `fused`: all experts of a layer are in one tensor, as transformers 5 holds them; else each has its own.
        """
        block = f"{layer}.mlp" if fused else f"{layer}.{self.config.names.block}"
        found: dict[str, Destination] = {f"{block}.gate.weight": self.router_weight.data}
        if fused:
            return found | {
                f"{block}.experts.gate_up_proj": shard(self.gate_up_weight.data, self.slices.get("gate_up_weight")),
                f"{block}.experts.down_proj": shard(self.down_weight.data, self.slices.get("down_weight")),
            }
        for place, expert in enumerate(self.mine):
            gate, up = self.gate_up_weight.data[place].split(self.inner_size)
            down = shard(self.down_weight.data[place], self.columns and replace(self.columns, dim=1))
            parts = (shard(gate, self.columns), shard(up, self.columns), down)
            found |= zip(self._names(layer, expert), parts, strict=True)
        return found

    def needless(self, layer: str) -> set[str]:
        """Tensors of the experts that other engines have, where each has its own; `layer` as in `destinations`."""
        others = set(range(self.config.num_experts)) - set(self.mine)
        return {name for expert in others for name in self._names(layer, expert)}

    def _names(self, layer: str, expert: int) -> list[str]:
        """Of an expert's gate, up and down in a checkpoint."""
        names = self.config.names
        before = f"{layer}.{names.block}.experts.{expert}"
        return [f"{before}.{name}.weight" for name in (names.gate, names.up, names.down)]


def are_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has all experts of a layer in one."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)
