"""Two engines that share their experts, behind one server: they rest, are called, step and end together."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from servers import running

from experts import tiny_experts
from helpers import oracle, prompts

TOGETHER = ["-dp", "2", "--enable-expert-parallel", "--enforce-eager", "--spec-method", "ngram", "--spec-tokens", "2"]
LIMITS = ["--max-model-len", "128", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(1 << 22), "--device", "cpu"]


@pytest.fixture(scope="module")
def server():
    with running(*TOGETHER, model=tiny_experts(), limits=LIMITS, engines=2) as one:
        yield one
        if one.is_healthy():
            assert one.stop() == 0


def ask(server, prompt: list[int], max_tokens: int = 16) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return server.post("/v1/completions", body)["choices"][0]["token_ids"]


def test_one_request_alone_is_served_while_the_other_engine_is_idle(server):
    for prompt in prompts(3):
        assert ask(server, prompt) == oracle(prompt, 16, model=tiny_experts())


def test_requests_at_any_time_to_both_are_served_and_engines_rest_between_them(server):
    several = prompts(16)
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda prompt: ask(server, prompt), several))
    assert found == [oracle(prompt, 16, model=tiny_experts()) for prompt in several]
    server.assert_all_free()

    def spent() -> int:
        return sum(_ticks(pid) for pid in server.engine_pids)

    before = spent()
    time.sleep(0.5)
    assert spent() - before < 10, "engines that have nothing to do go on stepping"
    assert ask(server, several[0]) == found[0], "and are called when there is something"
    assert server.get("/server_info")["graphs"]["cudagraph_mode"] == "NONE"


def _ticks(pid: int) -> int:
    """Hundredths of a second of processor time."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_client_that_goes_away_and_a_killed_engine_leave_nobody_waiting(server):
    body = {"prompt": [1, 2, 3], "max_tokens": 110, "ignore_eos": True}
    gone, _ = server.start_stream("/v1/completions", body)
    gone.close()
    server.assert_all_free()
    connection, response = server.start_stream("/v1/completions", body)
    with closing(connection):
        response.readline()
        os.kill(server.engine_pids[1], signal.SIGKILL)
        server.wait_until(lambda: not server.is_healthy(), timeout_s=10)
        assert response.read().decode().rstrip().endswith("[DONE]")
    status, error = server.refusal("/v1/completions", body)
    assert (status, error["message"]) == (503, "the process of engine 1 has ended (exit code -9)")
