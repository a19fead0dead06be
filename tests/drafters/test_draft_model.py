"""A second model as the drafter: what it drafts, what it leaves alone, and what is counted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftloop.attention.batches import tail_batch
from draftloop.config.speculative import SpeculativeConfig
from draftloop.distributed.group import ALONE
from draftloop.drafters.base import draft_group
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Launch, ModeSetting
from draftloop.models.loader import load_config, resolve_model
from draftloop.request import SamplingParams
from helpers import (
    MODES,
    answering,
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    near_draft,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

K = 3


def drafting(model: str | None = None, *, k: int = K, poison: bool | None = None, **settings: Any) -> LLM:
    spec = {"method": "draft_model", "model": model or tiny_model(), "num_speculative_tokens": k}
    spec |= {key: settings.pop(key) for key in ("draft_sample_method",) if key in settings}
    return engine(speculative_config=spec, poison=poison, **{"cudagraph_capture_sizes": (2, 8), **settings})


def unlike_draft() -> str:
    """A drafter that is practically never right."""
    return tiny_model("unlike", seed=5)


def acceptance(llm: LLM, asked: list[list[int]], params: SamplingParams) -> tuple[int, int]:
    """Accepted and drafted tokens of all steps but each request's last, which the length limit cuts."""
    core = llm.engine.core
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, params)
    counts: dict[str, tuple[int, int]] = {}

    def look() -> None:
        for sequence in core.scheduler.running:
            accepted = sum(i * steps for i, steps in enumerate(sequence.acceptance_histogram))
            counts[sequence.request_id] = accepted, sequence.num_draft_tokens

    run_through(llm, look)
    return sum(a for a, _ in counts.values()), sum(d for _, d in counts.values())


# ---- phases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_chain_replays_its_graph_at_every_step(mode):
    """B01: 50 decode steps; the chain replays K - 1 times in each, and what runs eager is counted."""
    llm = drafting(unlike_draft(), cudagraph_mode=mode.value)
    prompt = prompts(1)[0]
    assert answers(llm.generate(prompt, greedy(51))) == [oracle(prompt, 51)]
    assert llm.get_metrics()["spec_decode_num_accepted_tokens"] == 0, "so that there are exactly 50 steps"
    report = llm.get_graph_report()
    assert llm.engine.table.phases["draft.prefill"].tokens_per_row == 2 < 1 + K, "it has been fed the others"
    steps = {"target.verify": 50, "accept": 50, "draft.prefill": 50, "draft.decode": 50 * (K - 1) + K}
    none = dict.fromkeys(steps, 0)
    replays = {phase: report.replays[phase] for phase in steps}
    eager = {phase: report.eager_runs[phase] for phase in steps}
    if mode is ModeSetting.NONE:
        assert (replays, eager) == (none, steps)
    elif mode is ModeSetting.PIECEWISE:
        chain = steps["draft.decode"]
        assert (replays, eager) == (steps | {"draft.decode": 0}, none | {"draft.decode": chain})
        (row,) = (row for row in report.rows if row.phase == "draft.decode")
        assert row.reason
    else:
        assert (replays, eager) == (steps, none)
    prompt_replays, prompt_eager = (report.replays, report.eager_runs)
    for phase in ("target.prefill", "draft.prompt"):
        captured = mode in (ModeSetting.FULL, ModeSetting.PIECEWISE, ModeSetting.FULL_AND_PIECEWISE)
        assert (prompt_replays[phase], prompt_eager[phase]) == ((1, 0) if captured else (0, 1))


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE", "PIECEWISE"])
def test_drafts_are_what_the_draft_model_alone_would_say(mode):
    """Its cache holds the accepted tokens and nothing else, however many drafts were rejected before."""
    llm = drafting(near_draft(), cudagraph_mode=mode, max_num_batched_tokens=24, poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    asked = prompts(4)
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(20))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            assert state.drafts_MK[sequence.row].tolist() == oracle(tokens, K, model=near_draft())
            seen.append(sequence.request_id)

    run_through(llm, check)
    assert len(seen) > 20
    accepted = llm.get_metrics()["spec_decode_num_accepted_tokens_per_pos"]
    assert accepted[0] > accepted[1] > accepted[2] > 0, "blocks ended at every place"


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("mode", MODES)
def test_the_target_as_its_own_drafter_is_always_right(mode, overlap):
    """Stale keys, wrong positions or wrong lengths show here first. The prompts are cut into chunks."""
    llm = drafting(cudagraph_mode=mode.value, max_num_batched_tokens=16, async_scheduling=overlap, poison=True, k=4)
    accepted, drafted = acceptance(llm, prompts(7, longest=40), greedy(40))
    assert accepted == drafted > 100


