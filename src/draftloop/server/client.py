"""The API's side of the engines: starts their processes, hands requests out and answers back, notices a death."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from draftloop.config import EngineConfig
from draftloop.errors import RequestError
from draftloop.observability import log
from draftloop.request import SamplingParams
from draftloop.server.answers import Answers, BusyError, EngineUnavailableError
from draftloop.server.engine_process import run
from draftloop.server.engine_rank import EngineMain, EngineRank
from draftloop.server.messages import (
    Abort,
    Accepted,
    Add,
    Call,
    Close,
    Counters,
    Failed,
    Progress,
    Question,
    Ready,
    Refused,
    Update,
    check_params,
    encode,
    total,
)

State = Literal["starting", "ready", "draining", "dead"]

CAUSE_S = 2.0
"""An engine that lost another one waits so long for that one's own last word: it is the cause."""

logger = log.get_logger(__name__)


class EngineClient:
    """One engine, or several that share the requests, in processes of their own. Belongs to one event loop.

    Each request goes to the engine with the fewest open answers. They live and die together: where their layers
    exchange tokens none can do without the others, and a server with less than it was given is for its watcher to
    replace.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_waiting: int,
        silence_s: float,
        log_level: str = "INFO",
        engine: EngineMain = run,
        name: str = "",
    ) -> None:
        """`max_waiting` answers may wait for a row; a busy engine that says nothing for `silence_s` is given up.

        `engine` is what an engine's process runs. `name` tells this server from others of the same settings.
        """
        self.config, self.max_waiting, self.silence_s = config, max_waiting, silence_s
        self.state: State = "starting"
        self.reason = "the engine is starting"
        """Why it does not serve, unless it is ready."""
        self.on_step: Callable[[int, int], None] = lambda rank, num_tokens: None
        """Called with an engine's rank and how many tokens a step of it processed and produced, if any."""
        self.changed = asyncio.Event()
        """Set whenever the state has changed."""
        self._log_level, self._engine, self._name = log_level, engine, name
        self._open: dict[str, tuple[Answers, int]] = {}
        """By the engine's request id: who waits for it, and as which of its answers."""
        self._num_calls = 0
        self.ranks = [EngineRank(rank) for rank in range(config.data_parallel_size)]
        self._folder: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; `state` says when they are ready."""
        self._folder = Path(tempfile.mkdtemp(prefix="draftloop-"))  # readable by this user only
        self._context = zmq.asyncio.Context()
        for rank in self.ranks:
            rank.start(
                self._engine,
                self.config,
                self._log_level,
                context=self._context,
                folder=self._folder,
                name=self._name,
                on_exit=lambda rank=rank: self._gone(rank),
            )
        self._tasks = [asyncio.create_task(self._listen(rank)) for rank in self.ranks]
        self._tasks.append(asyncio.create_task(self._watch()))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    @property
    def ready(self) -> Ready:
        """What the first engine said of itself. Raises EngineUnavailableError before all have."""
        if not self.has_started:
            raise EngineUnavailableError(self.reason)
        ready = self.ranks[0].ready
        assert ready is not None
        return ready

    @property
    def has_started(self) -> bool:
        """All engines have said what they are; they may be dead by now."""
        return all(rank.ready is not None for rank in self.ranks)

    @property
    def num_open(self) -> int:
        """Answers that somebody waits for."""
        return len(self._open)

    @property
    def counters(self) -> Counters:
        """Of all engines together."""
        return total([rank.counters for rank in self.ranks])

    @property
    def num_pages(self) -> int:
        """Cache pages of all engines together."""
        return sum(rank.ready.num_pages for rank in self.ranks if rank.ready is not None)

    def drain(self) -> None:
        """Take no new requests; what runs goes on."""
        if self.state == "ready":
            self._enter("draining", "the server is shutting down")

    def fail_open(self, reason: str) -> None:
        """End all open requests with this error."""
        failed = list(self._open.values())
        self.abort(list(self._open))
        for answers in dict.fromkeys(answers for answers, _ in failed):
            answers.fail(reason)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the processes, by force if they have not ended by then, and give everything back."""
        self.drain()
        self.fail_open("the server is shutting down")
        is_listening = self.has_started or self.state == "dead"  # a starting engine reads no messages yet
        for rank in self.ranks if is_listening else ():
            rank.send(encode(Close()))
        await asyncio.gather(*(rank.close(timeout_s if is_listening else 0.0) for rank in self.ranks))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the processes now; for when there is no event loop any more, too."""
        for rank in self.ranks:
            rank.kill()

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self.changed.set()

    def _gone(self, rank: EngineRank) -> None:
        if not rank.is_gone:  # else it has said why
            self._die(f"{self._process_of(rank)} has ended (exit code {rank.exit_code})")

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that should go on has failed: whoever waits for an answer would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("what listens to the engine has failed", exc_info=error)
            self._die(f"what listens to the engine has failed: {type(error).__name__}: {error}")
            self.kill()

    def _process_of(self, rank: EngineRank) -> str:
        return "the engine's process" if len(self.ranks) == 1 else f"the process of engine {rank.rank}"

    def _die(self, reason: str) -> None:
        """The engines are of no use any more, and stay so."""
        if self.state == "dead":
            return
        logger.error("%s", reason)
        self._enter("dead", reason)
        self.fail_open(reason)
        for rank in self.ranks:
            rank.give_up()
            if len(self.ranks) > 1:
                rank.kill()

    def _failed(self, rank: EngineRank, message: Failed) -> None:
        rank.give_up()
        reason = message.message
        if self.state != "starting":
            reason = f"the engine has failed: {reason}"
        if message.by_another:  # whose own last word says more, if it still comes
            asyncio.get_running_loop().call_later(CAUSE_S, self._die, reason)
        else:
            self._die(reason)

    async def _watch(self) -> None:
        """A stall must end in an error: a busy engine says something every second, unless a step never ends."""
        while True:
            await asyncio.sleep(min(1.0, self.silence_s / 4))
            for rank in self.ranks:
                silence = time.monotonic() - rank.last_heard
                if rank.num_open and self.state in ("ready", "draining") and silence > self.silence_s:
                    which = "the engine" if len(self.ranks) == 1 else f"engine {rank.rank}"
                    self._die(f"{which} has been silent for {silence:.0f} s with {rank.num_open} requests open")
                    self.kill()

    # ---- requests ---------------------------------------------------------------------------

    def check_room(self, count: int) -> None:
        """Raises EngineUnavailableError where there is no engine, BusyError where `count` more answers are too many.

        Raises RequestError for a count that never fits.
        """
        if self.state != "ready":
            raise EngineUnavailableError(self.reason)
        most = len(self.ranks) * self.ready.max_num_seqs + self.max_waiting
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

        All answers to a prompt are given by one engine, which computes it once. Raises what `check_room` raises, and
        RequestError for what the engine refuses.
        """
        self.check_room(len(prompts) * params.n)
        answers = Answers(self.abort, arrived=time.monotonic())
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
        except (OverflowError, TypeError, UnicodeEncodeError, RecursionError, msgspec.MsgspecError) as error:
            raise RequestError(f"the request holds a value that cannot be passed on: {error}") from error
        rank = self.ranks[0]
        for index, (request, data) in enumerate(zip(requests, encoded, strict=True)):
            if index % params.n == 0:
                rank = min(self.ranks, key=lambda rank: (rank.num_open, rank.num_given))
            answers.request_ids.append(request.request_id)
            answers.ranks.append(rank.rank)
            self._open[request.request_id] = answers, index
            if not rank.num_open:
                rank.last_heard = answers.arrived  # an idle engine may be silent
            rank.num_open += 1
            rank.num_given += 1
            rank.send(data)
        self._call()
        try:
            await answers.wait_until_accepted()
        except BaseException:
            answers.close()
            raise
        return answers

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            if rank := self._close_answer(request_id):
                by_rank.setdefault(rank.rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self.ranks[rank].send(encode(Abort(request_ids=ids)))
        if by_rank:
            self._call()

    def _close_answer(self, request_id: str) -> EngineRank | None:
        """Nobody waits for this answer any more; the engine that gave it, or None where nobody did before."""
        place = self._open.pop(request_id, None)
        if place is None:
            return None
        answers, index = place
        rank = self.ranks[answers.ranks[index]]
        rank.num_open -= 1
        return rank

    async def ask(self, question: Question, *, profile_dir: str | None = None) -> list[dict[str, Any]]:
        """What each engine answers between two steps.

        Raises EngineUnavailableError without an engine, RequestError where one cannot do what it is asked for.
        """
        if self.state not in ("ready", "draining"):
            raise EngineUnavailableError(self.reason)
        answers = [rank.ask(question, profile_dir) for rank in self.ranks]
        self._call()
        try:
            return await asyncio.gather(*answers)
        except asyncio.CancelledError:
            if self.state == "dead":
                raise EngineUnavailableError(self.reason) from None
            raise

    # ---- messages ---------------------------------------------------------------------------

    def _call(self) -> None:
        """Engines that step together rest together: all of them hear that one has got a message."""
        if self.config.steps_together:
            self._num_calls += 1
            data = encode(Call(number=self._num_calls))
            for rank in self.ranks:
                rank.send(data)

    async def _listen(self, rank: EngineRank) -> None:
        while True:
            self._take(rank, await rank.receive())

    def _take(self, rank: EngineRank, message: Any) -> None:
        match message:
            case Progress():
                before, now = rank.counters, message.counters
                rank.counters, rank.num_drafts = now, message.num_drafts
                num_tokens = now.prompt_tokens - before.prompt_tokens + now.generated_tokens - before.generated_tokens
                if num_tokens:
                    self.on_step(rank.rank, num_tokens)
                for update in message.updates:
                    self._deliver(update)
            case Accepted(request_id=request_id, num_prompt_tokens=count):
                if request_id in self._open:
                    answers, index = self._open[request_id]
                    answers.accept(index, count)
            case Refused(request_id=request_id, message=text):
                if request_id in self._open:
                    answers, _ = self._open[request_id]
                    self._close_answer(request_id)
                    answers.refuse(text)
            case Ready():
                rank.ready = message
                if self.has_started and self.state == "starting":
                    self._enter("ready", "")
            case Failed():
                self._failed(rank, message)

    def _deliver(self, update: Update) -> None:
        if place := self._open.get(update.request_id):
            answers, index = place
            if update.ending is not None:
                self._close_answer(update.request_id)
            answers.deliver(index, update)


async def wait_for_state(client: EngineClient, *states: State) -> None:
    """Return once the engine is in one of these states."""
    while client.state not in states:
        client.changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.changed.wait(), 1.0)
