"""The engine's side of the pair: what it says after each step, and how soon it lets go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from servers import byte_model

from draftloop.engine.llm import LLM
from draftloop.request import SamplingParams
from draftloop.server.engine_process import EngineServer
from draftloop.server.messages import Abort, Accepted, Add, Close, Progress, Ready, Refused, decode_from_engine, encode
from example_drafters import example_configs
from helpers import assert_all_free, greedy, make_engine, oracle, prompts

NGRAM = example_configs()["ngram"][0]


class Pair:
    """An engine's server, stepped by hand, and the other end of its socket."""

    def __init__(self, llm: LLM, context: zmq.Context) -> None:
        self.llm = llm
        self.socket, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.socket.bind("inproc://pair")
        far.connect("inproc://pair")
        self.far, self.server = far, EngineServer(llm.engine, far)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def iterate(self, count: int = 1) -> list[Any]:
        """Iterations of the server's loop; what it said in them."""
        for _ in range(count):
            if self.llm.engine.core.idle and not self.far.poll(0):
                break  # it would wait for a message
            self.server._receive()
            self.server._step()
        said = []
        while self.socket.poll(0):
            said.append(decode_from_engine(self.socket.recv()))
        return said


@pytest.fixture(params=[False, True], ids=["in_turns", "overlapped"])
def pair(request) -> Iterator[Pair]:
    llm = make_engine(speculative_config=NGRAM, enforce_eager=True, async_scheduling=request.param)
    with zmq.Context() as context:
        yield Pair(llm, context)
        context.destroy(linger=0)
    llm.close()


def updates_of(said: list[Any]) -> list[Any]:
    return [update for message in said if isinstance(message, Progress) for update in message.updates]


def test_updates_are_what_is_new_and_join_to_the_answer(pair):
    asked = prompts(3)
    pair.send(*(Add(request_id=str(i), prompt_ids=ids, params=greedy(20)) for i, ids in enumerate(asked)))
    said = pair.iterate(40)
    assert [(one.request_id, one.num_prompt_tokens) for one in said if isinstance(one, Accepted)] == [
        (str(i), len(ids)) for i, ids in enumerate(asked)
    ]
    for i, ids in enumerate(asked):
        mine = [update for update in updates_of(said) if update.request_id == str(i)]
        assert [token for update in mine for token in update.token_ids] == oracle(ids, 20)
        *earlier, last = mine
        assert all(update.ending is None for update in earlier)
        assert last.ending.finish_reason == "length"
        assert last.ending.queue_s > 0
        assert last.ending.decode_s > 0
    assert [m for m in said if isinstance(m, Progress)][-1].counters.generated_tokens == 60
    assert_all_free(pair.llm)


def test_an_aborted_request_is_gone_before_the_next_step_and_everything_is_free_in_two_iterations(pair):
    pair.send(Add(request_id="a", prompt_ids=[1, 2], params=greedy(100)))
    pair.iterate(5)
    core = pair.llm.engine.core
    known = core.stats.generated_tokens
    assert known > 0
    pair.send(Abort(request_ids=["a", "never heard of"]))
    said = pair.iterate(2)
    assert updates_of(said) == []
    assert core.stats.generated_tokens == known
    counters = [message.counters for message in said if isinstance(message, Progress)][-1]
    assert (counters.num_running, counters.num_pages_in_use) == (0, 0)
    assert_all_free(pair.llm)


def test_a_request_that_cannot_be_served_is_refused_and_the_others_go_on(pair):
    pair.send(
        Add(request_id="bad", prompt_ids=[10_000], params=greedy(3)),
        Add(request_id="good", prompt_ids=[1], params=SamplingParams(temperature=0, max_tokens=3)),
    )
    said = pair.iterate(6)
    (refused,) = [message for message in said if isinstance(message, Refused)]
    assert (refused.request_id, "token id 10000" in refused.message) == ("bad", True)
    assert updates_of(said)[-1].ending.finish_reason == "length"


def test_a_request_whose_grammar_is_of_no_use_is_refused_and_nobody_waits_any_more():
    pytest.importorskip("xgrammar")
    llm = make_engine(byte_model(), enforce_eager=True)
    with zmq.Context() as context:
        pair = Pair(llm, context)
        params = SamplingParams(temperature=0, max_tokens=3, structured_outputs={"regex": "("})
        for request_id in ("new", "known by now"):
            pair.send(Add(request_id=request_id, prompt_ids=[1], params=params))
            said = pair.iterate(100_000)
            (refused,) = [message for message in said if isinstance(message, Refused)]
            assert (refused.request_id, "regex cannot be used" in refused.message) == (request_id, True)
            assert not [message for message in said if isinstance(message, Accepted)]
            assert said[-1].counters.num_waiting == 0
        context.destroy(linger=0)
    llm.close()


def test_it_says_when_it_is_ready_and_ends_when_it_is_told(pair):
    pair.send(Close())
    pair.server.serve()
    ready = decode_from_engine(pair.socket.recv())
    assert isinstance(ready, Ready)
    assert (ready.tokenizer, ready.max_num_seqs, ready.num_spec_tokens) == (None, 8, 3)
    assert {"settings", "drafter", "startup_s"} == set(ready.info)
