"""Traffic as `vllm bench serve` makes it, with clients that go away: nothing is lost, and nothing is left.

TRAFFIC_REQUESTS=1000 makes each stream ask as often; `-s` shows what it gave.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers import K, byte_model, events, running

REQUESTS = int(os.environ.get("TRAFFIC_REQUESTS", "12"))
"""Of each stream."""
STREAMS = 16
GOES_AWAY = 0.3
LIMITS = ["--max-model-len", "512", "--max-num-seqs", "12", "--kv-cache-memory-bytes", str(1 << 23)]
MIB = 1 << 20


@dataclass
class Seen:
    """What the clients saw, together."""

    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)


def request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """As the benchmark asks, on one of its two routes."""
    text = "".join(chance.choices("abcdefgh ", k=chance.randint(1, 120)))
    body = {
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    count = chance.randint(1, 60)
    if chance.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text, "max_tokens": count, "logprobs": None}
    content = [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return "/v1/chat/completions", {**body, "messages": messages, "max_completion_tokens": count}


def ask(server, chance: random.Random, seen: Seen, *, goes_away: float) -> None:
    """One request, read to its end or to some place in it."""
    path, body = request(chance)
    patience = chance.randint(0, 8) if chance.random() < goes_away else None
    connection, response = server.start_stream(path, body)
    with closing(connection):
        delivered, last = 0, {}
        for place, event in enumerate(events(response)):
            if place == patience:
                seen.add(gone=1, delivered_to_gone=delivered)
                return
            if event == "[DONE]":
                break
            last = event
            delivered += sum(len(choice.get("token_ids", [])) for choice in event["choices"])
            assert event["usage"]["completion_tokens"] == delivered
    asked = body.get("max_tokens") or body["max_completion_tokens"]
    stats = last["metrics"]["speculative_decoding"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == delivered == asked
    assert len(stats["acceptance_histogram"]) == K + 1
    seen.add(
        ended=1,
        delivered=delivered,
        prompts=last["usage"]["prompt_tokens"],
        drafts=stats["num_spec_steps"],
        draft_tokens=stats["num_draft_tokens"],
        accepted=stats["num_accepted_draft_tokens"],
    )


def traffic(server, *, requests: int, goes_away: float, seed: int) -> Counter[str]:
    """All streams at once, so many requests each; what the clients saw."""
    seen = Seen()

    def client(number: int) -> None:
        chance = random.Random(seed + number)
        for _ in range(requests):
            ask(server, chance, seen, goes_away=goes_away)

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(client, range(STREAMS)))
    return seen.counts


def held(pid: int) -> dict[str, int]:
    """Resident MiB, open files and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"mib": int(status["VmRSS"].split()[0]) // 1024, "files": files, "threads": int(status["Threads"])}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_traffic_with_clients_that_go_away_leaves_nothing_and_every_token_is_counted(device):
    drafter = ("--spec-method", "draft_model", "--spec-model", byte_model(), "--spec-tokens", str(K))
    with running(*drafter, limits=[*LIMITS, "--device", device], command=True) as server:
        pids = {"api": server.process.pid, "engine": server.engine_pid}
        traffic(server, requests=REQUESTS // 4, goes_away=GOES_AWAY, seed=0)  # every size has been seen
        server.assert_all_free()
        before, held_before = server.metrics(), {name: held(pid) for name, pid in pids.items()}

        seen = traffic(server, requests=REQUESTS // 2, goes_away=GOES_AWAY, seed=100)
        server.assert_all_free()
        after, held_after = server.metrics(), {name: held(pid) for name, pid in pids.items()}

        def growth(name: str, **labels: str) -> float:
            text = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
            return after[f"vllm:{name}{text}"] - before[f"vllm:{name}{text}"]

        print({"seen": dict(seen), "before": held_before, "after": held_after})
        assert seen["gone"] > 0.1 * seen["ended"] > 0
        ended = growth("request_success_total", finished_reason="length")
        aborted = growth("request_success_total", finished_reason="abort")
        assert ended + aborted == seen["ended"] + seen["gone"]
        assert aborted > 0.2 * seen["gone"], "some of those that go away do so after the last token"
        assert growth("request_generation_tokens_sum") >= seen["delivered"]
        assert growth("generation_tokens_total") >= seen["delivered"] + seen["delivered_to_gone"]
        for name in pids:
            assert held_after[name]["files"] <= held_before[name]["files"] + 2
            assert held_after[name]["threads"] <= held_before[name]["threads"] + 2
            assert held_after[name]["mib"] <= held_before[name]["mib"] + 16

        before = after
        seen = traffic(server, requests=REQUESTS // 4, goes_away=0, seed=200)
        server.assert_all_free()
        after = server.metrics()
        for name, key in {
            "generation_tokens_total": "delivered",
            "prompt_tokens_total": "prompts",
            "request_generation_tokens_sum": "delivered",
            "spec_decode_num_drafts_total": "drafts",
            "spec_decode_num_draft_tokens_total": "draft_tokens",
            "spec_decode_num_accepted_tokens_total": "accepted",
        }.items():
            assert growth(name) == seen[key], name
        assert growth("iteration_tokens_total_sum") == seen["delivered"] + seen["prompts"]
        log = server.log
        assert server.stop() == 0
        text = log.read_text()
        assert "Traceback" not in text
        assert "Task was destroyed" not in text
        assert " ERROR " not in text
