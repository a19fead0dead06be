"""Batch invariance: a token's numbers follow from its own sequence alone, not from what else is in the pass.

Kernels choose tiles, splits and libraries by how many tokens there are, and each choice adds up in another order.
Inside a `batch_invariant` function they keep to one choice for any number of tokens. It is asked when a kernel is
chosen: while a phase runs eager, or while it is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_wanted: ContextVar[bool] = ContextVar("batch_invariance", default=False)


def is_wanted() -> bool:
    """Whether the kernel that is being chosen must be batch invariant."""
    return _wanted.get()


def batch_invariant(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose kernels are batch invariant."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _wanted.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _wanted.reset(token)

    return run
