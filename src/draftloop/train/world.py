"""The processes of a training, which torchrun starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that train together."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """The same, divided by their number."""
        return self.sum(value) / self.size

    def agree(self, value: float, device: torch.device) -> float:
        """The first process's value, for what the clock decides."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return shared.item()


ALONE = World()
