"""Runs a function on several ranks, each a process of its own, and brings back what it returns."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from draftloop.distributed.group import Group, join, leave

TIMEOUT_S = 300

# A rank is a fork of a process that has done no more than to import this: torch alone takes seconds.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.distributed", "draftloop.engine.llm"])


def on_ranks(
    function: Callable[[Group], Any], size: int, device: str = "cpu", *, expected: int | None = None
) -> list[Any]:
    """`function(group)` of each rank. Raises AssertionError with the trace of a rank that fails, or hangs.

    `expected`: of so many, where the others are to end before they return.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [_FORKS.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        _FORKS.Process(target=_run, args=(function, rank, size, device, store.port, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        results = []
        for rank, (pipe, _) in enumerate(pipes[:expected]):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} says nothing"
            result, error = pickle.loads(pipe.recv_bytes())
            assert error is None, f"rank {rank}: {error}"
            results.append(result)
        return results
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _run(function: Callable, rank: int, size: int, device: str, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    result = error = None
    try:
        if device == "cuda":
            torch.cuda.set_device(place)
        result = function(join(store, rank, size, place))
    except BaseException:
        error = traceback.format_exc()
    pipe.send_bytes(pickle.dumps((result, error)))
    leave()
