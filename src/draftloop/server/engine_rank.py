"""One engine's process, as the API process sees it."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from draftloop.config import EngineConfig
from draftloop.distributed.replica import Replica
from draftloop.errors import RequestError
from draftloop.server.messages import Ask, Counters, FromEngine, Question, Ready, Told, decode_from_engine, encode

EngineMain = Callable[..., None]
"""Takes the settings, the address to connect to, the log level, and where there are several engines which it is."""


class EngineRank:
    """An engine of one or more, each with a process and a socket of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ready: Ready | None = None
        """What the engine has said of itself."""
        self.counters = Counters()
        self.num_drafts = 0
        """That its steps verify now."""
        self.num_open = 0
        """Answers that somebody waits for."""
        self.num_given = 0
        """Answers that it was ever asked for."""
        self.last_heard = time.monotonic()
        self.is_gone = False
        self._questions: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._socket: zmq.asyncio.Socket | None = None

    def start(
        self,
        engine: EngineMain,
        config: EngineConfig,
        log_level: str,
        *,
        context: zmq.asyncio.Context,
        folder: Path,
        name: str,
        on_exit: Callable[[], None],
    ) -> None:
        """Start the process. `name` is the server's; `on_exit` is called, in the event loop, when it has ended."""
        size = config.data_parallel_size
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)  # what a dead engine has not read must not hold up this process's end
        address = f"ipc://{folder}/engine-{self.rank}"
        self._socket.bind(address)
        spawn = multiprocessing.get_context("spawn")  # a fork would share the event loop, and CUDA forbids it
        store = f"{folder}/store" if config.steps_together else None
        place = () if size == 1 and not name else (Replica(rank=self.rank, size=size, store=store, name=name),)
        arguments = (config, address, log_level, *place)
        self._process = spawn.Process(target=engine, args=arguments, name=f"draftloop-engine-{self.rank}")
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit, on_exit)

    def _on_exit(self, on_exit: Callable[[], None]) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        asyncio.get_running_loop().call_later(0.1, on_exit)  # what it has said last may still be on its way

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        self._process.join(0)
        return self._process.exitcode

    def send(self, data: bytes) -> None:
        """Send an encoded message, at once, since the pair has no high-water mark."""
        if self._socket is not None and not self.is_gone:
            self._socket.send(data)

    async def receive(self) -> FromEngine:
        """The next message, but for answers to questions."""
        assert self._socket is not None
        while True:
            message = decode_from_engine(await self._socket.recv())
            self.last_heard = time.monotonic()
            if not isinstance(message, Told):
                return message
            future = self._questions.popleft()
            if not future.done() and message.error is None:
                future.set_result(message.answer)
            elif not future.done():
                future.set_exception(RequestError(message.error or ""))

    def ask(self, question: Question, profile_dir: str | None) -> asyncio.Future[dict[str, Any]]:
        """What the engine answers between two steps."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions.append(future)
        self.send(encode(Ask(question=question, profile_dir=profile_dir)))
        return future

    def give_up(self) -> None:
        """Nothing will come of it any more."""
        self.is_gone = True
        while self._questions:
            self._questions.popleft().cancel()

    def kill(self) -> None:
        """End the process now, if it is there; for when there is no event loop any more, too."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    async def close(self, timeout_s: float) -> None:
        """Wait for the process to end, and end it by force where it has not by then."""
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
            if timeout_s:
                await asyncio.to_thread(self._process.join, timeout_s)
            self.kill()
            await asyncio.to_thread(self._process.join)
        if self._socket is not None:
            self._socket.close(linger=0)