def test_sampled_drafts_of_the_same_model_are_accepted_though_the_temperature_is_one():
    """B24: with its probabilities in the acceptance test a drafter equal to the target is right; argmax is not."""
    params = SamplingParams(temperature=1, max_tokens=60)
    accepted, drafted = acceptance(drafting(cudagraph_mode="FULL"), prompts(7), params)
    assert drafted > 200
    assert accepted >= 0.99 * drafted
    llm = drafting(cudagraph_mode="FULL", draft_sample_method="greedy")
    by_argmax, drafted = acceptance(llm, prompts(7), params)
    assert 0.1 * drafted < by_argmax < 0.97 * drafted
    assert "greedy drafts" in llm.engine.drafter.describe()


def test_acceptance_does_not_depend_on_the_graph_mode():
    counts = {
        mode: acceptance(drafting(near_draft(), cudagraph_mode=mode.value), prompts(7), greedy(30)) for mode in MODES
    }
    assert len(set(counts.values())) == 1, counts
    accepted, drafted = counts[ModeSetting.NONE]
    assert 0 < accepted < drafted


def test_greedy_rows_beside_sampled_ones_equal_the_plain_engine():
    """B22: temperatures 0, 1, 0, 0.7 in one batch."""
    llm = drafting(cudagraph_mode="FULL", poison=True)
    asked = prompts(4)
    params = [SamplingParams(temperature=t, max_tokens=24, seed=3) for t in (0, 1, 0, 0.7)]
    got = answers(llm.generate(asked, params))
    for row in (0, 2):
        assert got[row] == oracle(asked[row], 24)
    assert got[1] != oracle(asked[1], 24), "seed 3 leaves the greedy path"


# ---- padding --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
def test_padding_rows_and_pages_of_nobody_stay_untouched(overlap):
    """B09, B19: 3 rows padded to 4, prompts that end around a page edge, canaries in every free page."""
    llm = drafting(
        max_num_seqs=4, cudagraph_capture_sizes=(4,), cudagraph_mode="FULL", async_scheduling=overlap, poison=False
    )
    core, state, pool = llm.engine.core, llm.engine.core.worker.state, llm.engine.pool
    padding = state.padding_row
    of_rows = {name: value for name, value in vars(state).items() if torch.is_tensor(value)}
    of_rows["page_tables_UMN"] = state.page_tables_UMN.transpose(0, 1)
    before = {name: value[padding].clone() for name, value in of_rows.items()}
    for length in range(13, 20):
        asked = [[(7 * length + i + j) % 160 for j in range(length + i)] for i in range(3)]
        free = core.scheduler.groups[0].free_pages
        for cache in pool.caches:
            cache[:, :, free] = 123.0
        for i, prompt in enumerate(asked):
            core.add(str(i), prompt, greedy(9))
        used: set[int] = set()

        def look(used=used) -> None:
            used.update(page for sequence in core.scheduler.running for page in sequence.held[0].ids)

        ended = run_through(llm, look)
        assert ended == {str(i): oracle(prompt, 9) for i, prompt in enumerate(asked)}
        untouched = sorted(set(free) - used)
        assert len(untouched) > 10
        for cache in pool.caches:
            assert cache[:, :, untouched].eq(123.0).all()
        for name, value in before.items():
            if name not in ("num_drafted_M", "draft_probs_MKV"):  # scratch that nobody reads for this row
                assert torch.equal(of_rows[name][padding], value), name
        rows = torch.tensor([padding], dtype=torch.int32)
        run = Launch(rows=1, tokens=1 + K, attend=lambda call: call())
        batch, _ = tail_batch(state, rows, 1 + K, 16, run, offset=-1, num_ids=1)
        assert batch.kv_lens_R.tolist() == [0]
        assert batch.slots_T.max() < 16, "all in page 0"


