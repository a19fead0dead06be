"""What happens to requests when clients, the engine or the server go away, and when there are too many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from servers import EAGER, LONG_LIMITS, PATIENCE_S, K, byte_model, events, running

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 8000, "ignore_eos": True, "return_token_ids": True}


def start(server, **fields):
    """A stream of which one token has come."""
    connection, response = server.start_stream(COMPLETIONS, {**LONG, **fields})
    found = events(response)
    next(found)
    return connection, found


@pytest.fixture(scope="module")
def server():
    """Holds four running answers and two waiting ones; wants a key."""
    options = ["--max-waiting", "2", "--api-key", "one", "--max-body-bytes", "20000", *EAGER]
    with running(*options, limits=LONG_LIMITS, command=True, DRAFTLOOP_API_KEY="two") as one:
        one.headers["Authorization"] = "Bearer one"
        yield one
        assert one.process.poll() is None, "it must outlive its engine"


def test_a_key_is_wanted_but_for_health_and_metrics(server):
    for key in ("", "Bearer three", "Bearer", "Basic one", "one", "Bearer onetwo"):
        status, _, data = server.request("POST", COMPLETIONS, {"prompt": "x"}, Authorization=key)
        assert status == 401
        assert json.loads(data)["error"]["code"] == "invalid_api_key"
    assert server.request("GET", "/v1/models", Authorization="Bearer two")[0] == 200
    for path in ("/health", "/ping", "/metrics", "/version", "/load"):
        assert server.request("GET", path, Authorization="")[0] == 200
    for path in ("/server_info", "/v1/models", "/openapi.json"):
        assert server.request("GET", path, Authorization="")[0] == 401


def test_the_api_process_has_no_torch_in_it(server):
    """Neither the library nor a GPU context: what serves clients is small, and a crash of the engine leaves it."""
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    api, engine = (Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.engine_pid))
    assert "libtorch" in engine
    assert "libtorch" not in api


def test_other_origins_are_not_let_in(server):
    assert "access-control-allow-origin" not in server.request("GET", "/health", Origin="https://elsewhere")[1]


def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(server):
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    assert server.refusal(COMPLETIONS, body)[0] == 413
    with closing(server.connect()) as connection:
        connection.request("POST", COMPLETIONS, iter([body[:100], body[100:]]), server.headers, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413, response.read()
        assert "--max-body-bytes" in json.loads(response.read())["error"]["message"]


def test_a_client_that_goes_away_frees_its_row_and_pages_at_once(server):
    before = server.metrics()['vllm:request_success_total{finished_reason="abort"}']
    streams = [start(server) for _ in range(3)]
    assert server.metrics()["vllm:num_requests_running"] == 3
    plain = server.connect()  # one that does not stream
    plain.request("POST", COMPLETIONS, json.dumps(LONG), server.headers)
    server.wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 4)
    for connection in [*(connection for connection, _ in streams), plain]:
        connection.close()
    server.assert_all_free()
    after = server.metrics()
    assert after['vllm:request_success_total{finished_reason="abort"}'] == before + 4
    num_tokens = after["vllm:generation_tokens_total"]
    time.sleep(0.3)
    assert server.metrics()["vllm:generation_tokens_total"] == num_tokens
    assert server.post(COMPLETIONS, {**LONG, "max_tokens": 5})["usage"]["completion_tokens"] == 5


def test_more_requests_than_may_wait_are_refused_and_the_others_served(server):
    streams = [start(server) for _ in range(4)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.post, COMPLETIONS, {**LONG, "max_tokens": 4}) for _ in range(2)]
        server.wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 2)
        status, headers, data = server.request("POST", COMPLETIONS, LONG)
        assert (status, json.loads(data)["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        for connection, _ in streams:
            connection.close()
        assert [answer.result()["usage"]["completion_tokens"] for answer in waiting] == [4, 4]
    server.assert_all_free()


def test_the_death_of_the_engine_turns_health_red_and_ends_open_requests_with_an_error(server):
    connection, found = start(server)
    with closing(connection), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.request, "POST", COMPLETIONS, LONG)
        server.wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 2)
        os.kill(server.engine_pid, signal.SIGKILL)
        last = list(found)[-2:]
        assert last[1] == "[DONE]"
        assert "the engine's process has ended (exit code -9)" in last[0]["error"]["message"]
        status, _, data = whole.result()
        assert (status, json.loads(data)["error"]["code"]) == (503, "engine_unavailable")
    status, error = server.refusal(COMPLETIONS, LONG)
    assert (status, error["code"]) == (503, "engine_unavailable")
    assert server.request("GET", "/health")[0] == 503
    assert server.metrics()["draftloop:engine_up"] == 0


# ---- SIGTERM --------------------------------------------------------------------------------


def test_sigterm_lets_requests_end_up_to_the_deadline():
    with running("--shutdown-timeout-s", "2", *EAGER, limits=LONG_LIMITS, command=True) as server:
        long, long_events = start(server, prompt="x")
        short, short_events = start(server, max_tokens=20)
        with closing(short), closing(long), ThreadPoolExecutor(1) as pool:
            rest = pool.submit(list, long_events)
            server.process.send_signal(signal.SIGTERM)
            *pieces, last, done = list(short_events)
            assert done == "[DONE]"
            assert last["choices"][0]["finish_reason"] == "length"
            assert 1 + len(pieces) <= 20
            last, done = rest.result()[-2:]
            assert done == "[DONE]"
            assert "the server is shutting down, and 2 s have passed" in last["error"]["message"]
        assert server.process.wait(PATIENCE_S) == 0
        with pytest.raises(ConnectionRefusedError):
            server.request("GET", "/health")


def test_the_engine_ends_when_the_server_is_killed():
    with running(*EAGER, ready=False, command=True) as server:
        server.wait_until(lambda: bool(server.engine_pids))
        status, _, data = server.request("GET", "/health")
        assert (status, json.loads(data)["error"]["message"]) == (503, "the engine is starting")
        server.wait_until(server.is_healthy)
        engine = server.engine_pid
        server.process.kill()
        server.process.wait()
        server.wait_until(lambda: not _is_alive(engine))


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_engine_that_cannot_start_ends_the_server_with_one_line():
    command = [sys.executable, "-m", "draftloop", "serve", byte_model(), "--port", "0", "--kv-cache-memory-bytes", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "for a single request" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("draftloop: ")


# ---- accounting -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A server, and the file that its drafter reads."""
    file = tmp_path_factory.mktemp("script") / "script.json"
    with running(script=str(file)) as server:
        yield server, file


