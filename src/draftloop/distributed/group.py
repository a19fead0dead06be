"""Ranks that compute together, and what they tell each other.

On a CPU a collective is one operator, so that a tape records it like any other. On a GPU it is captured as it is:
small ones go through symmetric memory (distributed/symmetric.py), others through NCCL.

A group is passed to whoever needs it; `ALONE` is the group of one rank, whose collectives cost nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakValueDictionary
from zlib import crc32

import torch
from torch import Tensor

from draftloop.kernels.opaque import define
from draftloop.observability.log import get_logger

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast by the switch between GPUs is never used: faults of it stop all that share the switch."""

logger = get_logger(__name__)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from draftloop.distributed.symmetric import SymmetricMemory

TIMEOUT = timedelta(minutes=5)
"""How long a collective waits for a rank that is alive but late, such as one that compiles kernels."""

Exchange: TypeAlias = tuple[Literal["sum", "gather"], int]
"""A collective, and the bytes that each rank brings to it."""

_numbers = itertools.count()
_GROUPS: WeakValueDictionary[int, Group] = WeakValueDictionary()
"""Operators take numbers and tensors only: a group goes to them by its number."""


class Group:
    """Ranks 0 to `size` - 1. All of them call the same methods in the same order.

    What a collective returns is the same on every rank, bit for bit, and is memory of its own (or the input, in a
    group of one rank).
    """

    def __init__(self, process_group: ProcessGroup | None = None, symmetric: SymmetricMemory | None = None) -> None:
        """`symmetric`: for what is small, on GPUs that reach each other's memory."""
        self.rank = process_group.rank() if process_group else 0
        self.size = process_group.size() if process_group else 1
        self.symmetric = symmetric
        self._process_group = process_group
        self._is_quiet = False
        self._counted: Counter[Exchange] | None = None
        self.number = next(_numbers)
        _GROUPS[self.number] = self

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # ---- on the device ----------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the type of x."""
        if self.size == 1 or self._is_quiet:
            return x
        self._count("sum", x)
        if not x.is_cuda:
            return _all_reduce(x, self.number)
        if self.symmetric is not None and self.symmetric.takes_sum(x):
            return self.symmetric.all_reduce(x)
        return self._sum(x)

    def all_gather(self, x: Tensor, dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Every rank's x, of one shape, side by side along `dim` in the order of ranks; written to `out` if given."""
        if self.size == 1:
            return x if out is None else out.copy_(x)
        if self._is_quiet:
            return torch.cat([x] * self.size, dim, out=out)
        self._count("gather", x)
        if not x.is_cuda:
            gathered = _all_gather(x, dim % x.dim(), self.number)
            return gathered if out is None else out.copy_(gathered)
        if self.symmetric is not None and self.symmetric.takes(x):
            return self.symmetric.all_gather(x, dim, out)
        return torch.cat(self._gather(x).unbind(0), dim, out=out)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over the ranks, of which each keeps its part: [size * N, ..] -> [N, ..]."""
        if self.size == 1:
            return x
        if self._is_quiet:
            return x.chunk(self.size)[self.rank]
        if not x.is_cuda:
            return _reduce_scatter(x, self.number)
        if self.symmetric is not None and self.symmetric.takes_sum(x):
            return self.symmetric.all_reduce(x).chunk(self.size)[self.rank]
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        _named("reduce_scatter_single", "reduce_scatter_tensor")(out, x.contiguous(), group=self._process_group)
        return out

    def _sum(self, x: Tensor) -> Tensor:
        from torch.distributed import all_reduce

        x = x.clone(memory_format=torch.contiguous_format)
        all_reduce(x, group=self._process_group)
        return x

    def _gather(self, x: Tensor) -> Tensor:
        """[size, ..]"""
        out = x.new_empty(self.size, *x.shape)
        gather = _named("all_gather_single", "all_gather_into_tensor")
        gather(out.flatten(0, 1), x.contiguous(), group=self._process_group)
        return out

    def _count(self, kind: Literal["sum", "gather"], x: Tensor) -> None:
        if self._counted is not None:
            self._counted[kind, x.nbytes] += 1

    @contextlib.contextmanager
    def counting(self) -> Generator[Counter[Exchange]]:
        """What is exchanged meanwhile, as far as it is not a replay."""
        self._counted = found = Counter[Exchange]()
        try:
            yield found
        finally:
            self._counted = None

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Ranks tell each other nothing, and values are wrong: for passes that only warm up, in whatever order."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    # ---- between hosts ----------------------------------------------------------------------

    def max(self, values: Sequence[int]) -> list[int]:
        """The largest value of each place over the ranks. Waits for all of them."""
        if self.size == 1:
            return list(values)
        from torch.distributed import ReduceOp, all_reduce

        all = torch.tensor(values, dtype=torch.int64)
        all_reduce(all, ReduceOp.MAX, group=self._process_group)
        return all.tolist()

    def min(self, values: Sequence[int]) -> list[int]:
        """The smallest of each place."""
        return [-value for value in self.max([-value for value in values])]

    def divide(self, size: int) -> tuple[Group, Group]:
        """Parts of `size` neighbouring ranks: this rank's part, and the ranks at its place in all parts.

        The process's whole group is divided, by all ranks together. Raises ValueError where parts do not fill it.
        """
        if self.size % size:
            raise ValueError(f"{self.size} ranks cannot be divided into parts of {size}")
        if size in (1, self.size):
            return (self, ALONE) if size == self.size else (ALONE, self)
        from torch.distributed import ProcessGroup, new_subgroups_by_enumeration

        ranks = range(self.size)
        parts = [list(ranks[start : start + size]) for start in ranks[::size]]
        inside, _ = new_subgroups_by_enumeration(parts, timeout=TIMEOUT)
        across, _ = new_subgroups_by_enumeration([list(ranks[place::size]) for place in range(size)], timeout=TIMEOUT)
        assert isinstance(inside, ProcessGroup)
        assert isinstance(across, ProcessGroup)
        return Group(inside), Group(across)


ALONE = Group()


def join(store: Store, rank: int, size: int, device: torch.device) -> Group:
    """Make this process a rank of `size`, all of which meet at `store`; with a GPU, that of `device`.

    A process is in one such group at a time: `leave` ends it, and so does joining another.
    """
    from torch.distributed import group, init_process_group

    leave()
    os.environ.update(NO_MULTICAST)
    on_gpu = device.type == "cuda"
    init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    assert group.WORLD is not None
    whole = Group(group.WORLD)
    return Group(group.WORLD, _symmetric(group.WORLD, whole, device)) if on_gpu else whole


def _symmetric(process_group: ProcessGroup, whole: Group, device: torch.device) -> SymmetricMemory | None:
    """None, and one line in the log, where some rank has none."""
    from draftloop.distributed.symmetric import SymmetricMemory

    symmetric, why = None, "another rank cannot"
    whole.all_gather(whole.all_reduce(torch.zeros(8, device=device)))  # NCCL connects, and loads its kernels
    made, machine = SymmetricMemory.num_made, _machine()
    latest, earliest, last, first = whole.max([made, -made, machine, -machine])
    try:
        if last != -first:  # torch would look for the others' memory on this machine
            raise RuntimeError("ranks are on several machines")
        if latest != -earliest:  # they would wait for each other
            raise RuntimeError("some ranks have met others before; make the next engine in a process of its own")
        symmetric = SymmetricMemory(process_group, device)
        symmetric.warm_up()
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    if whole.min([symmetric is not None])[0]:
        return symmetric
    logger.warning("GPUs do not read each other's memory, all that they exchange goes through NCCL: %s", why)
    return None


def _machine() -> int:
    """A number of this machine, by its name."""
    return crc32(socket.gethostname().encode())


def leave() -> None:
    """End what `join` began."""
    from torch.distributed import destroy_process_group, is_initialized

    if is_initialized():
        destroy_process_group()


def _named(name: str, before: str) -> Callable[..., Any]:
    """A collective of torch, which has called it otherwise before 2.13."""
    import torch.distributed

    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before)


def _reduced_part(x: Tensor, group: Group) -> Tensor:
    return group._sum(x).chunk(group.size)[group.rank].clone()  # gloo has no reduce-scatter


_all_reduce = define("all_reduce(Tensor x, int group) -> Tensor", lambda x, group: _GROUPS[group]._sum(x), "CPU")
_all_gather = define(
    "all_gather(Tensor x, int dim, int group) -> Tensor",
    lambda x, dim, group: torch.cat(_GROUPS[group]._gather(x).unbind(0), dim),
    "CPU",
)
_reduce_scatter = define(
    "reduce_scatter(Tensor x, int group) -> Tensor", lambda x, group: _reduced_part(x, _GROUPS[group]), "CPU"
)
