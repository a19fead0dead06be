"""Prompts that begin alike: computed once, with everything that the drafter keeps of them, and never mixed up."""

from __future__ import annotations

import random

import pytest
import torch

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import DRAFTERS, Drafter
from draftloop.drafters.synthetic import SyntheticDrafter
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError, RequestError
from draftloop.request import RequestOutput, SamplingParams
from example_drafters import each_drafter, example_configs, remembers, reuses_prefixes, works_on_host
from helpers import (
    answers,
    assert_all_free,
    check_books,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)


def drafts_the_same_from_prefixes(name: str, index: int) -> bool:
    return DRAFTERS[name].drafts and reuses_prefixes(name, index) and not remembers(name, index)


def random_ids(count: int, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(160) for _ in range(count)]


def acceptance(outputs: list[RequestOutput]) -> list[tuple[int, ...] | None]:
    return [output.spec and output.spec.acceptance_histogram for output in outputs]


@pytest.mark.parametrize(("name", "index"), each_drafter(only=drafts_the_same_from_prefixes))
def test_a_hit_costs_no_acceptance(name, index):
    """B40, for each drafter: prompts that end on, before and behind page edges, and that part in any place.

    Alone, one after the other, and while those that they share pages with still decode.
    """
    spec = example_configs()[name][index]
    overlap = None if works_on_host(name, index) else True
    settings = {"speculative_config": spec, "async_scheduling": overlap, "max_num_batched_tokens": 40}
    llm = engine(**settings, cudagraph_capture_sizes=(2, 8), poison=True)
    base = random_ids(64)
    asked = [base[:48], base[:48], base[:47], base[:49], [*base[:32], *random_ids(20, 5)], [*base[:33], 7, 8], base]
    params = greedy(8, seed=1)
    cold = []
    for prompt in asked:
        llm.reset_prefix_cache()
        cold += llm.generate(prompt, params)
    assert {output.num_cached_tokens for output in cold} == {0}
    llm.reset_prefix_cache()
    warm = [llm.generate(prompt, params)[0] for prompt in asked]
    again = llm.engine.drafter.num_rerun
    assert [output.num_cached_tokens for output in warm] == [0, *(n - again for n in (48, 32, 48, 32, 32, 48))]
    assert answers(warm) == answers(cold)
    assert acceptance(warm) == acceptance(cold)
    llm.reset_prefix_cache()
    core = llm.engine.core
    made = []

    def arrive() -> None:
        check_books(core.scheduler, num_rows=llm.engine.resolved.max_num_seqs)
        if len(made) < len(asked):
            made.append(core.add(f"beside-{len(made)}", asked[len(made)], params))

    arrive()
    run_through(llm, arrive)
    assert [sequence.output_ids for sequence in made] == answers(cold)
    if spec["method"] != "cascade":  # where a drafter is asked beside others, its plain rounds feed the caches too
        expected = [histogram and list(histogram) for histogram in acceptance(cold)]
        assert [s.acceptance_histogram if s.speculation else None for s in made] == expected
    assert sum(sequence.num_cached or 0 for sequence in made) > 100
    assert_all_free(llm)


@pytest.mark.parametrize("method", [None, "eagle3", "dflash", "draft_model"])
def test_an_8_page_prompt_that_comes_again_runs_one_token(method):
    """B40: not a page is dropped, and whoever drafts, the same is found."""
    spec = example_configs()[method][0] if method else None
    llm = make_engine(speculative_config=spec, max_model_len=160, max_num_batched_tokens=160)
    prompt = random_ids(128)
    first, second = (llm.generate(prompt, greedy(8))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 127)
    assert answers([first]) == answers([second])
    metrics = llm.get_metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (256, 127)


