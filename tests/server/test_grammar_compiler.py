"""Grammars that somebody sent to do harm: they cost their own request, and nobody else anything."""

from __future__ import annotations

import json
import signal
import time
from copy import copy
from types import SimpleNamespace

import pytest

from draftloop.errors import RequestError
from draftloop.request import StructuredOutputsParams
from draftloop.sampling import grammar as grammar_module
from draftloop.sampling.grammar_compiler import MAX_CHARACTERS, Compilers, GrammarError, ProcessLostError
from helpers import engine, greedy

xgrammar = pytest.importorskip("xgrammar")

SLOW = {"properties": {f"k{i}": {"type": "string", "pattern": "^(.{1,200}y){1,20}$"} for i in range(200)}}
"""Takes some twenty seconds."""


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], stop_token_ids=[0]).serialize_json()


@pytest.fixture(scope="module")
def compilers():
    made = Compilers()
    yield made
    made.close()


def test_what_takes_too_long_is_given_up_and_the_next_one_compiled(compilers, tokenizer):
    compilers.compile(StructuredOutputsParams(regex="a"), tokenizer, timeout_s=60)  # starts the process
    begin = time.monotonic()
    with pytest.raises(GrammarError, match=r"structured_outputs\.json takes more than 0.5 s or 2048 MiB to compile"):
        compilers.compile(StructuredOutputsParams(json=SLOW), tokenizer, timeout_s=0.5)
    assert time.monotonic() - begin < 15
    assert compilers.compile(StructuredOutputsParams(regex="a+"), tokenizer, timeout_s=60)


def test_what_is_nested_too_deeply_is_refused(compilers, tokenizer):
    deep = "(" * 100_000 + "a" + ")" * 100_000
    with pytest.raises(GrammarError, match="structured_outputs"):
        compilers.compile(StructuredOutputsParams(regex=deep + "{1,100000}"), tokenizer, timeout_s=3)
    assert compilers.compile(StructuredOutputsParams(choice=("a", "b")), tokenizer, timeout_s=60)


@pytest.mark.parametrize("chosen", ["😀", "日本", 'a "quoted" one', "a\\b\n"])
def test_a_choice_may_be_of_any_characters(compilers, tokenizer, chosen):
    compiled = compilers.compile(StructuredOutputsParams(choice=("no", chosen)), tokenizer, timeout_s=60)
    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
    matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(compiled, info))
    assert all(matcher.accept_token(byte) for byte in chosen.encode())
    assert matcher.accept_token(0), "and it ends there"


def test_a_refusal_keeps_the_process(compilers, tokenizer):
    compilers.compile(StructuredOutputsParams(regex="a"), tokenizer, timeout_s=60)
    (before,) = compilers._idle
    with pytest.raises(GrammarError, match=r"structured_outputs\.regex cannot be used"):
        compilers.compile(StructuredOutputsParams(regex="("), tokenizer, timeout_s=60)
    assert compilers._idle == [before]


def test_a_process_that_has_ended_meanwhile_is_replaced(compilers, tokenizer):
    """By an interrupt, or for want of memory: not by this grammar."""
    compilers.compile(StructuredOutputsParams(regex="a"), tokenizer, timeout_s=10)
    (alive,) = compilers._idle
    dead, killed = copy(alive), []
    dead._popen = SimpleNamespace(poll=lambda: -signal.SIGINT)
    dead.kill = lambda: killed.append(dead)
    compilers._idle.append(dead)
    assert compilers.compile(StructuredOutputsParams(regex="b"), tokenizer, timeout_s=10)
    assert (compilers._idle, killed) == ([alive], [dead])


def test_a_process_that_ends_while_it_is_asked_says_so(compilers, tokenizer):
    compilers.compile(StructuredOutputsParams(regex="a"), tokenizer, timeout_s=60)
    popen = compilers._idle[-1]._popen
    popen.kill()
    popen.wait()
    popen.poll = lambda: None  # pyrefly: ignore; it seems to live
    with pytest.raises(ProcessLostError, match="the process that compiles grammars has ended"):
        compilers.compile(StructuredOutputsParams(regex="b"), tokenizer, timeout_s=60)
    assert compilers.compile(StructuredOutputsParams(regex="c"), tokenizer, timeout_s=60)


def test_what_failed_for_want_of_time_is_tried_again_and_what_was_refused_is_not(monkeypatch):
    from servers import byte_model

    asked, error = [], GrammarError("refused")

    def fail(self, params):
        asked.append(params)
        raise error

    monkeypatch.setattr(grammar_module.GrammarCompiler, "_compile", fail)
    llm = engine(byte_model(), enforce_eager=True)
    for error, name, num_compiled in (
        (GrammarError("says nothing"), "refused", 1),
        (ProcessLostError("too slow"), "slow", 2),
        (OSError("no memory"), "no memory", 2),
    ):
        asked.clear()
        for _ in range(2):
            with pytest.raises(RequestError, match=str(error)):
                llm.generate([1], greedy(2, structured_outputs={"choice": [name]}))
        assert len(asked) == num_compiled, name


def test_a_text_that_is_too_long_is_refused_at_once():
    from servers import byte_model

    llm = engine(byte_model(), enforce_eager=True)
    long = json.dumps({"enum": ["x" * MAX_CHARACTERS]})
    with pytest.raises(RequestError, match=rf"characters; at most {MAX_CHARACTERS} are taken"):
        llm.generate([1], greedy(2, structured_outputs={"json": long}))


def test_a_grammar_that_is_slow_to_follow_ends_its_request_alone(monkeypatch):
    """It can be read in so many ways that each token takes longer than the last."""
    from servers import byte_model

    monkeypatch.setattr(grammar_module, "FOLLOW_S", 0.05)
    monkeypatch.setattr(grammar_module, "FOLLOW_S_PER_TOKEN", 0.0001)
    llm = engine(byte_model(), enforce_eager=True)
    many_ways = 'root ::= a* b\na ::= ("a"* "a"*)* a*\nb ::= root root "b" | "a"'
    slow, free = llm.generate([[1], [2]], [greedy(500, structured_outputs={"grammar": many_ways}), greedy(20)])
    assert slow.outputs[0].finish_reason == "error"
    assert "the grammar can be read in too many ways" in slow.error
    assert len(free.outputs[0].token_ids) == 20
