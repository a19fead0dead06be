"""The API's side of the engine: starts its process, sends requests, hands out what comes back, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from draftloop.config import EngineConfig
from draftloop.errors import DraftloopError, RequestError
from draftloop.observability import log
from draftloop.request import SamplingParams
from draftloop.server.engine_process import run
from draftloop.server.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Close,
    Counters,
    Failed,
    Progress,
    Question,
    Ready,
    Refused,
    ToEngine,
    Told,
    Update,
    check_params,
    decode_from_engine,
    encode,
    merge,
)

State = Literal["starting", "ready", "draining", "dead"]
EngineMain = Callable[[EngineConfig, str, str], None]
"""Takes the settings, the address to connect to, and the log level."""

logger = log.get_logger(__name__)


class EngineUnavailableError(DraftloopError):
    """The engine is not there: still starting, or dead. The message says which, and why."""


class BusyError(DraftloopError):
    """As many requests as may wait are waiting."""


class EngineClient:
    """One engine in a process of its own. All methods belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_waiting: int,
        silence_s: float,
        log_level: str = "INFO",
        engine: EngineMain = run,
    ) -> None:
        """`max_waiting` answers may wait for a row; a busy engine that says nothing for `silence_s` is given up.

        `engine` is what the engine's process runs.
        """
        self.config, self.max_waiting, self.silence_s = config, max_waiting, silence_s
        self.state: State = "starting"
        self.reason = "the engine is starting"
        """Why it does not serve, unless it is ready."""
        self.counters = Counters()
        self.on_step: Callable[[int], None] = lambda num_tokens: None
        """Called with how many tokens a step of the engine processed and produced, where it did any."""
        self.changed = asyncio.Event()
        """Set whenever the state has changed."""
        self._log_level, self._engine = log_level, engine
        self._ready: Ready | None = None
        self._open: dict[str, tuple[Answers, int]] = {}
        """By the engine's request id: who waits for it, and as which of its answers."""
        self._questions: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._folder: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_heard = time.monotonic()

    # ---- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; `state` says when it is ready."""
        self._folder = Path(tempfile.mkdtemp(prefix="draftloop-"))  # readable by this user only
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)  # what a dead engine has not read must not hold up this process's end
        address = f"ipc://{self._folder}/engine"
        self._socket.bind(address)
        spawn = multiprocessing.get_context("spawn")  # a fork would share the event loop, and CUDA forbids it
        arguments = self.config, address, self._log_level
        self._process = spawn.Process(target=self._engine, args=arguments, name="draftloop-engine")
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid if self._process else None

    @property
    def ready(self) -> Ready:
        """What the engine said of itself. Raises EngineUnavailableError before it has."""
        if self._ready is None:
            raise EngineUnavailableError(self.reason)
        return self._ready

    @property
    def has_started(self) -> bool:
        """The engine has said what it is; it may be dead by now."""
        return self._ready is not None

    @property
    def num_open(self) -> int:
        """Answers that somebody waits for."""
        return len(self._open)

    def drain(self) -> None:
        """Take no new requests; what runs goes on."""
        if self.state == "ready":
            self._enter("draining", "the server is shutting down")

    def fail_open(self, reason: str) -> None:
        """End all open requests with this error."""
        open_, self._open = self._open, {}
        if open_:
            self._send(Abort(request_ids=list(open_)))
        for answers in dict.fromkeys(answers for answers, _ in open_.values()):
            answers.fail(reason)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the process, by force if it has not ended by then, and give everything back."""
        process = self._process
        self.drain()
        self.fail_open("the server is shutting down")
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            if self._ready is not None or self.state == "dead":  # a starting engine reads no messages yet
                self._send(Close())
                await asyncio.to_thread(process.join, timeout_s)
            self.kill()
            await asyncio.to_thread(process.join)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=0)
            self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process now, if it is there; for when there is no event loop any more."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self.changed.set()

    def _on_exit(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        asyncio.get_running_loop().call_later(0.1, self._gone)  # what it has said last may still be on its way

    def _gone(self) -> None:
        assert self._process is not None
        self._process.join(0)
        self._die(f"the engine's process has ended (exit code {self._process.exitcode})")

    def _die(self, reason: str) -> None:
        """The engine is of no use any more, and stays so."""
        if self.state == "dead":
            return
        logger.error("%s", reason)
        self._enter("dead", reason)
        self.fail_open(reason)
        while self._questions:
            self._questions.popleft().cancel()

    async def _watch(self) -> None:
        """A stall must end in an error: a busy engine says something every second, unless a step never ends."""
        while True:
            await asyncio.sleep(min(1.0, self.silence_s / 4))
            silence = time.monotonic() - self._last_heard
            if self._open and self.state in ("ready", "draining") and silence > self.silence_s:
                self._die(f"the engine has been silent for {silence:.0f} s with {len(self._open)} requests open")
                self.kill()

    # ---- requests ---------------------------------------------------------------------------

    def check_room(self, count: int) -> None:
        """Raises EngineUnavailableError where there is no engine, BusyError where `count` more answers are too many.

        Raises RequestError for a count that never fits.
        """
        if self.state != "ready":
            raise EngineUnavailableError(self.reason)
        most = self.ready.max_num_seqs + self.max_waiting
        if count > most:
            raise RequestError(f"n asks for {count} answers; this server holds at most {most} at a time")
        if len(self._open) + count > most:
            raise BusyError(f"{len(self._open)} requests are open; this server holds at most {most} at a time")

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        speculation: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: str | None = None,
        traced: bool = False,
    ) -> Answers:
        """Queue `params.n` answers to each prompt; all or none. `traced`: updates say where tokens came from.
        `lora_request` names the adapter to answer with.

        Raises what `check_room` raises, and RequestError for what the engine refuses.
        """
        self.check_room(len(prompts) * params.n)
        now = time.monotonic()
        if not self._open:
            self._last_heard = now  # an idle engine may be silent
        answers = Answers(self, arrived=now)
        requests = [
            Add(
                request_id=f"{request_id}-{at * params.n + index}",
                prompt_ids=prompt_ids,
                params=params.answer(index),
                speculation=speculation,
                priority=priority,
                cache_salt=cache_salt,
                lora_request=lora_request,
                traced=traced,
            )
            for at, prompt_ids in enumerate(prompts)
            for index in range(params.n)
        ]
        try:
            check_params(params)  # nothing that the engine cannot read may reach it
            encoded = [encode(request) for request in requests]
        except (OverflowError, TypeError, UnicodeEncodeError, msgspec.MsgspecError) as error:
            raise RequestError(f"the request holds a value that cannot be passed on: {error}") from error
        for index, (request, data) in enumerate(zip(requests, encoded, strict=True)):
            answers.request_ids.append(request.request_id)
            self._open[request.request_id] = answers, index
            self._send_bytes(data)
        try:
            await answers.wait_until_accepted()
        except BaseException:
            answers.close()
            raise
        return answers

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more."""
        known = [one for one in request_ids if self._open.pop(one, None)]
        if known:
            self._send(Abort(request_ids=known))

    async def ask(self, question: Question, *, profile_dir: str | None = None) -> dict[str, Any]:
        """What the engine answers between two steps.

        Raises EngineUnavailableError without an engine, RequestError where it cannot do what it is asked for.
        """
        if self.state not in ("ready", "draining"):
            raise EngineUnavailableError(self.reason)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions.append(future)
        self._send(Ask(question=question, profile_dir=profile_dir))
        try:
            return await future
        except asyncio.CancelledError:
            if self.state == "dead":
                raise EngineUnavailableError(self.reason) from None
            raise

    # ---- messages ---------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        self._send_bytes(encode(message))

    def _send_bytes(self, data: bytes) -> None:
        if self._socket is not None and self.state != "dead":
            self._socket.send(data)  # at once, since the pair has no high-water mark

    async def _listen(self) -> None:
        assert self._socket is not None
        while True:
            data = await self._socket.recv()
            self._last_heard = time.monotonic()
            self._take(decode_from_engine(data))

    def _take(self, message: Any) -> None:
        match message:
            case Progress():
                before, now = self.counters, message.counters
                self.counters = now
                num_tokens = now.prompt_tokens - before.prompt_tokens + now.generated_tokens - before.generated_tokens
                if num_tokens:
                    self.on_step(num_tokens)
                for update in message.updates:
                    self._deliver(update)
            case Accepted(request_id=request_id, num_prompt_tokens=count):
                if request_id in self._open:
                    answers, index = self._open[request_id]
                    answers.accept(index, count)
            case Refused(request_id=request_id, message=text):
                if request_id in self._open:
                    self._open.pop(request_id)[0].refuse(text)
            case Told(answer=answer, error=error):
                future = self._questions.popleft()
                if not future.done() and error is None:
                    future.set_result(answer)
                elif not future.done():
                    future.set_exception(RequestError(error or ""))
            case Ready():
                self._ready = message
                self._enter("ready", "")
            case Failed(message=text):
                starting = self.state == "starting"
                self._die(text if starting else f"the engine has failed: {text}")

    def _deliver(self, update: Update) -> None:
        if place := self._open.get(update.request_id):
            if update.ending is not None:
                del self._open[update.request_id]
            answers, index = place
            answers.deliver(index, update)


