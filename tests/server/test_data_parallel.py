"""Two engines behind one server: both serve, what they count adds up, and they end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import openai
import pytest
from servers import EAGER, LONG_LIMITS, PATIENCE_S, running

from draftloop.config import EngineConfig
from draftloop.distributed.replica import Replica
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.request import SamplingParams
from draftloop.server import client as client_module
from draftloop.server.messages import AdapterCounters, Counters, Failed, total
from helpers import answers, tiny_model

LONG = {"prompt": "x", "temperature": 0, "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with running(*EAGER, "-dp", "2", limits=LONG_LIMITS, command=True) as one:
        yield one


def of_engines(server, name: str) -> list[float]:
    """A metric's samples of both engines; one with labels of its own is summed over them."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(f"{name}{{")]
    return [sum(float(line.split()[-1]) for line in lines if f'engine="{rank}"' in line) for rank in range(2)]


def test_both_engines_serve_and_metrics_add_up(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def ask(index: int) -> openai.types.Completion:
        extra = {"ignore_eos": True}
        text = f"prompt {index % 3}"
        return client.completions.create(model=model, prompt=text, temperature=0, max_tokens=40, extra_body=extra)

    with client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(12)))
    for index, answer in enumerate(answers):
        assert answer.choices[0].text == answers[index % 3].choices[0].text, "engines answer alike"
    for name, key in (("generation", "completion_tokens"), ("prompt", "prompt_tokens")):
        tokens = of_engines(server, f"vllm:{name}_tokens_total")
        assert min(tokens) > 0, "an engine had nothing to do"
        assert sum(tokens) == sum(getattr(answer.usage, key) for answer in answers)
    ended = of_engines(server, "vllm:request_success_total")
    assert ended == of_engines(server, "vllm:e2e_request_latency_seconds_count")
    assert sum(ended) == 12
    whole = server.post("/v1/completions", {"prompt": [[1], [2]], "n": 2, "temperature": 1, "max_tokens": 3})
    assert len(whole["choices"]) == 4
    after = of_engines(server, "vllm:request_success_total")
    assert [now - before for now, before in zip(after, ended, strict=True)] == [2, 2], "one prompt for each"
    assert of_engines(server, "draftloop:engine_up") == [1, 1]
    assert server.post("/reset_prefix_cache", {}) == {"engines": [{"success": True}] * 2}


def test_requests_go_where_the_fewest_are_open_and_end_when_nobody_waits(server):
    streams = [server.start_stream("/v1/completions", LONG) for _ in range(4)]
    for connection, response in streams:
        response.readline()
        assert connection
    server.wait_until(lambda: of_engines(server, "vllm:num_requests_running") == [2, 2])
    for connection, _ in streams:
        connection.close()
    server.assert_all_free()


def test_the_death_of_one_engine_ends_the_other_and_turns_health_red(server):
    connection, response = server.start_stream("/v1/completions", LONG)
    with closing(connection):
        response.readline()
        first, second = server.engine_pids
        os.kill(second, signal.SIGKILL)
        server.wait_until(lambda: not server.is_healthy(), timeout_s=10)
        rest = response.read().decode()
    status, _, data = server.request("GET", "/health")
    reason = json.loads(data)["error"]["message"]
    assert (status, reason) == (503, "the process of engine 1 has ended (exit code -9)")
    assert rest.rstrip().endswith("[DONE]")
    server.wait_until(lambda: not os.path.exists(f"/proc/{first}") or first not in server.engine_pids)
    assert of_engines(server, "draftloop:engine_up") == [0, 0]


def test_a_server_that_is_told_to_end_lets_both_engines_finish():
    with running(*EAGER, "-dp", "2", engines=2) as server:
        streams = [server.start_stream("/v1/completions", {**LONG, "max_tokens": 60}) for _ in range(2)]
        server.process.send_signal(signal.SIGTERM)
        for connection, response in streams:
            with closing(connection):
                assert '"finish_reason":"length"' in response.read().decode()
        assert server.process.wait(PATIENCE_S) == 0


def test_what_one_engine_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="data_parallel_size is 2, but this is a single engine; start several by"):
        LLM(tiny_model(), device="cpu", data_parallel_size=2)
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        LLM(tiny_model(), device="cpu", enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="data_parallel_size is 2; it must be 1 where tensor_parallel_size"):
        EngineConfig(data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size is 0; it must be an integer >= 1"):
        EngineConfig(data_parallel_size=0)


@pytest.mark.parametrize("has_last_word", [True, False])
def test_the_cause_is_the_engine_that_ended_first_not_the_one_that_lost_it(has_last_word: bool, monkeypatch):
    monkeypatch.setattr(client_module, "CAUSE_S", 0.05)

    async def lose() -> str:
        client = client_module.EngineClient(EngineConfig(data_parallel_size=2), max_waiting=1, silence_s=1)
        client.state = "ready"
        first, second = client.ranks
        client._take(first, Failed(message="connection closed by peer", by_another=True))
        assert client.state == "ready", "what it lost may still say why"
        if has_last_word:
            client._take(second, Failed(message="no memory"))
        else:
            await asyncio.sleep(0.1)
        assert client.state == "dead"
        return client.reason

    cause = "no memory" if has_last_word else "connection closed by peer"
    assert asyncio.run(lose()) == f"the engine has failed: {cause}"


def test_counters_of_engines_are_summed_place_by_place():
    one = AdapterCounters(num_spec_steps=1, num_draft_tokens=2, num_accepted_tokens=1)
    both = total(
        [
            Counters(prompt_tokens=3, acceptance_histogram=[1, 2], by_adapter={"a": one, "b": one}),
            Counters(prompt_tokens=4, acceptance_histogram=[], by_adapter={"a": one}),
        ]
    )
    twice = AdapterCounters(num_spec_steps=2, num_draft_tokens=4, num_accepted_tokens=2)
    assert both == Counters(prompt_tokens=7, acceptance_histogram=[1, 2], by_adapter={"a": twice, "b": one})


def test_requests_without_a_seed_are_answered_alike_by_no_two_engines():
    """Else a client that samples a prompt many times gets each answer once from every engine."""
    params = SamplingParams(temperature=3, max_tokens=16)
    settings = {"model": tiny_model(), "enforce_eager": True, "seed": 5, "max_model_len": 128, "device": "cpu"}
    found = []
    for replica in (Replica(), Replica(size=2), Replica(rank=1, size=2), Replica(name="other")):
        config = EngineConfig(**settings, kv_cache_memory_bytes=1 << 22, data_parallel_size=replica.size)
        llm = LLM.from_config(config, replica=replica)
        found.append(answers(llm.generate([[1, 2, 3]] * 2, params)))
        llm.close()
    first = found.pop(0)
    assert found[0] == first, "the first one draws as if it were alone"
    assert len({tuple(tokens) for two in found for tokens in two}) == 6
