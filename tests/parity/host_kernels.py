"""CUDA kernels on the host, each thread a fiber, and what nothing orders of their accesses (races.h)."""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from draftloop.kernels.streamed_pass import SOURCE

HERE = Path(__file__).parent
WRAPPED = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
PLACES = re.compile("@([0-9a-f]+)<([0-9a-f]+)")
OPTIONS = ["c++", "-std=c++17", "-w", "-Wno-psabi", "-fPIC", "-g1", "-I", str(SOURCE.parent), "-I", str(HERE)]


@functools.cache
def checker() -> Path | None:
    """The object file of races.cpp; None: no compiler can have loads and stores call it."""
    if not shutil.which("c++"):
        return None
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "empty.cpp").touch()
    probe = ["c++", "-fsanitize=thread", "-c", str(folder / "empty.cpp"), "-o", str(folder / "empty.o")]
    if subprocess.run(probe, capture_output=True).returncode:
        return None
    subprocess.run([*OPTIONS, "-O2", "-c", str(HERE / "races.cpp"), "-o", str(folder / "races.o")], check=True)
    return folder / "races.o"


class HostKernel:
    """A source of this folder, compiled with these macros. The test is skipped where that cannot be done."""

    def __init__(self, source: str, sizes: Mapping[str, int], folder: Path) -> None:
        races = checker()
        if races is None:
            pytest.skip("there is no C++ compiler that marks loads and stores")
        self._file, kernel = folder / f"{source}.so", folder / f"{source}.o"
        macros = [f"-D{name}={value}" for name, value in sizes.items()]
        compile_kernel = [*OPTIONS, "-O1", "-fsanitize=thread", *macros, "-c", str(HERE / source), "-o", str(kernel)]
        subprocess.run(compile_kernel, check=True)
        link = ["c++", "-shared", *WRAPPED, str(kernel), str(races), "-o", str(self._file)]
        subprocess.run(link, check=True)
        self._library = ctypes.CDLL(str(self._file))
        self._library.launch.restype = ctypes.c_bool
        self._library.races.restype = ctypes.c_char_p

    def watch(self, **tensors: Tensor) -> None:
        """What the kernel writes of global memory."""
        for name, tensor in tensors.items():
            place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel() * tensor.element_size())
            self._library.watch(name.encode(), place, size)

    def launch(self, *arguments: object, forgotten: str = "nothing") -> list[str]:
        """Accesses that nothing orders, one of each kind. `forgotten`: one of `races::Order`, which orders nothing."""
        self._library.forget(forgotten.encode())
        assert self._library.launch(*arguments), "blocks wait for ever"
        found = self._with_lines(self._library.races().decode()).splitlines()
        # one of those that other threads, or words side by side, have at the same lines
        return list({re.sub(r"(thread|block|\+) \d+", "", one): one for one in reversed(found)}.values())[::-1]

    def _with_lines(self, text: str) -> str:
        """Addresses of code, and of who called it, become lines of the kernel, where that can be found out."""
        places = sorted({place for both in PLACES.findall(text) for place in both})
        if not places or not shutil.which("addr2line"):
            return text
        command = ["addr2line", "-a", "-i", "-s", "-e", str(self._file), *places]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        frames = [one.splitlines()[1:] for one in re.split(r"^0x", output, flags=re.MULTILINE)[1:]]
        lines = dict(zip(places, frames, strict=True))

        def line(both: re.Match[str]) -> str:
            calls = [one.split(" ")[0] for place in both.groups() for one in lines[place]]
            return next((one for one in calls if re.search(r"\.cuh?:", one)), calls[0])

        return PLACES.sub(line, text)
