"""The least time that the hardware allows, from bytes and operations; see `graphs.phase.Cost`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftloop.graphs.phase import Phase


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What one device was measured to do, not what its data sheet says."""

    bytes_per_s: float
    flops_per_s: float


CEILINGS = {"NVIDIA H200": Ceiling(bytes_per_s=4.3e12, flops_per_s=790e12)}
"""By device name: copy bandwidth (read and write counted) and bf16 matrix rate on random data."""


def floor_ms(phases: Iterable[Phase], ceiling: Ceiling, *, rows: int, context: int) -> float:
    """Milliseconds for these phases in order, at `context` tokens per row.

    Each phase waits for the one before it, so their floors add up.
    """
    total = 0.0
    for phase in phases:
        if phase.parts:
            total += floor_ms(phase.parts, ceiling, rows=rows, context=context) / 1e3
            continue
        tokens = rows * (phase.tokens_per_row or 1)
        cost = phase.cost
        moved = cost.weight_bytes + rows * context * cost.cache_bytes
        total += max(moved / ceiling.bytes_per_s, tokens * cost.flops / ceiling.flops_per_s)
    return total * 1e3
