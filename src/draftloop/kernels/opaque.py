"""Operators written in Python or C that a tape records as one op.

`torch.library.Library` and not `torch.library.custom_op`, whose wrappers cost 6 us a call more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("draftloop", "FRAGMENT")

BODIES: dict[Any, Callable[..., Any]] = {}
"""Operator -> the function that it runs, for callers who need no dispatching any more."""


def define(schema: str, body: Callable[..., Any], *keys: str) -> Any:
    """Make `torch.ops.draftloop.<name>` of a schema, for the given dispatch keys, and return it.

    An operator may write to arguments, declared as `Tensor(a!)`, or return new tensors; not both.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key in keys:
        _LIBRARY.impl(name, body, key)
    operator = getattr(torch.ops.draftloop, name).default
    BODIES[operator] = body
    return operator
