"""What a graph table has captured: recorded where memory suffices on all ranks, and made loops of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from draftloop.distributed.group import Group
from draftloop.errors import CapacityError, GraphError
from draftloop.graphs.entries import Entry, Loops
from draftloop.graphs.phase import GraphMode, Key
from draftloop.graphs.program import Body, Program, Recorder
from draftloop.observability.log import get_logger

logger = get_logger(__name__)


class Captured:
    """An entry for each key that has a graph, or will have one when it is first used."""

    def __init__(self, recorder: Recorder, group: Group, *, require_graphs: bool) -> None:
        """`require_graphs`: a graph for which memory does not suffice is an error."""
        self._recorder, self._group, self._require_graphs = recorder, group, require_graphs
        self._entries: dict[Key, Entry] = {}
        self._loops: Loops | None = None
        self.unfit: set[Key] = set()
        """Graphs for which memory did not suffice."""

    def expect(self, keys: Iterable[Key]) -> None:
        """These are to be captured, and nothing else."""
        self._entries = {key: Entry() for key in keys}

    def __getitem__(self, key: Key) -> Entry:
        return self._entries[key]

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def items(self) -> Iterator[tuple[Key, Entry]]:
        """In the order of keys."""
        return ((key, self._entries[key]) for key in sorted(self._entries))

    def record(self, key: Key, body: Body) -> Program:
        """Record what the key names, once, and a loop of it if it is to repeat. Raises as `Recorder.record`."""
        program = self._record(key, body)
        self._keep(key, program)
        return program

    def record_if_it_fits(self, key: Key, body: Body) -> None:
        """The same with its memory and time noted; what does not fit on one rank is named, and left out on all.

        Raises GraphError for it if graphs are required.
        """
        before = self._recorder.owned_bytes()
        program, why = None, ""
        try:
            program = self._record(key, body)
        except CapacityError as error:
            why = str(error)
        if (why := self._agreed(why)) or program is None:
            self._leave_out(key, CapacityError(why))
            return
        entry = self._keep(key, program)
        entry.mib = (self._recorder.owned_bytes() - before) / 2**20
        entry.ms = self._recorder.time_ms(program)

    def repeat(self, loops: Loops) -> str:
        """Make a loop of every graph that is recorded from now on. Returns why there will be none, if so."""
        why = self._agreed(self._recorder.why_no_loops())
        if not why:
            self._loops = loops
        return why

    def is_to_repeat(self, key: Key) -> bool:
        return self._loops is not None and key.phase in self._loops.phases

    def reset_counts(self) -> None:
        for entry in self._entries.values():
            entry.replays = 0
            if entry.loop is not None:
                entry.loop.launches = entry.loop.iterations = 0

    def _record(self, key: Key, body: Body) -> Program:
        piecewise, repeats = key.mode is GraphMode.PIECEWISE, self.is_to_repeat(key)
        try:
            with self._group.counting() as exchanged:
                program = self._recorder.record(body, piecewise=piecewise, repeats=repeats)
            self._entries[key].exchanged = exchanged
            return program
        except GraphError as error:
            raise GraphError(f"phase {key.phase!r} at {key.rows} rows, {key.tokens} tokens: {error}") from error

    def _leave_out(self, key: Key, error: CapacityError) -> None:
        message = (
            f"no memory for the graph of {key.phase} at {key.rows} rows, {key.tokens} tokens ({error}); lower "
            "--gpu-memory-utilization, --max-num-seqs or --cudagraph-capture-sizes"
        )
        if self._require_graphs:
            raise GraphError(f"--require-graphs: {message}") from error
        logger.warning("%s. Smaller ones are tried; such batches run without it", message)
        self.unfit.add(key)
        del self._entries[key]

    def _keep(self, key: Key, program: Program) -> Entry:
        entry = self._entries[key]
        entry.program = program
        if self._loops is None or not self.is_to_repeat(key):
            return entry
        begin, why = time.perf_counter(), ""
        try:
            entry.loop = self._recorder.loop(program, key.rows, self._loops.watched, self._loops.ring)
            entry.loop_ms = (time.perf_counter() - begin) * 1e3
        except GraphError as error:
            why = str(error)
        if why := self._agreed(why):
            logger.warning("no device loops: %s at %d rows cannot repeat: %s", key.phase, key.rows, why)
            self._loops = None
            for other in self._entries.values():
                other.loop = None
        return entry

    def _agreed(self, why_not: str) -> str:
        """Why not all ranks can do something; empty if they can."""
        return why_not if self._group.min([not why_not])[0] else why_not or "another rank cannot"
