"""What stands before the replicas, with replicas that are functions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from draftloop.server import ray_proxy
from draftloop.server.ray_proxy import SecondChance

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def ask(app, body: bytes = b"{}", headers=(), *, path="/v1/completions", cut=0) -> tuple[int | None, bytes, bool]:
    """Status, body, and whether the answer ended; `cut` sends the body in pieces of so many bytes."""
    pieces = [body[at : at + cut] for at in range(0, len(body), cut)] if cut else [body]
    waiting: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": at + 1 < len(pieces)} for at, piece in enumerate(pieces)
    ]
    sent: list[dict[str, Any]] = []

    async def receive():
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(SecondChance(app)(scope, receive, send))
    status = next((one["status"] for one in sent if one["type"] == "http.response.start"), None)
    bodies = [one for one in sent if one["type"] == "http.response.body"]
    return status, b"".join(one["body"] for one in bodies), bool(bodies) and not bodies[-1].get("more_body", False)


class Replicas:
    """Gives each request to the next of these functions."""

    def __init__(self, *replicas):
        self.replicas, self.bodies, self.scopes = list(replicas), [], []

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        self.bodies.append(body + message["body"])
        await self.replicas.pop(0)(send)


def answers(status: int, body: bytes = b"fine"):
    async def replica(send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return replica


async def dies(send):
    pass


async def dies_while_streaming(send):
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    await send({"type": "http.response.body", "body": b'data: {"first": 1}\n\n', "more_body": True})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(ray_proxy, "FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize("cut", [0, 3])
def test_what_was_not_answered_is_asked_again_with_the_same_body(cut):
    replicas = Replicas(dies, answers(503, b"the engine is dead"), answers(200))
    assert ask(replicas, b'{"prompt": "x"}', cut=cut) == (200, b"fine", True)
    assert replicas.bodies == [b'{"prompt": "x"}'] * 3


def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_asked_again():
    replicas = Replicas(dies_while_streaming, answers(200))
    status, body, ended = ask(replicas)
    first, last, done, _ = body.split(b"\n\n")
    assert (status, ended) == (200, True)
    assert first == b'data: {"first": 1}'
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert done == b"data: [DONE]"
    assert len(replicas.replicas) == 1


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_every_other_answer_is_passed_on(status):
    assert ask(Replicas(answers(status))) == (status, b"fine", True)


def test_after_some_tries_the_refusal_is_passed_on_or_the_loss_is_told():
    assert ask(Replicas(*[answers(503, b"no engine")] * ray_proxy.TRIES)) == (503, b"no engine", True)
    status, body, _ = ask(Replicas(*[dies] * ray_proxy.TRIES))
    assert (status, json.loads(body)["error"]["code"]) == (503, "replica_lost")


def test_the_tries_outlast_a_replica_that_still_refuses_after_its_engine_has_died(monkeypatch):
    pauses_s = []

    async def pause(seconds):
        pauses_s.append(seconds)

    async def replica(scope, receive, send):
        # twice as long as it takes, since a proxy hears of it later
        await answers(503 if sum(pauses_s) < 2 * ray_proxy.LAST_WORDS_S else 200)(send)

    monkeypatch.undo()
    monkeypatch.setattr(ray_proxy.asyncio, "sleep", pause)
    assert ask(replica) == (200, b"fine", True)


def test_nothing_is_asked_again_for_a_client_that_has_gone():
    async def waits(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    assert ask(waits) == (None, b"", False)


def test_a_body_that_is_too_large_to_keep_is_passed_on_once(monkeypatch):
    monkeypatch.setattr(ray_proxy, "MAX_KEPT_BYTES", 10)
    replicas = Replicas(dies)
    assert ask(replicas, b"x" * 40, cut=8)[0] == 503
    assert replicas.bodies == [b"x" * 40]


def session(request: dict[str, Any], headers=(), path="/v1/completions") -> bytes | None:
    replicas = Replicas(answers(200))
    ask(replicas, json.dumps(request).encode(), headers, path=path)
    return dict(replicas.scopes[0]["headers"]).get(b"x-session-id")


def test_the_turns_of_a_conversation_are_one_session_and_other_conversations_others():
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
    first = [system, user]
    later = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Tell me"}]
    other = [system, {"role": "user", "content": "Goodbye"}]
    names = [session({"messages": messages}) for messages in (first, later, other)]
    assert names[0] is not None
    assert names[0] == names[1] != names[2]
    assert session({"messages": first, "cache_salt": "mine"}) != names[0]
    start = "word " * 100
    assert session({"prompt": start + "a"}) == session({"prompt": start + "b"}) != session({"prompt": "a"})
    assert session({"prompt": [1] * 300}) == session({"prompt": [1] * 400})


def test_a_session_that_the_client_names_stays_and_other_requests_have_none():
    assert session({"prompt": "x"}, [(b"x-session-id", b"mine")]) == b"mine"
    assert session({"prompt": "x"}, path="/tokenize") is None
    assert session({"model": "x"}) is None
    nested = b'{"messages": ' + b"[" * 100_000
    assert ask(Replicas(answers(200)), nested)[0] == 200, "the server says what is wrong with it"
