"""The memory of the paged caches: those of the target, and of each model that a drafter brings.

Caches that keep all tokens have the same pages, so that a row has one page table, whoever reads it. Those of layers
with a window may be another group, with pages and a table of its own: rows give back what lies behind the window.

Shape suffixes: L layers, P pages, S tokens per page, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
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
    window: int | None = None
    """Of layers that form a group with all others of this window; None: they keep all tokens."""

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
    """Caches over pages. Each group, all of one `CacheSpec.window`, has its own."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
        *,
        most_pages: Mapping[int | None, int] | None = None,
        memory: VirtualMemory | None = None,
    ) -> None:
        """Each group gets `num_pages`, or `most_pages` of its window where that is less; see `PageCounts`.

        With `memory` the pages have addresses, but the null page alone has memory: see `back`.
        """
        self.specs, self.num_pages, self.page_size = specs, num_pages, page_size
        self.counts = PageCounts(most_pages or {})
        sizes = [(spec, self.counts.of(spec.window, num_pages)) for spec in specs]
        self._reserved = [ReservedCache(spec, size, page_size, memory) for spec, size in sizes] if memory else []
        self.caches = [one.cache for one in self._reserved] or [s.allocate(n, page_size, device) for s, n in sizes]

    @property
    def windows(self) -> list[int | None]:
        """Of the groups, in the order of their tables; None, if any keeps all tokens, is the first."""
        return sorted({spec.window for spec in self.specs} or {None}, key=lambda window: window or 0)

    def num_pages_of(self, window: int | None) -> int:
        """Pages of a group, the null page among them."""
        return self.counts.of(window, self.num_pages)

    @property
    def is_reserved(self) -> bool:
        """True until its pages have memory."""
        return bool(self._reserved) and self.caches[0] is self._reserved[0].cache

    def back(self, num_pages: int) -> None:
        """Give memory to the first pages, as many as for a new pool, and forget the others. Raises CapacityError if it
        ends."""
        self.caches = []
        for one, spec in zip(self._reserved, self.specs, strict=True):
            size = self.counts.of(spec.window, num_pages)
            one.back(size)
            self.caches.append(one.cache[:, :, :size])
        self.num_pages = num_pages

    def nbytes_of(self, num_pages: int) -> int:
        """What memory a pool of so many pages takes."""
        if not self._reserved:
            return self.counts.nbytes(self.specs, num_pages, self.page_size)
        pairs = zip(self._reserved, self.specs, strict=True)
        return sum(one.nbytes_of(self.counts.of(spec.window, num_pages)) for one, spec in pairs)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def of_group(self, window: int | None) -> list[Tensor]:
        """Its caches."""
        return [cache for cache, spec in zip(self.caches, self.specs, strict=True) if spec.window == window]

    def copy_page(self, source: int, target: int, *, window: int | None = None) -> None:
        """Fill a page with what another one holds, in all caches of a group. Nothing waits for it."""
        for cache in map(as_bytes, self.of_group(window)):
            cache[:, :, target].copy_(cache[:, :, source])

    def poison(self, pages: Sequence[int], *, window: int | None = None) -> None:
        """Fill pages of a group that belong to nobody, and the null page, with NaN, so that reading them shows."""
        for cache in self.of_group(window):
            nan = FP8_NAN if cache.dtype is FP8 else float("nan")
            as_bytes(cache).index_fill_(2, torch.tensor([0, *pages], device=cache.device), nan)


@dataclass(frozen=True)
class PageCounts:
    """How many pages each group of a pool has: as many as the others, but no more than its rows can make use of."""

    most: Mapping[int | None, int]
    """By window; what is left out has no limit."""

    def of(self, window: int | None, num_pages: int) -> int:
        """Pages of a group in a pool of `num_pages`."""
        return min(num_pages, self.most.get(window, num_pages))

    def nbytes(self, specs: Sequence[CacheSpec], num_pages: int, page_size: int) -> int:
        """Of a pool over memory that is allocated as it is."""
        return sum(self.of(spec.window, num_pages) * spec.bytes_per_page(page_size) for spec in specs)


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
