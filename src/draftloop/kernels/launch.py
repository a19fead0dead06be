"""How kernels of CUDA C++ are found and launched."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftloop.kernels.cuda_source import load_kernel
from draftloop.kernels.driver import ask, bindings

Size = tuple[int, int, int]

_kernels: dict[tuple, Any] = {}
_lock = threading.Lock()


def find_kernel(source: Path, definitions: Mapping[str, int], device: torch.device, *, memory_bytes: int) -> Any:
    """The kernel that has its source's name, with room for so many bytes of shared memory; compiled and loaded, if
    nobody has. The device's context must be the current one."""
    key = (source, device.index, *definitions.items())
    with _lock:
        found = _kernels.get(key)
    if found is None:  # outside of the lock: kernels compile side by side
        found = load_kernel(source, definitions, source.stem, device)
        attributes = bindings().CUfunction_attribute
        ask("cuFuncSetAttribute", found, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, memory_bytes)
        # all that a multiprocessor has, also where a block takes a part
        ask("cuFuncSetAttribute", found, attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        with _lock:
            found = _kernels.setdefault(key, found)
    return found


def launch(
    kernel: Any,
    grid: Size,
    threads: int,
    arguments: Sequence[Any],
    device: torch.device,
    *,
    memory_bytes: int,
    cluster: Size = (1, 1, 1),
    all_at_once: bool = False,
    is_early: bool = False,
) -> None:
    """On the device's current stream. `arguments`: of ctypes, as the kernel takes them.

    `all_at_once`: blocks wait for each other, so all run or none does. `is_early`: it starts while the kernel in front
    drains, and waits for that itself.
    """
    driver = bindings()
    known, attributes = driver.CUlaunchAttributeID, []

    def attribute(which: Any) -> Any:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = which
        return attributes[-1].value

    if cluster != (1, 1, 1):
        size = attribute(known.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
        size.x, size.y, size.z = cluster
    if all_at_once:
        attribute(known.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
    if is_early:
        attribute(
            known.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ).programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = memory_bytes, torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    ask("cuLaunchKernelEx", config, kernel, ctypes.addressof(addresses), 0)
