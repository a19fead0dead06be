"""The engine's process: owns the engine, steps it while there is work, and sleeps while there is none.

Heavy modules are imported in `run`, which is called in the engine's process only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from tqdm import tqdm

from draftloop.config import EngineConfig, Environment
from draftloop.distributed.replica import ALONE, Replica
from draftloop.errors import DraftloopError, RankError, RequestError
from draftloop.observability import log
from draftloop.scheduler.batch import Sequence
from draftloop.server.messages import (
    Abort,
    Accepted,
    AdapterCounters,
    Add,
    Ask,
    Call,
    Close,
    Counters,
    Ending,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Told,
    TracedToken,
    Update,
    decode_to_engine,
    encode,
)
from draftloop.server.text import TextCursor

if TYPE_CHECKING:
    from draftloop.engine.build import Engine

HEARTBEAT_S = 1.0
"""A busy engine is heard of at least this often, even if nobody gets a token."""

logger = log.get_logger(__name__)


def run(config: EngineConfig, address: str, log_level: str, replica: Replica = ALONE) -> None:
    """Serve the API process at `address` until it says so, or is gone. `replica`: which of several engines this is."""
    for name in (signal.SIGINT, signal.SIGTERM):  # the API process decides when this one ends
        signal.signal(name, signal.SIG_IGN)
    log.setup(log_level, Environment.read().log_format)
    end_with_parent()
    tqdm.set_lock(threading.RLock())  # its own is shared by processes, and would be left behind by a kill
    context = zmq.Context()
    socket = connect(context, address)
    try:
        from draftloop.engine.startup import start

        engine = start(config, replica=replica)
        EngineServer(engine, socket).serve()
    except RankError as error:
        logger.error("%s", error)
        socket.send(encode(Failed(message=str(error), by_another=True)))
    except DraftloopError as error:
        socket.send(encode(Failed(message=str(error))))
    except Exception as error:
        logger.exception("the engine has failed")
        # the end of an engine that steps together with this one shows as any error of what they exchange
        may_be_another = replica.store is not None
        socket.send(encode(Failed(message=f"{type(error).__name__}: {error}", by_another=may_be_another)))
    finally:
        socket.close(linger=1000)
        context.term()


def connect(context: zmq.Context, address: str) -> zmq.Socket:
    """The engine's end of the pair. It never waits for a reader: a slow one must not stop the engine."""
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def end_with_parent() -> None:
    """Make this process end when the one that started it has ended, however that came."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class EngineServer:
    """Takes messages between steps, and says what each step gave."""

    def __init__(self, engine: Engine, socket: zmq.Socket) -> None:
        from draftloop.engine.profiler import StepProfiler

        self._engine, self._core, self._socket = engine, engine.core, socket
        self._cursors: dict[str, _Cursor] = {}
        self._compiling: dict[str, Sequence] = {}
        """Not accepted yet: whether their grammars are of any use is being found out."""
        self._profiler = StepProfiler(engine)
        self._is_open = True
        self._last_sent = 0.0

    def serve(self) -> None:
        """Until a `Close` comes. Raises what the engine raises."""
        self._send(_ready(self._engine))
        while self._is_open or not self._rests:
            self._receive()
            if not self._rests:
                self._step()
        self._profiler.close()
        self._engine.close()

    @property
    def _rests(self) -> bool:
        """There is nothing to do before another message comes."""
        return self._core.idle if self._core.lockstep is None else self._core.lockstep.at_rest

    def _receive(self) -> None:
        """Take all messages that are there; wait for one first if there is nothing else to do."""
        if self._rests:
            self._socket.poll()
        while self._socket.poll(0):
            self._take(decode_to_engine(self._socket.recv()))

    def _take(self, message: Any) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._cursors.pop(request_id, None)
                    self._compiling.pop(request_id, None)
                    self._core.abort(request_id)
                self._send_progress([])  # what was freed is visible at once
            case Ask():
                self._send(self._tell(message))
            case Call(number=number):
                assert self._core.lockstep is not None
                self._core.lockstep.hear(number)
            case Close():
                self._is_open = False

    def _tell(self, ask: Ask) -> Told:
        try:
            match ask.question:
                case "graphs":
                    return Told(answer=self._engine.table.report().to_dict())
                case "start_profile":
                    self._profiler.start(Path(ask.profile_dir or ""))
                    return Told()
                case "stop_profile":
                    return Told(answer={"file": self._profiler.stop()})
                case "reset_prefix_cache":
                    return Told(answer={"success": self._core.reset_prefix_cache()})
        except (RequestError, OSError) as error:
            return Told(error=str(error))

    def _add(self, message: Add) -> None:
        try:
            sequence = self._core.add(
                message.request_id,
                message.prompt_ids,
                message.params,
                speculation=message.speculation,
                priority=message.priority,
                cache_salt=message.cache_salt,
                lora_request=message.lora_request,
                traced=message.traced,
            )
        except RequestError as error:
            self._send(Refused(request_id=message.request_id, message=str(error)))
            return
        if sequence.grammar is not None:
            self._compiling[message.request_id] = sequence
        else:
            self._accept(sequence)

    def _accept(self, sequence: Sequence) -> None:
        self._cursors[sequence.request_id] = _Cursor(sequence)
        self._send(Accepted(request_id=sequence.request_id, num_prompt_tokens=sequence.num_prompt))

    def _accept_compiled(self) -> None:
        for request_id, sequence in list(self._compiling.items()):
            assert sequence.grammar is not None
            if sequence.grammar.ready:
                del self._compiling[request_id]
                if sequence.grammar.error is None:
                    self._accept(sequence)
                else:
                    self._core.abort(request_id)
                    self._send(Refused(request_id=request_id, message=sequence.grammar.error))
                    self._send_progress([])  # the engine may have nothing else to say for long

    def _step(self) -> None:
        changed = self._core.step()
        self._profiler.stepped()
        if self._compiling:
            self._accept_compiled()
        updates = []
        for sequence, text in changed:
            if cursor := self._cursors.get(sequence.request_id):
                updates.append(cursor.update(text))
                if sequence.finish_reason is not None:
                    del self._cursors[sequence.request_id]
        if updates or time.perf_counter() - self._last_sent > HEARTBEAT_S:
            self._send_progress(updates)

    def _send_progress(self, updates: list[Update]) -> None:
        stats, scheduler = self._core.stats, self._core.scheduler
        drafting = scheduler.drafting
        counters = Counters(
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            num_spec_steps=stats.num_spec_steps,
            num_steps_without_drafts=stats.num_steps_without_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            acceptance_histogram=stats.histogram,
            by_adapter={
                name: AdapterCounters(
                    num_spec_steps=part.num_spec_steps,
                    num_draft_tokens=part.num_draft_tokens,
                    num_accepted_tokens=part.num_accepted_tokens,
                )
                for name, part in stats.by_adapter.items()
            },
            steps_by_drafts=[drafting.steps_by_count.get(count, 0) for count in range(drafting.most + 1)],
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_compiling=len(self._compiling),
            num_pages_in_use=scheduler.num_pages_held,
            num_preemptions=scheduler.num_preemptions,
            cached_prompt_tokens=stats.num_cached_prompt_tokens,
        )
        self._send(Progress(updates=updates, counters=counters, num_drafts=drafting.current))

    def _send(self, message: FromEngine) -> None:
        self._last_sent = time.perf_counter()
        self._socket.send(encode(message))


class _Cursor:
    """How much of an answer has been sent."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._text = TextCursor(sequence.params.stop)
        self._num_tokens = self._num_traced = 0

    def update(self, text: str) -> Update:
        """What is new."""
        sequence, start = self._sequence, self._num_tokens
        self._num_tokens = len(sequence.output_ids)
        params = sequence.params
        ended = sequence.finish_reason is not None
        reports_prompt = params.prompt_logprobs is not None and start == 0
        piece = self._text.advance(text, is_last=ended)
        return Update(
            request_id=sequence.request_id,
            text=piece,
            token_ids=sequence.output_ids[start:],
            logprobs=None if params.logprobs is None else sequence.logprobs[start:],
            prompt_logprobs=sequence.prompt_logprobs if reports_prompt else None,
            ending=_ending(sequence) if ended else None,
            traced=self._traced(text, is_last=ended) if sequence.traced else None,
        )

    def _traced(self, text: str, *, is_last: bool) -> list[TracedToken]:
        """The next tokens whose text has been handed out; at the end the rest, up to where a stop text cut it."""
        ids, ends, sources = self._sequence.output_ids, self._sequence.text_ends, self._sequence.sources
        found = []
        while self._num_traced < len(ids):
            at = self._num_traced
            end = len(text) if is_last and at == len(ids) - 1 else ends[at]
            if end > self._text.num_shown and not is_last:
                break
            start = ends[at - 1] if at else 0
            found.append(TracedToken(token_id=ids[at], text=text[start:end], source=sources[at]))
            self._num_traced += 1
        return found


