"""A captured phase at one size, and the recorder that makes it: the CPU and CUDA twins share these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftloop.graphs.loop import Loop, Watched
    from draftloop.graphs.ring import Ring

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
    def record(self, body: Body, *, piecewise: bool, repeats: bool = False) -> Program:
        """Record `body`, which has been warmed up. Raises CapacityError if memory ends, GraphError if it cannot be.

        `repeats`: the program will be given to `loop`.
        """

    def warm_up(self, bodies: Sequence[Body], done: Callable[[], None]) -> None:
        """Run each body once as it is, calling `done` after each, so that nothing is compiled while recording."""

    @abstractmethod
    def time_ms(self, program: Program) -> float:
        """Milliseconds of one replay."""

    @abstractmethod
    def owned_bytes(self) -> int:
        """Memory in use; differences tell what a recording added."""

    def give_back(self) -> None:
        """Let go of memory that is kept for later, and that no program uses."""

    def why_no_loops(self) -> str:
        """Why programs cannot repeat on this device; empty where they can."""
        return ""

    @abstractmethod
    def loop(self, program: Program, num_rows: int, watched: Watched, ring: Ring) -> Loop:
        """Make a loop of a recorded program. Raises GraphError if it cannot repeat."""

    def order_after_loop(self) -> None:
        """Called before anything is launched while a loop may run: it must come after the loop's end."""

    def recording(self) -> AbstractContextManager[None]:
        """Surrounds the recording of many programs."""
        return nullcontext()


def in_place(call: Call) -> None:
    """Run an attention call where it stands: eager, or inside a full graph."""
    call()