def test_b60_counts_of_a_drafter_that_is_right_twice_in_three(scripted):
    """Acceptance length wrong, counters that go down, padded or empty drafts counted."""
    server, file = scripted
    prompts = {2: list(b"two of three"), 0: list(b"all wrong")}
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    plain = {**body, "max_tokens": 80, "prompt": list(prompts.values()), "speculative": {"enabled": False}}
    texts = zip(prompts.items(), server.post(COMPLETIONS, plain)["choices"], strict=True)
    file.write_text(json.dumps([(ids + choice["token_ids"], right) for (right, ids), choice in texts]))
    steps, before = 12, server.metrics()
    right = server.post(COMPLETIONS, {**body, "prompt": prompts[2], "max_tokens": 1 + 3 * steps})
    wrong = server.post(COMPLETIONS, {**body, "prompt": prompts[0], "max_tokens": 1 + steps})
    silent = server.post(COMPLETIONS, {**body, "prompt": [7, 7, 7], "max_tokens": 10})
    after = server.metrics()

    stats = right["metrics"]["speculative_decoding"]
    assert stats["num_spec_steps"] == steps
    assert stats["num_draft_tokens"] == 3 * steps
    assert stats["num_accepted_draft_tokens"] == 2 * steps
    assert stats["mean_acceptance_length"] == 3.0
    assert stats["acceptance_histogram"] == [0, 0, steps, 0]
    assert wrong["metrics"]["speculative_decoding"]["acceptance_histogram"] == [steps, 0, 0, 0]
    # steps without drafts are no drafts
    assert silent["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert silent["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 1.0

    def growth(name):
        return after[name] - before[name]

    all_stats = [one["metrics"]["speculative_decoding"] for one in (right, wrong, silent)]
    for metric, key in (
        ("vllm:spec_decode_num_drafts_total", "num_spec_steps"),
        ("vllm:spec_decode_num_draft_tokens_total", "num_draft_tokens"),
        ("vllm:spec_decode_num_accepted_tokens_total", "num_accepted_draft_tokens"),
    ):
        assert growth(metric) == sum(one[key] for one in all_stats)
    per_position = [after[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(K)]
    assert per_position == [steps, steps, 0]
    assert growth("draftloop:steps_without_drafts_total") == 9
    assert growth(f'draftloop:steps_total{{drafts="{K}"}}') == 2 * steps + 9
    assert (after['draftloop:steps_total{drafts="0"}'], after["draftloop:spec_k_now"]) == (0, K)
    assert growth("vllm:generation_tokens_total") == sum(
        a["usage"]["completion_tokens"] for a in (right, wrong, silent)
    )


def test_a_second_interrupt_ends_the_server_at_once_and_its_engine(scripted):
    server, _ = scripted
    connection, _ = start(server, max_tokens=400)
    engine = server.engine_pid
    with closing(connection):
        server.process.send_signal(signal.SIGINT)
        server.wait_until(lambda: "shutting down" in server.log.read_text())
        server.process.send_signal(signal.SIGINT)
        server.process.wait(PATIENCE_S)
    server.wait_until(lambda: not _is_alive(engine))


# ---- traffic --------------------------------------------------------------------------------


def test_b58_long_conversations_of_many_clients_go_on_and_a_stall_ends_in_an_error():
    """A server that falls silent under load, without an error."""
    with running("--enforce-eager", "--spec-method", "ngram", "--spec-tokens", str(K), silence_s=6) as server:
        before = server.metrics()
        with ThreadPoolExecutor(16) as pool:
            usages = [usage for found in pool.map(lambda i: _converse(server, i), range(8)) for usage in found]
        after = server.metrics()
        for name, key in (("generation", "completion_tokens"), ("prompt", "prompt_tokens")):
            growth = after[f"vllm:{name}_tokens_total"] - before[f"vllm:{name}_tokens_total"]
            assert growth == sum(usage[key] for usage in usages)

        with ThreadPoolExecutor(16) as pool:  # every third client goes away in the middle
            assert sum(pool.map(lambda i: _read_some(server, i), range(48))) == 32
        server.assert_all_free()

        connection, found = start(server, max_tokens=1500)
        with closing(connection):
            os.kill(server.engine_pid, signal.SIGSTOP)
            last = list(found)[-2:]
        assert "the engine has been silent for" in last[0]["error"]["message"]
        assert server.request("GET", "/health")[0] == 503


def _converse(server, client: int, num_turns: int = 6) -> list[dict[str, int]]:
    """A conversation that grows; what each turn used."""
    messages, usages = [], []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"turn {turn} of client {client}"})
        body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "seed": client}
        answer = server.post("/v1/chat/completions", body)
        choice, usage = answer["choices"][0], answer["usage"]
        assert len(choice["token_ids"]) == usage["completion_tokens"] == 8
        assert len(answer["prompt_token_ids"]) == usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        usages.append(usage)
    return usages


def _read_some(server, client: int) -> bool:
    """A stream; every third client reads a few pieces of it only. True if all was read."""
    connection, found = start(server, max_tokens=30, prompt=[client + 1] * 4)
    with closing(connection):
        if client % 3 == 0:
            next(found)
            return False
        *_, last, done = found
        assert done == "[DONE]"
        return last["choices"][0]["finish_reason"] == "length"
