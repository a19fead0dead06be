"""CUDA C++ that is compiled once for each kind of GPU, by NVRTC, and kept on disk: nvcc is not needed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import whitespace
from typing import Any

import torch

from draftloop.config.env import Environment
from draftloop.errors import GraphError
from draftloop.kernels.driver import ask

Capability = tuple[int, int]


def compile_source(source: Path, definitions: Mapping[str, int], capability: Capability) -> bytes:
    """A source as machine code; `definitions` are its macros, and it may include the headers beside it. Needs NVRTC,
    but no GPU.

    Raises GraphError with the compiler's words.
    """
    from cuda.bindings import nvrtc  # pyrefly: ignore[missing-import]

    def check(result: tuple) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise GraphError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
        return result[1] if len(result) > 1 else None

    # what only this capability has, such as products of warp groups, would be left out without the "a"
    options = [b"--gpu-architecture=sm_%d%da" % capability, b"--std=c++17", *_options(definitions)]
    headers = _headers(source)
    texts, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    program = check(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(names), texts, names))
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
            check(nvrtc.nvrtcGetProgramLog(program, log))
            raise GraphError(f"NVRTC cannot compile {source.name}: {log.decode().strip(chr(0) + whitespace)}")
        image = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image


def kept_image(source: Path, definitions: Mapping[str, int], capability: Capability, folder: Path) -> bytes:
    """The same from disk, where an earlier start has left it. Processes may do this at the same time."""
    texts = [path.read_bytes() for path in (source, *_headers(source))]
    parts = [*texts, *_options(definitions), repr((capability, bindings_version())).encode()]
    found = folder / f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.cubin"
    if found.exists():
        return found.read_bytes()
    image = compile_source(source, definitions, capability)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as scratch:
            scratch.write(image)
        os.replace(scratch.name, found)
    except OSError:
        pass  # a cache that cannot be written costs a second at the next start
    return image


def load_kernel(source: Path, definitions: Mapping[str, int], name: str, device: torch.device) -> Any:
    """A source's kernel on a device, whose context must be the current one."""
    folder = Environment.read().cache_root / "cuda"
    image = kept_image(source, definitions, torch.cuda.get_device_capability(device), folder)
    return ask("cuModuleGetFunction", ask("cuModuleLoadData", image), name.encode())


def bindings_version() -> str:
    from cuda.bindings import __version__  # pyrefly: ignore[missing-import]

    return __version__


def _headers(source: Path) -> list[Path]:
    return sorted(source.parent.glob("*.cuh"))


def _options(definitions: Mapping[str, int]) -> list[bytes]:
    return [f"-D{name}={value}".encode() for name, value in definitions.items()]