def _ending(sequence: Sequence) -> Ending:
    from draftloop.engine.stats import speculation_stats

    assert sequence.finish_reason is not None
    started = sequence.started or sequence.finished
    first_token = sequence.first_token or sequence.finished
    return Ending(
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        speculation=speculation_stats([sequence]),
        num_cached_tokens=sequence.num_cached or 0,
        queue_s=max(started - sequence.arrived, 0.0),
        prefill_s=max(first_token - started, 0.0),
        decode_s=max(sequence.finished - first_token, 0.0),
    )


def _ready(engine: Engine) -> Ready:
    tokenizer, resolved, pool = engine.tokenizer, engine.resolved, engine.pool
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    special = getattr(tokenizer, "special_tokens_map", {})
    return Ready(
        tokenizer=tokenizer.backend_tokenizer.to_str() if tokenizer is not None else None,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: token for name, token in special.items() if isinstance(token, str)},
        vocab_size=engine.model_config.vocab_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        num_pages=sum(pages.capacity for pages in engine.core.scheduler.groups),
        page_size=pool.page_size,
        num_spec_tokens=engine.core.stats.num_drafts,
        sampling_defaults=engine.sampling_defaults,
        info={
            "settings": [
                {"name": choice.name, "value": str(choice.value), "reason": choice.reason}
                for choice in resolved.choices
            ],
            "drafter": engine.drafter.describe() if engine.drafter else None,
            "startup_s": engine.seconds,
        },
    )
