"""`cluster_attention` on the host: its source compiled by a C++ compiler, every thread a fiber."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from attention_cases import Case, make
from host_kernels import HostKernel
from torch import Tensor

from draftloop.kernels.cluster_attention import Clusters, Shape, fill_in


def shape_of(case: Case) -> Shape:
    return Shape(case.lens[0][0], case.heads // case.kv_heads, case.head_dim, case.page_size)


def tensors_of(
    case: Case, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What `cluster_attention` is given, `out` last, and what must come out."""
    q, kv, batch, expected = make(case, device, torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    return (q, kv, batch.rows_R, batch.kv_lens_R, batch.page_table_MN, out), expected


class HostAttention:
    """The kernel for a case, and `out`, which it writes; `folder` is for the compiled source."""

    def __init__(self, case: Case, clusters: Clusters, folder: Path) -> None:
        shape = shape_of(case)
        assert shape.is_served
        assert shape.fits(clusters)
        sizes = {"MEMORY_BYTES": shape.memory_bytes(clusters), "THREADS": 32 * clusters.warps}
        self._kernel = HostKernel("cluster_attention_host.cpp", shape.definitions(clusters) | sizes, folder)
        self._tensors, self.expected = tensors_of(case, torch.device("cpu"))
        self.out = self._tensors[-1]
        self._kernel.watch(out=self.out)
        self._argument = fill_in(*self._tensors, scale=case.head_dim**-0.5)
        self._grid = clusters.splits, case.kv_heads, len(case.lens)

    def run(self, seed: int, forgotten: str = "nothing") -> list[str]:
        """Races (`HostKernel.launch`)."""
        self.out.fill_(torch.nan)
        return self._kernel.launch(*self._grid, seed, ctypes.byref(self._argument), forgotten=forgotten)
