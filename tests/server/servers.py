"""Servers in processes of their own, on loopback, over a tiny model whose tokens are bytes.

Most are forks, which start at once. Tests of how processes start, end and share nothing run the command itself.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from forks import Forked, prepare

EOS = 256
VOCAB = 257
K = 3
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}[tools {{ tools | length }}]{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MAX_LEN = 8192


def limits(max_len: int, memory_bytes: int) -> list[str]:
    """Of four requests at a time on a CPU."""
    sizes = f"--max-model-len {max_len} --max-num-seqs 4 --kv-cache-memory-bytes {memory_bytes} --device cpu"
    return sizes.split()


LIMITS = limits(2048, 1 << 23)
LONG_LIMITS = limits(MAX_LEN, 1 << 25)
"""For answers that no machine has come to the end of when a test is done with them."""

EAGER = ["--enforce-eager", "--spec-tokens", "0"]
"""Starts sooner; for what has nothing to do with either."""

PATIENCE_S = 120.0
"""Longest wait for anything that must happen, on a machine that is busy with other things."""


@functools.cache
def byte_model() -> str:
    """Folder of a tiny model with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from helpers import tiny_model

    folder = Path(tiny_model("served", vocab=VOCAB, eos=EOS, max_len=MAX_LEN))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


class Server:
    """A running `draftloop serve`, and a plain client of it."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, log: Path) -> None:
        self.process, self.log = process, log
        self.port = 0
        self.headers = {"Content-Type": "application/json"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {**self.headers, **headers})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, headers, data = self.request("GET", path)
        assert status == 200, data
        return json.loads(data) if headers.get("content-type") == "application/json" else data.decode()

    def post(self, path: str, body: Any) -> Any:
        """The answer of a request that must succeed."""
        status, _, data = self.request("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def refusal(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that must not succeed."""
        status, _, data = self.request("POST", path, body)
        assert status >= 400, data
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    def start_stream(self, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
        """A streaming request, whose answer has begun."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**body, "stream": True}), self.headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return connection, response

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which must end as it should."""
        connection, response = self.start_stream(path, body)
        with closing(connection):
            found = list(events(response))
        assert found.pop() == "[DONE]"
        return found

    def metrics(self) -> dict[str, float]:
        """Samples by name and their own labels (those of the server are left out)."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")
                found[name] = float(value)
        return found

    def wait_until(self, is_so: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        end = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < end, f"not so after {timeout_s} s\n{self.log.read_text()}"
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        return self.request("GET", "/health")[0] == 200

    def assert_all_free(self) -> None:
        """Nothing runs, waits or holds pages, soon after the last request has ended."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

        def is_free() -> bool:
            return self.get("/load") == {"server_load": 0} and not any(map(self.metrics().get, names))

        self.wait_until(is_free)

    @property
    def engine_pids(self) -> list[int]:
        """In the order of their ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return sorted(pid for pid, command in commands.items() if command and b"resource_tracker" not in command)

    @property
    def engine_pid(self) -> int:
        pids = self.engine_pids
        assert pids, "there is no engine process"
        return pids[0]

    def stop(self) -> int:
        """Ask it to end; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def events(response: Any) -> Iterator[Any]:
    """Server-sent events as they come."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


@contextmanager
def running(
    *arguments: str,
    model: str | None = None,
    script: str | None = None,
    ready: bool = True,
    silence_s: int = 120,
    limits: Sequence[str] = LIMITS,
    start_s: float = PATIENCE_S,
    command: bool = False,
    engines: int = 1,
    **environment: str,
) -> Iterator[Server]:
    """A server over the byte model; `script` is the file of a scripted drafter's answers.

    `command`: by the command line in a new interpreter, as users start it, in place of forks, of so many engines.
    """
    command_line = ["serve", model or byte_model(), "--port", "0", *limits]
    command_line += ["--engine-silence-s", str(silence_s), *arguments]
    log = Path(tempfile.mkdtemp(prefix="draftloop-tests-")) / "log"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process: subprocess.Popen[bytes] | Forked
    if command:
        with log.open("wb") as out:
            python = [sys.executable, "-m", "draftloop"]
            process = subprocess.Popen([*python, *command_line], stdout=out, stderr=out, env=environ)
    else:
        log.touch()
        process = Forked(_serve, command_line, script, engines, log=log, environ=environ)
    server = Server(process, log)
    try:
        server.wait_until(lambda: "listening at" in log.read_text() or process.poll() is not None, timeout_s=start_s)
        assert process.poll() is None, log.read_text()
        server.port = int(re.findall(r"listening at http://127\.0\.0\.1:(\d+)", log.read_text())[0])
        if ready:
            server.wait_until(server.is_healthy, timeout_s=240)
        yield server
        server.stop()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(log.parent)


def _serve(command_line: list[str], script: str | None, engines: int) -> None:
    """As a fork: what the command does."""
    from draftloop.cli import main
    from draftloop.server import engine_rank

    prepare(engine_rank, engines)
    if script is None:
        main(command_line)
    else:
        _serve_scripted(command_line[1], script)


# ---- a server with a scripted drafter, which cannot be said on a command line --------------


def _scripted(file: str, request_id: str, token_ids: list[int], k: int) -> list[int]:
    """Drafts of which the first ones are right, as many as the file says; nothing for other texts."""
    answers = json.loads(Path(file).read_text()) if Path(file).exists() else []
    for ids, right in answers:  # prompts with the tokens that follow, and how many drafts are to be right
        if len(token_ids) < len(ids) and ids[: len(token_ids)] == token_ids:
            drafts = ids[len(token_ids) : len(token_ids) + k]
            return [(draft + (place >= right)) % EOS for place, draft in enumerate(drafts)]
    return []


def _serve_scripted(model: str, file: str) -> None:
    from draftloop.config import EngineConfig
    from draftloop.observability import log
    from draftloop.server.options import ServerOptions
    from draftloop.server.run import serve

    log.setup()
    spec = {"method": "scripted", "script": functools.partial(_scripted, file), "num_speculative_tokens": K}
    config = EngineConfig.from_mapping(
        model=model,
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 22,
        device="cpu",
        speculative_config=spec,
    )
    serve(config, ServerOptions(port=0))
