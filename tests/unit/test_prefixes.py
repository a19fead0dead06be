"""What the scheduler finds of earlier prompts and answers, and on whose pages."""

from __future__ import annotations

import pytest

from draftloop.request import SamplingParams
from draftloop.scheduler.scheduler import Scheduler
from helpers import make_request, make_scheduler
from schedules import add, decode, emit, step


def cached(**settings) -> Scheduler:
    return make_scheduler(**{"prefix_caching": True, "max_num_batched_tokens": 128, **settings})


def num_cached(scheduler: Scheduler, name: str, prompt_ids: list[int]) -> int:
    """What a request with this prompt finds."""
    request = make_request(name, len(prompt_ids))
    request.prompt_ids = prompt_ids
    add(scheduler, request)
    step(scheduler)
    return request.num_cached


def test_a_loop_takes_a_part_of_the_pages_that_are_only_kept():
    """A cache that has been in use holds no empty page: loops must not be short for ever after."""
    scheduler = cached(num_pages=129, num_drafts=3, max_model_len=2048, max_num_batched_tokens=2048)
    (old,) = add(scheduler, make_request("old", 127 * 16, max_tokens=1))
    step(scheduler)
    emit(old)
    scheduler.finish(old)
    assert scheduler.groups[0].num_empty < 4
    (new,) = add(scheduler, make_request("new", 20, max_tokens=1000, cache_salt="other"))
    step(scheduler)
    emit(new)
    plan = scheduler.plan()
    assert scheduler.reserve(plan, 64) == 64
    assert scheduler.groups[0].num_free > 90, "and leaves most of them"


def test_an_8_page_prompt_that_comes_again_runs_its_last_token_alone():
    """B40: not a page is dropped, whatever drafts."""
    scheduler = cached(max_model_len=256, max_num_batched_tokens=256)
    a, b = make_request("a", 128), make_request("b", 128)
    add(scheduler, a)
    step(scheduler)
    add(scheduler, b)
    assert step(scheduler) == ([("b", 127, 1)], ["a"])
    assert (a.num_cached, b.num_cached) == (0, 127)
    assert a.held[0].ids[:7] == b.held[0].ids[:7]
    assert a.held[0].ids[7] != b.held[0].ids[7], (
        "its last position is the row's own: a drafter may keep the next token there"
    )
    scheduler.finish(a)
    scheduler.finish(b)
    (c,) = add(scheduler, make_request("c", 128))
    plan = scheduler.plan()
    assert c.held[0].ids[:8] == plan.chunks[0].sequence.held[0].ids[:8]
    assert c.held[0].copied is None, "nobody else holds it, so that it need not be copied"
    scheduler.launched(plan)
    scheduler.finish(c)
    assert scheduler.groups[0].num_free == scheduler.groups[0].capacity


def test_the_page_that_is_copied_is_held_until_then():
    scheduler = cached()
    a, b = make_request("a", 40), make_request("b", 40)
    add(scheduler, a)
    step(scheduler)
    add(scheduler, b)
    plan = scheduler.plan()
    assert (b.num_prefilled, b.held[0].copied) == (31, a.held[0].ids[1])
    scheduler.finish(a)
    assert scheduler.groups[0].num_holders(b.held[0].copied) == 1
    scheduler.launched(plan)
    assert b.held[0].copied is None
    scheduler.abort(b)
    assert scheduler.groups[0].num_free == scheduler.groups[0].capacity


@pytest.mark.parametrize("ends", [Scheduler.abort, Scheduler.preempt])
def test_who_goes_before_the_page_is_copied_lets_go_of_it(ends):
    scheduler = cached()
    a, b = make_request("a", 40), make_request("b", 40)
    add(scheduler, a)
    step(scheduler)
    add(scheduler, b)
    scheduler.plan()
    assert b.held[0].copied is not None
    ends(scheduler, b)
    scheduler.finish(a)
    assert scheduler.groups[0].num_free == scheduler.groups[0].capacity


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, 31), ({"cache_salt": "x"}, 0), ({"params": SamplingParams(prompt_logprobs=0)}, 0)],
    ids=["same", "other_salt", "prompt_logprobs"],
)
def test_what_is_found(changed, expected):
    scheduler = cached()
    a = make_request("a", 40)
    add(scheduler, a)
    step(scheduler)
    b = make_request("b", 40)
    for name, value in changed.items():
        setattr(b, name, value)
    add(scheduler, b)
    step(scheduler)
    assert b.num_cached == expected


