"""Requests that lose their row and go on: the same tokens, drafts and reports, whatever was in flight."""

from __future__ import annotations

import pytest
import torch

from draftloop.drafters.extract_hidden_states import read_hidden_states
from draftloop.engine.llm import LLM
from draftloop.errors import RequestError
from draftloop.request import SamplingParams
from example_drafters import each_drafter, example_configs, remembers, works_on_host
from helpers import (
    answers,
    assert_all_free,
    check_books,
    drafting_spec,
    engine,
    example_target,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    shrink,
)


def books(llm: LLM):
    return lambda: check_books(llm.engine.core.scheduler, num_rows=llm.engine.resolved.max_num_seqs)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("reset", [False, True], ids=["", "cache_reset"])
def test_pages_for_two_and_a_half_of_six_requests(num_drafts, reset):
    """B53: rows are lost while steps are in flight, and prefixes are forgotten between them."""
    llm = make_engine(speculative_config=drafting_spec(num_drafts), async_scheduling=True, max_model_len=96)
    llm.engine.table.poison = True
    shrink(llm, 13)
    core, asked = llm.engine.core, prompts(6, longest=30)
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(50))

    def look() -> None:
        books(llm)()
        if reset:
            assert core.reset_prefix_cache()

    assert run_through(llm, look) == {str(i): oracle(prompt, 50) for i, prompt in enumerate(asked)}
    assert core.scheduler.num_preemptions >= 2
    assert_all_free(llm)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("length", [61, 62, 63])
def test_resuming_within_a_block_of_the_limit_meets_it_exactly(num_drafts, length):
    """B18"""
    llm = engine(speculative_config=drafting_spec(num_drafts), max_model_len=64, poison=True, async_scheduling=True)
    core, asked = llm.engine.core, prompts(3, longest=40)
    sequences = [core.add(str(i), prompt, greedy(None)) for i, prompt in enumerate(asked)]

    def preempt() -> None:
        if sequences[1].num_tokens >= length and not sequences[1].num_preemptions:
            core.preempt("1")

    ended = run_through(llm, preempt)
    assert ended == {str(i): oracle(prompt, 64, max_model_len=64) for i, prompt in enumerate(asked)}
    assert sequences[1].num_preemptions == 1
    assert {(s.num_tokens, s.finish_reason) for s in sequences} == {(64, "length")}


def test_prompts_at_the_limit():
    """B18"""
    llm = engine(speculative_config=drafting_spec(3), max_model_len=64)
    (answer,) = answers(llm.generate([5] * 63, greedy(None)))
    assert len(answer) == 1
    with pytest.raises(RequestError, match="64 tokens; with max_model_len 64"):
        llm.generate([5] * 64, greedy(None))


@pytest.mark.parametrize(("name", "index"), each_drafter(only=lambda name, index: not remembers(name, index)))
def test_drafts_are_as_good_as_if_nothing_had_been(name, index):
    """Preempted again and again, in prompts and between steps in flight: the same tokens and the same acceptance."""
    spec = example_configs()[name][index]
    overlap = None if works_on_host(name, index) else True
    settings = {"speculative_config": spec, "async_scheduling": overlap, "max_num_batched_tokens": 16}
    llm = engine(**settings, cudagraph_capture_sizes=(2, 4), poison=True)
    core, asked = llm.engine.core, prompts(4, longest=40)

    def run(every: int) -> tuple[dict, list]:
        core.reset_prefix_cache()
        made = [core.add(f"{every}-{i}", prompt, greedy(12, seed=7)) for i, prompt in enumerate(asked)]
        steps = iter(range(1000))

        def preempt() -> None:
            books(llm)()
            step = next(steps)
            if every and step % every == 0:
                core.preempt(f"{every}-{step // every % 4}")

        return run_through(llm, preempt), made

    calm, expected = run(0)
    for every in (2, 3):
        ended, made = run(every)
        assert sum(s.num_preemptions for s in made) >= 4
        assert list(ended.values()) == list(calm.values()) or ended == {
            key.replace("0-", f"{every}-", 1): value for key, value in calm.items()
        }
        for sequence, reference in zip(made, expected, strict=True):
            assert sequence.acceptance_histogram == reference.acceptance_histogram
    assert_all_free(llm)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "dflash", "ngram"])
def test_seeds_survive(method):
    llm = engine(speculative_config=example_configs()[method][0], async_scheduling=True, poison=True)
    core, asked = llm.engine.core, prompts(4)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    expected = answers(llm.generate(asked, params))
    sequences = [core.add(str(i), prompt, params) for i, prompt in enumerate(asked)]
    steps = iter(range(1000))
    run_through(llm, lambda: core.preempt(str(next(steps) % 4)))
    assert sum(s.num_preemptions for s in sequences) > 4
    assert [s.output_ids for s in sequences] == expected


