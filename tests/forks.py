"""Processes that start at once: forks of one that has imported what they need, and has done nothing else.

Torch alone takes seconds to import. CUDA forbids a fork, so this is for CPUs.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch.distributed",
        "draftloop.cli",
        "draftloop.engine.startup",
        "draftloop.server.run",
        "draftloop.server.engine_process",
    ]
)


class Forked:
    """As much of `subprocess.Popen` as tests of servers use. The output goes to `log`."""

    def __init__(self, run: Callable[..., None], *arguments: Any, log: Path, environ: dict[str, str]) -> None:
        self._process = FORKS.Process(target=_start, args=(run, arguments, str(log), environ))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start(run: Callable[..., None], arguments: tuple[Any, ...], log: str, environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with open(log, "ab") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    run(*arguments)


class Prepared:
    """A process that waits for its work, forked while this one has no thread and no event loop."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        theirs, self._ours = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(theirs, self._ours))
        self._process.start()
        theirs.close()

    def take(self, *, target: Callable[..., None], args: tuple[Any, ...], name: str) -> Prepared:
        """Stands for a process yet to be started."""
        self._work = pickle.dumps((target, args))
        self._process.name = name
        return self

    def start(self) -> None:
        self._ours.send_bytes(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def _work(pipe: Connection, ours: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    ours.close()
    try:
        target, arguments = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return
    target(*arguments)


def prepare(module: Any, count: int) -> None:
    """What `module` spawns from now on are forks, so many at most."""
    prepared = [Prepared() for _ in range(count)]

    def take(**work: Any) -> Prepared:
        return prepared.pop(0).take(**work)

    spawn = SimpleNamespace(get_context=lambda method: SimpleNamespace(Process=take))
    mock.patch.object(module, "multiprocessing", spawn).start()
