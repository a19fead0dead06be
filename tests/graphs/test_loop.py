"""A loop repeats one graph until something stops it, passes every iteration on, and never overwrites one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftloop.graphs.loop import Loop, Watched
from draftloop.graphs.phase import GraphMode, Launch, Output, Pad, Phase, Slot, Unit
from draftloop.graphs.ring import Ring, Stop
from helpers import make_table

ROWS, PADDING_ROW, LIMIT = 4, 4, 1000
COUNTS, WIDTH = 1, 3  # a count and two tokens


class Counting:
    """Each row counts: an iteration emits its next number, and in odd iterations the one after that too."""

    def __init__(self, device: str, *, num_slots: int = 8, body: Callable[[], None] = lambda: None) -> None:
        def full(*shape: int, value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.num_tokens_M = full(ROWS + 1, value=1)
        self.max_tokens_M = full(ROWS + 1, value=LIMIT)
        self.max_tokens_M[PADDING_ROW] = 1
        self.stop_ids_MS = full(ROWS + 1, 2, value=-1)
        self.iteration = full(1, value=0)

        def count(launch: Launch, rows: Tensor) -> dict[str, Tensor]:
            body()
            self.iteration.add_(1)
            rows_R = rows.long()
            live_R = rows != PADDING_ROW
            emitted_R = ((1 + self.iteration % 2) * live_R).int()
            first_R = self.num_tokens_M[rows_R]
            self.num_tokens_M.index_add_(0, rows_R, emitted_R)
            return {"outcome": torch.stack([emitted_R, first_R, first_R + 1], 1)}

        phase = Phase(
            name="count",
            fn=count,
            slots={"rows": Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=PADDING_ROW)},
            outputs={"outcome": Output(unit=Unit.ROW, dtype=torch.int32, shape=(WIDTH,))},
            modes=frozenset({GraphMode.FULL}),
        )
        self.table = make_table([phase], rows=(1, ROWS), device=device, capture=False)
        self.ring = Ring(ROWS, WIDTH, device=torch.device(device), num_slots=num_slots)
        watched = Watched(
            rows_R=self.table.buffers["rows"],
            outcome_RW=self.table.buffers["outcome"],
            first_token=COUNTS,
            num_tokens_M=self.num_tokens_M,
            max_tokens_M=self.max_tokens_M,
            stop_ids_MS=self.stop_ids_MS,
            padding_row=PADDING_ROW,
        )
        assert self.table.repeat(["count"], watched, self.ring) == ""
        self.table.capture()
        self.num_tokens_M[:ROWS] = 1  # capturing on a CPU has counted
        self.iteration.zero_()

    def launch(self, rows: int, max_iterations: int) -> Loop:
        self.table.recorder.order_after_loop()
        self.table.buffers.write("rows", torch.arange(rows, dtype=torch.int32))
        self.ring.begin(max_iterations)
        return self.table.launch_loop("count", rows)

    def take(self, loop: Loop, rows: int) -> tuple[Stop, list[list[int]]]:
        """Why the loop ended, if so, and the tokens of each row."""
        stop, outcome_RW = self.ring.take(loop.failure)
        return stop, [row[1 : 1 + row[0]] for row in outcome_RW[:rows].tolist()]

    def all(self, loop: Loop, rows: int) -> tuple[Stop, list[list[int]], int]:
        """The same of everything up to the loop's end, and how many iterations that was."""
        tokens: list[list[int]] = [[] for _ in range(rows)]
        for count in range(1, 10_000):
            stop, new = self.take(loop, rows)
            tokens = [old + more for old, more in zip(tokens, new, strict=True)]
            if stop is not Stop.NONE:
                return stop, tokens, count
        raise AssertionError("the loop never ended")


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_it_ends_after_as_many_iterations_as_asked(device, rows, count):
    counting = Counting(device)
    for begin in (0, count):  # and again, from where it was
        stop, tokens, iterations = counting.all(counting.launch(rows, count), rows)
        assert (stop, iterations) == (Stop.COUNT, count)
        emitted = sum(1 + (i + 1) % 2 for i in range(begin, begin + count))
        first = 1 + sum(1 + (i + 1) % 2 for i in range(begin))
        assert tokens == [list(range(first, first + emitted))] * rows


def test_it_ends_where_a_row_emits_one_of_its_own_stop_ids(device):
    counting = Counting(device)
    counting.stop_ids_MS[1] = torch.tensor([500, 6], dtype=torch.int32)
    counting.stop_ids_MS[3] = 2  # a row that is not in the batch
    stop, tokens, iterations = counting.all(counting.launch(2, 100), 2)
    assert (stop, iterations) == (Stop.ROW_ENDED, 4)  # 1 2, 3, 4 5, 6
    assert tokens == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_token_past_those_emitted_stops_nothing(device):
    counting = Counting(device)
    counting.stop_ids_MS[0] = torch.tensor([4, 500], dtype=torch.int32)  # iteration 2 has it beside its only token
    assert counting.all(counting.launch(1, 2), 1)[0] is Stop.COUNT
    assert counting.all(counting.launch(1, 9), 1)[::2] == (Stop.ROW_ENDED, 1)


