"""One process per rank: started from here, or by torchrun, on one machine or several.

From here: the process that makes an engine is rank 0 and starts the others. They meet in a private folder, so nothing
needs a port of its own, and any number of engines fit on a machine.

By torchrun: all run the same command, and what says that a process is one of them is in its environment (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Rank 0 runs the command; the others follow it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING

from draftloop.distributed.followers import Followers, Leader, end_with
from draftloop.distributed.replica import Replica
from draftloop.errors import ConfigError, RankError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from draftloop.distributed.group import Group

LONGEST_STEP = timedelta(seconds=60)
"""An engine that keeps those that step together with it waiting for so long is stuck."""
START_S = 120.0
"""How long ranks may take to come together, imports included."""
MODULE = "draftloop.engine.follower"
"""What a rank that is started from here runs."""
_KEY = "draftloop/leader"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where torchrun has put this process."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place | None:
        """None where torchrun has not. Raises ConfigError for an environment that is half there."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            names = ", ".join(missing)
            raise ConfigError(
                f"RANK and WORLD_SIZE are set, as torchrun does, but {names} is not; set it, or unset both"
            )
        said = {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if not all(value.isdecimal() for value in said.values()):
            found = ", ".join(f"{name} is {value!r}" for name, value in said.items())
            raise ConfigError(f"{found}; they must be integers >= 0, as torchrun sets them, or all unset")
        rank, size, local = map(int, said.values())
        return cls(rank=rank, size=size, local_rank=local)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank needs to join the others."""

    rank: int
    size: int
    local_rank: int
    store: Store
    followers: Followers | None = None
    """Of rank 0."""
    leader: Leader | None = None
    """Of all others."""

    def join(self, device_type: str) -> Ranks:
        """All ranks do it together. On GPUs each takes that of its place on the machine."""
        import torch

        from draftloop.distributed.group import join

        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return Ranks(group=join(self.store, self.rank, self.size, device), device=device, followers=self.followers)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that run one engine."""

    group: Group
    device: torch.device
    followers: Followers | None = None
    """Of rank 0, which runs the engine; the others' workers do what its worker does."""
    engines: Group | None = None
    """Engines that take every step together, this one among them, where there are several."""
    steps: Group | None = None
    """The same, for agreeing on steps: between hosts, and not for long."""


def take_place(replica: Replica, device_type: str) -> Ranks:
    """The engine's device, and its groups. Raises ConfigError where there are fewer GPUs than engines."""
    import torch

    from draftloop.distributed.group import ALONE, Group, join

    device = torch.device(device_type)
    if device_type == "cuda":
        if torch.cuda.device_count() < replica.size:
            raise ConfigError(
                f"data_parallel_size is {replica.size}, but this machine has {torch.cuda.device_count()} GPUs; ask "
                "for as many"
            )
        device = torch.device("cuda", replica.rank)
        torch.cuda.set_device(device)
    if replica.store is None:
        return Ranks(group=ALONE, device=device)
    from torch.distributed import FileStore, ProcessGroup, new_group

    engines = join(FileStore(replica.store, replica.size), replica.rank, replica.size, device)
    steps = new_group(timeout=LONGEST_STEP, backend="gloo")
    assert isinstance(steps, ProcessGroup)
    return Ranks(group=ALONE, device=device, engines=engines, steps=Group(steps))


def check_place(place: Place | None, num_ranks: int) -> None:
    """Raises ConfigError where torchrun has started another number of processes than is asked for."""
    if place is not None and place.size != num_ranks and num_ranks > 1:
        raise ConfigError(
            f"WORLD_SIZE is {place.size}, as torchrun has it, but the settings ask for {num_ranks} ranks; let them "
            "agree, or unset RANK and WORLD_SIZE to have the ranks started here"
        )


def meet(num_ranks: int, place: Place | None, *, keep: bool = False) -> Meeting:
    """Bring the ranks together. Raises RankError where one ends, or does not come in time.

    `keep`: ranks that are started here outlive an engine, for the next one; see `Followers`.
    """
    return _start(num_ranks, keep=keep) if place is None else _meet_by_torchrun(place)


def _start(num_ranks: int, *, keep: bool) -> Meeting:
    from torch.distributed import FileStore

    folder = tempfile.mkdtemp(prefix="draftloop-")  # readable by this user only
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    secret = secrets.token_bytes(32)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes: list[subprocess.Popen] = []
    try:
        with Listener(f"{folder}/leader", authkey=secret) as listener:
            for rank in range(1, num_ranks):
                call = pickle.dumps((rank, num_ranks, folder, secret))
                command = [sys.executable, "-m", MODULE]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
                processes.append(process)
                assert process.stdin is not None
                process.stdin.write(call)  # stays open: its end is the end of this process
                process.stdin.flush()
            connections = _accept(listener, num_ranks - 1, processes)
        store = FileStore(f"{folder}/store", num_ranks)
        followers = Followers(connections, processes, keep=keep)
        return Meeting(rank=0, size=num_ranks, local_rank=0, store=store, followers=followers)
    except BaseException:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipe, and waits for its end
        raise


def join_from_stdin() -> Meeting:
    """As a rank that rank 0 has started."""
    from torch.distributed import FileStore

    rank, size, folder, secret = pickle.load(sys.stdin.buffer)
    end_with(lambda: sys.stdin.buffer.read(1))
    connection = Client(f"{folder}/leader", authkey=secret)
    connection.send_bytes(pickle.dumps(rank))
    store = FileStore(f"{folder}/store", size)
    return Meeting(rank=rank, size=size, local_rank=rank, store=store, leader=Leader(connection))


def _meet_by_torchrun(place: Place) -> Meeting:
    from torch.distributed import PrefixStore, rendezvous

    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore("draftloop", store)
    if rank > 0:
        host, port, secret = store.get(_KEY).decode().split()
        connection = Client((host, int(port)), authkey=bytes.fromhex(secret))
        _send_soon(connection)
        connection.send_bytes(pickle.dumps(rank))
        return Meeting(rank=rank, size=size, local_rank=place.local_rank, store=store, leader=Leader(connection))
    secret = secrets.token_bytes(32)
    host = os.environ["MASTER_ADDR"]
    with Listener((host, 0), authkey=secret) as listener:
        host, port = listener.address
        store.set(_KEY, f"{host} {port} {secret.hex()}")
        connections = _accept(listener, size - 1, [])
    for connection in connections:
        _send_soon(connection)
    return Meeting(rank=0, size=size, local_rank=place.local_rank, store=store, followers=Followers(connections))


def _send_soon(connection: Connection) -> None:
    """Small messages do not wait for each other."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _accept(listener: Listener, count: int, processes: list[subprocess.Popen]) -> list[Connection]:
    """The connections of ranks 1 and on, in their order."""
    found: dict[int, Connection] = {}
    given_up = threading.Event()

    def accept() -> None:
        while len(found) < count and not given_up.is_set():
            with suppress(AuthenticationError, EOFError, OSError):  # a stranger, who does not know the secret
                connection = listener.accept()
                found[pickle.loads(connection.recv_bytes())] = connection

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        _wait_for(thread, processes, lambda: sorted({*range(1, count + 1)} - found.keys()))
    finally:
        if thread.is_alive():  # left alone it would wait at a number that is another file's once the listener is closed
            given_up.set()
            with suppress(OSError):
                Client(listener.address).close()
            thread.join(1)
    return [found[rank] for rank in sorted(found)]


def _wait_for(thread: threading.Thread, processes: list[subprocess.Popen], missing: Callable[[], list[int]]) -> None:
    """Until it ends. Raises RankError where a process does so before, or `START_S` are over."""
    end = time.monotonic() + START_S
    while thread.is_alive():
        thread.join(0.05)
        for rank, process in enumerate(processes, 1):
            if (code := process.poll()) is not None:
                raise RankError(f"rank {rank} has ended before it began (exit code {code}); see its own output")
        if time.monotonic() > end:
            raise RankError(f"ranks {missing()} have not come within {START_S:.0f} s; see their own output")
