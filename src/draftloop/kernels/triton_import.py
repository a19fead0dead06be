"""Triton where it can run: with a CUDA build of torch, or in its interpreter.

Elsewhere `triton` and `tl` are None and `jit` leaves functions alone, so that importing a kernel
on a CPU-only machine neither needs Triton nor pays for its import. Tests that use the
interpreter set TRITON_INTERPRET=1 before anything imports a kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import torch

triton: Any = None
tl: Any = None
if torch.version.cuda is not None or os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):  # no wheel for this platform
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")


def jit(function: Any) -> Any:
    """`triton.jit` where Triton can run; else the function as it is, never to be launched."""
    return triton.jit(function) if triton is not None else function
