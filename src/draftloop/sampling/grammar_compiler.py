"""Compiles grammars in processes of their own, since what a request brings may take for ever, or all memory.

A compilation that exceeds a limit costs the process that did it, and nobody else anything. Run as a program this
module is such a process: it reads jobs from its standard input and answers on its standard output, each a frame of
a length (4 bytes, big-endian), a kind (1 byte) and a body.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from draftloop.request import StructuredOutputsParams
from draftloop.sampling.json_formats import with_patterns

MAX_CHARACTERS = 1 << 18
"""Of a grammar's text."""
MAX_BYTES = 1 << 31
"""Of memory that a process may take for its work, beside what it has at its start."""
MAX_RESULT_BYTES = 1 << 25
"""Of a compiled grammar: reading it is the engine's part."""
START_S = 60.0
"""What a process may take to load xgrammar, which takes seconds."""
GRACE_S = 1.0
"""A process ends itself; where it does not, it is killed so much later."""

TOKENIZER, JOB, DONE, REFUSED = b"T", b"J", b"D", b"R"
_HEAD = struct.Struct(">Ic")


class GrammarError(Exception):
    """The grammar cannot be used; the message says why."""


class ProcessLostError(GrammarError):
    """The process that compiled it has ended, or does not answer. It may be the grammar's fault, or nobody's."""


class Compilers:
    """Processes that compile, as many as are asked at the same time. They stay for what comes next."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def compile(self, params: StructuredOutputsParams, tokenizer: str, *, timeout_s: float) -> str:
        """The compiled grammar as xgrammar's JSON, for a tokenizer in that form too.

        Raises GrammarError for a grammar that says nothing or exceeds a limit.
        """
        process = self._take()
        is_fit = False
        try:
            result = process.compile(params, tokenizer, timeout_s)
            is_fit = True
        except GrammarError as error:
            is_fit = not isinstance(error, ProcessLostError)
            raise
        finally:
            self._keep(process) if is_fit else process.kill()
        return result

    def _take(self) -> _Process:
        """One that is idle and lives, or a new one."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return _Process()
            if process.lives:
                return process
            process.kill()

    def _keep(self, process: _Process) -> None:
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """End those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()


class _Process:
    """The parent's end."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is not meant for it
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._tokenizer: str | None = None
        try:
            self._receive(START_S)
        except BaseException:
            self.kill()
            raise

    @property
    def lives(self) -> bool:
        return self._popen.poll() is None

    def compile(self, params: StructuredOutputsParams, tokenizer: str, timeout_s: float) -> str:
        if tokenizer is not self._tokenizer:
            self._send(TOKENIZER, tokenizer.encode())
            self._receive(START_S)
            self._tokenizer = tokenizer
        job = {
            "kind": params.kind,
            "text": grammar_text(params),
            "any_whitespace": not params.disable_any_whitespace,
            "timeout_s": timeout_s,
        }
        self._send(JOB, json.dumps(job).encode())
        try:
            kind, body = self._receive(timeout_s + GRACE_S)
        except ProcessLostError:
            limits = f"{timeout_s:g} s or {MAX_BYTES >> 20} MiB"
            raise ProcessLostError(f"structured_outputs.{params.kind} takes more than {limits} to compile") from None
        if kind == REFUSED:
            raise GrammarError(f"structured_outputs.{params.kind} cannot be used: {body.decode()}")
        return body.decode()

    def _send(self, kind: bytes, body: bytes) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(_HEAD.pack(len(body), kind) + body)
            self._popen.stdin.flush()
        except OSError as error:
            raise ProcessLostError("the process that compiles grammars has ended") from error

    def _receive(self, timeout_s: float) -> tuple[bytes, bytes]:
        end = time.monotonic() + timeout_s
        size, kind = _HEAD.unpack(self._read(_HEAD.size, end))
        return kind, self._read(size, end)

    def _read(self, count: int, end: float) -> bytes:
        assert self._popen.stdout is not None
        file, parts = self._popen.stdout.fileno(), []
        waiting = select.poll()  # `select` takes no file numbers from 1024 on
        waiting.register(file, select.POLLIN)
        while count:
            ready = waiting.poll(max(end - time.monotonic(), 0.0) * 1e3)
            part = os.read(file, min(count, 1 << 20)) if ready else b""
            if not part:
                raise ProcessLostError("the process that compiles grammars has ended, or does not answer")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._popen.kill()
        with contextlib.suppress(BrokenPipeError), self._popen:  # closes the pipes, where something may be left unsaid
            pass


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar as one text, whatever its kind. Raises ValueError for JSON that is none."""
    value, kind = getattr(params, params.kind), params.kind
    if kind == "json_object":
        return '{"type": "object"}'
    if kind == "choice":
        return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    text = value if isinstance(value, str) else json.dumps(value)
    if kind in ("json", "structural_tag"):
        json.loads(text)  # says where it is wrong
    return text


def reason(error: BaseException) -> str:
    """The message without the place in somebody else's source."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()


# ---- in the process -------------------------------------------------------------------------


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    import xgrammar

    _limit_memory()
    _answer(answers, DONE, b"")
    compiler: Any = None
    while frame := _next_frame(sys.stdin.buffer):
        kind, body = frame
        if kind == TOKENIZER:
            info = xgrammar.TokenizerInfo.deserialize_json(body.decode())
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            _answer(answers, DONE, b"")
            continue
        job = json.loads(body)
        # nobody's Python runs while xgrammar works, so that the process ends here by the signal's default
        signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
        try:
            kind, answer = DONE, compiler.compile_grammar(_parse(xgrammar, job)).serialize_json().encode()
            if len(answer) > MAX_RESULT_BYTES:
                raise GrammarError(f"compiled it has {len(answer)} bytes; at most {MAX_RESULT_BYTES} are taken")
        except Exception as error:
            kind, answer = REFUSED, reason(error).encode(errors="replace")
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answers, kind, answer)


def _parse(xgrammar: Any, job: dict[str, Any]) -> Any:
    text, whitespace = job["text"], job["any_whitespace"]
    make: dict[str, Callable[[], Any]] = {
        "json": lambda: xgrammar.Grammar.from_json_schema(with_patterns(text), any_whitespace=whitespace),
        "json_object": lambda: xgrammar.Grammar.from_json_schema(text, any_whitespace=whitespace),
        "regex": lambda: xgrammar.Grammar.from_regex(text),
        "grammar": lambda: xgrammar.Grammar.from_ebnf(text),
        "choice": lambda: xgrammar.Grammar.from_ebnf(text),
        "structural_tag": lambda: xgrammar.Grammar.from_structural_tag(with_patterns(text)),
    }
    return make[job["kind"]]()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _next_frame(file: IO[bytes]) -> tuple[bytes, bytes] | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size, kind = _HEAD.unpack(head)
    return kind, file.read(size)


def _answer(file: IO[bytes], kind: bytes, body: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        file.write(_HEAD.pack(len(body), kind) + body)
        file.flush()


if __name__ == "__main__":
    main()
