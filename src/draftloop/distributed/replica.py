"""Which of several engines a process is. Plain data, for the process that starts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Replica:
    """An engine of `size` that share the requests."""

    rank: int = 0
    size: int = 1
    store: str | None = None
    """File in a private folder where they meet, if they step together."""


ALONE = Replica()
