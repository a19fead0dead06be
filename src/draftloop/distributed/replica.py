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
    name: str = ""
    """Of the server that it belongs to, where there are several of the same settings."""

    def seed(self, given: int) -> str:
        """For requests without a seed: no two engines draw the same for requests of the same number."""
        return " ".join(filter(None, [str(given), self.name, str(self.rank) if self.rank else ""]))


ALONE = Replica()
