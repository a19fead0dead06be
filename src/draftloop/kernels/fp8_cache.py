"""Keys and values stored as 8-bit floats (e4m3): what torch lacks to handle them as it does other dtypes.

Their scale is 1: keys and values of published models stay well inside of what e4m3 holds, and are cut to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_NAN = 0x7F
"""As a byte."""


def to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As a cache of this dtype holds it; 8-bit floats are rounded to the nearest, and cut where there are none."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8) if dtype is FP8 else x.to(dtype)


def stored(x: Tensor, cache: Tensor) -> Tensor:
    """What is written to `as_bytes(cache)` for x."""
    return x if x.dtype is cache.dtype else as_bytes(to_cache(x, cache.dtype))


def as_bytes(cache: Tensor) -> Tensor:
    """The same memory, so that it can be indexed; other dtypes than 8-bit floats as they are."""
    return cache.view(torch.uint8) if cache.dtype is FP8 else cache
