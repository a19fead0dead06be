"""A captured phase at one size, and the recorder that makes it: the CPU and CUDA twins share these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

Call = Callable[[], None]
Attend = Callable[[Call], None]
"""Runs an attention call: in place, or between captured segments."""
Body = Callable[[Attend], None]
"""A phase with its static buffers bound; reads and writes nothing else that changes address."""


class Program(ABC):
    """Something recorded once that runs again on the same storages."""

    @abstractmethod
    def replay(self) -> None: ...

    @abstractmethod
    def poison(self) -> None:
        """Fill all memory that the program owns with NaN / sentinels, so that stale reads show."""


class Recorder(ABC):
    """Records programs on one device; they share memory, since they never run at the same time."""

    on_first_use: bool = False
    """Record a size when it is first run: where recording is running, that costs nothing."""

    @abstractmethod
    def record(self, body: Body, *, piecewise: bool) -> Program:
        """Record `body`, which has been warmed up. Raises GraphError if it cannot be recorded."""

    def warm_up(self, bodies: Sequence[Body], done: Callable[[], None]) -> None:
        """Run each body once as it is, calling `done` after each, so that nothing is compiled while recording."""

    @abstractmethod
    def time_ms(self, program: Program) -> float:
        """Milliseconds of one replay."""

    @abstractmethod
    def owned_bytes(self) -> int:
        """Memory in use; differences tell what a recording added."""

    def recording(self) -> AbstractContextManager[None]:
        """Surrounds the recording of many programs."""
        return nullcontext()


def in_place(call: Call) -> None:
    """Run an attention call where it stands: eager, or inside a full graph."""
    call()
