"""Which pages hold what a request would fill them with. A page is known by all tokens up to its end."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from draftloop.kvcache.pages import PageAllocator, page_key, root_key
from draftloop.scheduler.batch import Sequence


class Prefix(NamedTuple):
    """What was found of a waiting request's first tokens."""

    num_pages: int
    """Pages that these tokens fill, behind a window too."""
    num_tokens: int
    """Those that need not run. The others begin in the last page found."""
    found: list[list[int]]
    """Pages that it can take over, of each group: the last ones, as far as the tokens that run see."""


def find_prefix(sequence: Sequence, groups: Many[PageAllocator], *, num_rerun: int) -> Prefix:
    """The longest of which all groups have what is needed. Of what it holds the last `num_rerun` tokens run again."""
    size = groups[0].page_size
    keys = _page_keys(sequence, sequence.num_to_prefill, groups[0])
    # only the last page held may be written again, so that what runs again must begin in it
    beyond, in_last_page = divmod(num_rerun - 1, size)
    whole = [pages for pages in groups if pages.window is None]
    count = min((len(pages.find(keys)) for pages in whole), default=len(keys)) - beyond
    runs = [(pages, _runs(pages, keys)) for pages in groups if pages.window is not None]
    while count > 0:
        num_tokens = count * size - in_last_page - 1
        if all(begins[count - 1] <= pages.first_seen(num_tokens) for pages, begins in runs):
            return Prefix(count, num_tokens, [p.find(keys[p.first_seen(num_tokens) : count]) for p in groups])
        count -= 1
    return Prefix(0, 0, [[] for _ in groups])


def _runs(pages: PageAllocator, keys: list[bytes]) -> list[int]:
    """Of each page, where the run of known ones begins that ends with it; behind it where it is not known itself."""
    begin, begins = 0, []
    for place, key in enumerate(keys, 1):
        if key not in pages:
            begin = place
        begins.append(begin)
    return begins


def register_prefix(sequence: Sequence, num_tokens: int, groups: Many[PageAllocator]) -> None:
    """Let others find the pages that its first `num_tokens` fill, unless the cache has been reset meanwhile."""
    if sequence.generation != groups[0].generation:
        return
    new = range(sequence.num_registered, num_tokens // groups[0].page_size)
    keys = _page_keys(sequence, num_tokens, groups[0]) if new else []
    for page in new:
        for pages, held in zip(groups, sequence.held, strict=True):
            if page >= held.first:
                pages.register(held.ids[page - held.first], keys[page])
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
