"""Minutes of mixed traffic: nothing may stall, be lost, or grow.

All rows are busy. Prompts and answers have any length, half of the prompts begin as an earlier one did, and every
twentieth request is aborted. A step that gives nothing for `STALL_S` ends the process with everybody's stack. In the
end every row and page must be free, and the device's reserved memory as it was after the first tenth of the requests.

What is known so far is written every `SAVE_S`, and where a signal or `--max-seconds` ends it; the numbers say so.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from draftloop.bench.acceptance import shares_accepted
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import CapacityError, ConfigError
from draftloop.observability.progress import progress_bar
from draftloop.request import SamplingParams

STALL_S = 60
SAMPLE_S = 0.5
SAVE_S = 60
ENDING_S = 10
"""Kept of `max_seconds` to drop what is open and to write."""
SETTLED = 0.1
"""Share of the samples after which memory may grow no more."""
MOST_GROWTH_MIB = 1.0
"""Per 100 requests, on a GPU."""


class Traffic:
    """Requests without end, a fixed number of them open."""

    def __init__(self, llm: LLM, *, longest_prompt: int, longest_answer: int, seed: int) -> None:
        self.llm, self.core = llm, llm.engine.core
        self._random = random.Random(seed)
        self._longest_prompt, self._longest_answer = longest_prompt, longest_answer
        self._bases = [self._ids(longest_prompt) for _ in range(8)]
        self._open: list[str] = []
        self.num_ended = self.num_aborted = self.num_tokens = 0

    def _ids(self, count: int) -> list[int]:
        return self._random.choices(range(self.core.vocab_size), k=count)

    def fill(self) -> None:
        """Let as many be open as there are rows, and a few more."""
        rows = self.llm.engine.resolved.max_num_seqs
        while len(self._open) < rows + 2:
            length = self._random.randint(1, self._longest_prompt)
            shared = self._random.choice([0, self._random.randint(0, length)])
            prompt = self._random.choice(self._bases)[:shared] + self._ids(length - shared)
            params = SamplingParams(
                temperature=self._random.choice([0.0, 0.0, 0.8]),
                seed=self.num_ended,
                max_tokens=self._random.randint(1, self._longest_answer),
                ignore_eos=True,
                detokenize=False,
            )
            request_id = self.llm._next_id()
            self.core.add(request_id, prompt, params)
            self._open.append(request_id)

    def step(self) -> int:
        """Tokens of one step of the engine."""
        count = 0
        for sequence, _ in self.core.step():
            count += 1
            if sequence.finish_reason is not None and sequence.request_id in self._open:  # else it was aborted just now
                if sequence.finish_reason != "length":
                    raise CapacityError(f"a request ended by {sequence.finish_reason!r}: {sequence.error}")
                self._open.remove(sequence.request_id)
                self.num_ended += 1
                self.num_tokens += len(sequence.output_ids)
                if self.num_ended % 20 == 0 and self._open:
                    self.core.abort(self._open.pop(self._random.randrange(len(self._open))))
                    self.num_aborted += 1
        return count

    def drop(self) -> None:
        """Abort what is open."""
        while self._open:
            self.core.abort(self._open.pop())

    def finish(self) -> None:
        """Let what is open end. Raises CapacityError if something is held then."""
        while not self.core.idle:
            self.step()
        scheduler = self.core.scheduler
        held = scheduler.num_pages_held
        if held or scheduler.running:
            raise CapacityError(f"{held} pages and {len(scheduler.running)} rows are held although nothing runs")


class Ending:
    """What ends the traffic before its time."""

    def __init__(self, seconds: float | None) -> None:
        self._last = None if seconds is None else time.perf_counter() + seconds - ENDING_S
        self.signal: signal.Signals | None = None

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Meanwhile the first SIGINT or SIGTERM ends the traffic; a second one does what it always does."""

        def take(number: int, frame: Any) -> None:
            self.signal = signal.Signals(number)
            restore()

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            restore()

    @property
    def why(self) -> str | None:
        """None while it may go on."""
        if self.signal is not None:
            return self.signal.name
        is_over = self._last is not None and time.perf_counter() > self._last
        return "--max-seconds" if is_over else None


