"""What a graph table knows of its phases and of each size that is captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from draftloop.distributed.group import Exchange
from draftloop.graphs.loop import Loop, Watched
from draftloop.graphs.phase import GraphMode, Phase
from draftloop.graphs.program import Program
from draftloop.graphs.ring import Ring


@dataclass(kw_only=True)
class Entry:
    """What is known of one size that is captured."""

    program: Program | None = None
    """None until the first use, where the recorder works that way."""
    ms: float | None = None
    mib: float | None = None
    replays: int = 0
    loop: Loop | None = None
    loop_ms: float | None = None
    """What making the loop took."""
    exchanged: Mapping[Exchange, int] = field(default_factory=dict)
    """How often each replay exchanges what with other ranks."""


@dataclass(frozen=True, kw_only=True)
class Loops:
    """Phases whose graphs repeat on the device, and what every loop needs."""

    phases: frozenset[str]
    watched: Watched
    ring: Ring


@dataclass(kw_only=True)
class PhaseState:
    phase: Phase
    mode: GraphMode
    reason: str
    eager_runs: dict[str, int] = field(default_factory=dict)
    """How often the phase ran eager, by the reason."""
