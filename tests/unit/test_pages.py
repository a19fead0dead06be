"""The page allocator and the memory behind it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftloop.errors import CapacityError
from draftloop.kvcache.pages import PageAllocator, page_key, root_key
from draftloop.kvcache.pool import CachePool, CacheSpec, count_pages

SPEC = CacheSpec(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)
CPU = torch.device("cpu")


@given(st.lists(st.integers(-3, 5)))
def test_pages_are_held_by_one_owner_and_none_is_lost(steps):
    """Positive: allocate that many; negative: free the oldest allocation."""
    pages, held = PageAllocator(12, 16), []
    for step in steps:
        if step < 0:
            if held:
                pages.free(held.pop(0))
        elif step <= pages.num_free:
            held.append(pages.allocate(step))
        owned = [page for group in held for page in group]
        assert sorted([*owned, *pages.free_pages]) == list(range(1, 12)), "page 0 is nobody's"


def test_a_request_for_more_than_is_free_takes_nothing():
    pages = PageAllocator(5, 16)
    pages.allocate(2)
    with pytest.raises(CapacityError, match="3 pages needed, 2 of 4 free"):
        pages.allocate(3)
    assert pages.num_free == 2


def test_freed_pages_wait_at_the_back_of_the_queue():
    pages = PageAllocator(5, 16)
    first = pages.allocate(2)
    pages.free(first)
    assert pages.allocate(2) == [3, 4]


def test_freeing_twice_is_our_mistake():
    pages = PageAllocator(5, 16)
    taken = pages.allocate(1)
    pages.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free(taken)


def test_registered_pages_are_kept_until_their_memory_is_needed_the_end_of_a_chain_first():
    pages = PageAllocator(6, 16)
    chain = pages.allocate(3)
    for page, key in zip(chain, (b"a", b"b", b"c"), strict=True):
        pages.register(page, key)
    pages.free(chain)
    assert (pages.num_free, pages.num_empty, pages.find([b"a", b"b", b"c"])) == (5, 2, chain)
    assert chain[0] not in pages.newly_free(), "poison must not reach what may be found"
    pages.allocate(3)
    assert pages.find([b"a", b"b", b"c"]) == chain[:2]
    pages.hold(chain[:1])
    pages.allocate(1)
    assert pages.find([b"a", b"b"]) == chain[:1], "what somebody holds is not given away"
    with pytest.raises(CapacityError, match="1 pages needed, 0 of 5 free"):
        pages.allocate(1)


def test_of_two_pages_with_the_same_tokens_the_first_is_found_and_the_other_is_emptied_when_it_is_freed():
    pages = PageAllocator(4, 16)
    one, other = pages.allocate(2)
    pages.register(one, b"a")
    pages.register(other, b"a")
    assert pages.find([b"a"]) == [one]
    pages.free([other])
    assert pages.num_empty == 2
    pages.reset()
    assert pages.find([b"a"]) == []
    pages.free([one])
    assert pages.num_empty == 3


def test_keys_stand_for_all_tokens_before_and_for_the_salt():
    root = root_key(None, 0)
    assert page_key(root, [1, 2]) == page_key(root, [1, 2])
    others = [root_key("", 0), root_key("x", 0), root_key(None, 1), page_key(root, [1])]
    assert len({page_key(before, [1, 2]) for before in [root, *others]}) == 5
    assert page_key(root, [258]) != page_key(root, [1, 1])


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_tokens(tokens, expected):
    assert PageAllocator(8, 16).pages_for(tokens) == expected


def test_a_page_of_a_cache_has_the_bytes_that_are_counted():
    assert SPEC.allocate(5, 16, CPU).nbytes == 5 * SPEC.bytes_per_page(16)


def test_poison_reaches_free_pages_and_the_null_page_only():
    pool = CachePool([SPEC, SPEC], 6, 16, CPU)
    pool.poison([2, 5])
    for cache in pool.caches:
        assert cache[:, :, [0, 2, 5]].isnan().all()
        assert cache[:, :, [1, 3, 4]].eq(0).all()


def test_no_more_pages_than_can_be_used():
    assert count_pages(lambda pages: pages * 100, budget_bytes=1000, useful_pages=7, least_pages=3) == 7
    assert count_pages(lambda pages: pages * 100, budget_bytes=501, useful_pages=7, least_pages=3) == 5
    assert count_pages(lambda pages: -(-pages // 4) * 400, budget_bytes=799, useful_pages=7, least_pages=3) == 4


@pytest.mark.parametrize("budget", [0, -1, 2 * SPEC.bytes_per_page(16) * 3 - 1])
def test_too_little_memory_for_one_request_says_how_much_is_needed(budget):
    pool = CachePool([SPEC, SPEC], 6, 16, CPU)
    with pytest.raises(CapacityError, match=r"needs \d+ MiB for a single request.*--kv-cache-memory-bytes"):
        count_pages(pool.nbytes_of, budget_bytes=budget, useful_pages=7, least_pages=3)
