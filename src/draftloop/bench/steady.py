"""A batch in which every row decodes and none ends: what an iteration takes there, and each phase of it.

Iterations are timed as the engine runs them, by the host's clock. Phases are then run one by one over the same
rows, each at its real length and with its real cache: padding rows would attend to nothing and look fast.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from draftloop.bench.exchange import exchange_rows
from draftloop.bench.roofline import Ceiling, floor_ms
from draftloop.bench.sampling_mix import SamplingMix
from draftloop.engine.llm import LLM
from draftloop.errors import CapacityError, ConfigError
from draftloop.graphs.phase import Phase
from draftloop.graphs.ring import RING_SLOTS
from draftloop.scheduler.batch import Stage

WARM_STEPS = 3
PHASE_ROUNDS = 12
"""How often each phase is timed by itself."""
HEAD_START_CYCLES = 4_000_000
"""About 2 ms in which the host enqueues phases, so that the device never waits for it between two of them."""


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """A stretch of steady iterations."""

    ms: float
    """Per iteration."""
    runs: Mapping[str, float]
    """How often an iteration ran each phase. What a chain runs is counted as its parts."""
    chain: str | None
    """The phase that ran all of them as one graph, if there was one."""
    launches: float
    """Graphs that the host launched per iteration."""
    eager_runs: int
    num_accepted: int
    num_drafted_steps: int
    context: float
    """Tokens per row, on average over rows and iterations."""

    @property
    def phases(self) -> list[str]:
        """What one iteration runs, as often as it does; without what less than half of them run."""
        return [name for name, count in self.runs.items() for _ in range(round(count))]


def iterations_to_measure(llm: LLM, output_tokens: int) -> int:
    """As many as make that many tokens if every draft is accepted; with a device loop, whole loops."""
    loop = llm.engine.core.worker.loop
    whole = min(loop.max_iterations, RING_SLOTS) if loop else 1
    least = max(output_tokens // (1 + llm.engine.core.worker.tree.depth), 4)
    return -(-least // whole) * whole


class SteadyBatch:
    """Random prompts that decode until the context is left. The engine must be idle, and is idle again after it."""

    def __init__(
        self,
        llm: LLM,
        rows: int,
        *,
        prompt_tokens: int,
        num_iterations: int,
        seed: int = 0,
        mix: SamplingMix = SamplingMix.GREEDY,
    ) -> None:
        """`num_iterations` is how many `measure` will be asked for in all.

        Raises ConfigError if their tokens exceed the longest sequence, here or on entering, when it is known how far
        the first rows got while the last ones' prompts ran; CapacityError if the memory cannot hold all rows.
        """
        self.llm, self.rows, self.core, self.table = llm, rows, llm.engine.core, llm.engine.table
        self._random, self._mix = random.Random(seed), mix
        # the device may be ahead of the host when the clock stops
        ahead = RING_SLOTS if self.core.worker.loop else self.core.pipeline_depth
        iterations = WARM_STEPS + num_iterations + ahead + 1 + 2 * PHASE_ROUNDS
        self._prompt_tokens, self._needed = prompt_tokens, iterations * (1 + self.core.worker.tree.depth)
        self._check_room(self.core.scheduler.max_model_len - prompt_tokens)

    def __enter__(self) -> SteadyBatch:
        scheduler = self.core.scheduler
        room = min(2 * self._needed, scheduler.max_model_len - self._prompt_tokens)
        vocab_size = self.core.vocab_size
        for index in range(self.rows):
            prompt = self._random.choices(range(vocab_size), k=self._prompt_tokens)
            params = self._mix.params(index, max_tokens=room, vocab_size=vocab_size)
            self.core.add(self.llm._next_id(), prompt, params)
        try:
            self._check_pages()
            while scheduler.waiting or any(sequence.stage is not Stage.DECODE for sequence in scheduler.running):
                self._step_towards_full()
            self._check_room(min(s.max_total - s.num_prompt - len(s.output_ids) for s in scheduler.running))
        except BaseException:
            self._end()
            raise
        for _ in range(WARM_STEPS):
            self.core.step()
        return self

    def _step_towards_full(self) -> None:
        running, num_waiting = list(self.core.scheduler.running), len(self.core.scheduler.waiting)
        idle = all(sequence.stage is Stage.DECODE for sequence in running)
        self.core.step()
        if idle and num_waiting == len(self.core.scheduler.waiting) > 0:
            raise self._too_many(len(running))
        if any(sequence.stage is Stage.FINISHED for sequence in running):
            self._check_room(0)

    def _check_pages(self) -> None:
        """Rows that grow until one of them has to be preempted are not a steady batch."""
        scheduler = self.core.scheduler
        num_fitting = scheduler.row_pages.num_fitting(scheduler.waiting[0])
        if num_fitting < self.rows:
            raise self._too_many(num_fitting)

    def _too_many(self, num_fitting: int) -> CapacityError:
        length = (self.core.scheduler.running or self.core.scheduler.waiting)[0].max_total
        return CapacityError(
            f"only {num_fitting} of {self.rows} rows of {length} tokens fit; raise --max-num-seqs, "
            "--gpu-memory-utilization or --kv-cache-memory-bytes, or measure smaller batches"
        )

    def _check_room(self, room: int) -> None:
        if room < self._needed:
            raise ConfigError(
                f"measuring takes up to {self._needed} tokens after a prompt of {self._prompt_tokens}, but only {room} "
                f"are left to max_model_len {self.core.scheduler.max_model_len}; raise it, or lower --output-tokens or "
                "--device-loop"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self.core.close()
        for sequence in [*self.core.scheduler.running, *self.core.scheduler.waiting]:
            self.core.abort(sequence.request_id)

    # ---- iterations -------------------------------------------------------------------------

    def measure(self, num_iterations: int) -> Iterations:
        """Time the next iterations. Every step of the engine commits one, whoever launched it."""
        stats = self.core.stats
        accepted, drafted, context = stats.num_accepted_tokens, stats.num_spec_steps, self._known_tokens()
        self.table.reset_counts()
        begin = time.perf_counter()
        for _ in range(num_iterations):
            self.core.step()
        elapsed = time.perf_counter() - begin
        report = self.table.report()
        counts = Counter(report.replays) + Counter(report.eager_runs)
        runs: Counter[str] = Counter()
        chain = None
        for name, count in counts.items():
            parts = self.table.phases[name].parts
            chain = name if parts else chain
            for part in parts or (self.table.phases[name],):
                runs[part.name] += count
        by_loops = sum(loop.iterations - loop.launches for loop in report.loops)
        return Iterations(
            ms=elapsed / num_iterations * 1e3,
            runs={name: count / num_iterations for name, count in runs.items()},
            chain=chain,
            launches=(sum(report.replays.values()) - by_loops) / num_iterations,
            eager_runs=sum(report.eager_runs.values()),
            num_accepted=stats.num_accepted_tokens - accepted,
            num_drafted_steps=stats.num_spec_steps - drafted,
            context=(context + self._known_tokens()) / 2,
        )

    def _known_tokens(self) -> float:
        return statistics.mean(s.num_tokens for s in self.core.scheduler.running)

    # ---- phases -----------------------------------------------------------------------------

    def time_phases(self, iterations: Iterations) -> tuple[dict[str, list[float]], float]:
        """Milliseconds of each phase of those iterations, and of their chain, run after run; and tokens per row.

        A phase that less than half of the iterations ran (plain decoding where nothing was drafted) is left out.
        Rows go on decoding, so the context grows as in serving, but the host learns nothing of it: no iteration can
        be measured in this batch afterwards.
        """
        self.run_phases(iterations)  # a tape is recorded on its first use
        before, names = self._device_tokens(), iterations.phases
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(PHASE_ROUNDS):
            calls = [partial(self._run, name) for name in names]
            for name, ms in zip(names, time_calls(calls, self.core.worker.device), strict=True):
                found[name].append(ms)
        if (chain := iterations.chain) is not None:
            found[chain] = time_calls([partial(self._run, chain)] * PHASE_ROUNDS, self.core.worker.device)
        return found, (before + self._device_tokens()) / 2

    def run_phases(
        self, iterations: Iterations, surround: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Run the phases of an iteration one by one, each inside `surround(name)`; see `time_phases`."""
        self.core.close()
        self.core.worker.order_after_loop()
        for name in iterations.phases:
            with surround(name):
                self._run(name)

    @torch.inference_mode()
    def _run(self, name: str) -> None:
        """Over the batch as it stands: the rows' numbers and what earlier phases left are in place."""
        self.core.worker.run(name, self.rows)

    def _device_tokens(self) -> float:
        rows = [sequence.row for sequence in self.core.scheduler.running]
        return self.core.worker.state.num_tokens_M[rows].float().mean().item()


