"""The pages of rows: how many they need, of each group of layers, and what they hold. Plain data, no tensors.

Where a group's layers have a window, a row gives back the pages that lie behind it, as soon as no token to come sees
them. No draft that is dropped brings a token back that was known to be emitted, so that the tokens that are known
say where the window is; the steps in flight are further on.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftloop.kvcache.pages import PageAllocator, pages_in_sight
from draftloop.scheduler.batch import HeldPages, Sequence
from draftloop.scheduler.prefixes import Prefix, find_prefix

TOKENS_AHEAD = 64
"""A row that needs a page gets pages for this many more tokens, where that takes nothing from anybody."""
FEW_STEPS = 8
"""Steps that a device loop may make at once while pages are scarce."""
REUSABLE_SHARE = 4
"""A longer loop takes at most one in so many of the pages that are only kept for prefixes to be found in."""


def tokens_per_step(num_drafts: int) -> int:
    """Positions that have pages for a row's next step: its last token's, those of a block, and of drafts after it."""
    return 1 + (1 + num_drafts) + num_drafts


class RowPages:
    """Accounts for the pages of all rows. Which row must do without them is the scheduler's affair."""

    def __init__(
        self, groups: Many[PageAllocator], *, num_drafts: int, num_rerun: int = 1, max_num_batched_tokens: int
    ) -> None:
        """`num_rerun`: tokens at the end of a prefix found in the caches that run again, 1 or more."""
        self.groups = list(groups)
        self.num_drafts, self.num_rerun, self.max_num_batched_tokens = num_drafts, num_rerun, max_num_batched_tokens

    @property
    def page_size(self) -> int:
        return self.groups[0].page_size

    # ---- what rows need ---------------------------------------------------------------------

    def needed(self, sequence: Sequence, pages: PageAllocator) -> int:
        """Pages of a group for the longest this request can get, and for drafts that reach past its end."""
        whole = pages.pages_for(sequence.max_total + self.num_drafts)
        if pages.window is None:
            return whole
        return min(whole, pages_in_sight(pages.window, tokens_per_step(self.num_drafts), pages.page_size))

    def num_fitting(self, sequence: Sequence) -> int:
        """Rows like this one that the caches hold at once, however long they get."""
        return min(pages.capacity // self.needed(sequence, pages) for pages in self.groups)

    def ahead(self, num_tokens: int, sequence: Sequence, num_steps: int = 1) -> int:
        """Where pages must end for a row that has at most `num_tokens` and makes some steps more, drafts of the last
        one included."""
        longest = min(num_tokens + num_steps * (1 + self.num_drafts), sequence.max_total)
        return self.groups[0].pages_for(longest + self.num_drafts)

    def short(self, sequence: Sequence, group: int, num_steps: int = 1) -> int:
        """Pages that a row needs to make some steps more, however far those in flight get; negative: it has more."""
        num_steps += sequence.steps_in_flight
        return self.ahead(sequence.num_tokens, sequence, num_steps) - sequence.held[group].end

    def _prompt_end(self, sequence: Sequence, pages: PageAllocator, start: int) -> int:
        """Where pages must end for a prompt that goes on at `start`: behind its first block of drafts. Of a group with
        a window, behind the longest chunk."""
        end = self.ahead(sequence.num_to_prefill + 1, sequence)
        if pages.window is None:
            return end
        most = min(pages_in_sight(pages.window, self.max_num_batched_tokens, pages.page_size), pages.capacity)
        return min(end, pages.first_seen(start) + most)

    # ---- rows that run ----------------------------------------------------------------------

    def let_go(self, sequence: Sequence, position: int) -> None:
        """Give back the pages that no token from this position on sees."""
        for pages, held in zip(self.groups, sequence.held, strict=True):
            if (behind := pages.first_seen(position) - held.first) > 0:
                pages.free(held.release(behind))

    def advance(self, sequence: Sequence) -> int:
        """Let a prompt's pages follow it. Returns how many tokens may run next; 0 where there are no pages."""
        start = sequence.num_prefilled
        self.let_go(sequence, start)
        for pages, held in zip(self.groups, sequence.held, strict=True):
            short = min(self._prompt_end(sequence, pages, start) - held.end, pages.num_free)
            if short > 0:
                held.ids += pages.allocate(short)
        return min(held.end for held in sequence.held) * self.page_size - start

    def grow(self, growing: list[tuple[Sequence, int]], group: int, *, spare: int, num_running: int) -> None:
        """Give rows the pages of a group that they are short of, which are there, and of `spare` empty ones some more
        to those that need any; one is left for each that runs."""
        pages = self.groups[group]
        for sequence, short in growing:
            held = sequence.held[group]
            whole = pages.pages_for(sequence.max_total + self.num_drafts)
            more = min(pages.pages_for(TOKENS_AHEAD), whole - held.end - short)
            if more > spare - num_running:
                more = 0
            spare -= more
            held.ids += pages.allocate(short + more)

    def reserve(self, sequences: Many[Sequence], most: int, *, are_scarce: bool) -> int:
        """Decoding steps, up to `most`, for which these rows then have pages. They have those for one already."""
        if are_scarce:
            most = min(most, FEW_STEPS)
        while most > 1:
            short = [[max(self.short(s, group, most), 0) for s in sequences] for group in range(len(self.groups))]
            rooms = [
                pages.num_free
                if most <= FEW_STEPS
                else pages.num_empty + (pages.num_free - pages.num_empty) // REUSABLE_SHARE
                for pages in self.groups
            ]
            if all(sum(counts) <= room for counts, room in zip(short, rooms, strict=True)):
                for group, counts in enumerate(short):
                    for sequence, count in zip(sequences, counts, strict=True):
                        sequence.held[group].ids += self.groups[group].allocate(count)
                return most
            most //= 2
        return 1

    def take_back(self, decodes: Many[Sequence]) -> None:
        """Free the pages that rows have beyond their next step."""
        for sequence in decodes:
            for group, (pages, held) in enumerate(zip(self.groups, sequence.held, strict=True)):
                if (spare := -self.short(sequence, group)) > 0:
                    pages.free(held.shorten(spare))

    # ---- rows that begin and end ------------------------------------------------------------

    def find(self, sequence: Sequence) -> Prefix:
        """Pages that hold what its first tokens would fill them with."""
        return find_prefix(sequence, self.groups, num_rerun=self.num_rerun)

    def nothing(self) -> Prefix:
        return Prefix(0, 0, [[] for _ in self.groups])

    def _to_admit(self, sequence: Sequence, prefix: Prefix, group: int) -> int:
        """Pages of a group that it needs beside those found: for its prompt, and one block of drafts ahead."""
        pages, found = self.groups[group], prefix.found[group]
        first = self._prompt_end(sequence, pages, prefix.num_tokens)
        return first - prefix.num_pages + self._is_last_held(found, pages)

    def _is_last_held(self, found: Many[int], pages: PageAllocator) -> bool:
        return bool(found) and pages.num_holders(found[-1]) > 0

    def fits(self, sequence: Sequence, prefix: Prefix, *, num_running: int) -> bool:
        """There are pages for it, with one to spare for each running request, which will need it."""
        for group, (pages, found) in enumerate(zip(self.groups, prefix.found, strict=True)):
            kept = sum(pages.num_holders(page) == 0 for page in found)
            if self._to_admit(sequence, prefix, group) + num_running > pages.num_free - kept:
                return False
        return True

    def admit(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a request its pages, those found among them; they `fits`.

        The last tokens found run again: what a drafter keeps of them may depend on tokens after them, which are
        another request's. So the last page found becomes the row's own, by copying it where somebody else holds it.
        """
        sequence.held = []
        for group, (pages, found) in enumerate(zip(self.groups, prefix.found, strict=True)):
            need = self._to_admit(sequence, prefix, group)
            copied = found[-1] if self._is_last_held(found, pages) else None
            pages.hold(found)
            shared = found if copied is None else found[:-1]
            first = prefix.num_pages - len(found)
            sequence.held.append(HeldPages(ids=shared + pages.allocate(need), first=first, copied=copied))
        sequence.num_prefilled = prefix.num_tokens
        is_copied = any(held.copied is not None for held in sequence.held)
        sequence.num_registered = prefix.num_pages - is_copied
        sequence.generation = self.groups[0].generation

    def copied(self, sequence: Sequence) -> None:
        """Let go of pages whose copies the row has: that is on its way."""
        for pages, held in zip(self.groups, sequence.held, strict=True):
            if held.copied is not None:
                pages.free([held.copied])
                held.copied = None

    def release(self, sequence: Sequence, *, is_sound: bool) -> None:
        """Take all pages from a row. Where what they hold is not `is_sound`, nobody is to find it."""
        self.copied(sequence)
        for pages, held in zip(self.groups, sequence.held, strict=True):
            if not is_sound:
                pages.forget(held.ids)
                pages.forget_keys(sequence.page_keys)  # also what it has given back
            pages.free(held.ids)
        sequence.held = []
        sequence.num_registered = 0
