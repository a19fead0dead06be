"""Streams for people who read along: the same answer, its tokens evenly in time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import K, byte_model, running

from draftloop.request import TokenSource
from draftloop.server.messages import Ending, TracedToken, Update, merge
from draftloop.server.smooth import MAX_INTERVAL_S, Smoother, split

END = Ending(finish_reason="length")


def update(count: int, text: str = "", ending: Ending | None = None) -> Update:
    return Update(request_id="r", text=text, token_ids=list(range(count)), ending=ending)


def shown(smoother: Smoother, until: float = 1e9) -> list[tuple[float, Update]]:
    """Everything that is shown up to then if nothing more comes, and when."""
    found = []
    while (at := smoother.next_due) is not None and at < until:
        found += [(at, piece) for _, piece in smoother.due(at)]
    return found


def test_the_tokens_of_a_step_are_spread_evenly_until_the_next():
    smoother, found = Smoother(), []
    for step in range(4):
        smoother.take([(0, update(4, "abcdefgh"))], step * 0.2)
        found += shown(smoother, (step + 1) * 0.2 - 1e-6)
    assert found[0] == (0.0, update(4, "abcdefgh")), "how long steps take is not known yet"
    assert [piece.text for _, piece in found[1:]] == ["ab", "cd", "ef", "gh"] * 3
    times = [at for at, _ in found]
    assert times == pytest.approx([0.0, *(0.2 + i * 0.05 for i in range(12))])


steps = st.lists(st.tuples(st.integers(0, 5), st.text("abé", max_size=9), st.floats(0, 2)), min_size=1, max_size=12)


@settings(max_examples=200)
@given(steps)
def test_nothing_is_lost_nor_late_by_more_than_a_step(steps):
    smoother, now, found, longest = Smoother(), 0.0, [], 0.0
    updates = [update(count, text) for count, text, _ in steps]
    updates[-1].ending = END
    for index, ((_, _, gap), one) in enumerate(zip(steps, updates, strict=True)):
        if index:
            now, longest = now + gap, max(longest, gap)
        found += shown(smoother, now)
        smoother.take([(0, one)], now)
    rest = shown(smoother)
    found += rest
    assert merge([piece for _, piece in found]) == merge(updates)
    assert all(a <= b for (a, _), (b, _) in itertools.pairwise(found))
    assert rest[-1][1].ending == END
    assert rest[-1][0] - now <= min(longest, MAX_INTERVAL_S)
    assert not any(piece.ending for _, piece in found[:-1])


def test_answers_of_a_request_do_not_wait_for_each_other():
    smoother = Smoother()
    for now in (0.0, 0.1):
        smoother.take([(0, update(2, "ab")), (1, update(1, "z"))], now)
    assert smoother.due(0.1) == [(0, Update("r", "aba", [0, 1, 0])), (1, Update("r", "zz", [0, 0]))]
    assert smoother.due(0.16) == [(0, Update("r", "b", [1]))]


def test_what_belongs_to_a_token_stays_with_it():
    traced = [TracedToken(token_id=i, text=c, source=TokenSource(position=i)) for i, c in enumerate("xyz")]
    whole = Update("r", "xyz", [0, 1, 2], logprobs=[{0: 1}, {1: 2}, {2: 3}], prompt_logprobs=[None], traced=traced)
    pieces = split(whole)
    assert merge(pieces) == whole
    assert [(piece.token_ids, piece.logprobs, piece.traced) for piece in pieces] == [
        ([i], [{i: i + 1}], [traced[i]]) for i in range(3)
    ]
    assert [piece.prompt_logprobs for piece in pieces] == [[None], None, None]


def test_a_smooth_stream_is_the_same_answer_token_by_token():
    """Usage and the end too, on both routes."""
    drafter = ("--spec-method", "draft_model", "--spec-model", byte_model(), "--spec-tokens", str(K))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    with running("--smooth-stream", "--enforce-eager", *drafter) as server:
        for path, prompt in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            whole = server.post(path, {**body, **prompt})
            *events, last = server.stream(path, {**body, **prompt, "stream_options": options})
            pieces = [event["choices"][0] for event in events]
            texts = [piece.get("text") or piece.get("delta", {}).get("content", "") for piece in pieces]
            first = whole["choices"][0]
            assert "".join(texts) == (first.get("text") or first["message"]["content"])
            ids = [piece.get("token_ids", []) for piece in pieces]
            assert list(itertools.chain(*ids)) == first["token_ids"]
            num_steps = 1 + last["metrics"]["speculative_decoding"]["num_spec_steps"]
            assert sum(map(bool, ids)) > num_steps, "more pieces than steps"
            for event, count in zip(events, itertools.accumulate(map(len, ids)), strict=True):
                assert event["usage"]["completion_tokens"] == count
            assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
            assert pieces[-1]["finish_reason"] == first["finish_reason"] == "length"
        server.assert_all_free()