def time_calls(calls: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Milliseconds of each call when they run one after another; on a GPU between events that surround it."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        return [(end - begin) * 1e3 for begin, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    torch.cuda._sleep(HEAD_START_CYCLES)
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


# ---- rows -----------------------------------------------------------------------------------


def measure_steady(
    llm: LLM,
    rows: int,
    ceiling: Ceiling,
    *,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    mix: SamplingMix = SamplingMix.GREEDY,
) -> list[dict[str, Any]]:
    """The row `iteration_ms`, then a row `phase_ms` for each phase of it and for the chain that runs them all.

    `repeats` batches of `rows` are measured after one that warms up; phases in the last. Raises as `SteadyBatch`.
    """
    number = iterations_to_measure(llm, output_tokens)
    stretches: list[Iterations] = []
    times: dict[str, list[float]] = {}
    context = 0.0
    for repeat in range(1 + repeats):
        shape = {"prompt_tokens": prompt_tokens, "num_iterations": number}
        with SteadyBatch(llm, rows, **shape, seed=repeat, mix=mix) as batch:
            stretches.append(batch.measure(number))
            if repeat == repeats:
                times, context = batch.time_phases(stretches[-1])
    return [
        _iteration_row(llm, rows, ceiling, stretches[1:]),
        *_phase_rows(llm, rows, ceiling, stretches[-1], times, context),
        *exchange_rows(llm, rows, stretches[-1].chain),
    ]


def against_greedy(
    llm: LLM, greedy: dict[str, Any], ceiling: Ceiling, mix: SamplingMix, **options: int
) -> list[dict[str, Any]]:
    """`measure_steady` of a mix, beside the row that it made of greedy requests.

    Rows are `sampled_iteration_ms`, with the ratio to greedy, and `sampled_phase_ms`.
    """
    step, *phases = measure_steady(llm, greedy["batch"], ceiling, mix=mix, **options)
    step |= {"greedy": greedy["value"], "to_greedy": round(step["value"] / greedy["value"], 4)}
    return [{**row, "metric": f"sampled_{row['metric']}", "sampling": mix.value} for row in (step, *phases)]


def _iteration_row(llm: LLM, rows: int, ceiling: Ceiling, stretches: Sequence[Iterations]) -> dict[str, Any]:
    last, phases = stretches[-1], llm.engine.table.phases
    floor = sum(
        count * floor_ms(phases[name], ceiling, rows=rows, context=last.context) for name, count in last.runs.items()
    )
    steps = sum(stretch.num_drafted_steps for stretch in stretches)
    accepted = sum(stretch.num_accepted for stretch in stretches)
    return {
        "metric": "iteration_ms",
        "batch": rows,
        "acceptance_length": round(1 + accepted / steps, 3) if steps else 1.0,
        **against_floor([stretch.ms for stretch in stretches], floor),
        "context": round(last.context),
        "launches": round(statistics.mean(stretch.launches for stretch in stretches), 6),
        "eager_runs": sum(stretch.eager_runs for stretch in stretches),
    }


def _phase_rows(
    llm: LLM, rows: int, ceiling: Ceiling, last: Iterations, times: Mapping[str, list[float]], context: float
) -> list[dict[str, Any]]:
    def row(phase: Phase, runs: float) -> dict[str, Any]:
        floor = floor_ms(phase, ceiling, rows=rows, context=context)
        return {
            "metric": "phase_ms",
            "phase": phase.name,
            "batch": rows,
            "chain": bool(phase.parts),
            "runs": round(runs, 3),
            **against_floor(times.get(phase.name, []), floor),
            "context": round(context),
        }

    runs = dict(last.runs) | ({last.chain: 1.0} if last.chain else {})
    return [row(llm.engine.table.phases[name], count) for name, count in runs.items()]


def against_floor(values: Sequence[float], floor: float) -> dict[str, float | None]:
    """Median and spread in ms, the floor and how many times that is; None for what was not measured or has none."""
    median = statistics.median(values) if values else None
    return {
        **spread(values),
        "floor": _rounded(floor or None),
        "ratio": round(median / floor, 3) if median is not None and floor else None,
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, least and most; None of no values."""
    if not values:
        return dict.fromkeys(("value", "min", "max"))
    return {"value": _rounded(statistics.median(values)), "min": _rounded(min(values)), "max": _rounded(max(values))}


def _rounded(value: float | None) -> float | None:
    """Four decimals, and more of what is small (a tiny model's floor)."""
    return None if value is None else round(value, 4) if value >= 0.1 else float(f"{value:.3g}")
