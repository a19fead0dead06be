"""The least time that the hardware allows, from bytes and operations; see `graphs.phase.Cost`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftloop.graphs.phase import Cost, Phase


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What one device was measured to do, not what its data sheet says."""

    bytes_per_s: float
    flops_per_s: float


CEILINGS = {"NVIDIA H200": Ceiling(bytes_per_s=4.3e12, flops_per_s=790e12)}
"""By device name: copy bandwidth (read and write counted) and bf16 matrix rate on random data."""


def ceiling_of(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """From the list, or else measured now: reading memory, and multiplying matrices of this type. Takes a second."""
    on_gpu = device.type == "cuda"
    if on_gpu and (known := CEILINGS.get(torch.cuda.get_device_name(device))):
        return known
    num_bytes, size = (2**31, 8192) if on_gpu else (2**28, 1024)
    data = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    bytes_per_s = num_bytes / _least_s(data.sum, on_gpu)
    del data
    matrix = torch.randn(size, size, device=device).to(dtype)
    return Ceiling(bytes_per_s=bytes_per_s, flops_per_s=2 * size**3 / _least_s(lambda: matrix @ matrix, on_gpu))


def _least_s(call: Callable[[], object], on_gpu: bool) -> float:
    """Of a few runs, since whatever disturbs them only adds."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def floor_ms(phase: Phase, ceiling: Ceiling, *, rows: int, context: float) -> float:
    """Milliseconds that one run needs at `context` tokens per row: weights once, and the cache of every row, or the
    operations of all tokens, whichever takes longer. Of experts it needs those that `experts_hit` expects.

    Phases wait for each other, so the floor of a chain is the sum of its parts'.
    """
    if phase.parts:
        return sum(floor_ms(part, ceiling, rows=rows, context=context) for part in phase.parts)
    cost, tokens = phase.cost, rows * (phase.tokens_per_row or 1)
    moved = cost.weight_bytes + experts_hit(cost, tokens) * cost.expert_bytes + rows * context * cost.cache_bytes
    return max(moved / ceiling.bytes_per_s, tokens * cost.flops / ceiling.flops_per_s) * 1e3


def experts_hit(cost: Cost, tokens: int) -> float:
    """Of E experts a layer, how many T tokens that go through k each are expected to hit, if all are as likely and no
    token knows of another: E * (1 - (1 - k / E) ** T).
    """
    if not cost.num_experts:
        return 0.0
    return cost.num_experts * (1 - (1 - cost.experts_per_token / cost.num_experts) ** tokens)
