"""What serving costs is measured with real sockets and processes, and stays below its goal."""

from __future__ import annotations

import json
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from draftloop import cli
from draftloop.bench import server_overhead
from draftloop.bench.server_overhead import GOAL
from draftloop.errors import ConfigError


def test_streaming_takes_less_of_a_core_than_allowed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(server_overhead, "OUTPUT_TOKENS", 128)  # so that streams end soon
    out = tmp_path / "server.json"
    command = f"bench server --streams 16 --tokens-per-step 2 --tokens-per-s 1600 --seconds 1.5 --out {out}"
    cli.main(command.split())
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["/v1/completions", "/v1/chat/completions"]
    for row in rows:
        assert row["cpu_s"] > 0
        assert 0 < row["tokens_per_s"] < 2000, "a busy machine may not keep up"
        assert row["value"] == pytest.approx(row["cpu_s"] / (row["tokens_per_s"] * row["seconds"]) * 1e5, rel=0.05)
        assert row["value"] < GOAL
    assert "% of a core for 1,000 tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--streams 0", "--tokens-per-step 0", "--tokens-per-s 0", "--seconds -1"])
def test_wrong_options_are_one_line(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "server", *option.split()])
    assert f"{option.split()[0]} is {option.split()[1]}" in capsys.readouterr().err


def test_a_server_that_does_not_start_or_refuses_is_named():
    with tempfile.TemporaryFile() as log, subprocess.Popen(["false"]) as process:
        log.write(b"no such port")
        process.wait()
        with pytest.raises(ConfigError, match="the server did not start:\nno such port"):
            server_overhead._wait_until_ready(process, log)
    answer = SimpleNamespace(status=404, read=lambda: b"no such route")
    connection: Any = SimpleNamespace(request=lambda *_: None, getresponse=lambda: answer)
    with pytest.raises(ConfigError, match="the server answered 404: no such route"):
        next(server_overhead._stream(connection, "/nowhere", {}))
