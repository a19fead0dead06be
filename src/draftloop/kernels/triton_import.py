"""Triton where it can run: with a CUDA build of torch, or in its interpreter.

Elsewhere `triton`, `tl` and `TensorDescriptor` are None and `jit` leaves functions alone, so that importing a kernel
on a CPU-only machine neither needs Triton nor pays for its import. Tests that use the
interpreter set TRITON_INTERPRET=1 before anything imports a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

Loader = Callable[[str, str], ModuleType]
"""(name, path of an extension module) -> the module."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton: Any = None
tl: Any = None
TensorDescriptor: Any = None
if torch.version.cuda is not None or INTERPRETED:
    with contextlib.suppress(ImportError):  # no wheel for this platform
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
        TensorDescriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor


def apart(load: Loader) -> Loader:
    """Loads extension modules of one name so that none ever changes another, whichever threads ask.

    Triton 3.6 keeps each launcher in a module of the same name. Where the process has loaded a file before, Python
    puts its functions into whatever module has the name now: one, perhaps, that another thread has just loaded and not
    looked into yet, and its kernel is launched with another's arguments.
    """
    lock = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            module = load(name, path)
            sys.modules.pop(name, None)
            return module

    return load_apart


if triton is not None:  # kernels are compiled by many threads at the start
    _build: Any = importlib.import_module("triton.runtime.build")
    _build._load_module_from_path = apart(_build._load_module_from_path)


def jit(*unspecialized: str) -> Callable[[Any], Any]:
    """`triton.jit` where Triton can run; else the function stays as it is, never to be launched.

    `unspecialized` names integer arguments whose value must not lead to another compilation.
    """

    def decorate(function: Any) -> Any:
        return function if triton is None else triton.jit(function, do_not_specialize=list(unspecialized))

    return decorate


def constant(value: int | float) -> Any:
    """A module's constant that its kernels may read by name."""
    return value if tl is None else tl.constexpr(value)


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options and the constant PDL of kernels that may start before the one in front has drained.

    Such a kernel calls `gdc_wait` in every program, before it writes and before it reads anything but
    weights: all that ran earlier is complete then, because each kernel in turn waited for its
    predecessor. It calls `gdc_launch_dependents` when its loads are done. Compute capability 9.0 on.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def gpu_name(device: torch.device) -> str:
    """What tables of measurements call a CUDA device."""
    return torch.cuda.get_device_name(device)


def next_power_of_2(n: int) -> int:
    """Smallest power of 2 that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