def test_it_ends_where_a_row_comes_to_its_length(device):
    counting = Counting(device)
    counting.max_tokens_M[2] = 7
    stop, _, iterations = counting.all(counting.launch(3, 100), 3)
    assert (stop, iterations) == (Stop.ROW_ENDED, 4)
    assert int(counting.num_tokens_M[2]) == 7


def test_padding_never_stops_it(device):
    counting = Counting(device)
    assert counting.all(counting.launch(3, 5), 3)[::2] == (Stop.COUNT, 5)  # three rows run the graph of four


def test_a_host_that_stalls_loses_nothing_and_finds_nothing_overwritten(device):
    counting = Counting(device, num_slots=4)
    tokens, stops = [], []
    for _ in range(3):
        loop, full = counting.launch(1, 100), 4 * (1 + len(stops))
        while counting.ring.published < full:
            time.sleep(0.001)
        time.sleep(0.05)  # in which it could go on
        assert counting.ring.published == full
        stop, (new,), iterations = counting.all(loop, 1)
        tokens += new
        stops.append((stop, iterations))
    assert stops == [(Stop.RING_FULL, 4)] * 3
    assert tokens == list(range(1, 19))


def test_a_ring_smaller_than_the_loop_is_gone_through_again_and_again(device):
    """The host reads along, now and then falling behind, so that the loop ends and is launched again."""
    counting = Counting(device, num_slots=3)
    tokens: list[int] = []
    while len(tokens) < 300:
        loop, stop = counting.launch(1, 50), Stop.NONE
        while stop is Stop.NONE:
            stop, (new,) = counting.take(loop, 1)
            tokens += new
            if len(tokens) % 40 == 0:
                time.sleep(0.01)
    assert tokens == list(range(1, len(tokens) + 1))
    assert counting.ring.published > 100


def test_an_interrupt_ends_this_launch_within_two_iterations_and_no_later_one():
    counting = Counting("cpu", num_slots=1000)
    slow = counting.table._captured[counting.table.key_for("count", 1)].loop
    replay, may_run = slow.program.replay, threading.Semaphore(1)
    slow.program.replay = lambda: (may_run.acquire(), replay())
    counting.take(loop := counting.launch(1, 900), 1)  # the next one waits
    before = counting.ring.published
    counting.ring.interrupt()
    may_run.release(1000)
    stop, _, _ = counting.all(loop, 1)
    assert stop is Stop.INTERRUPTED
    assert counting.ring.published - before <= 2
    assert counting.all(counting.launch(1, 3), 1)[::2] == (Stop.COUNT, 3)


@pytest.mark.gpu
def test_an_interrupt_ends_a_launch_on_the_device():
    work = torch.randn(4096, 4096, device="cuda")
    counting = Counting("cuda", num_slots=4000, body=lambda: [work @ work for _ in range(4)])
    counting.take(loop := counting.launch(1, 3000), 1)  # some milliseconds each
    before = counting.ring.published
    counting.ring.interrupt()
    assert counting.all(loop, 1)[0] is Stop.INTERRUPTED
    assert counting.ring.published - before <= 2
    assert counting.all(counting.launch(1, 3), 1)[::2] == (Stop.COUNT, 3)


def test_an_error_in_the_loop_reaches_whoever_waits_for_it():
    counting = Counting("cpu")
    loop = counting.table._captured[counting.table.key_for("count", 1)].loop
    replay, left = loop.program.replay, [3]

    def fails_at_last() -> None:
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError("the third")
        replay()

    loop.program.replay = fails_at_last
    assert counting.launch(1, 50) is loop
    assert [counting.take(loop, 1)[1] for _ in range(2)] == [[[1, 2]], [[3]]], "what came before is delivered"
    with pytest.raises(ZeroDivisionError, match="the third"):
        counting.take(loop, 1)
    loop.program.replay = replay
    assert counting.all(counting.launch(1, 2), 1)[::2] == (Stop.COUNT, 2)


def test_what_is_launched_behind_a_loop_comes_after_it(device):
    counting = Counting(device, num_slots=100)
    loop = counting.launch(2, 20)
    counting.table.recorder.order_after_loop()
    counting.table.run("count", 2)
    assert counting.all(loop, 2)[::2] == (Stop.COUNT, 20)
    assert int(counting.iteration) == 21


def test_the_report_counts_launches_and_iterations(device):
    counting = Counting(device)
    loop = counting.launch(4, 5)
    counting.all(loop, 4)
    loop.iterations = 5  # whoever reads the ring counts
    counting.table.run("count", 4)
    report = counting.table.report()
    assert [(row.phase, row.rows, row.launches, row.iterations) for row in report.loops] == [
        ("count", 1, 0, 0),
        ("count", 4, 1, 5),
    ]
    assert report.replays == {"count": 6}
    assert "loop" in report.format()
    counting.table.reset_counts()
    assert counting.table.report().replays == {"count": 0}
