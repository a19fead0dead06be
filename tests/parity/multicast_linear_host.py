"""`linear_multicast` on the host: its source compiled by a C++ compiler, every thread a fiber."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from host_kernels import HostKernel
from torch import Tensor

from draftloop.kernels.linear_multicast import MulticastTiles, Product
from draftloop.kernels.linear_wide import Kind, make_out


class Rows(ctypes.Structure):
    """What the host's copy engine knows of a matrix."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "columns", "box_rows", "halves")),
    ]


class HostLinear:
    """The kernel for these tensors of a CPU, and `out`, which it writes; `folder` is for the compiled source. Rings are
    short, so that few stages use their slots again."""

    def __init__(
        self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor, kind: Kind, tiles: MulticastTiles, folder: Path
    ) -> None:
        (tokens, size), columns = x_TK.shape, weight_NK.shape[0]
        rings = {"WEIGHT_SLOTS": tiles.token_slots, "MEMORY_BYTES": tiles.memory_bytes(tokens)}
        self._kernel = HostKernel("multicast_linear_host.cpp", tiles.definitions(tokens, kind) | rings, folder)
        self.out = make_out(x_TK, weight_NK, kind, tiles.splits)
        self._kernel.watch(out=self.out)
        blocks, halves = tiles.blocks(tokens), 1 + (kind is Kind.GATED)
        weight_sharers, token_sharers = (1, tiles.cluster) if blocks == 1 else (tiles.cluster, 1)
        weight_rows = Rows(weight_NK.data_ptr(), columns, size, tiles.rows // weight_sharers, halves)
        token_rows = Rows(x_TK.data_ptr(), tokens, size, tiles.padded(tokens) // token_sharers, 1)
        product = Product(self.out.data_ptr(), bias_N.data_ptr(), tokens, columns // halves, size)
        self._grid, self._given = (columns // tiles.rows, tiles.splits, blocks), (weight_rows, token_rows, product)
        self._kept = (x_TK, weight_NK, bias_N)  # whose addresses it has

    def run(self, seed: int, forgotten: str = "nothing") -> list[str]:
        """Races (`HostKernel.launch`)."""
        self.out.fill_(torch.nan)
        return self._kernel.launch(*self._grid, seed, *map(ctypes.byref, self._given), forgotten=forgotten)
