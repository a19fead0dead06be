"""CPU stand-in for a captured CUDA graph: an op tape with the same semantics.

Python branches and scalars are frozen at recording, so are the addresses of everything that
exists outside of the tape, and a host read of a tensor's value is refused. Faults of padding,
dispatch and staleness therefore fail on a laptop the way they would on a GPU.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from draftloop.errors import GraphError
from draftloop.graphs.loop import TapeLoop, Watched
from draftloop.graphs.program import Body, Call, Program, Recorder, in_place
from draftloop.graphs.ring import Ring
from draftloop.kernels.opaque import BODIES

aten = torch.ops.aten

HOST_READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    # in inference mode these arrive whole, not as the host reads inside of them
    aten.where.default,
    aten.argwhere.default,
    aten.nonzero_numpy.default,
    aten.allclose.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
}
"""Ops that make the host wait for the device: illegal in a CUDA capture, so illegal here."""

HOST_METHODS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__", "__array__")
}

UNWRITTEN = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}
"""Ops that return memory nobody has written."""

MAX_SCRATCH_BYTES = 64 << 10
"""Such memory up to this size is allocated once, not at every replay."""


def poison_(tensor: Tensor) -> None:
    """NaN, or a sentinel that no index survives, or True for masks."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min // 2)


class _NoHostReads(TorchFunctionMode):
    """`Tensor.item()` has a CPU fast path that skips the dispatcher, so it is caught one level up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_METHODS:
            raise GraphError(f"Tensor.{func.__name__} reads a device value on the host; it cannot be captured")
        return func(*args, **(kwargs or {}))


class _Ref:
    """Stands for the result of an earlier op."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Op:
    """One recorded op. Arguments that earlier ops make are looked up in the registers at replay."""

    __slots__ = ("aliases", "args", "frees", "func", "kwargs", "nested", "out", "outs", "refs", "run", "unwritten")

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], out: Any, *, aliases: bool) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        # dispatching costs more than small ops take: ours run their bodies, and torch's what OpOverload wraps
        self.run = BODIES.get(func, func._op)
        self.unwritten = func in UNWRITTEN
        self.aliases = aliases  # returns (a view of) an argument rather than memory of its own
        self.refs = [(i, a.index) for i, a in enumerate(args) if isinstance(a, _Ref)]
        self.nested = sum(isinstance(leaf, _Ref) for leaf in _leaves([*args, *kwargs.values()])) != len(self.refs)
        self.outs: list[int] = []
        self.frees: tuple[int, ...] = ()


