"""How far a kernel reaches into the ones before it, so that memory stays busy while small kernels run.

Between two linear layers of few tokens stand kernels that move next to nothing: a norm, a gate, attention of one row.
Each costs microseconds in which no weights are read. Launches that depend on each other by program
(`triton_import.pdl_options`) take that time back:

- `early`: small kernels let the next kernel start as soon as they start themselves, and attention reads what it can
  of its keys and values before it waits.
- `bytes_ahead`: a linear layer asks for about so many bytes of its weights before it waits for its input. They come to
  L2; nothing holds them until they are read.

No result depends on either. What runs ahead of its wait reads weights, or what was written before the linear layer in
front of it began: that layer waits for all before it, and lets nothing start until then.

`MEASURED` is made of what `draftloop.bench.sweep_overlap` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from draftloop.kernels.triton_import import gpu_name, jit, pdl_options, tl


class Overlap(NamedTuple):
    """What kernels do before they wait."""

    early: bool = False
    bytes_ahead: int = 0


MEASURED: dict[str, Overlap] = {}
"""GPU -> what makes passes of few tokens fastest there; others wait first."""

_tried: Overlap | None = None


@contextmanager
def trying(overlap: Overlap) -> Iterator[None]:
    """Kernels launched or captured meanwhile overlap so, whatever was measured: for sweeps and tests."""
    global _tried
    before, _tried = _tried, overlap
    try:
        yield
    finally:
        _tried = before


def overlap_of(device: torch.device) -> Overlap:
    """What kernels on this device do."""
    if not pdl_options(device)["PDL"]:
        return Overlap()
    return MEASURED.get(gpu_name(device), Overlap()) if _tried is None else _tried


def early_options(device: torch.device) -> dict[str, Any]:
    """`pdl_options` of a small kernel, and whether it lets the next one start at once."""
    return {**pdl_options(device), "EARLY": overlap_of(device).early}


def rows_ahead(device: torch.device, num_programs: int, rows: int, row_bytes: int) -> int:
    """How many of its rows of weights each program asks for.

    Whole rows and not the first blocks of all: so L2 has a share of every block, and memory is read beside it.
    """
    return min(overlap_of(device).bytes_ahead // (num_programs * row_bytes), rows)


_FETCH = """
{
.reg .pred live;
.reg .b32 thread;
.reg .b64 address;
mov.u32 thread, %tid.x;
setp.lt.s32 live, thread, $2;
mad.wide.s32 address, thread, $3, $1;
@live cp.async.bulk.prefetch.L2.global [address], $4;
mov.b32 $0, 0;
}
"""
FETCH = _FETCH if tl is None else tl.constexpr(_FETCH)


@jit()
def fetch_rows(pointer, num_rows, stride, num_bytes):
    """Ask for the first bytes of each row to come to L2; each thread asks for one row, and nobody waits.

    Stride and number are in bytes and multiples of 16, as is the address.
    """
    tl.inline_asm_elementwise(
        FETCH,
        "=r,l,r,r,r",
        [pointer.to(tl.int64), num_rows, stride, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
