"""Caches that have addresses before they have memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftloop.errors import CapacityError
from draftloop.kernels.fp8_cache import FP8
from draftloop.kvcache.pool import CachePool, CacheSpec, count_pages
from draftloop.kvcache.virtual_memory import CudaVirtualMemory, VirtualMemory
from virtual_memory import GuardedMemory

CPU = torch.device("cpu")
TARGET = CacheSpec(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
ODD = CacheSpec(num_layers=1, num_kv_heads=5, head_dim=12, dtype=torch.float32)
"""Its pages have 3840 bytes in each plane, which no granule is a multiple of."""
SMALL = CacheSpec(num_layers=2, num_kv_heads=1, head_dim=32, dtype=FP8)


def memories() -> list:
    return [GuardedMemory, pytest.param(lambda: CudaVirtualMemory(torch.device("cuda")), marks=pytest.mark.gpu)]


def reserve(memory: VirtualMemory, num_pages: int = 100) -> CachePool:
    return CachePool([TARGET, ODD, SMALL], num_pages, 16, CPU, memory=memory)


@pytest.mark.parametrize("make_memory", memories())
def test_pages_keep_their_addresses_and_planes_stay_apart_when_memory_comes(make_memory):
    pool = reserve(make_memory())
    assert pool.is_reserved
    before = [cache[-1, 1].data_ptr() for cache in pool.caches]
    assert all(cache[:, :, 0].float().eq(0).all() for cache in pool.caches), "the null page has memory"
    pool.back(77)
    assert not pool.is_reserved
    assert [cache[-1, 1].data_ptr() for cache in pool.caches] == before
    assert (pool.num_pages, {cache.shape[2] for cache in pool.caches}) == (77, {77})
    assert all(cache.float().eq(0).all() for cache in pool.caches)
    for cache in pool.caches:
        planes = cache.flatten(0, 1)
        marks = torch.arange(1.0, 1 + len(planes), device=cache.device)
        planes[:] = marks.view(-1, 1, 1, 1, 1).to(cache.dtype)
        assert cache.flatten(0, 1).float().flatten(1).eq(marks[:, None]).all()
    pool.poison([76])
    assert all(cache[:, :, [0, 76]].float().isnan().all() for cache in pool.caches)


@pytest.mark.parametrize("make_memory", memories())
def test_groups_of_layers_get_memory_for_as_many_pages_as_they_can_use(make_memory):
    """Of a window no more than the limit, whatever there is of the others; each group is poisoned by itself."""
    windowed = replace(SMALL, window=24)
    pool = CachePool([TARGET, windowed], 100, 16, CPU, most_pages={24: 40}, memory=make_memory())
    assert pool.windows == [None, 24]
    for num_pages, of_window in ((30, 30), (77, 40)):
        pool.back(num_pages)
        assert [cache.shape[2] for cache in pool.caches] == [num_pages, of_window]
        assert (pool.num_pages_of(None), pool.num_pages_of(24)) == (num_pages, of_window)
    assert pool.nbytes_of(100) - pool.nbytes_of(77) == pool.nbytes_of(140) - pool.nbytes_of(117), "of one group alone"
    pool.poison([3], window=24)
    assert not pool.caches[0].float().isnan().any()
    assert pool.caches[1][:, :, [0, 3]].float().isnan().all()


def test_memory_is_what_is_counted_and_is_given_back_with_the_last_tensor():
    memory = GuardedMemory()
    pool = reserve(memory)
    assert memory.in_use == pool.nbytes_of(1)
    pool.back(60)
    assert memory.in_use == pool.nbytes_of(60)
    kept = pool.caches[1]
    del pool
    gc.collect()
    assert memory.in_use > 0
    assert kept.eq(0).all(), "a tensor keeps its memory"
    del kept
    gc.collect()
    assert (memory.in_use, memory.reserved) == (0, 0)


@given(budget=st.integers(0, 3 << 20), granule=st.sampled_from([1 << 12, 1 << 14, 1 << 16]))
def test_pages_fill_the_budget_and_never_pass_it(budget, granule):
    pool = reserve(GuardedMemory(granule=granule))
    pages = count_pages(pool.nbytes_of, budget_bytes=max(budget, pool.nbytes_of(1)), useful_pages=100, least_pages=1)
    budget = max(budget, pool.nbytes_of(1))
    assert pool.nbytes_of(pages) <= budget
    assert pages == 100 or pool.nbytes_of(pages + 1) > budget


def test_memory_that_ends_is_said():
    memory = GuardedMemory()
    pool = reserve(memory)
    memory.most = memory.in_use + 3 * memory.granule
    with pytest.raises(CapacityError, match="free"):
        pool.back(100)
