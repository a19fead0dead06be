"""Which pages hold what a request would fill them with. A page is known by all tokens up to its end."""

from __future__ import annotations

from draftloop.kvcache.pages import PageAllocator, page_key, root_key
from draftloop.scheduler.batch import Sequence


def find_prefix(sequence: Sequence, pages: PageAllocator, *, num_rerun: int) -> list[int]:
    """Pages that a waiting request can take over. Of what they hold the last `num_rerun` tokens run again."""
    found = pages.find(_page_keys(sequence, sequence.num_to_prefill, pages))
    # only the last page held may be written again, so that what runs again must begin in it
    return found[: max(len(found) - (num_rerun - 1) // pages.page_size, 0)]


def register_prefix(sequence: Sequence, num_tokens: int, pages: PageAllocator) -> None:
    """Let others find the pages that its first `num_tokens` fill, unless the cache has been reset meanwhile."""
    if sequence.generation != pages.generation:
        return
    new = range(sequence.num_registered, num_tokens // pages.page_size)
    keys = _page_keys(sequence, num_tokens, pages) if new else []
    for page in new:
        pages.register(sequence.pages[page], keys[page])
        sequence.num_registered = page + 1


def _page_keys(sequence: Sequence, num_tokens: int, pages: PageAllocator) -> list[bytes]:
    """Of the pages that its first `num_tokens` fill."""
    count, size = num_tokens // pages.page_size, pages.page_size
    keys = sequence.page_keys
    if len(keys) < count:
        ids = sequence.token_ids
        for page in range(len(keys), count):
            before = keys[-1] if keys else _root_key(sequence, pages)
            keys.append(page_key(before, ids[page * size : (page + 1) * size]))
    return keys[:count]


def _root_key(sequence: Sequence, pages: PageAllocator) -> bytes:
    adapter = sequence.adapter.number if sequence.adapter else 0
    return root_key(sequence.cache_salt, pages.generation, adapter)