def run_soak(
    config: EngineConfig,
    *,
    minutes: float,
    longest_prompt: int,
    longest_answer: int,
    out: Path,
    max_seconds: float | None = None,
) -> Path:
    """Run, print, write the numbers, return the file. `max_seconds`: for all of it, the start included.

    Raises ConfigError if prompt and answer do not fit the model, CapacityError if memory grows or something is lost.
    After a signal, SystemExit with 128 and its number.
    """
    ending = Ending(max_seconds)
    with ending.on_signals():
        llm = LLM.from_config(config)
        try:
            limit = llm.engine.resolved.max_model_len
            if longest_prompt + longest_answer > limit:
                raise ConfigError(
                    f"{longest_prompt} prompt tokens and {longest_answer} output tokens exceed max_model_len {limit}; "
                    "lower --longest-prompt or --longest-answer"
                )
            traffic = Traffic(llm, longest_prompt=longest_prompt, longest_answer=longest_answer, seed=config.seed)
            path = out

            def save(seconds: float, longest_step: float, samples: Sequence[tuple[int, float]], ended: str) -> None:
                nonlocal path, row
                row = {**_row(llm, traffic, seconds, longest_step, samples), "ended_by": ended}
                path = write_numbers(path, [{**engine_facts(llm), **row}])

            row: dict[str, Any] = {}
            _run(traffic, minutes * 60, ending, save)
        finally:
            llm.close()
    Console().print({key: value for key, value in row.items() if key != "samples"}, f"written to {path}")
    if torch.cuda.is_available() and row["growth_mib_per_100_requests"] > MOST_GROWTH_MIB:
        raise CapacityError(f"memory grew by {row['growth_mib_per_100_requests']} MiB for each 100 requests")
    if ending.signal is not None:
        sys.exit(128 + ending.signal)
    return path


Save = Callable[[float, float, Sequence[tuple[int, float]], str], None]
"""Takes the seconds so far and those without tokens at most, samples of (ended requests, MiB held), what ended it."""


def _run(traffic: Traffic, seconds: float, ending: Ending, save: Save) -> None:
    begin = last_tokens = last_sample = last_save = time.perf_counter()
    longest, samples = 0.0, []
    with progress_bar(total=round(seconds), description="Soaking", unit="s") as bar:
        while (now := time.perf_counter()) - begin < seconds and ending.why is None:
            if now - last_sample > SAMPLE_S or not samples:
                faulthandler.dump_traceback_later(STALL_S, exit=True)
                samples.append((traffic.num_ended, held_mib()))
                bar.set_postfix(requests=traffic.num_ended, MiB=round(samples[-1][1]), refresh=False)
                bar.update(round(now - begin) - bar.n)
                last_sample = now
            if now - last_save > SAVE_S:
                save(now - begin, longest, samples, "nothing yet")
                last_save = last_tokens = time.perf_counter()
            traffic.fill()
            if traffic.step():
                now = time.perf_counter()
                longest, last_tokens = max(longest, now - last_tokens), now
    why = ending.why
    if why is not None:
        traffic.drop()
    traffic.finish()
    faulthandler.cancel_dump_traceback_later()
    samples.append((traffic.num_ended, held_mib()))
    save(time.perf_counter() - begin, longest, samples, why or "--minutes")


def _row(
    llm: LLM, traffic: Traffic, seconds: float, longest_step: float, samples: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    stats, scheduler = llm.engine.core.stats, llm.engine.core.scheduler
    return {
        "metric": "soak_requests",
        "batch": llm.engine.resolved.max_num_seqs,
        "value": traffic.num_ended,
        "aborted": traffic.num_aborted,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(traffic.num_tokens / seconds, 1),
        "acceptance_length": round(1 + sum(shares_accepted([stats.histogram])), 3) if stats.num_spec_steps else None,
        "cached_share": round(stats.num_cached_prompt_tokens / max(stats.prompt_tokens, 1), 3),
        "preemptions": scheduler.num_preemptions,
        "longest_step_s": round(longest_step, 3),
        "held_mib": round(samples[-1][1], 1),
        "growth_mib_per_100_requests": round(growth(samples), 4),
        "samples": [[ended, round(mib, 1)] for ended, mib in samples[:: max(len(samples) // 50, 1)]],
    }


def growth(samples: Sequence[tuple[int, float]]) -> float:
    """MiB for each 100 requests, a straight line through what was held once it had settled."""
    settled = np.array(samples[int(len(samples) * SETTLED) :], dtype=float)
    if len(settled) < 2 or np.ptp(settled[:, 0]) == 0:
        return 0.0
    return float(np.polyfit(settled[:, 0], settled[:, 1], 1)[0] * 100)


def held_mib() -> float:
    """What the allocator of the GPU has reserved; without one, the process's resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved() / 2**20
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
