"""Runs a function on several ranks, each a process of its own, and brings back what it returns."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import torch

from draftloop.distributed.group import Group, join, leave
from forks import FORKS

TIMEOUT_S = 300
WATCHDOG_S = 60
"""Ranks that wait for each other for so long hang: all of them end, each with its stacks."""


def on_ranks(
    function: Callable[[Group], Any], size: int, device: str = "cpu", *, expected: int | None = None
) -> list[Any]:
    """`function(group)` of each rank. Raises AssertionError with the trace of a rank that fails, or hangs.

    `expected`: of so many, where the others are to end before they return.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn") if device == "cuda" else FORKS
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_run, args=(function, rank, size, device, store.port, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        results = []
        for rank, (pipe, _) in enumerate(pipes[:expected]):
            wait([pipe, ranks[rank].sentinel], TIMEOUT_S)
            assert pipe.poll(), f"rank {rank} says nothing, exit code {ranks[rank].exitcode}"
            result, error = pickle.loads(pipe.recv_bytes())
            assert error is None, f"rank {rank}: {error}"
            results.append(result)
        return results
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def on_nodes(commands: Sequence[Sequence[str | Path]], seconds: float) -> list[str]:
    """What each command prints, all side by side. Raises AssertionError with what all have said if one fails, or hangs.

    A node that fails ends the others: torchrun would keep them for minutes.
    """
    with contextlib.ExitStack() as stack:
        said = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        nodes = [
            stack.enter_context(Popen(command, stdout=out, stderr=error))
            for command, (out, error) in zip(commands, said, strict=True)
        ]
        end = time.monotonic() + seconds
        while None in (codes := [node.poll() for node in nodes]) and not any(codes) and time.monotonic() < end:
            time.sleep(0.1)
        for node in nodes:
            node.terminate()  # torchrun ends its processes then
        for node in nodes:
            try:
                node.wait(10)
            except TimeoutExpired:
                node.kill()
        texts = [[file.read() for file in files if file.seek(0) == 0] for files in said]
        assert codes == [0] * len(codes), f"exit codes {codes}; output and errors: {texts}"
        return [out for out, _ in texts]


def watch(what: str, seconds: float = WATCHDOG_S) -> None:
    """As a rank: `what` comes next, and takes no longer; else this process ends with its stacks."""
    print(what, file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(seconds, exit=True)


_moved_at = 0.0


def moves() -> None:
    """Something is done: watchdogs wait anew."""
    global _moved_at
    _moved_at = time.monotonic()


@contextlib.contextmanager
def watchdog(followers: Sequence[Popen], stderr: int, what: str) -> Generator[None]:
    """As the rank that has started the others, with PYTHONFAULTHANDLER: meanwhile something moves, or all end."""
    moves()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.5):
            if time.monotonic() > _moved_at + WATCHDOG_S:
                os.write(stderr, f"\n{what} hangs; the stacks of all ranks:\n".encode())
                for process in followers:
                    process.send_signal(signal.SIGABRT)
                    process.wait(5)
                faulthandler.dump_traceback(stderr)
                os._exit(1)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _run(function: Callable, rank: int, size: int, device: str, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    result = error = None
    watch(f"{function.__name__} of rank {rank}")
    try:
        if device == "cuda":
            torch.cuda.set_device(place)
        result = function(join(store, rank, size, place))
    except BaseException:
        error = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(pickle.dumps((result, error)))
    leave()
