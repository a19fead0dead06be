"""The graph table: the only capture loop and the only dispatch of the program."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from draftloop.config.env import Environment
from draftloop.distributed.group import ALONE, Exchange, Group
from draftloop.errors import GraphError
from draftloop.graphs.buffers import Buffers
from draftloop.graphs.captured import Captured
from draftloop.graphs.entries import Entry, Loops, PhaseState
from draftloop.graphs.loop import Loop, Watched
from draftloop.graphs.phase import GraphMode, Key, Launch, ModeSetting, Phase, settle_mode
from draftloop.graphs.program import Attend, Body, Recorder, in_place
from draftloop.graphs.report import CoverageRow, GraphReport, captured_row, loop_row
from draftloop.graphs.ring import Ring
from draftloop.graphs.sizes import Ladders

TIMED_RUNS = 3


class GraphTable:
    """Owns the static buffers, captures every declared phase, and runs phases by name.

    Raises ValueError for two phases of one name, or buffers that disagree; ConfigError and
    GraphError as `capture` and `run` say.
    """

    def __init__(
        self,
        phases: Iterable[Phase],
        ladders: Ladders,
        setting: ModeSetting,
        recorder: Recorder,
        device: torch.device,
        *,
        largest_rows: int,
        largest_tokens: int,
        require_graphs: bool = False,
        poison: bool | None = None,
        poison_more: Callable[[], None] | None = None,
        group: Group = ALONE,
    ) -> None:
        """`group`: ranks that capture the same graphs; one that does not fit on one of them is left out on all.

        `largest_rows` and `largest_tokens` are what the configuration allows, captured or not.

        `poison_more` is called before each replay in poison mode, for memory that the table does
        not own (unused pages).
        """
        self.ladders, self.setting, self.recorder, self.device = ladders, setting, recorder, device
        self.largest_rows, self.largest_tokens = largest_rows, largest_tokens
        self.require_graphs, self.group = require_graphs, group
        self.poison = Environment.read().poison if poison is None else poison
        self._poison_more = poison_more
        self._states: dict[str, PhaseState] = {}
        self._captured = Captured(recorder, group, require_graphs=require_graphs)
        for phase in phases:
            if phase.name in self._states:
                raise ValueError(f"two phases are called {phase.name!r}")
            mode, reason = settle_mode(phase, setting)
            self._states[phase.name] = PhaseState(phase=phase, mode=mode, reason=reason)
        self.buffers = Buffers(((s.phase, *self._largest(s.phase)) for s in self._states.values()), device)

    @property
    def phases(self) -> Mapping[str, Phase]:
        return {name: state.phase for name, state in self._states.items()}

    # ---- sizes ------------------------------------------------------------------------------

    def key_for(self, name: str, rows: int, tokens: int | None = None) -> Key | None:
        """The graph that serves this many live rows (and tokens, if ragged), or None.

        Capture and dispatch both ask here, so what is captured is what is found.
        """
        state = self._states[name]
        if state.mode is GraphMode.NONE:
            return None
        key = self.ladders.key(state.phase, state.mode, rows, tokens)
        return None if key in self._captured.unfit else key

    def covers(self, name: str, rows: int) -> bool:
        """True if the phase exists and has a graph for this many rows."""
        return name in self._states and self.key_for(name, rows) is not None

    def keys(self) -> list[Key]:
        """Every graph to capture, the largest first, so that smaller ones fit into its memory."""
        found = {
            self.key_for(name, 1 if state.phase.ragged else size, size)
            for name, state in self._states.items()
            for size in (self.ladders.tokens if state.phase.ragged else self.ladders.rows)
        }
        return sorted((key for key in found if key), key=lambda k: (k.tokens, k.rows, k.phase), reverse=True)

    def _largest(self, phase: Phase) -> tuple[int, int]:
        """The largest (rows, tokens) that this phase can run at, padded or eager."""
        if phase.tokens_per_row is None:
            return self.ladders.prefill_rows, max([*self.ladders.tokens, self.largest_tokens])
        rows = max([*self.ladders.rows, self.largest_rows])
        return rows, rows * phase.tokens_per_row

    # ---- capture ----------------------------------------------------------------------------

    def capture(
        self, progress: Callable[[Key, int], None] | None = None, warmed: Callable[[], None] | None = None
    ) -> None:
        """Capture every key. `warmed()` is called after each warm-up, `progress(key, total)` before each capture.

        A graph for which memory does not suffice is named and left out. Raises GraphError for it if graphs
        are required, if a phase cannot be captured although it says so, or if graphs are required and the
        configuration's largest batch has none.
        """
        if self.require_graphs and (gaps := self.uncovered()):
            lines = "; ".join(f"{name}: {why}" for name, why in gaps.items())
            raise GraphError(f"--require-graphs: not every phase is covered. {lines}")
        keys = self.keys()
        self._captured.expect(keys)
        if self.recorder.on_first_use:
            return
        with self.recorder.recording():
            for key in keys:
                self._pad_all(key)
            # the parts of a chain are warmed up one by one
            bodies = [self._body(key) for key in keys if not self._states[key.phase].phase.parts]
            self.recorder.warm_up(bodies, warmed or (lambda: None))
            for key in keys:
                if progress:
                    progress(key, len(keys))
                self._pad_all(key)
                self._captured.record_if_it_fits(key, self._body(key))

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run what does not run in full graphs once over padding, at its largest: it then has the memory it takes."""
        self.recorder.give_back()
        for name, state in self._states.items():
            phase, (rows, tokens) = state.phase, self._largest(state.phase)
            key = self.key_for(name, rows, tokens if phase.ragged else None)
            program = key and self._captured[key].program
            self.buffers.pad(phase, (0, 0), (rows, tokens), poison=False)
            if key is None and GraphMode.NONE in phase.modes:
                self._call(name, rows, tokens, in_place)
            elif program and state.mode is GraphMode.PIECEWISE:
                program.replay()

    def repeat(self, phases: Collection[str], watched: Watched, ring: Ring) -> str:
        """Make a loop of every graph of these phases when it is captured. Returns why there will be none, if so."""
        return self._captured.repeat(Loops(phases=frozenset(phases), watched=watched, ring=ring))

    def _body(self, key: Key) -> Body:
        def body(attend: Attend) -> None:
            self._call(key.phase, key.rows, key.tokens, attend)

        return body

    def _pad_all(self, key: Key) -> None:
        """Make every entry padding: warm-up and capture touch no row of a request."""
        self.buffers.pad(self._states[key.phase].phase, (0, 0), (key.rows, key.tokens), poison=False)

    def uncovered(self) -> dict[str, str]:
        """Phases whose largest allowed batch has no graph, though mode and phase allow graphs, with the reason."""
        gaps = {}
        for name, state in self._states.items():
            if not self._owes_graphs(state):
                continue
            tokens = self.largest_tokens if state.phase.ragged else None
            rows = self.ladders.prefill_rows if state.phase.ragged else self.largest_rows
            if self.key_for(name, rows, tokens) is None:
                gaps[name] = self._why_eager(state, rows, tokens)
        return gaps

    def _owes_graphs(self, state: PhaseState) -> bool:
        """True where the user's mode asks for graphs and the phase allows some."""
        return self._asked(state) is not GraphMode.NONE and state.phase.modes != {GraphMode.NONE}

    def _asked(self, state: PhaseState) -> GraphMode:
        return self.setting.ragged if state.phase.ragged else self.setting.uniform

    def _why_eager(self, state: PhaseState, rows: int, tokens: int | None) -> str:
        if state.mode is GraphMode.NONE:
            return state.reason
        if any(key.phase == state.phase.name for key in self._captured.unfit):
            return "memory did not suffice for a graph of this size"
        return self.ladders.why_none(state.phase, rows, tokens)

    # ---- run --------------------------------------------------------------------------------

    def run(
        self,
        name: str,
        rows: int,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        tokens: int | None = None,
        rows_across_ranks: int | None = None,
        tokens_across_ranks: int | None = None,
    ) -> dict[str, Tensor]:
        """Run a phase for `rows` live rows and return views of its outputs' live part.

        A slot that is not among `inputs` is read as an earlier phase (or `buffers.write`) left it.
        The views are overwritten by the next run of any phase with an output of that name.

        `rows_across_ranks` is what the ranks agreed on: the rows of the one that has most; of a ragged phase
        `tokens_across_ranks`. All of them then run the graph of that size, or all run eager, padded to that size:
        a rank may have no live row at all.

        Raises ValueError for unknown inputs, or slots that hold another number of entries;
        GraphError if there is no graph for this size and the phase, or the user, forbids eager, or if
        a graph should be there and is not.
        """
        state = self._states[name]
        phase = state.phase
        live_tokens = rows * phase.tokens_per_row if phase.tokens_per_row is not None else tokens
        if live_tokens is None:
            raise ValueError(f"{name} is ragged: say how many tokens it runs")
        for slot, value in (inputs or {}).items():
            if slot not in phase.slots:
                raise ValueError(f"{name} has no slot {slot!r}; it takes {sorted(phase.slots)}")
            self.buffers.write(slot, value)
        agreed = max(rows, rows_across_ranks or 0), max(live_tokens, tokens_across_ranks or 0)
        key = self.key_for(name, *agreed)
        self._check_inputs(phase, rows, live_tokens)
        if key is None:
            self._run_eager(state, (rows, live_tokens), agreed)
        else:
            entry = self._stage(key, rows, live_tokens)
            if entry.program is None:
                self._captured.record(key, self._body(key))  # which runs it
            else:
                entry.program.replay()
            entry.replays += 1
        self.buffers.produced(phase, rows, live_tokens)
        return self.buffers.views(phase.outputs, rows, live_tokens)

    def exchanged(self, name: str, rows: int) -> Mapping[Exchange, int]:
        """What the graph of this size exchanges with other ranks; empty where there is none."""
        key = self.key_for(name, rows)
        return {} if key is None else self._captured[key].exchanged

    def repeats(self, name: str, rows: int) -> bool:
        """True if there is a loop of this phase for this many rows."""
        key = self.key_for(name, rows) if name in self._states else None
        return key is not None and self._captured[key].loop is not None

    def launch_loop(self, name: str, rows: int) -> Loop:
        """Run a phase for `rows` live rows again and again, until something stops it; see `Ring.begin`.

        Returns at once. Until the loop has ended its outputs are nobody's to read.
        Raises ValueError for slots that hold another number of entries.
        """
        phase, key = self._states[name].phase, self.key_for(name, rows)
        tokens = rows * (phase.tokens_per_row or 1)
        self._check_inputs(phase, rows, tokens)
        assert key is not None, name
        entry = self._stage(key, rows, tokens)
        assert entry.loop is not None, name
        entry.loop.launch()
        entry.loop.launches += 1
        self.buffers.produced(phase, rows, tokens)
        return entry.loop

    def time_ms(self, name: str, rows: int) -> float:
        """Milliseconds of a phase over so many padding rows, the best of a few runs; no row of a request is touched."""
        phase, key = self._states[name].phase, self.key_for(name, rows)
        tokens = rows * (phase.tokens_per_row or 1)
        if key is None:
            self.buffers.pad(phase, (0, 0), (rows, tokens), poison=False)
            return min(self._time_eager(name, rows, tokens) for _ in range(TIMED_RUNS))
        self._pad_all(key)
        program = self._captured[key].program or self._captured.record(key, self._body(key))
        return min(self.recorder.time_ms(program) for _ in range(TIMED_RUNS))

    @torch.inference_mode()
    def _time_eager(self, name: str, rows: int, tokens: int) -> float:
        begin = time.perf_counter()
        self._call(name, rows, tokens, in_place)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) * 1e3

    def _check_inputs(self, phase: Phase, rows: int, tokens: int) -> None:
        """Refuse stale slots; in poison mode, poison what this run may not read."""
        self.buffers.require(phase, rows, tokens)
        if self.poison:
            if self._poison_more:
                self._poison_more()
            self.buffers.poison_outputs(phase)

    def _stage(self, key: Key, rows: int, tokens: int) -> Entry:
        """The graph of this size, with its padding in place."""
        entry = self._captured.get(key)
        if entry is None:
            raise GraphError(
                f"{key.phase} at {key.rows} rows, {key.tokens} tokens is dispatched, but was never captured"
            )
        phase = self._states[key.phase].phase
        self.buffers.pad(phase, (rows, tokens), (key.rows, key.tokens), poison=self.poison)
        if self.poison and entry.program is not None:
            entry.program.poison()
        return entry

    def _run_eager(self, state: PhaseState, live: tuple[int, int], agreed: tuple[int, int]) -> None:
        """Run the phase as it is, at the size that the ranks agreed on."""
        phase, (rows, tokens) = state.phase, agreed
        if not phase.ragged:
            tokens = rows * (phase.tokens_per_row or 1)
        why = self._why_eager(state, rows, tokens if phase.ragged else None)
        if GraphMode.NONE not in phase.modes:
            raise GraphError(f"{phase.name}: {why}, and the phase does not allow eager")
        if self.require_graphs and self._owes_graphs(state):
            raise GraphError(f"--require-graphs: {phase.name} would run eager: {why}")
        if self._owes_graphs(state) and self.key_for(phase.name, *live) is not None:
            why += ", on another rank"
        state.eager_runs[why] = state.eager_runs.get(why, 0) + 1
        if (rows, tokens) != live:
            rows = max(rows, 1)  # tokens of no row need one to be padding of
            self.buffers.pad(phase, live, (rows, tokens), poison=self.poison)
        with torch.inference_mode():
            self._call(phase.name, rows, tokens, in_place)

    def _call(self, name: str, rows: int, tokens: int, attend: Attend) -> None:
        """The phase's own function over its buffers: what is captured, and what runs eager."""
        phase = self._states[name].phase
        if phase.parts:
            for part in phase.parts:
                self._call(part.name, rows, rows * (part.tokens_per_row or 1), attend)
            return
        slots = self.buffers.views(phase.slots, rows, tokens)
        targets = self.buffers.views(phase.outputs, rows, tokens)
        results = phase.fn(Launch(rows=rows, tokens=tokens, attend=attend, outputs=targets), **slots)
        if set(results) != set(targets):
            raise ValueError(f"{name} declares the outputs {sorted(targets)}, but returned {sorted(results)}")
        for output, target in targets.items():
            if results[output] is not target:
                target.copy_(results[output])

    # ---- report -----------------------------------------------------------------------------

    def report(self) -> GraphReport:
        """Phase x size: mode, milliseconds, memory, use, and the reason where there is no graph."""
        rows = []
        gaps, entries = self.uncovered(), defaultdict[str, list[tuple[Key, Entry]]](list)
        for key, entry in self._captured.items():
            entries[key.phase].append((key, entry))
        for name, state in self._states.items():
            asked, ragged = self._asked(state).value, state.phase.tokens_per_row is None
            rows += [
                captured_row(key, entry, asked=asked, ragged=ragged, reason=state.reason)
                for key, entry in entries[name]
            ]
            gap = gaps.get(name, state.reason if state.mode is GraphMode.NONE else "")
            if gap or state.eager_runs:
                largest = self._largest(state.phase)
                rows.append(
                    CoverageRow(
                        phase=name, asked=asked, mode=GraphMode.NONE.value, rows=largest[0], tokens=largest[1],
                        ragged=ragged, captured=False, reason="; ".join(state.eager_runs) or gap, ms=None, mib=None,
                        replays=0, eager_runs=sum(state.eager_runs.values()),
                    )
                )  # fmt: skip
        loops = tuple(loop_row(key, entry) for key, entry in self._captured.items() if self._captured.is_to_repeat(key))
        return GraphReport(setting=self.setting.value, rows=tuple(rows), loops=loops)

    def reset_counts(self) -> None:
        """Start counting replays and eager runs anew."""
        self._captured.reset_counts()
        for state in self._states.values():
            state.eager_runs.clear()
