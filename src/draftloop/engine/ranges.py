"""Names for what an engine runs, in the timelines of nsys (NVTX) and of torch's profiler.

Where nobody asks for them nothing is wrapped: an unobserved step costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from draftloop.errors import ConfigError

if TYPE_CHECKING:
    from draftloop.engine.core import EngineCore

MakeRange = Callable[[str], AbstractContextManager]


def name_steps(core: EngineCore, make_range: MakeRange) -> Callable[[], None]:
    """Put every step of an engine, and every phase in it, into a range of its name. Returns what undoes it."""
    table = core.worker.table
    undo = [
        _wrap(core, "step", make_range, lambda: "step"),
        _wrap(table, "run", make_range, lambda name, *_, **__: name),
        _wrap(table, "launch_loop", make_range, lambda name, *_: f"{name}.loop"),
    ]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _wrap(owner: Any, method: str, make_range: MakeRange, name_of: Callable[..., str]) -> Callable[[], None]:
    """Replace a method of this one object."""
    inner = getattr(owner, method)
    before = vars(owner).get(method)

    @wraps(inner)
    def named(*args: Any, **options: Any) -> Any:
        with make_range(name_of(*args, **options)):
            return inner(*args, **options)

    setattr(owner, method, named)

    def undo() -> None:
        if before is None:
            delattr(owner, method)
        else:
            setattr(owner, method, before)

    return undo


def nvtx_range(name: str) -> AbstractContextManager:
    """A range that nsys shows."""
    return torch.cuda.nvtx.range(name)


def check_nvtx() -> None:
    """Raises ConfigError where torch has no NVTX."""
    if not torch.cuda.is_available():
        raise ConfigError("DRAFTLOOP_NVTX is 1; NVTX ranges need a GPU, and torch sees none")