class Tape(TorchDispatchMode, Program):
    """Records every op once and runs them again.

    Results inside the tape live in registers that are dropped after their last use. With
    `static` they keep their address instead, as tensors that a call between segments holds must.
    Small memory that an op asks for to write to, such as attention's output, keeps its address always.
    """

    def __init__(self, *, static: bool) -> None:
        super().__init__()
        self.static = static
        self.poisoned = False
        self._ops: list[_Op | Call] = []
        self._registers: dict[int, int] = {}  # id of a recorded tensor -> register
        self._scratch: list[Tensor] = []  # memory that ops write to and that stays
        self._kept: list[Any] = []  # recorded tensors stay alive while ids are looked up
        self._count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler never sees a tape. To be hidden from it, torch would import it: 2 s of a first start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS or _indexes_by_mask(func, args):
            raise GraphError(f"{func} needs the host to read a device value; it cannot be captured")
        with torch._C.DisableTorchFunction():  # the body of an op is device code: it may read what it likes
            out = func(*args, **kwargs)
        if func in UNWRITTEN and out.nbytes <= MAX_SCRATCH_BYTES:
            self._scratch.append(out)
            return out
        swap = self._swap
        op = _Op(
            func,
            [swap(a) for a in args],
            {k: swap(v) for k, v in kwargs.items()},
            out,
            aliases=not _storages(out).isdisjoint(_storages([*args, *kwargs.values()])),
        )
        if op.aliases and not func._schema.is_mutable and not op.refs and not op.nested:
            self._kept.append(out)  # a view of something outside of the tape: its address never changes
            return out
        for leaf in _leaves(out):
            if isinstance(leaf, Tensor):
                self._registers[id(leaf)] = self._count
                op.outs.append(self._count)
                self._count += 1
        self._kept.append(out)
        self._ops.append(op)
        return out

    def _swap(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._swap(one) for one in value]
        return _Ref(self._registers[id(value)]) if isinstance(value, Tensor) and id(value) in self._registers else value

    def call_between(self, call: Call) -> None:
        """Run a call now and at every replay, outside of the recording."""
        assert self.static, "a call between segments holds tensors, so they must keep their address"
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            call()
        self._ops.append(call)

    def finish(self) -> None:
        """Work out where each register is used last; forget what only recording needed."""
        last: dict[int, _Op] = {}
        for op in self._ops:
            if isinstance(op, _Op):
                used = [leaf.index for leaf in _leaves([*op.args, *op.kwargs.values()]) if isinstance(leaf, _Ref)]
                last.update(dict.fromkeys([*used, *op.outs], op))
                if not self.static:
                    op.out = None
        for register, op in last.items():
            op.frees = (*op.frees, register)
        self._registers.clear()
        self._kept.clear()

    @torch.inference_mode()
    def poison(self) -> None:
        self.poisoned = True
        for memory in self._scratch:
            poison_(memory)
        if self.static:
            for op in self._ops:
                if isinstance(op, _Op) and not op.aliases:
                    for leaf in _leaves(op.out):
                        if isinstance(leaf, Tensor):
                            poison_(leaf)

    @torch.inference_mode()
    def replay(self) -> None:
        registers: list[Any] = [None] * self._count
        if self.poisoned:
            for memory in self._scratch:
                poison_(memory)
        for op in self._ops:
            if not isinstance(op, _Op):
                op()
                continue
            args, kwargs = op.args, op.kwargs
            if op.nested:
                args = [_look_up(value, registers) for value in args]
                kwargs = {name: _look_up(value, registers) for name, value in kwargs.items()}
            elif op.refs:
                args = args.copy()
                for position, index in op.refs:
                    args[position] = registers[index]
            out = op.run(*args, **kwargs)
            if self.poisoned and op.unwritten:
                poison_(out)
            if self.static and not op.aliases:
                for kept, new in zip(_leaves(op.out), _leaves(out), strict=True):
                    if isinstance(kept, Tensor):
                        kept.copy_(new)
                out = op.out
            if len(op.outs) == 1 and isinstance(out, Tensor):
                registers[op.outs[0]] = out
            elif op.outs:
                tensors = [leaf for leaf in _leaves(out) if isinstance(leaf, Tensor)]
                for index, leaf in zip(op.outs, tensors, strict=True):
                    registers[index] = leaf
            for index in op.frees:
                registers[index] = None


def _indexes_by_mask(func: Any, args: Any) -> bool:
    """How many elements a mask selects is known on the device only, unless all get one value (a masked fill)."""
    if func in (aten.index_put.default, aten.index_put_.default) and args[2].numel() == 1:
        return False
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return False
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _leaves(value: Any) -> list[Any]:
    """What an op takes or returns, without the lists and tuples around it."""
    if not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for one in value for leaf in (_leaves(one) if isinstance(one, (list, tuple)) else (one,))]


def _look_up(value: Any, registers: list[Any]) -> Any:
    """The same with the tensors that references in it stand for."""
    if isinstance(value, list):
        return [_look_up(one, registers) for one in value]
    return registers[value.index] if isinstance(value, _Ref) else value


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in _leaves(tree) if isinstance(leaf, Tensor)}


class TapeRecorder(Recorder):
    """Records phases on the CPU. There is nothing to warm up and no memory is kept."""

    def __init__(self, *, on_first_use: bool = False) -> None:
        self.on_first_use = on_first_use
        self._device: ThreadPoolExecutor | None = None  # runs loops; made with the first one

    def record(self, body: Body, *, piecewise: bool, repeats: bool = False) -> Tape:
        tape = Tape(static=piecewise)
        with torch.inference_mode(), _NoHostReads(), tape:
            body(tape.call_between if piecewise else in_place)
        tape.finish()
        return tape

    def loop(self, program: Program, num_rows: int, watched: Watched, ring: Ring) -> TapeLoop:
        self._device = self._device or ThreadPoolExecutor(max_workers=1, thread_name_prefix="device-loop")
        return TapeLoop(program, num_rows, watched, ring, thread=self._device)

    def order_after_loop(self) -> None:
        if self._device is not None:
            self._device.submit(lambda: None).result()

    def time_ms(self, program: Program) -> float:
        start = time.perf_counter()
        program.replay()
        return (time.perf_counter() - start) * 1e3

    def owned_bytes(self) -> int:
        return 0
