"""What cannot be served: refused by name, in one shape, and never the server's fault."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from servers import EAGER, K, byte_model, limits, running

from draftloop.server.errors import add_error_handlers
from draftloop.server.protocol import ChatRequest, CompletionRequest
from helpers import tiny_model
from refused import OUT_OF_RANGE, leaves

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
JSON = {"response_format": {"type": "json_object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}


def named(tool: str) -> dict:
    return {"type": "function", "function": {"name": tool}}


@pytest.fixture(scope="module")
def server():
    drafter = ("--spec-method", "draft_model", "--spec-model", byte_model(), "--spec-tokens", str(K))
    with running("--enforce-eager", *drafter) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (COMPLETIONS, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (COMPLETIONS, {"messages": []}, "messages", "it belongs to /v1/chat/completions"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "valid number"),
        (COMPLETIONS, {"temperature": -1}, "temperature", ">= 0"),
        (COMPLETIONS, {"n": 2, "temperature": 0}, "n", "1 at temperature 0"),
        (COMPLETIONS, {"n": 100_000}, "n", "holds at most"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "at most 20"),
        (COMPLETIONS, {"prompt": [1, 257]}, "prompt", "token id 257"),
        (COMPLETIONS, {"prompt": [1] * 2048}, "prompt", "at most 2047"),
        (COMPLETIONS, {"prompt": "x" * 100_000}, "prompt", "never fit"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least one"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": None}, "prompt", "required"),
        (COMPLETIONS, {"speculative": {"num_token": 2}}, "num_token", "unknown"),
        (COMPLETIONS, {"speculative": {"num_tokens": -1}}, "speculative", "an integer >= 0"),
        (COMPLETIONS, {"speculative": {"num_tokens": K + 1}}, "speculative", f"drafts at most {K} tokens"),
        (COMPLETIONS, {"speculative": {"num_tokens": 2, "enabled": False}}, "speculative", "with speculation"),
        (CHAT, {"speculative": {"drafters": ["ngram"]}}, "speculative", "this engine's drafters: draft_model"),
        (COMPLETIONS, {"top_k": 2**40}, "top_k", "at most"),
        (COMPLETIONS, {"temperature": 1e300}, "temperature", "at most"),
        (COMPLETIONS, {"prompt": "half \ud800"}, "prompt", "half a character"),
        (COMPLETIONS, {"prompt": [2**70]}, None, "cannot be passed on"),
        (COMPLETIONS, {"stop": "\ud800"}, None, "cannot be passed on"),
        (COMPLETIONS, {"\ud800": 1}, "\ud800", "unknown parameter"),
        (COMPLETIONS, {"request_id": "a\nb"}, "request_id", "printable"),
        (COMPLETIONS, {"stop": ["x"] * 33}, "stop", "at most 32"),
        (COMPLETIONS, {"stop": "x" * 257}, "stop", "at most 256"),
        (COMPLETIONS, {"bad_words": ["x" * 257]}, "bad_words", "at most 256"),
        (COMPLETIONS, {"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
        (CHAT, {"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs", "at most 262144"),
        (CHAT, {"stream": True, "structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        (COMPLETIONS, {"structured_outputs": {"choice": "x"}}, "structured_outputs", "a list of texts"),
        (COMPLETIONS, {"structured_outputs": {"json": {"n": 2**70}}}, None, "cannot be passed on"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages", "arguments are not JSON"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "may not hold"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"tools": [TOOL], "tool_choice": named("g")}, "tool_choice", "names 'g'; tools has f"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", **JSON}, "tool_choice", "leave response_format out"),
        (CHAT, {**JSON, "structured_outputs": {"regex": "a"}}, "response_format", "exclude each other; leave one out"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "no json_schema.schema"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        (COMPLETIONS, {"n": 2, "temperature": 1, "echo": True, "logprobs": 1}, "n", "n is 2"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "leave stream out"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(server, path, fields, param, message):
    least = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    status, error = server.refusal(path, {**least, **fields})
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]
    server.assert_all_free()


def test_without_a_tokenizer_there_are_token_ids_alone():
    with running(*EAGER, model=tiny_model(), limits=limits(64, 1 << 22)) as server:
        assert server.request("POST", COMPLETIONS, {"prompt": [1, 2], "max_tokens": 1})[0] == 200
        for path, fields, message in (
            (COMPLETIONS, {"prompt": "x"}, "the prompt must be token ids"),
            (COMPLETIONS, {"prompt": [1], "return_token_sources": True}, "return_token_sources needs a tokenizer"),
            (COMPLETIONS, {"prompt": [1], "stop": "x"}, "without a tokenizer there is no text to stop at"),
            (COMPLETIONS, {"prompt": [1], "bad_words": ["x"]}, "without a tokenizer they have no tokens"),
            (COMPLETIONS, {"prompt": [1], "structured_outputs": {"regex": "a"}}, "name one with --tokenizer"),
            (CHAT, {"messages": MESSAGES}, "this model has no chat template"),
            ("/tokenize", {"prompt": "x"}, "the prompt must be token ids"),
        ):
            status, error = server.refusal(path, fields)
            assert (status, error["type"]) == (400, "invalid_request_error"), fields
            assert message in error["message"]


def test_a_fault_of_the_server_is_told_apart_and_says_nothing_of_it():
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    async def fails() -> None:
        raise KeyError("a secret")

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text


def meant_for_http(name: str, value: object) -> bool:
    """JSON can say it, and it is of a type that would not be taken for another."""
    if name not in CompletionRequest.model_fields or value is None:
        return False
    odd = any(leaf in ("nan", "1", "True", "x") or len(leaf) > 300 for leaf in leaves(value))
    return not odd or name == "stop"


def test_every_parameter_out_of_range_is_refused_with_its_name_value_and_range(server):
    asked = [case for case in OUT_OF_RANGE if meant_for_http(*case[:2])]
    assert len(asked) > 35
    for name, value, limit in asked:
        status, error = server.refusal(COMPLETIONS, {"prompt": "x", "temperature": 1, name: value})
        assert (status, error["param"]) == (400, name), (name, value)
        assert all(leaf in error["message"] for leaf in (name, *leaves(value))), error["message"]
        assert re.search(f"{limit}|Input should be a", error["message"]), error["message"]
    server.assert_all_free()


def test_what_is_no_request_at_all_is_refused_in_the_same_shape(server):
    assert server.refusal(COMPLETIONS, b"{no json")[0] == 400
    assert server.refusal(COMPLETIONS, b"[" * 100_000)[0] == 400
    assert server.refusal("/v1/nothing", {})[0] == 404
    assert server.refusal("/v1/models", {})[0] == 405


def test_what_is_nested_without_end_is_refused_however_deep(server):
    """Each depth ends in other hands: those of the parser, or of whoever passes it on."""
    for depth in (*range(800, 1000, 10), 20_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": ' + nested + b"}}"
        status, _ = server.refusal(COMPLETIONS, body)
        assert status == 400, depth
        tool = b'{"function": {"name": "f", "parameters": ' + nested + b"}}"
        body = b'{"messages": [{"role": "user", "content": "?"}], "tools": [' + tool + b'], "tool_choice": "required"}'
        status, _ = server.refusal(CHAT, body)
        assert status == 400, depth


# ---- anything at all ------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "\ud800", "\0", "json_object"]),
    st.lists(st.integers(-2, 300) | st.just(2**70), max_size=3),
    st.lists(st.sampled_from(["", "ab"]), max_size=2),
    st.dictionaries(
        st.sampled_from(["type", "1", "regex", "include_usage", "enabled"]), st.integers(-1, 2), max_size=2
    ),
)


@settings(max_examples=300)
@given(data=st.data())
def test_no_request_is_an_internal_error(server, data):
    path, model = data.draw(st.sampled_from([(COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)]))
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(model.model_fields)), VALUES, min_size=1, max_size=3))
    least = {"prompt": "x", "max_tokens": 1} if path == COMPLETIONS else {"messages": MESSAGES, "max_tokens": 1}
    body = {**least, **fields}
    if not isinstance(body["max_tokens"], int) or body["max_tokens"] > 4:
        body["max_tokens"] = 2
    status, _, answer = server.request("POST", path, body)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]


def test_an_answer_whose_logits_are_nan_is_an_error_of_the_server(tmp_path):
    folder = shutil.copytree(byte_model(), tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with running(*EAGER, model=str(folder)) as server:
        status, error = server.refusal(COMPLETIONS, {"prompt": [1, 7], "max_tokens": 2})
        assert (status, error["type"]) == (500, "server_error")
        assert "the model's logits after 2 tokens are NaN or infinite" in error["message"]
        assert server.request("POST", COMPLETIONS, {"prompt": [1, 2], "max_tokens": 1})[0] == 200
