"""Where the tokens of a step came from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from draftloop.kvcache.rows import NO_DRAFT
from draftloop.request import TokenSource


def block_sources(num_tokens: int, num_accepted: int, drafts: Sequence[int]) -> list[TokenSource]:
    """One for each of the `num_tokens` that a step gave to a request, of which the first `num_accepted` are drafts.

    `drafts` is what was verified, up to the first NO_DRAFT. A request that ends inside its accepted drafts rejects
    none.
    """
    drafts = tuple(takewhile(lambda draft: draft != NO_DRAFT, drafts))
    sources = [TokenSource(position=place, num_drafted=len(drafts)) for place in range(1, num_accepted + 1)]
    sources.append(TokenSource(num_drafted=len(drafts), rejected=drafts[num_accepted:]))
    return sources[:num_tokens]
