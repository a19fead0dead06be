"""The scheduler's pages, without a device: who gets how many, and who gives them back when they run out."""

from __future__ import annotations

import inspect
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.errors import RequestError
from draftloop.scheduler.batch import Sequence, Stage
from draftloop.scheduler.scheduler import Scheduler
from helpers import check_books, make_request, make_scheduler
from schedules import add, decode, emit, step


def test_admission_waits_for_the_pages_of_prompt_and_first_block():
    scheduler = make_scheduler(num_pages=6, num_drafts=3)
    a, b = add(scheduler, make_request("a", 36, max_tokens=30), make_request("b", 28, max_tokens=13))
    assert step(scheduler) == ([("a", 0, 32)], [])
    assert len(a.held[0].ids) == 3, "36 tokens, one more, and two blocks of drafts ahead; not the 5 it may come to need"
    assert b.stage is Stage.WAITING, "3 pages would leave none for the other to grow"
    scheduler.finish(a)
    assert step(scheduler) == ([("b", 0, 28)], [])


@pytest.mark.parametrize("num_drafts", [0, 3, 15])
@pytest.mark.parametrize("depth", [1, 2])
def test_pages_reach_past_all_that_steps_in_flight_may_emit(num_drafts, depth):
    scheduler, block = make_scheduler(num_drafts=num_drafts, max_model_len=256), 1 + num_drafts
    (a,) = add(scheduler, make_request("a", 10, max_tokens=100))
    step(scheduler)
    for _ in range(40):
        if a.steps_in_flight >= depth:
            emit(a, min(block, a.max_total - a.num_tokens))
        if a.num_tokens == a.max_total:
            break
        assert step(scheduler) == ([], ["a"])
        longest = min(a.num_tokens + a.steps_in_flight * block, a.max_total)
        assert len(a.held[0].ids) * 16 >= longest + num_drafts
    assert len(a.held[0].ids) <= scheduler.row_pages.needed(a, scheduler.groups[0])


def preempting(num_pages: int = 9) -> tuple[Scheduler, list[Sequence]]:
    """Two requests of 40 tokens that decode, and may become 128: together more than there is."""
    scheduler = make_scheduler(num_pages=num_pages, max_num_batched_tokens=128)
    both = add(scheduler, *(make_request(name, 40, max_tokens=80) for name in "ab"))
    step(scheduler)
    return scheduler, both


def test_who_came_last_is_preempted_when_pages_run_out_and_goes_on_first():
    scheduler, (a, b) = preempting()
    (c,) = add(scheduler, make_request("c", 3))
    while b.stage is Stage.DECODE:
        for sequence in scheduler.running:
            if sequence.stage is Stage.DECODE and sequence.steps_in_flight:
                emit(sequence)
        plan = scheduler.plan()
        scheduler.launched(plan)
    assert (b.stage, b.held, b.num_prefilled, b.num_preemptions) == (Stage.WAITING, [], 0, 1)
    assert [s.request_id for s in plan.decodes] == ["a"], "and nobody takes its place in the same step"
    assert scheduler.waiting[:1] == [b] or c.stage is not Stage.WAITING
    said = len(b.output_ids)
    scheduler.finish(a)
    chunk = next(chunk for chunk in scheduler.plan().chunks if chunk.sequence is b)
    assert (chunk.count, chunk.completes_prompt, chunk.emits) == (40 + said - 1, True, False)


def test_nobody_is_preempted_while_something_is_in_flight():
    scheduler, (a, b) = preempting()
    a.output_ids, b.output_ids = [7] * 23, [7] * 23
    a.steps_in_flight = b.steps_in_flight = 1
    assert not scheduler.plan(settled=False), "it waits until that has landed"
    assert scheduler.num_preemptions == 0
    assert [s.request_id for s in scheduler.plan().decodes] == ["a"]
    assert scheduler.num_preemptions == 1


