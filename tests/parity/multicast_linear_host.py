"""`linear_multicast` on the host: its source compiled by a C++ compiler, every thread a fiber."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from draftloop.kernels.linear_multicast import SOURCE, MulticastTiles, Product
from draftloop.kernels.linear_wide import Kind, make_out


class Rows(ctypes.Structure):
    """What the host's copy engine knows of a matrix."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "columns", "box_rows", "halves")),
    ]


def launch_on_host(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor, kind: Kind, tiles: MulticastTiles, folder: Path
) -> Tensor:
    """What the kernel writes for these tensors of a CPU; `folder` is for the compiled source."""
    (tokens, size), columns, library = x_TK.shape, weight_NK.shape[0], folder / "multicast_linear.so"
    macros = {**tiles.definitions(tokens, kind), "MEMORY_BYTES": tiles.memory_bytes(tokens)}
    here = Path(__file__).parent
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I", str(SOURCE.parent), "-I", str(here)]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run(["c++", *options, str(here / "multicast_linear_host.cpp"), "-o", str(library)], check=True)
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_bool

    out = make_out(x_TK, weight_NK, kind, tiles.splits).fill_(torch.nan)
    blocks, halves = tiles.blocks(tokens), 1 + (kind is Kind.GATED)
    weight_sharers, token_sharers = (1, tiles.cluster) if blocks == 1 else (tiles.cluster, 1)
    weight_rows = Rows(weight_NK.data_ptr(), columns, size, tiles.rows // weight_sharers, halves)
    token_rows = Rows(x_TK.data_ptr(), tokens, size, tiles.padded(tokens) // token_sharers, 1)
    product = Product(out.data_ptr(), bias_N.data_ptr(), tokens, columns // halves, size)
    arguments = [ctypes.byref(one) for one in (weight_rows, token_rows, product)]
    assert launch(columns // tiles.rows, tiles.splits, blocks, *arguments), "blocks wait for ever"
    return out
