"""Who runs next, without a device: first come, first served, within rows, pages and the token budget."""

from __future__ import annotations

import inspect
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.errors import RequestError
from draftloop.scheduler.batch import Sequence, Stage
from draftloop.scheduler.drafting import DraftsByRows
from draftloop.scheduler.scheduler import Scheduler
from helpers import check_books, make_request, make_scheduler
from schedules import add, emit, step


def test_prompts_run_in_the_order_of_arrival():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 10), make_request("b", 12), make_request("c", 4))
    assert step(scheduler) == ([("a", 0, 10), ("b", 0, 12), ("c", 0, 4)], [])
    assert step(scheduler) == ([], ["a", "b", "c"])


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=32)
    (long,) = add(scheduler, make_request("a", 70))
    assert [step(scheduler) for _ in range(3)] == [
        ([("a", 0, 32)], []), ([("a", 32, 32)], []), ([("a", 64, 6)], []),
    ]  # fmt: skip
    assert long.stage is Stage.DECODE
    assert step(scheduler) == ([], ["a"])


def test_a_prompt_in_progress_goes_before_new_ones():
    scheduler = make_scheduler(max_num_batched_tokens=32)
    add(scheduler, make_request("a", 40), make_request("b", 30))
    assert step(scheduler) == ([("a", 0, 32)], [])
    assert step(scheduler) == ([("a", 32, 8), ("b", 0, 24)], [])
    assert step(scheduler) == ([("b", 24, 6)], ["a"])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_decoding_rows_take_their_tokens_out_of_the_budget(num_drafts):
    scheduler = make_scheduler(max_num_batched_tokens=32, num_drafts=num_drafts)
    add(scheduler, make_request("a", 2), make_request("b", 2))
    step(scheduler)
    add(scheduler, make_request("c", 60))
    assert step(scheduler) == ([("c", 0, 32 - 2 * (1 + num_drafts))], ["a", "b"])


def test_prompts_that_join_do_not_change_the_number_of_drafts():
    """B51: it follows from the rows that decode, and prompts do not yet."""
    scheduler = make_scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_drafts=3,
        drafting=DraftsByRows((0, 3), [(1, 4, 3), (5, 8, 0)]),
    )
    decoding = add(scheduler, *(make_request(f"d{i}", 4, max_tokens=40) for i in range(4)))
    step(scheduler)
    add(scheduler, *(make_request(f"p{i}", 120, max_tokens=4) for i in range(3)))
    counts = []
    for _ in range(12):
        plan = scheduler.plan()
        counts.append((len(plan.decodes), plan.num_drafts))
        scheduler.launched(plan)
        for sequence in decoding:
            emit(sequence)
    assert set(counts) == {(4, 3), (5, 0), (6, 0), (7, 0)}


def test_prompts_advance_even_where_decoding_rows_fill_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=8, num_drafts=3)
    add(scheduler, make_request("a", 2), make_request("b", 2))
    step(scheduler)
    add(scheduler, make_request("c", 5))
    assert step(scheduler) == ([("c", 0, 1)], ["a", "b"])


def test_no_step_runs_more_prompts_than_allowed():
    scheduler = make_scheduler(max_prefill_rows=2)
    add(scheduler, *(make_request(name, 3) for name in "abc"))
    assert step(scheduler) == ([("a", 0, 3), ("b", 0, 3)], [])
    assert step(scheduler) == ([("c", 0, 3)], ["a", "b"])


def test_admission_waits_for_a_free_row():
    scheduler = make_scheduler(max_num_seqs=2)
    a, _b, c = add(scheduler, *(make_request(name, 3) for name in "abc"))
    step(scheduler)
    assert step(scheduler) == ([], ["a", "b"])
    assert c.stage is Stage.WAITING
    row = a.row
    scheduler.finish(a)
    assert step(scheduler) == ([("c", 0, 3)], ["b"])
    assert c.row == row


def test_prompts_gather_where_throughput_is_all_that_counts():
    scheduler = make_scheduler(max_num_seqs=4, max_prefill_rows=4, min_prefill_rows=3)
    first = add(scheduler, *(make_request(name, 3) for name in "abcd"))
    add(scheduler, *(make_request(name, 3) for name in "efgh"))
    assert len(step(scheduler)[0]) == 4
    for ended, sequence in enumerate(first[:3]):
        assert scheduler.has_prompt_to_run() == (ended == 3)
        assert step(scheduler)[0] == []
        scheduler.finish(sequence)
    assert scheduler.has_prompt_to_run()
    assert step(scheduler) == ([("e", 0, 3), ("f", 0, 3), ("g", 0, 3)], ["d"])
    scheduler.finish(first[3])
    assert step(scheduler)[0] == [("h", 0, 3)], "the last ones wait for nobody"


def test_prompts_do_not_gather_before_lower_priorities_nor_where_nobody_decodes():
    scheduler = make_scheduler(max_num_seqs=4, max_prefill_rows=4, min_prefill_rows=3)
    add(scheduler, *(make_request(name, 3) for name in "ab"))
    assert len(step(scheduler)[0]) == 2
    add(scheduler, make_request("c", 3), make_request("d", 3), make_request("e", 3))
    assert step(scheduler) == ([], ["a", "b"]), "two rows are free, three prompts wait"
    add(scheduler, make_request("urgent", 3, priority=-1))
    assert step(scheduler)[0][0] == ("urgent", 0, 3)


