"""Which pages are free. Plain data: the pool's memory is elsewhere."""

from __future__ import annotations

from collections import deque

from draftloop.errors import CapacityError


class PageAllocator:
    """Hands out page numbers. Page 0 is nobody's: padding writes there.

    A freed page goes to the back of the queue, so that a stale reader is not hidden by luck.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = deque(range(1, num_pages))
        self._newly_free = set(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> list[int]:
        return list(self._free)

    def newly_free(self) -> list[int]:
        """Pages freed since the last call, or never used; for poison mode."""
        pages, self._newly_free = list(self._newly_free), set()
        return pages

    @property
    def capacity(self) -> int:
        """Pages that one request could have at most."""
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take pages. Raises CapacityError if there are not enough."""
        if count > len(self._free):
            raise CapacityError(f"{count} pages needed, {len(self._free)} of {self.capacity} free")
        pages = [self._free.popleft() for _ in range(count)]
        self._newly_free.difference_update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        assert not set(pages) & set(self._free), "a page was freed twice"
        self._free.extend(pages)
        self._newly_free.update(pages)
