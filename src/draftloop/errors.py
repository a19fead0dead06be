"""What users can get wrong. Each message says what, its value, the limit and the remedy.

`assert` is for our own mistakes; these are for everybody else's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DraftloopError(Exception):
    """Base of every error that draftloop raises on purpose."""


class ConfigError(DraftloopError, ValueError):
    """A setting, model folder or checkpoint that cannot work; raised before serving starts."""


class RequestError(DraftloopError, ValueError):
    """One request that cannot be served; other requests go on."""


class GraphError(DraftloopError, RuntimeError):
    """A phase cannot be captured, or would run eager where graphs are required."""


class CapacityError(DraftloopError, RuntimeError):
    """Memory does not suffice; the message says how much is needed and what to change."""


class RankError(DraftloopError, RuntimeError):
    """A rank that this one computes with is gone, or does not answer; the message says why."""


def nearest(name: str, known: Iterable[str]) -> str:
    """End of a sentence about an unknown name: `"; did you mean 'x'?"`, or a mere full stop."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else "."


def check_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names outside `known`. Raises ConfigError naming the first one and its nearest neighbour."""
    known = sorted(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}{nearest(name, known)} Known: {', '.join(known)}")
