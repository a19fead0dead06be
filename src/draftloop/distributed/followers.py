"""The other ranks, as rank 0 sees them: what they are told, and how it is noticed that one has ended.

Orders are names of methods with their arguments, pickled, over connections that are opened with a secret. Nothing
comes back but a last word: why a rank ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from multiprocessing.connection import Connection, wait
from subprocess import Popen, TimeoutExpired
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from draftloop.errors import RankError

P = ParamSpec("P")
Result = TypeVar("Result")
Doer = TypeVar("Doer", bound="Told")
Method = Callable[Concatenate[Doer, P], Result]

Order = tuple[str, Sequence[Any], Mapping[str, Any]]
"""A method, as `Class.name`, and what it is called with."""

GRACE_S = 5.0
"""After a rank has ended: how long this process may take to notice, before it is ended too."""
EXPLAIN_S = 2.0
"""How long after its connections break the last word of a rank may come."""
END_S = 5.0
"""How long ranks may take to end when they are told to."""


class Followers:
    """Ranks 1 and on. Orders are done in the order in which they are told."""

    def __init__(self, connections: Sequence[Connection], processes: Sequence[Popen] = (), *, keep: bool = False):
        """`processes`: those of the ranks, where they were started from here. `keep`: engine after engine uses them."""
        self._connections, self._processes, self._keep = connections, processes, keep
        self._orders: list[Order] = []
        self._failure: RankError | None = None
        self._is_noticed = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._watch, name="draftloop-ranks", daemon=True).start()

    def send(self, message: Any) -> None:
        """Pass anything that can be pickled. Raises RankError where a rank has ended."""
        data = pickle.dumps(message)
        for connection in self._connections:
            try:
                connection.send_bytes(data)
            except OSError:
                self.explain()
                raise RankError("another rank cannot be reached any more") from None

    def tell(self, name: str, args: Sequence[Any], options: Mapping[str, Any], *, at_once: bool) -> None:
        """Give an order, which is sent with the next one that is to be done `at_once`."""
        self._orders.append((name, args, options))
        if at_once:
            orders, self._orders = self._orders, []
            self.send(orders)

    def failure(self) -> RankError | None:
        """Why a rank has ended, None while all live. Whoever asks is to raise it."""
        if self._failure is not None:
            self._is_noticed.set()
        return self._failure

    def check(self) -> None:
        """Raises RankError where a rank has ended."""
        if error := self.failure():
            raise error

    def explain(self) -> None:
        """After an error that may come of a rank's end: wait for what it has said, and raise that as RankError."""
        end = time.monotonic() + EXPLAIN_S
        while self._failure is None and time.monotonic() < end:
            time.sleep(0.01)
        self.check()

    def release(self) -> None:
        """The engine is closed."""
        if self._is_closed:
            return
        self._orders.clear()
        if self.failure() is None:
            self.send([])
        if self.failure() is not None or not self._keep:
            self.close()

    def close(self) -> None:
        """End the ranks. Waits for it: one that still takes part in a last sum needs this process."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._connections:
            _hang_up(connection)
        end = time.monotonic() + END_S
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.poll(max(0.0, end - time.monotonic()))  # a rank's end can be read
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _watch(self) -> None:
        """Wait for a last word, or for a connection to end without one."""
        try:
            ready = wait(self._connections)
        except OSError:
            return  # closed from here
        rank = 1 + self._connections.index(ready[0])  # type: ignore[arg-type]
        try:
            reason = pickle.loads(self._connections[rank - 1].recv_bytes())
        except (EOFError, OSError):
            reason = self._how_it_ended(rank)
        if self._is_closed:
            return
        self._failure = RankError(f"rank {rank} has ended: {reason}")
        if not self._is_noticed.wait(GRACE_S) and not self._is_closed:
            # what runs waits for that rank, perhaps inside of a driver, and can only be ended from outside
            print(f"draftloop: {self._failure}; this process ends with it", file=sys.stderr, flush=True)
            for process in self._processes:
                process.kill()
            os._exit(1)

    def _how_it_ended(self, rank: int) -> str:
        if not self._processes:
            return "its process is gone; see its own output"
        try:
            code = self._processes[rank - 1].wait(1)
        except TimeoutExpired:
            return "it does not answer any more"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}; see its own output"


class Told(Protocol):
    """Something of which every rank has one."""

    followers: Followers | None
    """None where there are none, and in followers."""


def on_every_rank(*, at_once: bool = False) -> Callable[[Method[Doer, P, Result]], Method[Doer, P, Result]]:
    """Mark what followers do too: they get the arguments, plain data, with what is sent next or `at_once`."""

    def mark(method: Method[Doer, P, Result]) -> Method[Doer, P, Result]:
        @wraps(method)
        def told(self: Doer, *args: P.args, **options: P.kwargs) -> Result:
            if self.followers is not None:
                self.followers.tell(method.__qualname__, args, options, at_once=at_once)
            return method(self, *args, **options)

        return told

    return mark


def obey(orders: Iterable[Order], *doers: Told) -> None:
    """As a follower: do what rank 0 does, with one's own of each class."""
    own = {type(doer).__name__: doer for doer in doers}
    for order, args, options in orders:
        owner, _, name = order.rpartition(".")
        getattr(own[owner], name)(*args, **options)


def _hang_up(connection: Connection) -> None:
    """The end of orders; what the other side says can still be read."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_WR)


class Leader:
    """Rank 0, as the others see it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> Any:
        """The next message. Raises EOFError where there will be none."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError from error

    def orders(self) -> Iterator[Sequence[Order]]:
        """Until the engine is closed."""
        while orders := self.receive():
            yield orders

    def give_reason(self, reason: str) -> None:
        """The last word."""
        with contextlib.suppress(OSError):  # it has ended first
            self._connection.send_bytes(pickle.dumps(reason))


def end_with(is_gone: Callable[[], Any]) -> None:
    """End this process as soon as a call returns, whatever it is doing then."""

    def watch() -> None:
        is_gone()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
