"""Compiles kernels.c, and the headers beside it, for this machine when it is first needed, and keeps the result.

It takes a second once. Without a C compiler everything still works, by torch's own operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from draftloop.config.env import Environment
from draftloop.observability.log import get_logger

logger = get_logger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
# No -ffast-math: infinities and NaN must stay what they are.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-semantic-interposition"),
)
TIMEOUT_S = 120
LOST = "float32 models on the CPU decode slower by about a third, and gain little from speculation"


class BuildError(Exception):
    """The kernels cannot be had on this machine; says why."""


def find_compiler() -> list[str]:
    """The C compiler's command: $CC, or the first of cc, gcc and clang. Raises BuildError."""
    if given := os.environ.get("CC"):
        command = shlex.split(given)
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
        raise BuildError(f"the C compiler that CC names, {given!r}, does not exist; correct CC or unset it")
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("there is no C compiler; install gcc, for example with `apt install gcc`")


def build(folder: Path) -> Path:
    """The compiled library in `folder`, made if it is not there yet. Raises BuildError.

    Processes may do this at the same time: each compiles to a file of its own, and renames it.
    """
    compiler = find_compiler()
    found = folder / f"kernels-{_key(compiler)}.so"
    if found.exists():
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "kernels.so"
            # the library needs libgomp.so.1 by that name, which torch has loaded: both share one pool of threads
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            if done.returncode:
                reason = "\n".join(done.stderr.strip().splitlines()[:5]) or f"exit status {done.returncode}"
                raise BuildError(f"`{shlex.join(command)}` failed: {reason}")
            made.replace(found)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{type(error).__name__}: {error}") from error
    return found


def load(folder: Path) -> ctypes.CDLL:
    """Build if necessary, and load. Raises BuildError."""
    for attempt in range(2):
        path = build(folder)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            if attempt:
                raise BuildError(f"{path} cannot be loaded: {error}") from error
            with contextlib.suppress(OSError):  # damaged: once more
                path.unlink()
    raise AssertionError


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None, which is logged once with the reason and the remedy."""
    try:
        return load(Environment.read().cache_root / "native")
    except BuildError as error:
        logger.warning("no native CPU kernels: %s. Until then torch's operators are used: %s", error, LOST)
        return None


def _key(compiler: list[str]) -> str:
    """Names what the result depends on. The compiler's file stands for its version: asking it takes longer."""
    binary = Path(compiler[0]).resolve()
    stat = binary.stat()
    texts = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    parts = [*texts, *FLAGS, *compiler, str(binary), str(stat.st_size), str(stat.st_mtime_ns), _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and instruction sets of this machine's processor."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU p"))]
        if lines:
            return "\n".join(lines)
    return f"{platform.machine()} {platform.processor()}"