def test_a_page_is_found_behind_the_very_pages_that_it_was_computed_behind():
    scheduler = cached()
    first, second, third, fourth = ([start + i for i in range(16)] for start in (10, 30, 50, 70))
    for name, prompt, expected in (
        ("a", [*first, *second, 1], 0),
        ("b", [*third, *fourth, 1], 0),
        ("mixed", [*first, *fourth, 1], 15),
        ("same", [*first, *second, 2], 31),
    ):
        assert num_cached(scheduler, name, prompt) == expected, name


def test_answers_are_found_too_but_not_where_the_drafter_was_not_fed():
    for fed, expected in ((True, 95), (False, 31)):
        scheduler = cached()
        a = make_request("a", 40, max_tokens=80)
        add(scheduler, a)
        step(scheduler)
        scheduler.launched(scheduler.plan(), fed=fed)
        decode(scheduler, a, 60)
        scheduler.finish(a)
        assert num_cached(scheduler, "b", a.token_ids) == expected


def test_the_answer_of_a_request_that_was_preempted_is_found_though_its_drafter_was_not_fed_before():
    """All of it has run again since, the drafter too."""
    scheduler = cached()
    a = make_request("a", 40, max_tokens=80)
    add(scheduler, a)
    step(scheduler)
    scheduler.launched(scheduler.plan(), fed=False)
    decode(scheduler, a, 10)
    scheduler.preempt(a)
    step(scheduler)
    decode(scheduler, a, 40)
    scheduler.finish(a)
    assert num_cached(scheduler, "b", a.token_ids) == (a.num_tokens - 1) // 16 * 16 - 1


def test_a_reset_while_requests_run_finds_nothing_from_before():
    scheduler = cached()
    a = make_request("a", 40, max_tokens=60)
    add(scheduler, a)
    step(scheduler)
    scheduler.reset_prefix_cache()
    decode(scheduler, a, 40)
    scheduler.finish(a)
    assert scheduler.groups[0].num_registered == 0
    b = make_request("b", 40)
    add(scheduler, b)
    step(scheduler)
    assert b.num_cached == 0
    scheduler.finish(b)
    assert scheduler.groups[0].num_registered == 2


@pytest.mark.parametrize("before", ["waits", "runs"])
def test_what_is_computed_after_a_reset_is_found_whoever_computes_it(before):
    scheduler = cached(max_num_seqs=1)
    first, other = make_request("first", 20), make_request("other", 40)
    if before == "waits":
        add(scheduler, first, other)
        step(scheduler)
        assert not scheduler.has_prompt_to_run(), "having looked for its pages"
        scheduler.reset_prefix_cache()
        scheduler.finish(first)
    else:
        add(scheduler, other)
        step(scheduler)
        scheduler.reset_prefix_cache()
        scheduler.preempt(other)
    step(scheduler)
    assert other.num_cached == 0
    scheduler.finish(other)
    (again,) = add(scheduler, make_request("again", 40))
    step(scheduler)
    assert again.num_cached == 31


def test_what_a_request_with_bad_logits_computed_is_not_found():
    scheduler = cached()
    a = make_request("a", 40)
    add(scheduler, a)
    step(scheduler)
    a.finish_reason = "error"
    scheduler.finish(a)
    assert scheduler.groups[0].num_registered == 0


def test_a_preempted_request_finds_what_it_had():
    scheduler = cached()
    a = make_request("a", 40, max_tokens=60)
    add(scheduler, a)
    step(scheduler)
    decode(scheduler, a, 30)
    scheduler.preempt(a)
    assert step(scheduler) == ([("a", 63, 6)], []), "of 70 tokens 4 pages are there; the last token decodes"
    assert a.num_cached == 0, "that is told of a request's own prompt only"