@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash", "draft_model"])
def test_a_prompt_that_parts_behind_a_shared_page_changes_nothing_for_who_holds_it(method):
    """What runs again of it is written to a copy: a head keeps with each token the one that follows."""
    spec = example_configs()[method][0]
    llm = engine(speculative_config=spec, async_scheduling=False, max_num_batched_tokens=64)
    core, base = llm.engine.core, random_ids(40)
    holder = core.add("holder", base, greedy(40))
    core.step()
    pages, before = (
        holder.held[0].ids[:2],
        [cache[:, :, holder.held[0].ids[:2]].clone() for cache in llm.engine.pool.caches],
    )
    parts = core.add("parts", [*base[:32], *random_ids(5, 9)], greedy(4))
    while parts.finish_reason is None:
        core.step()
    assert (parts.num_cached, holder.finish_reason) == (32 - llm.engine.drafter.num_rerun, None)
    for cache, content in zip(llm.engine.pool.caches, before, strict=True):
        assert torch.equal(cache[:, :, pages], content)
    core.abort("holder")
    run_through(llm)


def test_a_conversation_finds_its_own_answers():
    llm = engine(speculative_config=example_configs()["eagle3"][0], max_model_len=160, poison=True)
    turn, said = random_ids(20), 0
    for _ in range(5):
        (output,) = llm.generate(turn, greedy(12))
        assert answers([output]) == [oracle(turn, 12, max_model_len=160)]
        # but for its last token, which the target has not read, all that was said and fills a page
        assert output.num_cached_tokens == max((said - 1) // 16 * 16 - 1, 0)
        said = len(turn) + 12
        turn = [*turn, *output.outputs[0].token_ids, *random_ids(4, len(turn))]


def test_nothing_behind_a_stop_inside_a_block_is_found():
    """B35: all drafts are right, so that the block's rest is computed too, but nobody was told it."""
    spec = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 4}
    llm = engine(speculative_config=spec, cudagraph_mode="FULL")
    prompt = random_ids(24)
    text = oracle(prompt, 16)
    for place in range(4, 14):  # the page edge is behind the eighth token
        llm.reset_prefix_cache()
        (output,) = llm.generate(prompt, greedy(16, stop_token_ids=[text[place]]))
        known = len(prompt) + len(output.outputs[0].token_ids)
        assert known <= len(prompt) + place + 1
        (again,) = llm.generate([*prompt, *text], greedy(1))
        assert again.num_cached_tokens == (known - 1) // 16 * 16 - 1


def test_answers_of_steps_that_do_not_feed_the_drafter_are_not_found():
    """Rows that declined speculation decode alone, so that the head has seen none of it; its prompt it has."""
    for method, found in (("eagle3", 15), ("ngram", 47)):
        llm = engine(speculative_config=example_configs()[method][0])
        prompt = random_ids(20)
        (output,) = llm.generate(prompt, greedy(40), speculation=method == "ngram")
        (again,) = llm.generate([*prompt, *output.outputs[0].token_ids], greedy(4))
        assert again.num_cached_tokens == found


def test_prompt_logprobs_are_exact_where_the_prompt_was_there_before():
    """Each position's logits are needed, so all of it runs."""
    llm = engine(max_model_len=96)
    prompt = random_ids(50)
    params = greedy(4, prompt_logprobs=2)
    (first,) = llm.generate(prompt, params)
    llm.generate(prompt, greedy(4))
    (second,) = llm.generate(prompt, params)
    assert second.num_cached_tokens == 0
    for one, other in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
        assert list(one) == list(other)
        assert all(one[token].logprob == pytest.approx(other[token].logprob, abs=1e-5) for token in one)


def test_tenants_of_unlike_salt_share_nothing():
    llm = engine()
    prompt = random_ids(40)

    def found(salt: str | None) -> int | None:
        asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        (output,) = llm.generate(asked, greedy(4))
        assert answers([output]) == [oracle(prompt, 4)]
        return output.num_cached_tokens

    assert [found(salt) for salt in (None, "a", "b", "a", None)] == [0, 0, 0, 31, 31]
    with pytest.raises(RequestError, match="cache_salt is 5; it must be a text"):
        llm.generate({"prompt_token_ids": prompt, "cache_salt": 5}, greedy(4))
    with pytest.raises(RequestError, match=r"the prompt has the keys \['ids'\]"):
        llm.generate({"ids": prompt}, greedy(4))