# ---- vocabularies ---------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(256, 250), (250, 256)])
def test_vocabularies_of_unequal_size_give_the_targets_distribution(target, draft):
    """B47: of tokens at the end of the vocabulary, which the drafter may lack, come as many as the target expects."""
    folders = {size: tiny_model(f"vocab-{size}", vocab=size, seed=9) for size in (250, 256)}
    llm = make_engine(
        folders[target],
        speculative_config={"method": "draft_model", "model": folders[draft], "num_speculative_tokens": K},
        logprobs_mode="processed_logprobs",
    )
    last = range(target - 6, target)
    params = SamplingParams(max_tokens=60, logprobs=20, seed=3, logit_bias=dict.fromkeys(last, 5.0))
    count, expected, variance = 0, 0.0, 0.0  # what is not among the 20 likeliest adds next to nothing
    for output in llm.generate(prompts(6, vocab=240), params):
        for token, top in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            share = sum(math.exp(top[other].logprob) for other in last if other in top)
            count, expected, variance = count + (token in last), expected + share, variance + share * (1 - share)
    assert 0.1 * 360 < expected < 0.9 * 360
    assert abs(count - expected) < 4 * math.sqrt(variance)
    assert llm.get_metrics()["spec_decode_num_accepted_tokens"] > 30
    llm.close()


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize(("target", "draft"), [(256, 250), (250, 256)])
def test_vocabularies_of_unequal_size(target, draft, mode):
    """B47: padded to other sizes, same tokens. No id is drafted that either does not know."""
    folders = {size: tiny_model(f"vocab-{size}", vocab=size, seed=9) for size in (250, 256)}
    llm = make_engine(
        folders[target],
        speculative_config={"method": "draft_model", "model": folders[draft], "num_speculative_tokens": K},
        cudagraph_capture_sizes=(4,),
        max_num_seqs=4,
        cudagraph_mode=mode,
    )
    llm.engine.table.poison = True
    state = llm.engine.core.worker.state
    # ids at the end of the vocabulary too: the smaller model has no embedding for them
    asked = [*prompts(3, vocab=250), [target - 1, 4, target - 2, 6]]
    for temperature in (0, 1):
        core = llm.engine.core
        for i, prompt in enumerate(asked):
            core.add(str(i), prompt, SamplingParams(temperature=temperature, max_tokens=24, seed=i))

        def check() -> None:
            assert state.drafts_MK.max() < 250

        ended = run_through(llm, check)
        if temperature == 0:
            assert ended == {str(i): oracle(p, 24, model=folders[target]) for i, p in enumerate(asked)}
            counts = llm.get_metrics()
            # three prompts agree; the last begins with ids that the smaller model does not know
            assert counts["spec_decode_num_accepted_tokens"] > 0.5 * counts["spec_decode_num_draft_tokens"]
        assert all(0 <= token < target for tokens in ended.values() for token in tokens)
        assert all(len(tokens) == 24 for tokens in ended.values())


def test_unlike_tokenizers_are_refused_before_any_weights_are_read():
    one, other = tiny_model("words", words="word"), tiny_model("other-words", words="other")
    with pytest.raises(ConfigError, match="different tokenizers"):
        make_engine(one, speculative_config={"method": "draft_model", "model": other, "num_speculative_tokens": 2})


def test_a_vocabulary_of_quite_another_size_is_refused():
    huge = tiny_model("huge", vocab=160 + 2000)
    with pytest.raises(ConfigError, match=r"2160 ids.*160 ids.*different tokenizers"):
        make_engine(speculative_config={"method": "draft_model", "model": huge, "num_speculative_tokens": 2})


def test_one_tokenizer_padded_to_another_size_is_taken():
    small, large = tiny_model("words", words="word"), tiny_model("more-words", words="word", vocab=192)
    llm = make_engine(
        small,
        speculative_config={"method": "draft_model", "model": large, "num_speculative_tokens": 2},
        enforce_eager=True,
    )
    output = llm.generate("word5 word9 word11", greedy(8))[0]
    assert output.prompt_token_ids == [5, 9, 11]
    assert output.outputs[0].token_ids == oracle([5, 9, 11], 8)
    assert output.outputs[0].text.split() == [f"word{i}" for i in output.outputs[0].token_ids]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "draft_model"}, "needs 'model'"),
        ({"method": "draft_model", "model": "/nowhere"}, "'/nowhere' does not exist"),
        ({"method": "draft_model", "prompt_lookup_min": 2}, "does not use 'prompt_lookup_min'"),
    ],
)
def test_what_cannot_draft_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config={"num_speculative_tokens": 2, **spec})


def test_idle_engine_holds_nothing():
    llm = drafting(cudagraph_mode="FULL")
    llm.generate(prompts(3), greedy(5))
    assert_all_free(llm)


def test_ranks_that_cannot_divide_a_draft_model_each_have_all_of_it_or_say_why():
    model = load_config(resolve_model(tiny_model()))
    target: Any = SimpleNamespace(group=SimpleNamespace(size=3))
    assert draft_group(SpeculativeConfig(model="x", num_speculative_tokens=1), target, model) is ALONE
    asked = SpeculativeConfig(model="x", num_speculative_tokens=1, draft_tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="size is 3, but it does not divide the 4 attention heads of 'x'; say 1"):
        draft_group(asked, target, model)
