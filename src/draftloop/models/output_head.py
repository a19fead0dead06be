"""The entries of an output head, divided among ranks: each computes the logits of its own.

Whoever wants the likeliest token exchanges each rank's best alone, some bytes per row (`maxima`); whoever wants
probabilities gathers the logits (`whole`).

Shape suffixes: T tokens, C hidden size, V entries of all ranks, W those that each has, N chunks of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftloop.distributed.group import ALONE, Group
from draftloop.kernels.argmax import argmax, best_index, chunk_maxima, maxima_torch, takes_argmax, unpack_maxima
from draftloop.kernels.write_children import top
from draftloop.models.shards import Shard, Slices


@dataclass(frozen=True)
class Vocabulary:
    """What the logits of an output head stand for, and which of them this rank has."""

    size: int
    """V"""
    group: Group = ALONE

    @property
    def is_divided(self) -> bool:
        return self.group.size > 1

    @property
    def width(self) -> int:
        """W, the last ranks' padding included."""
        return -(-self.size // self.group.size)

    @property
    def first(self) -> int:
        """Of this rank's entries."""
        return min(self.group.rank * self.width, self.size)

    @property
    def slices(self) -> Slices | None:
        """This rank's rows of the output head; None where it has them all."""
        if not self.is_divided:
            return None
        return Slices(dim=0, size=self.size, runs=((self.first, min(self.width, self.size - self.first)),))

    def own_rows(self, head_VC: Tensor) -> Tensor:
        """Of a whole output head, this rank's rows, in memory of their own."""
        if self.slices is None:
            return head_VC
        rows_WC = head_VC.new_empty(self.width, head_VC.shape[1])
        Shard(rows_WC, self.slices).copy_(head_VC)
        return rows_WC

    def whole(self, logits_TW: Tensor) -> Tensor:
        """[T, V] on every rank."""
        if not self.is_divided:
            return logits_TW
        return self.group.all_gather(logits_TW, -1)[:, : self.size].contiguous()

    def maxima(self, logits_TW: Tensor, *, known: int | None = None, most: int = 1) -> Tensor:
        """int64 [T, N], the same on every rank: packed as by `argmax.chunk_maxima`, the largest of a row is its
        likeliest token, of several the one with the lowest id. The `most` likeliest are among them. Entries from
        `known` on are left out.
        """
        end = self.size if known is None else min(self.size, known)
        num_live = min(max(end - self.first, 0), self.width)
        if most > 1:
            best_TN = top(logits_TW, most, first=self.first, num_live=num_live)
        else:
            pack = chunk_maxima if takes_argmax(logits_TW) else maxima_torch
            best_TN = pack(logits_TW, first=self.first, num_live=num_live)
        return self.group.all_gather(best_TN, -1)

    def likeliest(self, logits_TW: Tensor, *, known: int | None = None) -> Tensor:
        """int64 [T], the same on every rank: the likeliest token, as `maxima` has it."""
        if not self.is_divided:
            return argmax(logits_TW[:, :known])
        best_TN = self.maxima(logits_TW, known=known)
        return best_index(best_TN) if best_TN.is_cuda else unpack_maxima(best_TN)[0]
