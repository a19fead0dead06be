"""The shipped model with its shipped drafter behind a real server, asked by OpenAI's client and as lm-eval asks."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import openai
import pytest
import torch
from servers import running
from transformers import AutoModelForCausalLM

from draftloop.models.resolve import resolve_model

MODEL, K = "smollm2-135m", 3  # what the shipped head drafts for it
LIMITS = ["--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(1 << 28), "--device", "cpu"]
MESSAGES = [{"role": "user", "content": "What is the capital of France? One sentence."}]
GREEDY = {"model": MODEL, "temperature": 0}
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server():
    with running("--dtype", "float32", model=MODEL, limits=LIMITS, command=True) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_openai_client_over_the_shipped_model_and_head(server, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    info = server.get("/server_info")
    assert info["num_speculative_tokens"] == K
    assert "eagle3" in info["drafter"]

    whole = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=24, **GREEDY)
    assert "Paris" in whole.choices[0].message.content
    stats = whole.metrics["speculative_decoding"]
    assert stats["num_accepted_draft_tokens"] > 0
    assert len(stats["acceptance_histogram"]) == K + 1

    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculative": {"enabled": False}},
            **GREEDY,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, "with and without drafts"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert "speculative_decoding" not in chunks[-1].metrics

    answer = client.chat.completions.create(
        messages=MESSAGES, max_completion_tokens=8, logprobs=True, top_logprobs=3, **GREEDY
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content + "<|im_end|>"
    assert all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in tokens), "greedy"


def test_the_example_streams_an_answer(server, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    importlib.import_module("serve_and_query").ask(server.url)
    assert "Paris" in capsys.readouterr().out


def test_tools_and_json_of_the_shipped_model(client):
    chunks = list(
        client.chat.completions.create(
            messages=[{"role": "user", "content": "Weather in Rome for the next 3 days?"}],
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_completion_tokens=60,
            stream=True,
            **GREEDY,
        )
    )
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments)) == ("get_weather", {"city", "days"})
    assert 1 <= arguments["days"] <= 7
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    schema = {"name": "forecast", "schema": WEATHER["parameters"], "strict": True}
    answer = client.chat.completions.create(
        messages=MESSAGES,
        max_completion_tokens=100,
        response_format={"type": "json_schema", "json_schema": schema},
        **GREEDY,
    )
    found = json.loads(answer.choices[0].message.content)
    assert found["city"] in ("Paris", "Rome")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_loglikelihoods_as_lm_eval_asks_for_them_are_those_of_transformers(server):
    """`local-completions`: prompts as ids, echoed, one token, the first without a value."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL).folder, dtype=torch.float32)
    texts = ["The capital of France is Paris.", "def add(a, b):\n    return a + b\n"]
    prompts = [server.post("/tokenize", {"prompt": text})["tokens"] for text in texts]
    body = {
        "model": MODEL,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1,
        "echo": True,
    }
    for prompt, choice in zip(prompts, server.post("/v1/completions", body)["choices"], strict=True):
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None
        expected = [float(logprobs_TV[at, token]) for at, token in enumerate(prompt[1:])]
        assert math.isclose(sum(found[1:-1]), sum(expected), rel_tol=1e-3)
        assert found[1:-1] == pytest.approx(expected, rel=1e-3, abs=1e-4)
        tops = choice["logprobs"]["top_logprobs"]
        greedy = [float(row_V.max()) for row_V in logprobs_TV]
        assert [max(one.values()) for one in tops[1:]] == pytest.approx(greedy, rel=1e-3)
