"""A device loop on CUDA: a conditional WHILE node whose body is a captured graph and `next_iteration` of loop.cu.

The device runtime library is not needed: the driver itself supplies `cudaGraphSetConditional` when it loads the kernel.
Source: CUDA C++ Programming Guide, "Conditional Graph Nodes".
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.distributed.group import Group
from draftloop.errors import GraphError
from draftloop.graphs.loop import Loop, Watched, ended_early
from draftloop.graphs.program import Program
from draftloop.graphs.ring import Ring, Stop, Word
from draftloop.kernels.cuda_source import bindings_version, load_kernel
from draftloop.kernels.driver import DriverError, ask, bindings

SOURCE = Path(__file__).with_name("loop.cu")
KERNEL = "next_iteration"
THREADS = 256
FIRST_DRIVER = 12040
"""CUDA 12.4, the first with conditional nodes in this form."""


class CudaLoop(Loop):
    """`program` must have kept its graph, which becomes a child of the loop's body: nothing is captured again."""

    def __init__(self, program: Program, raw_graph: int, num_rows: int, watched: Watched, ring: Ring) -> None:
        """Raises GraphError where the graph cannot be repeated, with what the driver says."""
        super().__init__(program, num_rows, watched, ring)
        if watched.group.size > 1 and watched.group.symmetric is None:
            raise GraphError("GPUs do not read each other's memory, so that ranks cannot agree when a loop ends")
        self._device = watched.rows_R.device
        self._done = torch.cuda.Event()
        self._exec = _instantiate(raw_graph, num_rows, watched, ring)
        self._destroy = bindings().cuGraphExecDestroy  # at exit nothing can be imported any more
        # else the first launch would have to
        _ask("cuGraphUpload", self._exec, torch.cuda.current_stream(self._device).cuda_stream)

    def launch(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        _ask("cuGraphLaunch", self._exec, stream.cuda_stream)
        self._done.record(stream)

    def failure(self) -> BaseException | None:
        try:
            return ended_early() if self._done.query() else None
        except RuntimeError as error:  # whatever went wrong on the device
            return error

    def __del__(self) -> None:
        if not hasattr(self, "_destroy"):
            return
        try:
            self.ring.interrupt()
            self._done.synchronize()  # it writes to the ring, which may go when it has ended
        except RuntimeError:
            pass  # the device is gone
        self._destroy(self._exec)


def why_not(device: torch.device) -> str:
    """Why there are no device loops on this machine; empty where there are."""
    try:
        version = _ask("cuDriverGetVersion")
        if version < FIRST_DRIVER:
            return f"the driver speaks CUDA {_dotted(version)}; conditional graph nodes need {_dotted(FIRST_DRIVER)}"
        torch.cuda.current_stream(device).synchronize()  # makes this device's context the current one
        _kernel(device)
    except ImportError as error:
        return f"{error}; install cuda-bindings, which torch's CUDA builds bring along"
    except Exception as error:  # a library that cannot be found says so in many ways
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def definitions() -> dict[str, int]:
    """The numbers that both sides of the ring use, as macros."""
    numbers = {f"{kind}_{one.name}": one.value for kind, all in (("WORD", Word), ("STOP", Stop)) for one in all}
    return {**numbers, "STOP_KINDS": len(Stop)}


@cache
def _kernel(device: torch.device) -> Any:
    return load_kernel(SOURCE, definitions(), KERNEL, device)


def _instantiate(raw_graph: int, num_rows: int, watched: Watched, ring: Ring) -> Any:
    driver, context = bindings(), _ask("cuCtxGetCurrent")
    graph = _ask("cuGraphCreate", 0)
    try:
        assign_default = driver.CU_GRAPH_COND_ASSIGN_DEFAULT  # 1 again at each launch
        handle = _ask("cuGraphConditionalHandleCreate", graph, context, 1, assign_default)
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        params.conditional.size = 1
        params.conditional.ctx = context
        edges = (
            (None, None, 0) if int(bindings_version().split(".")[0]) >= 13 else (None, 0)
        )  # CUDA 13 may annotate them
        _ask("cuGraphAddNode", graph, *edges, params)
        body = params.conditional.phGraph_out[0]
        child = _ask("cuGraphAddChildGraphNode", body, None, 0, driver.CUgraph(raw_graph))
        kernel = driver.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = _kernel(watched.rows_R.device)
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = THREADS, 1, 1
        kernel.kernelParams = _arguments(int(handle), num_rows, watched, ring)
        _ask("cuGraphAddKernelNode", body, [child], 1, kernel)
        return _ask("cuGraphInstantiate", graph, 0)
    finally:
        driver.cuGraphDestroy(graph)


def _arguments(handle: int, num_rows: int, watched: Watched, ring: Ring) -> tuple[tuple, tuple]:
    """The kernel's arguments and their types, in order."""
    state = (watched.num_tokens_M, watched.max_tokens_M, watched.stop_ids_MS)
    shared = (ring.number, ring.words_W, ring.slots_NS, watched.rows_R, watched.outcome_RW, *state)
    sizes = (num_rows, ring.width, watched.first_token, watched.stop_ids_MS.shape[1], watched.padding_row)
    sizes = (*sizes, ring.num_slots, ring.slots_NS.shape[1], watched.group.rank, watched.group.size)
    addresses = (*map(_address, shared), _decisions(watched.group))
    types = (ctypes.c_uint64, *(ctypes.c_void_p for _ in addresses), *(ctypes.c_int for _ in sizes))
    return (handle, *addresses, *sizes), types


def _decisions(group: Group) -> int:
    """The address of the addresses of the words at which the ranks wait; 0 for one rank."""
    if group.size == 1:
        return 0
    assert group.symmetric is not None
    return group.symmetric.word_addresses


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()  # pinned memory has one address on host and device


def _ask(name: str, *args: Any) -> Any:
    """Call the driver. Raises GraphError with its own name for what went wrong."""
    try:
        return ask(name, *args)
    except DriverError as error:
        raise GraphError(str(error)) from error


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
