"""Layers with a sliding window hold the pages of their window alone: same text, fewer pages, prefixes that are found.

The models are tiny; a window is 24 tokens, a page 16, a prompt 70 tokens and more.
"""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftloop.engine.llm import LLM
from draftloop.kvcache.pages import pages_in_sight
from draftloop.scheduler.batch import Stage
from draftloop.scheduler.row_pages import tokens_per_step
from heads import tiny_head
from helpers import (
    MODES,
    answers,
    assert_all_free,
    check_books,
    engine,
    greedy,
    make_engine,
    prompts,
    run_through,
    shrink,
)
from transformers_models import LONGER_WINDOW, tiny_of
from trees import Knowing

MIXED, ALL = "gemma3 of longer windows", "mistral"
"""Layers with and without a window, and layers with one alone."""
NUM_TOKENS = 50
SIZES = {
    "max_model_len": 192,
    "max_num_batched_tokens": 40,
    "cudagraph_capture_sizes": (2, 4),
    "max_num_seqs": 4,
    "dtype": "float32",
}


def long_prompts(count: int = 3) -> list[list[int]]:
    return [(prompt * 9)[: 70 + 9 * index] for index, prompt in enumerate(prompts(2 * count)[count:])]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def expected(name: str, prompt: tuple[int, ...], count: int = NUM_TOKENS) -> list[int]:
    """What transformers says, greedily."""
    model = AutoModelForCausalLM.from_pretrained(tiny_of(name), dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


def drafted(name: str) -> dict:
    return {"method": "draft_model", "model": tiny_of(name, noise=0.01), "num_speculative_tokens": 3}


def make(name: str, *, spec: dict | None = None, **settings) -> LLM:
    return engine(tiny_of(name), speculative_config=spec, poison=True, **{**SIZES, **settings})


def most_held(llm: LLM) -> list[int]:
    """Pages that a decoding row holds of each group, at most, while no step is in flight but the next."""
    ahead = tokens_per_step(llm.engine.core.worker.num_drafts) + 64  # TOKENS_AHEAD
    return [192 // 16 + 1 if w is None else pages_in_sight(w, ahead, 16) for w in llm.engine.pool.windows]


def run(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    """The answers; after each step the books are right, and no row holds more than it may."""
    core = llm.engine.core

    def check() -> None:
        check_books(core.scheduler, num_rows=4)
        for sequence in core.scheduler.running:
            limits = most_held(llm)
            if sequence.stage is Stage.PREFILL:
                limits = [max(most, pages_in_sight(LONGER_WINDOW, 40, 16)) for most in limits]
            assert all(len(held.ids) <= most for held, most in zip(sequence.held, limits, strict=True))

    for index, prompt in enumerate(asked):
        core.add(str(index), prompt, greedy(NUM_TOKENS))
    found = run_through(llm, check)
    assert_all_free(llm)
    return [found[str(index)] for index in range(len(asked))]


@pytest.mark.parametrize(("name", "mode"), [*((MIXED, mode) for mode in MODES), (ALL, "FULL")])
def test_text_far_past_the_window_is_what_transformers_says(name, mode, device):
    """B44, and what is behind the window is given to others meanwhile."""
    llm = make(name, spec=drafted(name), cudagraph_mode=mode, device=device)
    assert llm.engine.pool.windows == [None, LONGER_WINDOW], "what the drafter keeps is whole"
    asked = long_prompts()
    assert run(llm, asked) == [expected(name, tuple(prompt)) for prompt in asked]
    assert llm.engine.core.stats.num_accepted_tokens > 30


@pytest.mark.parametrize("name", [MIXED, ALL])
@pytest.mark.parametrize(
    "settings",
    [{"spec": {"method": "ngram", "num_speculative_tokens": 3}}, {"cudagraph_mode": "FULL", "device_loop": 7}],
    ids=["ngram", "loop"],
)
def test_lookup_and_loops_of_steps_without_drafts(name, settings, device):
    llm = make(name, **settings, device=device)
    assert llm.engine.pool.windows == ([None] if name == MIXED else []) + [LONGER_WINDOW]
    asked = long_prompts()
    assert run(llm, asked) == [expected(name, tuple(prompt)) for prompt in asked]


def test_a_row_of_any_length_holds_its_window():
    """At the end of 120 tokens a layer that sees 24 has what it sees and may reach, where others have all."""
    llm = make(MIXED, async_scheduling=False)
    core, held = llm.engine.core, []
    core.add("a", long_prompts(1)[0], greedy(NUM_TOKENS))
    run_through(llm, lambda: held.append([len(one.ids) for s in core.scheduler.running for one in s.held]))
    whole, window = zip(*(counts for counts in held if counts), strict=True)
    assert max(whole) >= (70 + NUM_TOKENS) // 16
    assert max(window) <= pages_in_sight(LONGER_WINDOW, 66, 16)
    assert window[-1] < whole[-1] - 2


def test_trees_of_drafts_roll_back_across_the_window_s_edge(monkeypatch):
    """Whichever branch is accepted: its keys are moved in the pages of both groups."""
    knowing = Knowing(monkeypatch)
    tree = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0)]"
    spec = {"method": "eagle3", "model": tiny_head("eagle3"), "speculative_token_tree": tree}
    llm = knowing.watch(make_engine(tiny_of(MIXED), speculative_config=spec, **SIZES))
    llm.engine.table.poison = True
    asked = long_prompts()
    for prompt in asked:
        knowing.texts[tuple(prompt)] = expected(MIXED, tuple(prompt))
    assert run(llm, asked) == [expected(MIXED, tuple(prompt)) for prompt in asked]
    assert llm.engine.core.stats.num_accepted_tokens > 90
    llm.engine.close()


# ---- prefixes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "drafts"), [(MIXED, True), (ALL, False)])
def test_a_prefix_is_found_where_the_pages_of_its_last_window_are(name, drafts, device):
    llm = make(name, spec=drafted(name) if drafts else None, async_scheduling=False, device=device)
    groups = llm.engine.core.scheduler.groups
    prompt = long_prompts(1)[0][:70]
    text = expected(name, tuple(prompt))
    assert answers(llm.generate([prompt], greedy(NUM_TOKENS))) == [text]

    again = llm.generate([prompt], greedy(NUM_TOKENS))
    assert again[0].num_cached_tokens == 63, "four pages; their last token runs again"
    assert answers(again) == [text]

    longer = [*prompt, *text]
    further = llm.generate([longer], greedy(8))
    assert further[0].num_cached_tokens == 111, "the answer is found too, by the pages of its last window"
    assert answers(further) == [expected(name, tuple(longer), 8)]

    # of the window's pages the one before the last of the prompt goes: what ends within its sight is not found
    lost = groups[-1].find([key_of(llm, prompt, page=2)])
    groups[-1].forget(lost)
    shorter = llm.generate([prompt], greedy(NUM_TOKENS))
    assert shorter[0].num_cached_tokens == 31
    assert answers(shorter) == [text]
    assert_all_free(llm)


def key_of(llm: LLM, prompt: list[int], *, page: int) -> bytes:
    """What a page of a prompt is registered under."""
    core = llm.engine.core
    sequence = core.add("keys", prompt, greedy(1))
    core.scheduler.row_pages.find(sequence)
    core.abort("keys")
    return sequence.page_keys[page]


def test_rows_that_share_a_prefix_do_not_touch_each_other_s_pages():
    """The second one is admitted while the first runs: it shares, copies, and slides on while the other does too."""
    name = MIXED
    llm = make(name, spec=drafted(name), async_scheduling=False)
    core, prompt = llm.engine.core, long_prompts(1)[0][:70]
    core.add("a", prompt, greedy(NUM_TOKENS))
    for _ in range(3):
        core.step()
    others = [prompt[:64], [*prompt[:64], 7, 8, 9]]
    for index, other in enumerate(others):
        core.add(str(index), other, greedy(NUM_TOKENS))
    found = run_through(llm, lambda: check_books(core.scheduler, num_rows=4))
    assert found["a"] == expected(name, tuple(prompt))
    assert [found[str(index)] for index in range(2)] == [expected(name, tuple(other)) for other in others]
    assert core.stats.num_cached_prompt_tokens >= 2 * 47
    assert_all_free(llm)


# ---- few pages ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_pages"), [(MIXED, 4), (MIXED, 7), (ALL, 4)])
def test_where_a_window_s_pages_run_out_prompts_go_on_in_smaller_parts_or_rows_are_preempted(name, num_pages, device):
    llm = make_engine(tiny_of(name), speculative_config=drafted(name), **SIZES, device=device)
    llm.engine.table.poison = True
    shrink(llm, 40, by_window={LONGER_WINDOW: num_pages})
    asked = long_prompts()
    assert run(llm, [*asked, asked[0]]) == [expected(name, tuple(prompt)) for prompt in [*asked, asked[0]]]
    llm.engine.close()


def test_a_preempted_row_goes_on_as_if_nothing_had_been():
    name = ALL
    llm = make(name, spec=drafted(name), async_scheduling=False)
    core, prompt = llm.engine.core, long_prompts(1)[0]
    core.add("a", prompt, greedy(NUM_TOKENS))
    for _ in range(12):
        core.step()
    core.preempt("a")
    sequence = core.scheduler.waiting[0]
    found = run_through(llm, lambda: check_books(core.scheduler, num_rows=4))
    assert found["a"] == expected(name, tuple(prompt))
    assert (sequence.num_preemptions, sequence.num_cached) == (1, 0)
    assert_all_free(llm)


# ---- what is chosen at the start ------------------------------------------------------------


def test_a_window_that_no_row_outgrows_changes_nothing():
    llm = make(ALL, max_model_len=40)
    assert llm.engine.pool.windows == [None]
    assert len(llm.engine.core.scheduler.groups) == 1


def test_memory_goes_to_the_layers_that_keep_all(caplog):
    """One layer of three keeps all tokens: where rows are few, their windows take little of the budget."""
    budget = {"kv_cache_memory_bytes": 40 * 3 * 16 * 2 * 2 * 16 * 4, "max_num_seqs": 1, "enable_prefix_caching": False}
    with caplog.at_level("INFO", logger="draftloop"):
        llm = make_engine(tiny_of(MIXED), **{**SIZES, **budget, "cudagraph_capture_sizes": (1,), "max_prefill_rows": 1})
    pool = llm.engine.pool
    assert pool.num_pages == 192 // 16 + 2, "all that one row can use"
    assert pool.num_pages_of(LONGER_WINDOW) < pool.num_pages
    assert pool.nbytes <= budget["kv_cache_memory_bytes"]
    assert "pages for layers that see 24 tokens" in caplog.text
    llm.engine.close()