def test_pages_held_ahead_are_taken_back_before_anybody_is_preempted():
    scheduler = make_scheduler(num_pages=17, max_model_len=256, max_num_batched_tokens=128)
    a, b = add(scheduler, make_request("a", 40, max_tokens=200), make_request("b", 40, max_tokens=200))
    step(scheduler)
    for sequence in (a, b):
        emit(sequence)
    plan = scheduler.plan()
    assert scheduler.reserve(plan, 64) > 1
    held = len(a.held[0].ids)
    a.held[0].num_mapped = held  # the device was told
    b.output_ids = [7] * 120
    assert scheduler.plan().decodes == (a, b)
    assert (scheduler.num_preemptions, len(a.held[0].ids), len(b.held[0].ids)) == (0, 3, 11)
    assert (a.held[0].num_mapped, a.held[0].num_stale) == (3, held), "and its table loses them"


def test_a_loop_gets_pages_for_all_its_steps_or_makes_fewer():
    scheduler = make_scheduler(num_pages=17, num_drafts=3, max_model_len=256, max_num_batched_tokens=128)
    a, b = add(scheduler, make_request("a", 40, max_tokens=200), make_request("b", 40, max_tokens=200))
    step(scheduler)
    emit(a)
    emit(b)
    plan = scheduler.plan()
    steps = scheduler.reserve(plan, 64)
    assert 1 < steps < 64
    for sequence in (a, b):
        assert len(sequence.held[0].ids) * 16 >= sequence.num_tokens + steps * 4 + 3
    check_books(scheduler, num_rows=4)


def test_a_request_may_take_the_pages_of_any_number_of_lower_priority(monkeypatch):
    scheduler = make_scheduler(num_pages=101, max_num_seqs=101, max_prefill_rows=100, max_num_batched_tokens=2000)
    for index in range(50):
        scheduler.add(make_request(f"low {index}", 5, priority=1, max_tokens=4))
    step(scheduler)
    scheduler.max_model_len = 1600
    scheduler.add(make_request("high", 1590, max_tokens=4))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 30)
    try:
        plan = scheduler.plan()
    finally:
        sys.setrecursionlimit(limit)
    assert plan.chunks[0].sequence.request_id == "high"
    assert scheduler.num_preemptions == 50


def test_a_request_that_the_cache_can_never_hold_is_refused_with_the_pages_it_needs():
    scheduler = make_scheduler(num_pages=4)
    with pytest.raises(RequestError, match=r"30 prompt tokens and up to 20 new ones need 4 pages of 16 tokens.* has 3"):
        scheduler.add(make_request("a", 30, max_tokens=20))
    assert scheduler.idle


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_drafts=st.sampled_from([0, 1, 4]),
    budget=st.integers(1, 40),
    windows=st.sampled_from([{}, {20: 4}, {20: 7}]),
)
def test_any_traffic_ends_with_everything_free(seed, num_drafts, budget, windows):
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_pages=12,
        windows=windows,
        num_drafts=num_drafts,
        max_num_batched_tokens=budget,
        max_prefill_rows=2,
        prefix_caching=True,
    )
    todo = [make_request(str(i), rng.randint(1, 60), max_tokens=rng.randint(1, 40)) for i in range(12)]
    for _ in range(4000):
        if todo and rng.random() < 0.5:
            scheduler.add(todo.pop())
        if scheduler.running and rng.random() < 0.05:
            rng.choice([scheduler.abort, scheduler.preempt])(rng.choice(scheduler.running))
        settled = rng.random() < 0.7
        preemptions = scheduler.num_preemptions
        plan = scheduler.plan(settled=settled)
        assert settled or scheduler.num_preemptions == preemptions
        tokens = sum(chunk.count for chunk in plan.chunks)
        assert tokens <= max(budget - len(plan.decodes) * (1 + num_drafts), 1)
        assert len(plan.chunks) <= 2
        check_books(scheduler, num_rows=4)
        for chunk in plan.chunks:
            assert chunk.start == chunk.sequence.num_prefilled
            assert_holds(scheduler, chunk.sequence, chunk.start, chunk.end)
        for sequence in plan.decodes:  # the steps in flight, this one, and drafts after it
            most = sequence.num_tokens + (1 + sequence.steps_in_flight) * (1 + num_drafts)
            assert_holds(scheduler, sequence, sequence.num_tokens - 1, min(most, sequence.max_total) + num_drafts)
        scheduler.launched(plan)
        landed = [s for s in scheduler.running if s.steps_in_flight and (settled or rng.random() < 0.8)]
        for sequence in landed:
            room = sequence.max_total - sequence.num_tokens
            sequence.output_ids += [3] * min(rng.randint(1, 1 + num_drafts) * sequence.steps_in_flight, room)
            sequence.steps_in_flight = 0
            if sequence.num_tokens == sequence.max_total:
                scheduler.finish(sequence)
        if scheduler.idle and not todo:
            break
    assert scheduler.idle
    assert [pages.num_free for pages in scheduler.groups] == [11, *(count - 1 for count in windows.values())]


