"""What serving costs: processor time of the API process for each token that it streams, with no model behind it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftloop.bench.stamp import write_numbers
from draftloop.bench.synthetic_engine import MODEL
from draftloop.errors import ConfigError

GOAL = 15.0
"""Percent of one core for 1,000 tokens/s."""
OUTPUT_TOKENS = 512
START_S = 60.0
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "word " * 64},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "word " * 64}]},
}


def run_server_overhead(
    *, streams: int, tokens_per_step: Sequence[int], tokens_per_s: float, seconds: float, out: Path
) -> Path:
    """Measure each route at each number of tokens a step, print a line for each and write them."""
    rows = []
    for count in tokens_per_step:
        rate = {"tokens_per_step": count, "steps_per_s": tokens_per_s / count / streams}
        with _server(rate) as (port, pid):
            for route, body in ROUTES.items():
                row = _measure(port, pid, route, body, streams=streams, seconds=seconds)
                rows.append({**row, "tokens_per_step": count})
                print(
                    f"{route}, {count} tokens a step, {streams} streams, {row['tokens_per_s']:.0f} tokens/s: "
                    f"{row['value']:.1f} % of a core for 1,000 tokens/s"
                )
    path = write_numbers(out, rows)
    print(path)
    return path


def _measure(port: int, pid: int, route: str, body: dict[str, Any], *, streams: int, seconds: float) -> dict[str, Any]:
    begin_s, end_s = time.monotonic() + 1.0, time.monotonic() + 1.0 + seconds
    counts = [0] * streams
    """Tokens of each stream between these times, from what its usage says."""

    def read(stream: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while time.monotonic() < end_s:
            known = 0
            for now, usage in _stream(connection, route, body):
                if begin_s <= now < end_s:
                    counts[stream] += usage - known
                known = usage
        connection.close()

    threads = [threading.Thread(target=read, args=(stream,)) for stream in range(streams)]
    for thread in threads:
        thread.start()
    time.sleep(begin_s - time.monotonic())
    cpu, start = _cpu_s(pid), time.monotonic()
    time.sleep(max(end_s - time.monotonic(), 0))
    cpu, passed = _cpu_s(pid) - cpu, time.monotonic() - start
    for thread in threads:
        thread.join()
    tokens = sum(counts)
    return {
        "metric": "api_core_percent_per_1000_tokens_per_s",
        "model": MODEL,
        "method": route,
        "streams": streams,
        "tokens_per_s": round(tokens / passed, 1),
        "cpu_s": round(cpu, 3),
        "seconds": round(passed, 2),
        "value": round(cpu / tokens * 1e5, 2),
        "goal": GOAL,
    }


def _stream(connection: http.client.HTTPConnection, route: str, body: dict[str, Any]) -> Iterator[tuple[float, int]]:
    """For each event: when it came, and tokens so far. Read cheaply: client and server share the machine."""
    fields = {**body, "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
    connection.request("POST", route, json.dumps(fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ConfigError(f"the server answered {response.status}: {response.read().decode()}")
    count = 0
    for line in response:
        if line.startswith(b"data: {"):
            count += line.count(b" word")
            yield time.monotonic(), count


@contextmanager
def _server(rate: dict[str, float]) -> Generator[tuple[int, int]]:
    """An API process; its port and process id."""
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "draftloop.bench.synthetic_engine", json.dumps(rate)]
        with subprocess.Popen(command, stderr=log) as process:
            try:
                yield _wait_until_ready(process, log), process.pid
            finally:
                process.terminate()


def _wait_until_ready(process: subprocess.Popen, log: Any) -> int:
    def said() -> str:
        log.seek(0)
        return log.read().decode(errors="replace")

    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        text = said()
        if "ready after" in text and (found := re.search(r"listening at \S+:(\d+)", text)):
            return int(found[1])
        time.sleep(0.05)
    raise ConfigError(f"the server did not start:\n{said()}")


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
