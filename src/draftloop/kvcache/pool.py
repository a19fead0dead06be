"""The memory of the paged caches: one for the target and one for each model that a drafter brings.

All caches have the same pages, so a row has one page table, whoever reads it.

Shape suffixes: L layers, P pages, S tokens per page, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from draftloop.errors import CapacityError
from draftloop.kernels.fp8_cache import FP8, FP8_NAN, as_bytes
from draftloop.kvcache.virtual_memory import ReservedCache, VirtualMemory


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What one model keeps per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_page(self, page_size: int) -> int:
        return self.num_layers * 2 * page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int, device: torch.device) -> Tensor:
        """[L, 2, P, S, G, D]: keys at index 0 of the second dimension, values at 1."""
        shape = (self.num_layers, 2, num_pages, page_size, self.num_kv_heads, self.head_dim)
        if device.type == "cpu":
            return _zeros_when_touched(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=device)


def _zeros_when_touched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of the host that take memory when they are written: filling gigabytes can take a start half a minute."""
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class CachePool:
    """Caches over one set of pages."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
        *,
        memory: VirtualMemory | None = None,
    ) -> None:
        """With `memory` the pages have addresses, but the null page alone has memory: see `back`."""
        self.specs, self.num_pages, self.page_size = specs, num_pages, page_size
        self._reserved = [ReservedCache(spec, num_pages, page_size, memory) for spec in specs] if memory else []
        self.caches = [one.cache for one in self._reserved] or [s.allocate(num_pages, page_size, device) for s in specs]

    @property
    def is_reserved(self) -> bool:
        """True until its pages have memory."""
        return bool(self._reserved) and self.caches[0] is self._reserved[0].cache

    def back(self, num_pages: int) -> None:
        """Give memory to the first `num_pages` pages, and forget the others. Raises CapacityError if it ends."""
        for one in self._reserved:
            one.back(num_pages)
        self.caches = [one.cache[:, :, :num_pages] for one in self._reserved]
        self.num_pages = num_pages

    def nbytes_of(self, num_pages: int) -> int:
        """What memory so many pages take."""
        if self._reserved:
            return sum(one.nbytes_of(num_pages) for one in self._reserved)
        return num_pages * bytes_per_page(self.specs, self.page_size)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def copy_page(self, source: int, target: int) -> None:
        """Fill a page with what another one holds, in all caches. Nothing waits for it."""
        for cache in map(as_bytes, self.caches):
            cache[:, :, target].copy_(cache[:, :, source])

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages that belong to nobody, and the null page, with NaN, so that reading them shows."""
        for cache in self.caches:
            nan = FP8_NAN if cache.dtype is FP8 else float("nan")
            as_bytes(cache).index_fill_(2, torch.tensor([0, *pages], device=cache.device), nan)


def bytes_per_page(specs: Sequence[CacheSpec], page_size: int) -> int:
    """Of all caches."""
    return sum(spec.bytes_per_page(page_size) for spec in specs)


def count_pages(nbytes_of: Callable[[int], int], *, budget_bytes: int, useful_pages: int, least_pages: int) -> int:
    """How many pages to allocate: what the budget holds, but no more than can ever be used.

    `nbytes_of` says what memory so many pages take. `useful_pages` covers every row at full length, `least_pages` one
    request of the shortest useful length. Raises CapacityError, saying how much is needed, if not even that fits.
    """
    pages = bisect_right(range(useful_pages + 1), budget_bytes, key=nbytes_of) - 1
    if pages < least_pages:
        raise CapacityError(
            f"the key/value cache needs {nbytes_of(least_pages) / 2**20:.0f} MiB for a single request, but "
            f"{max(budget_bytes, 0) / 2**20:.0f} MiB are left for it; raise --gpu-memory-utilization or "
            f"--kv-cache-memory-bytes, or lower --max-model-len, --max-num-batched-tokens or --cudagraph-capture-sizes"
        )
    return pages