def assert_holds(scheduler: Scheduler, sequence: Sequence, first: int, end: int) -> None:
    """A row has the pages of the tokens `first` to `end` - 1, and of all that these see."""
    for pages, held in zip(scheduler.groups, sequence.held, strict=True):
        seen = 0 if pages.window is None else max(first - pages.window + 1, 0)
        assert held.first * 16 <= seen
        assert held.end * 16 >= end


def test_a_prompt_holds_its_window_and_runs_in_parts_that_have_pages():
    """Three pages are a window of 20 tokens and what one step may add: a prompt of any length runs in them."""
    scheduler = make_scheduler(windows={20: 4}, max_num_batched_tokens=48, max_model_len=400)
    (a,) = add(scheduler, make_request("a", 150, max_tokens=100))
    assert [step(scheduler)[0] for _ in range(3)] == [[("a", 0, 48)], [("a", 48, 16)], [("a", 64, 16)]]
    while a.num_tokens < 249:
        step(scheduler)
        emit(a)
        assert len(a.held[1].ids) <= 3
    assert (a.held[1].first, len(a.held[0].ids)) == (14, 16)


def test_who_comes_last_gives_way_to_a_prompt_whose_window_finds_no_page():
    scheduler = make_scheduler(windows={20: 10}, max_num_batched_tokens=33, prefix_caching=True)
    (last,) = add(scheduler, make_request("last", 20, max_tokens=60, priority=1))
    step(scheduler)
    emit(last)
    (a,) = add(scheduler, make_request("a", 90, cache_salt="another prompt"))
    for _ in range(2):
        step(scheduler)
        emit(last)
    assert (a.num_prefilled, last.stage) == (64, Stage.DECODE)
    pages, held = scheduler.groups[1], a.held[1]
    pages.free(held.shorten(held.end - 4))  # those of its 64 tokens are left,
    pages.allocate(pages.num_free)  # as if another row held the others,
    pages.hold(held.ids)  # and shared these
    assert not scheduler.plan(settled=False), "what is in flight lands first"
    assert not scheduler.num_preemptions
    plan = scheduler.plan()
    assert ([chunk.sequence for chunk in plan.chunks], plan.decodes, last.stage) == ([a], (), Stage.WAITING)


def test_rows_keep_the_pages_ahead_of_them_while_requests_wait_for_a_row():
    """Else each step would take them back, and tell the device of it."""
    scheduler = make_scheduler(num_pages=17, max_num_seqs=1, max_model_len=256)
    (a,) = add(scheduler, make_request("a", 20, max_tokens=200))
    step(scheduler)
    decode(scheduler, a, 12)
    held = len(a.held[0].ids)
    assert held * 16 > a.num_tokens + 2 * 16
    add(scheduler, make_request("b", 20, max_tokens=200))
    decode(scheduler, a, 3)
    assert len(a.held[0].ids) == held