def test_admission_waits_for_the_pages_of_prompt_and_first_block():
    scheduler = make_scheduler(num_pages=6, num_drafts=3)
    a, b = add(scheduler, make_request("a", 36, max_tokens=30), make_request("b", 28, max_tokens=13))
    assert step(scheduler) == ([("a", 0, 32)], [])
    assert len(a.held[0].ids) == 3, "36 tokens, one more, and two blocks of drafts ahead; not the 5 it may come to need"
    assert b.stage is Stage.WAITING, "3 pages would leave none for the other to grow"
    scheduler.finish(a)
    assert step(scheduler) == ([("b", 0, 28)], [])


def test_who_waits_for_a_grammar_holds_nobody_up():
    scheduler = make_scheduler()
    scheduler.add(make_request("compiling", 5, is_compiling=True))
    assert not scheduler.has_prompt_to_run()
    scheduler.add(make_request("free", 5))
    assert scheduler.has_prompt_to_run()
    assert [chunk.sequence.request_id for chunk in scheduler.plan().chunks] == ["free"]


def test_a_request_that_waits_is_not_overtaken():
    scheduler = make_scheduler(num_pages=6)
    add(scheduler, make_request("a", 20, max_tokens=30), make_request("big", 40), make_request("small", 2))
    step(scheduler)
    assert step(scheduler) == ([], ["a"])


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
    assert scheduler.groups[0].num_free >= 0


def test_lower_priority_is_served_later_and_loses_its_row_to_higher():
    scheduler = make_scheduler(max_num_seqs=1)
    (late,) = add(scheduler, make_request("late", 10, priority=1))
    step(scheduler)
    add(scheduler, make_request("b", 10, priority=1), make_request("first", 10))
    assert [s.request_id for s in scheduler.waiting] == ["first", "b"]
    assert scheduler.has_prompt_to_run(), "so that a device loop is interrupted"
    assert not scheduler.plan(settled=False)
    assert step(scheduler) == ([("first", 0, 10)], [])
    assert late.num_preemptions == 1
    assert [s.request_id for s in scheduler.waiting] == ["late", "b"], "it was there before"


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


def test_a_stream_of_long_prompts_starves_nobody():
    """Rows decode in every step, prompts of any length advance in every step, and in the order of arrival."""
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_seqs=4, num_drafts=3)
    (short,) = add(scheduler, make_request("short", 4, max_tokens=60))
    step(scheduler)
    order = []
    for index in range(60):
        if index % 4 == 0:
            add(scheduler, make_request(f"long{index // 4}", 100, max_tokens=4))
        if index == 6:
            add(scheduler, make_request("late", 3, max_tokens=4))
        plan = scheduler.plan()
        assert short in plan.decodes
        assert sum(chunk.count for chunk in plan.chunks) >= min(16, sum(s.num_prompt for s in scheduler.waiting) or 0)
        scheduler.launched(plan)
        for sequence in plan.decodes:
            sequence.steps_in_flight = 0
            if sequence is not short:
                order.append(sequence.request_id)
                scheduler.finish(sequence)
    assert order[:4] == ["long0", "long1", "late", "long2"]


def test_finishing_frees_row_and_pages():
    scheduler = make_scheduler()
    before = scheduler.groups[0].num_free
    (a,) = add(scheduler, make_request("a", 10))
    step(scheduler)
    assert scheduler.groups[0].num_free < before
    scheduler.finish(a)
    assert scheduler.groups[0].num_free == before
    assert (a.stage, a.held, scheduler.idle) == (Stage.FINISHED, [], True)


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "in_prefill", "decoding"])
def test_aborting_frees_wherever_the_request_is_and_twice_does_no_harm(steps):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    before = scheduler.groups[0].num_free
    a, b = add(scheduler, make_request("a", 16), make_request("b", 3))
    for _ in range(steps):
        step(scheduler)
    for _ in range(2):
        scheduler.abort(a)
    assert a.stage is Stage.FINISHED
    for _ in range(3):
        step(scheduler)
    assert b.stage is Stage.DECODE
    scheduler.abort(b)
    assert scheduler.groups[0].num_free == before
    assert scheduler.idle
    assert not scheduler.plan()


def test_a_prompt_tail_that_looks_like_a_decode_batch_is_a_prompt():
    """A batch decodes because its requests do, not because each row has 1 + K tokens."""
    scheduler = make_scheduler(max_num_batched_tokens=32, num_drafts=3)
    add(scheduler, make_request("a", 36))
    step(scheduler)
    assert step(scheduler) == ([("a", 32, 4)], [])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "total"), [(10, 5, 15), (10, 118, 128), (10, 500, 128), (10, None, 128), (127, None, 128)]
)
def test_length_limits(prompt, max_tokens, total):
    scheduler = make_scheduler()
    (a,) = add(scheduler, make_request("a", prompt, max_tokens=max_tokens))
    assert a.max_total == total


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (0, "prompt is empty"),
        (128, r"128 tokens; with max_model_len 128 it may have at most 127"),
        (500, r"500 tokens; with max_model_len 128"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt, message):
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("a", prompt))
    assert scheduler.idle


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
