"""An engine that computes nothing: it gives tokens at a set rate, so that what serving costs can be seen alone.

It speaks the messages of `draftloop.server.engine_process`, in a process of its own. Run as a program, this module
is the API process in front of it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from draftloop.config import EngineConfig
from draftloop.request import SpeculationStats
from draftloop.server.engine_process import connect, end_with_parent
from draftloop.server.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Close,
    Counters,
    Ending,
    Progress,
    Ready,
    Told,
    Update,
    decode_to_engine,
    encode,
)

MODEL = "synthetic"
WORD = " word"
"""The text of every token."""
MAX_MODEL_LEN = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What each request gets."""

    tokens_per_step: int
    steps_per_s: float


@dataclass(kw_only=True)
class _Running:
    request_id: str
    left: int
    num_steps: int = 0


class SyntheticEngine:
    """Steps at even times, and catches up where it was held up."""

    def __init__(self, rate: Rate, socket: zmq.Socket) -> None:
        self._rate, self._socket = rate, socket
        self._running: dict[str, _Running] = {}
        self._counters = Counters(acceptance_histogram=[0] * rate.tokens_per_step)
        self._is_open = True

    def serve(self) -> None:
        """Until a `Close` comes."""
        self._socket.send(encode(_ready(self._rate)))
        next_step = time.monotonic()
        while self._is_open:
            wait_s = max(next_step - time.monotonic(), 0.0) if self._running else None
            if self._socket.poll(None if wait_s is None else round(wait_s * 1e3)):
                was_idle = not self._running
                self._take(decode_to_engine(self._socket.recv()))
                if was_idle:
                    next_step = time.monotonic()
            elif time.monotonic() >= next_step:
                self._step()
                next_step += 1 / self._rate.steps_per_s

    def _take(self, message: Any) -> None:
        match message:
            case Add(request_id=request_id, prompt_ids=prompt_ids, params=params):
                self._counters.prompt_tokens += len(prompt_ids)
                self._running[request_id] = _Running(request_id=request_id, left=params.max_tokens or 1)
                self._socket.send(encode(Accepted(request_id=request_id, num_prompt_tokens=len(prompt_ids))))
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._running.pop(request_id, None)
            case Ask():
                self._socket.send(encode(Told(answer={"rows": []})))
            case Close():
                self._is_open = False

    def _step(self) -> None:
        updates = [self._update(one) for one in list(self._running.values())]
        counters = self._counters
        counters.num_running = len(self._running)
        counters.generated_tokens += sum(len(update.token_ids) for update in updates)
        self._socket.send(encode(Progress(updates=updates, counters=counters)))

    def _update(self, one: _Running) -> Update:
        count = min(self._rate.tokens_per_step, one.left)
        one.left -= count
        one.num_steps += 1
        if not one.left:
            del self._running[one.request_id]
        return Update(
            request_id=one.request_id,
            text=WORD * count,
            token_ids=[1] * count,
            ending=None if one.left else self._ending(one.num_steps),
        )

    def _ending(self, num_steps: int) -> Ending:
        k = self._rate.tokens_per_step - 1
        if not k:
            return Ending(finish_reason="length")
        stats = SpeculationStats(
            num_spec_tokens=k,
            num_spec_steps=num_steps,
            num_draft_tokens=k * num_steps,
            num_accepted_draft_tokens=k * num_steps,
            acceptance_histogram=(*[0] * k, num_steps),
        )
        return Ending(finish_reason="length", speculation=stats)


def _ready(rate: Rate) -> Ready:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Ready(
        tokenizer=tokenizer.to_str(),
        chat_template="{% for message in messages %}{{ message.content }}\n{% endfor %}",
        special_tokens={},
        vocab_size=2,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1024,
        num_pages=1,
        page_size=16,
        num_spec_tokens=rate.tokens_per_step - 1,
        info={},
    )


def run(rate: Rate, config: EngineConfig, address: str, log_level: str) -> None:
    """The engine's process."""
    end_with_parent()
    context = zmq.Context()
    socket = connect(context, address)
    SyntheticEngine(rate, socket).serve()
    socket.close(linger=1000)
    context.term()


def main() -> None:
    """The API process: as `draftloop serve`, at a free port, but for its engine."""
    from draftloop.observability import log
    from draftloop.server.options import ServerOptions
    from draftloop.server.run import serve

    log.setup()
    rate = Rate(**json.loads(sys.argv[1]))
    serve(EngineConfig(model=MODEL), ServerOptions(port=0), engine=partial(run, rate))


if __name__ == "__main__":
    main()
