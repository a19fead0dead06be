"""Adapters over HTTP: a request names one as its model."""

from __future__ import annotations

import json

import openai
import pytest
from servers import K, Server, byte_model, running

from adapters import merged, random_adapter
from draftloop.config import EngineConfig
from draftloop.errors import ConfigError
from draftloop.server.app import make_app
from draftloop.server.client import EngineClient
from draftloop.server.options import ServerOptions
from helpers import oracle

PROMPT = "hello world, hello"


def adapter(name: str, seed: int) -> str:
    return random_adapter(byte_model(), f"served-{name}", seed=seed)


@pytest.fixture(scope="module")
def server():
    paths = [f"one={adapter('one', 1)}", json.dumps({"name": "two", "path": adapter("two", 2)})]
    drafter = ("--spec-method", "draft_model", "--spec-model", byte_model(), "--spec-tokens", str(K))
    with running(
        *drafter, "--served-model-name", "tiny", "--enable-lora", "--max-loras", "2", "--lora-modules", *paths
    ) as server:
        yield server


def test_a_request_is_answered_by_the_adapter_that_it_names(server: Server) -> None:
    models = {"tiny": byte_model(), "one": merged(byte_model(), adapter("one", 1))}
    models["two"] = merged(byte_model(), adapter("two", 2))
    ids = list(server.post("/tokenize", {"prompt": PROMPT})["tokens"])
    before = server.metrics()
    said = {}
    for name, folder in models.items():
        body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
        answer = server.post("/v1/completions", {**body, "ignore_eos": True})
        assert answer["model"] == name
        said[name] = answer["choices"][0]["token_ids"]
        assert said[name] == oracle(ids, 12, model=folder)
        chunks = server.stream("/v1/completions", {**body, "ignore_eos": True})
        assert {chunk["model"] for chunk in chunks} == {name}
        streamed = [token for chunk in chunks if chunk["choices"] for token in chunk["choices"][0]["token_ids"]]
        assert streamed == said[name]
    assert said["one"] != said["tiny"] != said["two"] != said["one"]
    after = server.metrics()
    total = after["vllm:spec_decode_num_drafts_total"] - before["vllm:spec_decode_num_drafts_total"]
    mine = [after[f'draftloop:adapter_num_drafts_total{{adapter="{name}"}}'] for name in ("one", "two")]
    assert 0 < sum(mine) < total


def test_openais_client_lists_adapters_and_chats_with_one(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        cards = {card.id: card.model_dump() for card in client.models.list()}
        assert list(cards) == ["tiny", "one", "two"]
        assert (cards["one"]["parent"], cards["one"]["root"]) == ("tiny", adapter("one", 1))
        assert cards["tiny"]["parent"] is None
        assert client.models.retrieve("two").id == "two"
        messages = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="one", messages=messages, max_tokens=4, temperature=0)
        assert answer.model == "one"
        with pytest.raises(openai.NotFoundError, match="there is no model 'three'; known: tiny, one, two"):
            client.chat.completions.create(model="three", messages=messages)


def test_an_adapter_may_not_be_called_as_the_model_is() -> None:
    config = EngineConfig(enable_lora=True, lora_modules=("tiny=/somewhere",))
    client = EngineClient(config, max_waiting=1, silence_s=1)
    with pytest.raises(ConfigError, match="lora_modules names 'tiny', as the model is called"):
        make_app(client, ServerOptions(served_model_name=("tiny",)))
