"""Device functions that see floats as integers of the same order, which can be searched bit by bit and packed.

float32 only. -0.0 is 0.0; what NaN is depends on its sign, so callers look for it first.
"""

from __future__ import annotations

from draftloop.kernels.triton_import import jit, tl


@jit()
def order_of(x):
    """int32: as x is to other floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit()
def value_of(order):
    """The float of that order."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@jit()
def pack(order, index, live):
    """int64, as in `argmax.chunk_maxima`: of several the largest has the highest order and then the lowest index."""
    packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(live, packed, -0x7FFFFFFFFFFFFFFF)


@jit()
def logits_at(logits_ptr, changed_ptr, is_changed, index, size, CHANGED: tl.constexpr):
    """float32: one position's logits, from where they were changed if they were (1, else 0); -inf from `size` on."""
    if CHANGED:
        # what is masked off is not read
        raw = tl.load(logits_ptr + index, mask=index < size * (1 - is_changed), other=float("-inf")).to(tl.float32)
        changed = tl.load(changed_ptr + index, mask=index < size * is_changed, other=float("-inf"))
        x = tl.where(is_changed != 0, changed, raw)
    else:
        x = tl.load(logits_ptr + index, mask=index < size, other=float("-inf")).to(tl.float32)
    return x
