"""Captured CUDA graphs. All of them share one memory pool, since they never run at the same time."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from draftloop.distributed.group import ALONE, Group
from draftloop.errors import CapacityError, GraphError
from draftloop.graphs.loop import Loop, Watched
from draftloop.graphs.program import Body, Call, Program, Recorder, in_place
from draftloop.graphs.ring import Ring

WARM_UP_THREADS = 8
"""Compiling a kernel is mostly C++ outside of Python's lock."""


class CudaProgram(Program):
    """Captured segments with calls between them; a full graph is a single segment."""

    def __init__(self, recorder: CudaRecorder, *, keep_graphs: bool) -> None:
        """`keep_graphs`: what was captured stays after it is made executable, as a part for other graphs."""
        self._recorder, self.keep_graphs = recorder, keep_graphs
        self.steps: list[Call] = []
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def replay(self) -> None:
        for step in self.steps:
            step()

    def poison(self) -> None:
        self._recorder.poison_pool()


class CudaRecorder(Recorder):
    """Captures phases on one stream into one memory pool."""

    def __init__(self, device: torch.device, group: Group = ALONE) -> None:
        """`group`: ranks whose collectives are among what is captured."""
        self.device, self.group = device, group
        self.pool = torch.cuda.graph_pool_handle()
        self._abandoned: list[torch.cuda.CUDAGraph] = []
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, bodies: Sequence[Body], done: Callable[[], None]) -> None:
        """Compiles kernels, many at a time, and lets libraries allocate outside of the pool.

        Bodies run side by side on the same buffers. That is harmless: they hold nothing but padding,
        and no value they compute is used. Nor is what ranks exchange, which they do not do here: each has an order
        of its own.
        """
        if not bodies:
            return
        torch.cuda.synchronize(self.device)
        local = threading.local()

        def run(body: Body) -> None:
            if not hasattr(local, "stream"):
                torch.cuda.synchronize(self.device)  # the thread has a context after that, which cuBLAS wants to find
                local.stream = torch.cuda.Stream(self.device)
            with torch.inference_mode(), torch.cuda.stream(local.stream):
                body(in_place)

        with self.group.quiet(), ThreadPoolExecutor(max_workers=min(WARM_UP_THREADS, os.cpu_count() or 1)) as pool:
            for future in [pool.submit(run, body) for body in bodies]:
                future.result()
                done()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            bodies[-1](in_place)  # libraries keep a workspace for each stream
        self.give_back()

    def record(self, body: Body, *, piecewise: bool, repeats: bool = False) -> CudaProgram:
        program = CudaProgram(self, keep_graphs=repeats)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self._begin(program)
            try:
                body((lambda call: self._break(program, call)) if piecewise else in_place)
            except torch.OutOfMemoryError as error:
                self._abandon(program)
                raise CapacityError(str(error).partition(". ")[0]) from error
            except Exception as error:
                self._abandon(program)
                raise GraphError(f"capture failed: {error}") from error
            self._end(program)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return program

    def _begin(self, program: CudaProgram) -> None:
        program.graphs.append(torch.cuda.CUDAGraph(keep_graph=program.keep_graphs))
        # what watches over collectives asks the device from a thread of its own, which is no fault of the capture
        mode = "global" if self.group.size == 1 else "thread_local"
        program.graphs[-1].capture_begin(pool=self.pool, capture_error_mode=mode)

    def _end(self, program: CudaProgram) -> None:
        program.graphs[-1].capture_end()
        if program.keep_graphs:
            program.graphs[-1].instantiate()
        program.steps.append(program.graphs[-1].replay)

    def _break(self, program: CudaProgram, call: Call) -> None:
        self._end(program)
        program.graphs[-1].replay()  # capturing computes nothing, and the call reads what the segment makes
        call()
        program.steps.append(torch.inference_mode()(call))  # it writes tensors that were made in that mode
        self._begin(program)

    def _abandon(self, program: CudaProgram) -> None:
        self._abandoned.append(program.graphs[-1])  # the pool ends with the last graph that began in it
        # It may be invalid already, or empty; the first error is the one to show.
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
            program.graphs[-1].capture_end()

    def why_no_loops(self) -> str:
        from draftloop.graphs.cuda_loop import why_not

        return why_not(self.device)

    def loop(self, program: Program, num_rows: int, watched: Watched, ring: Ring) -> Loop:
        from draftloop.graphs.cuda_loop import CudaLoop

        assert isinstance(program, CudaProgram)
        (graph,) = program.graphs  # captured whole
        return CudaLoop(program, graph.raw_cuda_graph(), num_rows, watched, ring)

    def time_ms(self, program: Program) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        program.replay()
        start.record()
        program.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def owned_bytes(self) -> int:
        # only captures take memory while programs are recorded, so the driver's count will do;
        # a snapshot of the allocator would cost more than the capture
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def give_back(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Keep the garbage collector out: it is slow, and may free device memory inside a capture."""
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()

    def _segments(self) -> list[dict[str, Any]]:
        return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(self.pool)]

    def poison_pool(self) -> None:
        """Fill the pool with ones: NaN in every floating type, -1 in every integer type."""
        for segment in self._segments():
            memory = torch.as_tensor(_Bytes(segment["address"], segment["total_size"]), device=self.device)
            memory.fill_(0xFF)


class _Bytes:
    """Raw device memory, in the form that torch adopts without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
