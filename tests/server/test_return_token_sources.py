"""`return_token_sources`: of each token, whether it was drafted, and which drafts it replaces."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from servers import EOS, K, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RENDERED = "[user]hello[assistant]"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
ASK = {**GREEDY, "return_token_sources": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A server whose drafter is right twice in three for RENDERED, always for "all", and what the model answers."""
    file = tmp_path_factory.mktemp("script") / "script.json"
    with running(script=str(file)) as server:
        body = {**GREEDY, "prompt": [RENDERED, "all"], "max_tokens": 80, "return_token_ids": True}
        choices = server.post(COMPLETIONS, body)["choices"]
        script = [(c["prompt_token_ids"] + c["token_ids"], right) for c, right in zip(choices, (2, K), strict=True)]
        file.write_text(json.dumps(script))
        yield server, [choice["token_ids"] for choice in choices]


def replay(sources: list[dict], answer: list[int], right: int) -> Counter[str]:
    """Check the sources of a drafter that drafts `right` of K tokens right, over and over; count them by kind."""
    for at, one in enumerate(sources):
        place = (at - 1) % (right + 1) + 1
        assert one["token_id"] == answer[at]
        if at == 0:
            assert one["source"] == "plain"
        elif place <= right:
            assert (one["source"], one["position"]) == ("draft", place)
        elif right == K:
            assert one["source"] == "bonus"
        else:
            assert one["source"] == "replacement"
            wrong = [(token + 1) % EOS for token in answer[at : at + K - right]]
            assert [draft["token_id"] for draft in one["rejected"]] == wrong
        assert ("position" in one, "rejected" in one) == (one["source"] == "draft", one["source"] == "replacement")
    return Counter(one["source"] for one in sources)


def test_sources_of_a_scripted_drafter_are_what_it_did_and_agree_with_the_metrics(scripted):
    server, answers = scripted
    for prompt, answer, right in ((RENDERED, answers[0], 2), ("all", answers[1], K)):
        before = server.metrics()
        whole = server.post(COMPLETIONS, {**ASK, "prompt": prompt})
        after = server.metrics()
        choice, stats = whole["choices"][0], whole["metrics"]["speculative_decoding"]
        counts = replay(choice["token_sources"], answer, right)
        assert [one["token_id"] for one in choice["token_sources"]] == choice["token_ids"]
        assert counts.total() == 40
        rejected = sum(len(one.get("rejected", [])) for one in choice["token_sources"])
        assert counts == (
            {"plain": 1, "draft": 26, "replacement": 13} if right == 2 else {"plain": 1, "draft": 30, "bonus": 9}
        )
        assert stats["num_accepted_draft_tokens"] == counts["draft"]
        assert stats["num_spec_steps"] == -(-39 // (right + 1))
        assert stats["num_draft_tokens"] == counts["draft"] + rejected
        for name, count in (("accepted", counts["draft"]), ("draft", counts["draft"] + rejected)):
            metric = f"vllm:spec_decode_num_{name}_tokens_total"
            assert after[metric] - before[metric] == count


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_stream_carries_the_sources_of_the_whole_answer_and_their_texts_join_to_it(scripted, route):
    server, answers = scripted
    asked = {"prompt": RENDERED} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    whole = server.post(route, {**ASK, **asked})["choices"][0]
    pieces = [choice for event in server.stream(route, {**ASK, **asked}) for choice in event["choices"]]
    sources = [one for piece in pieces for one in piece.get("token_sources", [])]
    assert sources == whole["token_sources"]
    replay(sources, answers[0], 2)
    text = whole["text"] if route == COMPLETIONS else whole["message"]["content"]
    assert "".join(one["text"] for one in sources) == text


def test_texts_of_tokens_end_where_a_stop_text_cut_the_answer(scripted):
    server, _ = scripted
    text = server.post(COMPLETIONS, {**ASK, "prompt": RENDERED, "max_tokens": 60})["choices"][0]["text"]
    for start in range(8, 20):
        stop = text[start : start + 4]
        body = {**ASK, "prompt": RENDERED, "max_tokens": 60, "stop": stop}
        shown = ""
        for event in server.stream(COMPLETIONS, body):
            for choice in event["choices"]:
                shown += choice["text"]
                texts = "".join(one["text"] for one in choice.get("token_sources", []))
                assert len(texts) <= len(shown), "a token came before its text"
        choice = server.post(COMPLETIONS, body)["choices"][0]
        assert shown == choice["text"] == "".join(one["text"] for one in choice["token_sources"])
        assert len(choice["token_sources"]) == len(choice["token_ids"])


def test_without_speculation_all_tokens_are_plain(scripted):
    server, answers = scripted
    off = server.post(COMPLETIONS, {**ASK, "prompt": RENDERED, "speculative": {"enabled": False}})["choices"][0]
    assert {one["source"] for one in off["token_sources"]} == {"plain"}
    assert off["token_ids"] == answers[0][:40]


def test_nobody_gets_sources_who_did_not_ask(scripted):
    server, _ = scripted
    for fields in ({}, {"return_token_sources": False}):
        body = {**GREEDY, **fields, "prompt": RENDERED}
        assert "token_sources" not in server.post(COMPLETIONS, body)["choices"][0]
        assert all("token_sources" not in c for e in server.stream(COMPLETIONS, body) for c in e["choices"])
    assert server.refusal(COMPLETIONS, {"prompt": "x", "return_token_sources": "maybe"})[0] == 400
