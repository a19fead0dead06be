"""Collectives over memory that the GPUs of one host read from each other: ordinary kernels, a few microseconds each.

A captured graph holds them anywhere, bodies of device loops included, where NCCL's kernels may not be. Multicast by
the switch is not used. Kernels are torch's (`torch.ops.symm_mem`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUFFER_BYTES = 64 << 20
"""Of each rank. What is gathered goes through it in pieces."""
SUM_BYTES = 16 << 20
"""Larger sums, those of long prompts, are left to NCCL."""
ONE_SHOT_BYTES = 256 << 10
"""Up to this every rank adds up everything by itself; above, between more than two, each adds up its part of it."""
SUMMED = (torch.float32, torch.bfloat16)
"""Types that the kernels add up."""
ALIGNMENT = 16
NUM_WORDS = 512


class SymmetricMemory:
    """One buffer in each GPU of a group, which all others read. Collectives that use it follow one another."""

    num_made: ClassVar[int] = 0
    """By this process. Torch numbers a process's meetings, so that only ranks that have had as many can meet."""

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        """All ranks make it together. Raises RuntimeError where their GPUs do not reach each other's memory."""
        import torch.distributed._symmetric_memory as symm_mem

        SymmetricMemory.num_made += 1
        self.rank, self.size = process_group.rank(), process_group.size()
        self._name = process_group.group_name
        self._bytes = symm_mem.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._bytes, process_group)
        self._words = symm_mem.empty(NUM_WORDS, dtype=torch.int64, device=device)
        self._words_handle = symm_mem.rendezvous(self._words, process_group)
        self.clear_words()

    @property
    def word_addresses(self) -> int:
        """On the device: the address of each rank's first word, which others may write to."""
        return self._words_handle.buffer_ptrs_dev

    def clear_words(self) -> None:
        """Set all ranks' words to zero. All ranks do it together."""
        self._words.zero_()
        self._words_handle.barrier(channel=0)  # nobody writes to them before all are zero
        torch.cuda.synchronize(self._words.device)

    def takes(self, x: Tensor) -> bool:
        """Whether such tensors are gathered: matrices, of which a row fits."""
        return x.dim() == 2 and x.nbytes <= BUFFER_BYTES * x.shape[0]

    def takes_sum(self, x: Tensor) -> bool:
        """Whether the kernels add up such tensors."""
        return x.nbytes <= SUM_BYTES and x.dtype in SUMMED and x.nbytes % (ALIGNMENT * self.size) == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, added up in the same order by whoever does it."""
        buffer = self._view(x)
        if self.size == 2 or x.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous(), "sum", self._name)
        buffer.copy_(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, out)

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None) -> Tensor:
        """Every rank's rows or columns, copied from where they are."""
        if out is None:
            shape = list(x.shape)
            shape[dim] *= self.size
            out = x.new_empty(shape)
        parts = out.chunk(self.size, dim)
        num_rows = max(1, BUFFER_BYTES * x.shape[0] // max(x.nbytes, 1))
        for start in range(0, x.shape[0], num_rows):
            piece = x[start : start + num_rows]
            self._view(piece).copy_(piece)
            self._handle.barrier(channel=0)  # all are there
            for rank, part in enumerate(parts):
                part[start : start + num_rows].copy_(self._handle.get_buffer(rank, piece.shape, x.dtype))
            self._handle.barrier(channel=1)  # all are read: the buffer may be written again
        return out

    def warm_up(self) -> None:
        """Run each kernel once, so that none is loaded while graphs are captured."""
        for dtype in SUMMED:
            for num_bytes in (ALIGNMENT * self.size, 2 * ONE_SHOT_BYTES):
                x = self._bytes.new_zeros(num_bytes).view(dtype)
                self.all_reduce(x)
                self.all_gather(x[None], -1, None)
        torch.cuda.synchronize(self._bytes.device)

    def _view(self, x: Tensor) -> Tensor:
        return self._bytes[: x.nbytes].view(x.dtype).view(x.shape)