def test_a_row_is_taken_while_the_device_repeats():
    """Nothing that the loop still makes of it counts."""
    llm = engine(
        speculative_config=drafting_spec(3),
        cudagraph_mode="FULL",
        device_loop=50,
        async_scheduling=True,
        poison=True,
    )
    core, asked = llm.engine.core, prompts(3)
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(90))
    steps = iter(range(1000))
    ended = run_through(llm, lambda: core.preempt(str(next(steps) // 5 % 3)) if next(steps) % 5 == 0 else None)
    assert ended == {str(i): oracle(prompt, 90) for i, prompt in enumerate(asked)}
    assert core.scheduler.num_preemptions > 2
    assert_all_free(llm)


def test_a_loop_makes_no_more_steps_than_it_has_pages_for():
    llm = make_engine(
        speculative_config=drafting_spec(3), cudagraph_mode="FULL", device_loop=64, max_num_seqs=2, max_prefill_rows=2
    )
    llm.engine.table.poison = True
    shrink(llm, 12)
    core, asked = llm.engine.core, prompts(4)
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(100))
    assert run_through(llm, books(llm)) == {str(i): oracle(prompt, 100) for i, prompt in enumerate(asked)}
    assert core.worker.loop is not None
    loops = llm.get_graph_report().loops
    assert sum(loop.iterations for loop in loops) > 10
    assert_all_free(llm)


def test_logprobs_come_once_and_are_the_same():
    llm = engine(speculative_config=drafting_spec(3), max_num_batched_tokens=16)
    core, asked = llm.engine.core, prompts(3, longest=40)
    params = greedy(20, logprobs=2, prompt_logprobs=1)
    expected = llm.generate(asked, params)
    core.reset_prefix_cache()
    sequences = [core.add(str(i), prompt, params) for i, prompt in enumerate(asked)]
    steps = iter(range(1000))
    run_through(llm, lambda: core.preempt(str(next(steps) % 3)))
    for sequence, output in zip(sequences, expected, strict=True):
        assert sequence.num_preemptions
        for found, wanted in (
            (sequence.logprobs, output.outputs[0].logprobs),
            (sequence.prompt_logprobs, output.prompt_logprobs),
        ):
            assert [one and list(one) for one in found] == [one and list(one) for one in wanted]
            values = [(a[k].logprob, b[k].logprob) for a, b in zip(found, wanted, strict=True) if a for k in a]
            assert all(abs(a - b) < 1e-4 for a, b in values)


def test_states_that_are_observed_come_once(tmp_path):
    spec = {"method": "extract_hidden_states", "layer_ids": [0, 2], "num_speculative_tokens": 1}
    found = {}
    for every in (0, 2):
        folder = tmp_path / str(every)
        llm = make_engine(speculative_config={**spec, "output_dir": str(folder)}, max_num_batched_tokens=16)
        core = llm.engine.core
        for i, prompt in enumerate(prompts(3, longest=40)):
            core.add(str(i), prompt, greedy(12))
        steps = iter(range(1000))
        run_through(llm, lambda core=core, every=every, steps=steps: every and core.preempt(str(next(steps) // 3 % 3)))
        assert bool(core.scheduler.num_preemptions) == bool(every)
        llm.close()
        found[every] = {states.request_id: states for states in read_hidden_states(folder)}
    assert found[0].keys() == found[2].keys() == {"0", "1", "2"}
    for request_id, states in found[0].items():
        assert torch.equal(states.token_ids, found[2][request_id].token_ids)
        torch.testing.assert_close(states.hidden, found[2][request_id].hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [False, True], ids=["depth_1", "depth_2"])
def test_aborts_at_any_moment_free_everything(depth):
    """Queued, in a prompt, decoding, preempted, in a device loop, and twice."""
    llm = engine(
        speculative_config=drafting_spec(3),
        cudagraph_mode="FULL",
        device_loop=8,
        async_scheduling=depth,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        max_prefill_rows=2,
        poison=True,
    )
    core, asked = llm.engine.core, prompts(4, longest=40)
    for moment in range(14):
        for i, prompt in enumerate(asked):
            core.add(f"{moment}-{i}", prompt, greedy(60))
        for _ in range(moment):
            core.step()
        core.preempt(f"{moment}-1")
        for victim in (0, 1, 3, 0):
            core.abort(f"{moment}-{victim}")
            books(llm)()
        assert run_through(llm, books(llm)) == {f"{moment}-2": oracle(asked[2], 60)}
        assert_all_free(llm)


def test_lower_priority_is_answered_first():
    llm = engine(max_num_seqs=1, max_prefill_rows=1)
    asked = prompts(3)
    outputs = llm.generate(asked, greedy(5), priority=[2, 1, 0])
    assert answers(outputs) == [oracle(prompt, 5) for prompt in asked]
    first = [output.metrics["time_to_first_token_ms"] for output in outputs]
    assert first == sorted(first, reverse=True)
    with pytest.raises(RequestError, match="3 prompts came with 2 priorities"):
        llm.generate(asked, greedy(5), priority=[1, 2])
    with pytest.raises(RequestError, match=r"priority is 1.5; it must be an integer"):
        llm.engine.core.add("x", [1], greedy(5), priority=1.5)


def test_a_target_with_groups_of_caches_is_preempted_too():
    spec = example_configs()["gemma4_mtp"][0]
    llm = make_engine(speculative_config=spec, max_model_len=96)
    shrink(llm, 10)
    asked = prompts(5, longest=30)
    expected = [oracle(prompt, 40, model=example_target(spec)) for prompt in asked]
    assert answers(llm.generate(asked, greedy(40))) == expected
    assert llm.get_metrics()["num_preemptions"] > 0
