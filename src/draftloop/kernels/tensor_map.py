"""How the copy engine of a GPU of compute capability 9.0 finds boxes of a tensor."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from draftloop.kernels.driver import ask, bindings

MAP_BYTES = 128


class Box(NamedTuple):
    """What the copy engine takes at once out of a tensor of 16 bits. The last dimension comes first."""

    tensor: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Of all dimensions but the first."""
    box: tuple[int, ...]
    is_swizzled: bool = True
    """By 128 bytes."""


def tensor_map(box: Box) -> bytes:
    """As kernels take it, `MAP_BYTES` long."""
    driver, dimensions = bindings(), len(box.sizes)
    swizzle = driver.CUtensorMapSwizzle
    found = ask(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        dimensions,
        box.tensor.data_ptr(),
        [driver.cuuint64_t(size) for size in box.sizes],
        [driver.cuuint64_t(2 * stride) for stride in box.strides],
        [driver.cuuint32_t(size) for size in box.box],
        [driver.cuuint32_t(1)] * dimensions,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if box.is_swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(found.getPtr()), MAP_BYTES)
