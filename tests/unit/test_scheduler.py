"""Who runs next, without a device: first come, first served, within rows, pages and the token budget."""

from __future__ import annotations

import pytest

from draftloop.errors import RequestError
from draftloop.scheduler.batch import Stage
from draftloop.scheduler.drafting import DraftsByRows
from helpers import make_request, make_scheduler
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
