"""Who runs next, without a device: first come, first served, within rows, pages and the token budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.errors import RequestError
from draftloop.scheduler.batch import Sequence, Stage, StepPlan
from draftloop.scheduler.scheduler import Scheduler
from helpers import make_request, make_scheduler


def shape(plan: StepPlan) -> tuple[list[tuple[str, int, int]], list[str]]:
    return [(c.sequence.request_id, c.start, c.count) for c in plan.chunks], [s.request_id for s in plan.decodes]


def step(scheduler: Scheduler) -> tuple[list[tuple[str, int, int]], list[str]]:
    plan = scheduler.plan()
    scheduler.launched(plan)
    return shape(plan)


def add(scheduler: Scheduler, *requests: Sequence) -> list[Sequence]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


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


def test_admission_waits_for_all_pages_that_a_request_can_need():
    scheduler = make_scheduler(num_pages=6)
    a, b = add(scheduler, make_request("a", 20, max_tokens=30), make_request("b", 20, max_tokens=13))
    assert step(scheduler) == ([("a", 0, 20)], []), "4 of 5 pages are taken, 3 are needed"
    assert len(a.pages) == 4
    assert b.stage is Stage.WAITING
    scheduler.finish(a)
    assert step(scheduler) == ([("b", 0, 20)], [])


def test_a_request_that_waits_is_not_overtaken():
    scheduler = make_scheduler(num_pages=6)
    add(scheduler, make_request("a", 20, max_tokens=30), make_request("big", 40), make_request("small", 2))
    step(scheduler)
    assert step(scheduler) == ([], ["a"])


@pytest.mark.parametrize("num_drafts", [0, 3, 15])
def test_pages_reach_past_the_end_for_drafts(num_drafts):
    scheduler = make_scheduler(num_drafts=num_drafts)
    (a,) = add(scheduler, make_request("a", 10, max_tokens=22))
    step(scheduler)
    assert len(a.pages) == -(-(32 + num_drafts) // 16)


def test_finishing_frees_row_and_pages():
    scheduler = make_scheduler()
    before = scheduler.pages.num_free
    (a,) = add(scheduler, make_request("a", 10))
    step(scheduler)
    assert scheduler.pages.num_free < before
    scheduler.finish(a)
    assert scheduler.pages.num_free == before
    assert (a.stage, a.pages, scheduler.idle) == (Stage.FINISHED, [], True)


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "in_prefill", "decoding"])
def test_aborting_frees_wherever_the_request_is_and_twice_does_no_harm(steps):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    before = scheduler.pages.num_free
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
    assert scheduler.pages.num_free == before
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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_drafts=st.sampled_from([0, 1, 4]), budget=st.integers(1, 40))
def test_any_traffic_ends_with_everything_free(seed, num_drafts, budget):
    rng = random.Random(seed)
    scheduler = make_scheduler(num_pages=20, num_drafts=num_drafts, max_num_batched_tokens=budget, max_prefill_rows=2)
    todo = [make_request(str(i), rng.randint(1, 60), max_tokens=rng.randint(1, 40)) for i in range(12)]
    left = {request.request_id: rng.randint(1, 6) for request in todo}
    prefilled: dict[str, int] = {}
    for _ in range(2000):
        if todo and rng.random() < 0.5:
            scheduler.add(todo.pop())
        if scheduler.running and rng.random() < 0.05:
            scheduler.abort(rng.choice(scheduler.running))
        plan = scheduler.plan()
        tokens = sum(chunk.count for chunk in plan.chunks)
        assert tokens <= max(budget - len(plan.decodes) * (1 + num_drafts), 1)
        assert len(plan.chunks) <= 2
        rows = [sequence.row for sequence in scheduler.running]
        assert len(set(rows)) == len(rows) <= 4
        pages = [page for sequence in scheduler.running for page in sequence.pages]
        assert len(set(pages)) == len(pages)
        for chunk in plan.chunks:
            assert chunk.start == prefilled.get(chunk.sequence.request_id, 0)
            prefilled[chunk.sequence.request_id] = chunk.end
        scheduler.launched(plan)
        for sequence in plan.decodes:
            left[sequence.request_id] -= 1
            if left[sequence.request_id] == 0:
                scheduler.finish(sequence)
        if scheduler.idle and not todo:
            break
    assert scheduler.idle
    assert scheduler.pages.num_free == 19