def test_it_can_be_switched_off():
    llm = make_engine(enable_prefix_caching=False)
    prompt = random_ids(40)
    assert [llm.generate(prompt, greedy(4))[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert llm.engine.core.scheduler.groups[0].num_registered == 0


def test_a_drafter_that_does_not_say_that_it_can_has_all_of_every_prompt(caplog):
    """The default is safe: a drafter of another package that keeps more than it says drafts as well as ever."""
    spec = {"method": "forgetful", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2.0}
    try:

        class Forgetful(SyntheticDrafter):
            name = "forgetful"
            reuses_prefixes = Drafter.reuses_prefixes

        llm = make_engine(speculative_config=spec)
        assert [llm.generate(random_ids(40), greedy(4))[0].num_cached_tokens for _ in range(2)] == [0, 0]
        assert any(choice.name == "enable_prefix_caching" for choice in llm.engine.resolved.choices)
        with pytest.raises(ConfigError, match="this drafter needs every token of a prompt to run"):
            make_engine(speculative_config=spec, enable_prefix_caching=True)
    finally:
        DRAFTERS.pop("forgetful", None)


def test_of_several_drafters_all_must_be_able():
    observer = {"method": "extract_hidden_states", "layer_ids": [0], "output_dir": "unused"}
    assert not DRAFTERS["extract_hidden_states"].can_reuse_prefixes(SpeculativeConfig.from_mapping(observer))
    for config in example_configs()["cascade"]:
        assert DRAFTERS["cascade"].can_reuse_prefixes(SpeculativeConfig.from_mapping(config))


def test_several_answers_to_one_prompt_share_it():
    llm = engine(speculative_config=example_configs()["eagle3"][0], max_num_batched_tokens=64, poison=True)
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=16)
    prompt = random_ids(50)
    (first,), (second,) = llm.generate(prompt, params), llm.generate(prompt, params)
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in second.outputs]
    assert second.num_cached_tokens == 47


def test_a_page_size_of_its_own():
    for size, found in ((16, 95), (32, 95), (64, 63)):
        llm = make_engine(block_size=size, speculative_config=example_configs()["eagle3"][0], max_model_len=160)
        prompt = random_ids(100)
        outputs = [llm.generate(prompt, greedy(12))[0] for _ in range(2)]
        assert outputs[1].num_cached_tokens == found
        assert answers(outputs) == [oracle(prompt, 12, max_model_len=160)] * 2
        assert acceptance(outputs)[0] == acceptance(outputs)[1]


def test_what_is_kept_gives_way_to_what_runs():
    """A cache full of prompts that nobody asks for again holds up nobody."""
    llm = make_engine(model=tiny_model(), kv_cache_memory_bytes=20 * 2 * 2 * 16 * 2 * 16 * 4, max_model_len=96)
    pages = llm.engine.core.scheduler.groups[0]
    for seed in range(12):
        prompt = random_ids(60, seed)
        assert answers(llm.generate(prompt, greedy(20))) == [oracle(prompt, 20, max_model_len=96)]
    assert pages.num_empty < 6
    assert answers(llm.generate(prompts(5), greedy(40))) == [oracle(p, 40) for p in prompts(5)]
    assert_all_free(llm)


def test_the_second_identical_prompt_of_the_shipped_head(record_property):
    """Its first token takes at most a quarter of the time, and acceptance is the same within 2 points."""
    spec = {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 5}
    llm = LLM(
        "smollm2-135m", dtype="float32", device="cpu", max_num_seqs=1, max_model_len=1024, speculative_config=spec
    )
    text = "The lighthouse keeper wrote every evening what the sea had brought. " * 32
    first, second = (llm.generate(text, SamplingParams(temperature=0, max_tokens=32))[0] for _ in range(2))
    llm.close()
    ran = [len(output.prompt_token_ids) - output.num_cached_tokens for output in (first, second)]
    times = [output.metrics["time_to_first_token_ms"] for output in (first, second)]
    record_property("time_to_first_token_ms", times)
    print(f"tokens run {ran}, time to first token {times[0]:.0f} and {times[1]:.0f} ms")
    assert ran[1] <= 16, "what does not fill a page, and the last token"
    assert times[1] <= 0.25 * times[0]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.spec.draft_acceptance_rate == pytest.approx(first.spec.draft_acceptance_rate, abs=0.02)
