"""Who holds which page, and which pages hold what may be asked for again. Plain data: the memory is elsewhere.

A page whose tokens are all known can be registered under a key that stands for them and for all tokens before them. A
request whose prompt begins with the same tokens holds the same pages. A registered page that nobody holds any more
keeps what it has until its memory is needed: the one that has been left alone longest goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from draftloop.errors import CapacityError

ROOT = b""


def page_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Stands for a page's tokens and, by the key of the page before it, for all tokens before them."""
    return hashlib.blake2b(before + array("i", token_ids).tobytes(), digest_size=16).digest()


def pages_in_sight(window: int, num_new: int, page_size: int) -> int:
    """Pages, at most, that hold so many new tokens and all that the first of them sees."""
    return -(-(window - 1 + num_new) // page_size) + 1


def root_key(salt: str | None, generation: int, adapter: int = 0) -> bytes:
    """What stands before the first page: requests of unlike salt or adapter share nothing, nor does what came before a
    reset."""
    text = f"{generation}:{adapter}:{'' if salt is None else '+' + salt}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class PageAllocator:
    """Hands out the page numbers of one group of layers. Page 0 is nobody's: padding writes there.

    A freed page goes to the back of the queue, so that a stale reader is not hidden by luck.
    """

    def __init__(self, num_pages: int, page_size: int, window: int | None = None) -> None:
        """`window`: of the layers; rows give back what lies behind it. None: they see, and keep, all tokens."""
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self.generation = 0
        """Counts resets."""
        self._empty = deque(range(1, num_pages))
        """Held by nobody, and not registered."""
        self._newly_free = set(self._empty)
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Held by nobody, but registered; the first is given away first."""
        self._holders: dict[int, int] = {}
        """How many hold a page; who does not appear is held by nobody."""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    # ---- counts -----------------------------------------------------------------------------

    @property
    def num_empty(self) -> int:
        """Free pages that hold nothing of use."""
        return len(self._empty)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def num_registered(self) -> int:
        return len(self._key_of)

    @property
    def free_pages(self) -> list[int]:
        """All that can be allocated, in the order in which they will be."""
        return [*self._empty, *self._kept]

    def num_holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def newly_free(self) -> list[int]:
        """Pages emptied since the last call, or never used; for poison mode."""
        pages, self._newly_free = list(self._newly_free), set()
        return pages

    @property
    def capacity(self) -> int:
        """Pages that one request could have at most."""
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def first_seen(self, position: int) -> int:
        """The first page of a row that its tokens from this position on see."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    # ---- holding ----------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take pages for one holder, empty ones first. Raises CapacityError if there are not enough."""
        if count > self.num_free:
            raise CapacityError(f"{count} pages needed, {self.num_free} of {self.capacity} free")
        while len(self._empty) < count:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
            self._empty.append(page)
        pages = [self._empty.popleft() for _ in range(count)]
        self._newly_free.difference_update(pages)
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Become one more holder of registered pages."""
        for page in pages:
            assert page in self._key_of, "only what is registered can be shared"
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def free(self, pages: Sequence[int]) -> None:
        """Give up a hold. Of a chain of kept pages the last is given away first, since it is found through the others.

        Emptied pages keep their order.
        """
        for page in reversed(pages):
            assert page in self._holders, "a page was freed twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._key_of:
                    self._kept[page] = None
        emptied = [page for page in pages if page not in self._holders and page not in self._key_of]
        self._empty.extend(emptied)
        self._newly_free.update(emptied)

    # ---- what pages hold --------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        """A page is registered under it."""
        return key in self._page_of

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of known keys from the first on."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes) -> None:
        """Say what a page that somebody holds is full of. Where another page holds the same, that one stays."""
        assert page in self._holders, "only what is held can be registered"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find these any more. Who holds them keeps them."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)
                if page in self._kept:
                    del self._kept[page]
                    self._empty.append(page)
                    self._newly_free.add(page)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """`forget` whatever is registered under these."""
        self.forget([self._page_of[key] for key in keys if key in self._page_of])

    def reset(self) -> None:
        """Let nobody find anything that was computed before now."""
        self.generation += 1
        self.forget(list(self._key_of))

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
