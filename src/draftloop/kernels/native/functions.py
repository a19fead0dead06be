"""The functions of kernels.c, and which tensors they can work on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from draftloop.kernels.native.build import library

_ARGUMENTS = {
    "dl_linear": [c_void_p] * 4 + [c_int64] * 3 + [c_int] * 2,
    "dl_rms_norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float],
    "dl_add_rms_norm": [c_void_p] * 5 + [c_int64] * 2 + [c_float],
    "dl_norm_concat": [c_void_p] * 5 + [c_int64] * 2 + [c_float],
    "dl_silu_mul": [c_void_p] * 2 + [c_int64] * 2,
    "dl_rope_write": [c_void_p] * 8 + [c_int64] * 12 + [c_float],
    "dl_paged_attention": [c_void_p] * 8 + [c_int64] * 14 + [c_int, c_int64, c_float, c_float, c_int],
    "dl_row_tokens": [c_void_p] * 13 + [c_int64] * 10,
    "dl_write_draft": [c_void_p] * 7 + [c_int64] * 4 + [c_int, c_int64],
    "dl_accept_block": [c_void_p] * 8 + [c_int64] * 6,
}
DTYPES = (torch.float32,)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
_CHECKED = ("dl_rope_write", "dl_paged_attention", "dl_row_tokens", "dl_write_draft", "dl_accept_block")
"""Functions that return whether all indices were good."""


class _Functions:
    """The library's functions, each an attribute once they are `available`."""


c: Any = _Functions()
_off = False


def available() -> bool:
    """Whether the kernels can be used; the first call compiles them."""
    if not c.__dict__ and (loaded := library()) is not None:
        functions = {name: getattr(loaded, name) for name in _ARGUMENTS}
        for name, function in functions.items():
            function.argtypes, function.restype = _ARGUMENTS[name], c_int if name in _CHECKED else None
        c.__dict__.update(functions)  # at once, since other threads may ask too
    return bool(c.__dict__) and not _off


@contextmanager
def switched_off() -> Generator[None]:
    """Inside, torch's operators are used."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def takes(*tensors: Tensor | None, weight: Tensor | None = None) -> bool:
    """Whether the kernels can work on these: float32, contiguous, on the CPU, no gradient wanted.

    `weight`, of a linear layer, may be bf16 as well.
    """
    for x in (*tensors, weight):
        if x is None:
            continue
        if x.device.type != "cpu" or x.dtype not in (WEIGHT_DTYPES if x is weight else DTYPES) or not x.is_contiguous():
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
    return available()


def pointer(x: Tensor | None) -> int | None:
    """For an argument that may be left out."""
    return None if x is None else x.data_ptr()