class Answers:
    """What the engine gives to one request: several prompts, several answers each, in the order of `submit`."""

    def __init__(self, client: EngineClient, *, arrived: float) -> None:
        self._client = client
        self.arrived = arrived
        self.request_ids: list[str] = []
        self.num_prompt_tokens: dict[int, int] = {}
        """By answer: tokens of its prompt, once accepted."""
        self._pending: dict[int, list[Update]] = {}
        self._news = asyncio.Event()
        self._refusal: str | None = None
        self._failure: str | None = None

    def accept(self, index: int, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens[index] = num_prompt_tokens
        self._news.set()

    def refuse(self, reason: str) -> None:
        self._refusal = reason
        self._news.set()

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._news.set()

    def deliver(self, index: int, update: Update) -> None:
        self._pending.setdefault(index, []).append(update)
        self._news.set()

    async def wait_until_accepted(self) -> None:
        """Raises RequestError if any answer is refused, EngineUnavailableError if the engine dies."""
        while len(self.num_prompt_tokens) < len(self.request_ids):
            self._check()
            self._news.clear()
            await self._news.wait()
        self._check()
        if self._pending:
            self._news.set()

    async def next(self) -> list[tuple[int, Update]]:
        """What has come since the last call: of each answer at most one update, which holds all that is new.

        Raises EngineUnavailableError if the engine dies before the end.
        """
        while not self._pending:
            self._check()
            self._news.clear()
            await self._news.wait()
        pending, self._pending = self._pending, {}
        return [(index, merge(updates)) for index, updates in pending.items()]

    def _check(self) -> None:
        if self._refusal is not None:
            raise RequestError(self._refusal)
        if self._failure is not None:
            raise EngineUnavailableError(self._failure)

    def close(self) -> None:
        """Abort what has not ended."""
        self._client.abort(self.request_ids)


async def wait_for_state(client: EngineClient, *states: State) -> None:
    """Return once the engine is in one of these states."""
    while client.state not in states:
        client.changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.changed.wait(), 1.0)
