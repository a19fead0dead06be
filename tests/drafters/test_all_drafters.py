"""What every drafter must keep: the text of the plain engine, in every mode, at every batch size and limit.

A new drafter adds a line to `example_configs` in tests/example_drafters.py and is tested by all of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from draftloop.drafters.base import DRAFTERS, Drafter
from draftloop.engine.llm import LLM
from draftloop.graphs.phase import ModeSetting
from draftloop.request import SamplingParams
from example_drafters import each_drafter, example_configs, remembers, works_on_host
from helpers import (
    MODES,
    answers,
    assert_all_free,
    ending_at,
    engine,
    example_target,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)
from parallel import tiny_pard

CASES = each_drafter()
LOSSLESS = each_drafter(only=lambda name, index: not DRAFTERS[name].forced_acceptance)
FORCED = each_drafter(only=lambda name, index: DRAFTERS[name].forced_acceptance)
OF_EACH_KIND = ("ngram", "draft_model", "eagle3", "dflash", "medusa", "cascade")
"""On the host, by a model, a chain, a block, heads, and several at once."""
SHARES_OPTIONS = ("cascade",)
"""Its drafters are told how to draw."""


def each(cases: list) -> pytest.MarkDecorator:
    """All tests of one drafter come together, so that they find the engines of the last ones."""
    return pytest.mark.parametrize(("name", "index"), cases, scope="module")


def can_overlap(name: str, index: int, overlap: bool = True) -> bool:
    """Some need the tokens of each step on the host."""
    return not (overlap and works_on_host(name, index))


def at_each_depth(test: Callable) -> Callable:
    depths = pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
    return pytest.mark.cases(where=can_overlap)(depths(test))


def config(name: str, index: int) -> dict:
    found = example_configs().get(name)
    assert found, f"drafter {name!r} has no example configuration; add one to example_configs()"
    return found[index]


def expected(name: str, prompt: list[int], max_tokens: int, **limits: int) -> list[int]:
    """What the drafter's target says by itself."""
    return oracle(prompt, max_tokens, model=example_target(config(name, 0)), **limits)


def is_like_the_first(name: str, index: int) -> bool:
    """Does this example of a drafter run the same phases in the same way as its first?"""
    is_tree = "speculative_token_tree" in config(name, index)
    return not is_tree and works_on_host(name, index) == works_on_host(name, 0)


def drafting(name: str, index: int, **settings) -> LLM:
    """An engine with few captured sizes, so that most batches are padded: 1 to 2 rows, 3 to 8, 7 to 8."""
    return engine(speculative_config=config(name, index), **{"cudagraph_capture_sizes": (2, 8), **settings})


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_every_drafter_has_an_example(name):
    assert config(name, 0)["method"] == name


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_every_drafter_says_what_it_can_do(name):
    """Either way: what is merely left out is an oversight."""
    drafter = DRAFTERS[name]
    said = {key for cls in drafter.__mro__ if cls not in Drafter.__mro__ for key in vars(cls)}
    if drafter.drafts:
        for flag, method in (("reuses_prefixes", "can_reuse_prefixes"), ("follows_load", "rounds_after")):
            assert said & {flag, method}, f"drafter {name!r} does not say {flag}, True or False; see Drafter.{flag}"
    if drafter.samples and name not in SHARES_OPTIONS:
        assert "draft_sample_method" in drafter.options, f"drafter {name!r} samples, but not on request"
    assert all(cls.__doc__ for cls in (drafter, inspect.getmodule(drafter))), f"drafter {name!r} names no source"


def shows_more(name: str, index: int, mode: ModeSetting) -> bool:
    """What a mode leaves out of the graphs a drafter of each kind shows; the others run with all, some and none."""
    if mode in (ModeSetting.PIECEWISE, ModeSetting.FULL_DECODE_ONLY) and name not in OF_EACH_KIND:
        return False
    return index == 0 or mode is ModeSetting.FULL_AND_PIECEWISE or not is_like_the_first(name, index)


@pytest.mark.cases(where=shows_more)
@pytest.mark.parametrize("mode", MODES)
@each(LOSSLESS)
def test_greedy_text_is_that_of_the_plain_engine(name, index, mode):
    """Of seven rows that end one after the other, and of one."""
    llm = drafting(name, index, cudagraph_mode=mode.value)
    for poison, lengths in ((True, (16, 3, 10, 3, 12, 6, 8)), (False, (12,))):
        llm.engine.table.poison = poison
        asked = prompts(len(lengths))
        texts = [expected(name, prompt, length) for prompt, length in zip(asked, lengths, strict=True)]
        assert answers(llm.generate(asked, [greedy(length) for length in lengths])) == texts, lengths
        assert_all_free(llm)


@at_each_depth
@each(LOSSLESS)
def test_chunked_prompts_beside_decoding_rows(name, index, overlap):
    """Prompts of 1 to 20 tokens, 24 tokens of budget: they are cut while others decode, at either depth."""
    llm = drafting(name, index, async_scheduling=overlap, max_num_batched_tokens=24, cudagraph_mode="FULL", poison=True)
    asked = prompts(12)
    outputs = llm.generate(asked, [greedy(4 + i) for i in range(12)])
    assert answers(outputs) == [expected(name, p, 4 + i) for i, p in enumerate(asked)]
    assert_all_free(llm)


@each(LOSSLESS)
def test_the_length_limit_inside_a_block_is_met_exactly(name, index):
    llm = drafting(name, index, max_model_len=40, poison=True)
    asked = [prompt for prompt in prompts(7, longest=39) if len(prompt) < 40]
    outputs = llm.generate(asked, greedy(None))
    for prompt, output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        assert len(prompt) + len(answer.token_ids) == 40
        assert answer.finish_reason == "length"
        assert answer.token_ids == expected(name, prompt, 40, max_model_len=40)
    assert_all_free(llm)


@pytest.mark.parametrize("name", [name for name in sorted(DRAFTERS) if "max_model_len" in DRAFTERS[name].options])
def test_a_row_past_the_drafters_own_length_stops_drafting_and_its_neighbours_go_on(name):
    spec = {**config(name, 0), "max_model_len": 30}
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), async_scheduling=False, poison=True)
    core, state, k = llm.engine.core, llm.engine.core.worker.state, spec["num_speculative_tokens"]
    asked, fits = [prompts(1)[0][:4], [7, 9] * 12, [5] * 40], []

    def check() -> None:
        for sequence in core.scheduler.running:
            if sequence.output_ids:
                fits.append(min(max(30 - sequence.num_tokens, 0), k))
                drafts = state.drafts_MK[sequence.row].tolist()
                assert [draft >= 0 for draft in drafts] == [i < fits[-1] for i in range(k)]

    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(40))
    assert run_through(llm, check) == {str(i): expected(name, p, 40) for i, p in enumerate(asked)}
    assert {0, k} <= set(fits)
    assert "rows stop drafting at 30 tokens" in llm.engine.drafter.describe()


@pytest.mark.parametrize("name", ["draft_model", "pard"])
def test_a_draft_model_that_takes_fewer_tokens_than_the_target_drafts_as_far_as_it_goes(name):
    short = tiny_model("short", max_len=64)
    spec = {"method": name, "model": tiny_pard(short) if name == "pard" else short, "num_speculative_tokens": 2}
    llm = make_engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8))
    assert "rows stop drafting at 64 tokens" in llm.engine.drafter.describe()
    prompt = prompts(1)[0]
    assert answers(llm.generate(prompt, greedy(100))) == [oracle(prompt, 100)]


@each(CASES)
def test_max_tokens_is_met_exactly_wherever_it_falls_in_a_block(name, index):
    llm = drafting(name, index, poison=True)
    counts = range(1, 2 * config(name, index)["num_speculative_tokens"] + 3)
    prompt = prompts(6)[-1]
    outputs = llm.generate([prompt] * len(counts), [greedy(n) for n in counts])
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(counts)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    if not DRAFTERS[name].forced_acceptance:
        assert answers(outputs) == [expected(name, prompt, n) for n in counts]
    assert llm.get_metrics()["generation_tokens"] == sum(counts)


@each(CASES)
def test_coverage_is_complete_and_nothing_that_may_be_a_graph_runs_eager(name, index):
    llm = drafting(name, index, cudagraph_mode="FULL", require_graphs=True)
    table = llm.engine.table
    assert table.uncovered() == {}
    llm.generate(prompts(7), greedy(12))
    host_only = {n for n, phase in table.phases.items() if {m.value for m in phase.modes} == {"NONE"}}
    report = llm.get_graph_report()
    assert {phase for phase, runs in report.eager_runs.items() if runs} <= host_only
    assert report.replays["target.verify" if DRAFTERS[name].drafts else "target.decode"] > 0


@each(CASES)
def test_a_request_may_decline_speculation_beside_others(name, index):
    llm = drafting(name, index, poison=True)
    core, asked = llm.engine.core, prompts(6)
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(20), speculation=i % 2 == 0)
    drafted = {str(i): 0 for i in range(6)}

    def look() -> None:
        for sequence in core.scheduler.running:
            drafted[sequence.request_id] = sequence.num_draft_tokens

    ended = run_through(llm, look)
    plain = [i for i in range(6) if i % 2]
    assert all(ended[str(i)] == expected(name, asked[i], 20) for i in plain), "they must not notice"
    assert all(drafted[str(i)] == 0 for i in plain)
    if not DRAFTERS[name].forced_acceptance:
        assert ended == {str(i): expected(name, prompt, 20) for i, prompt in enumerate(asked)}


@each(CASES)
def test_a_request_may_cap_its_drafts_beside_others(name, index):
    most = config(name, index)["num_speculative_tokens"] if DRAFTERS[name].drafts else 0
    caps = [*range(most + 1), None]
    llm = drafting(name, index, cudagraph_mode="FULL", poison=True)
    core, asked = llm.engine.core, prompts(len(caps))
    for i, cap in enumerate(caps):
        core.add(str(i), asked[i], greedy(20, speculative=None if cap is None else {"num_tokens": cap}))
    state, seen = core.worker.state, {}

    def look() -> None:
        for sequence in core.scheduler.running:
            cap = caps[int(sequence.request_id)]
            seen[cap] = sequence.acceptance_histogram, sequence.num_draft_tokens
            assert state.drafts_MK[sequence.row, most if cap is None else cap :].eq(-1).all()

    ended = run_through(llm, look)
    for cap in range(most + 1):
        histogram, num_drafted = seen[cap]
        assert not any(histogram[cap + 1 :])
        assert num_drafted <= cap * sum(histogram)
    if not DRAFTERS[name].forced_acceptance:
        assert ended == {str(i): expected(name, prompt, 20) for i, prompt in enumerate(asked)}
    assert_all_free(llm)


@each(CASES)
def test_a_batch_that_declines_speculation_is_plain_decoding(name, index):
    llm = drafting(name, index)
    outputs = llm.generate(prompts(3), greedy(10), speculation=False)
    assert answers(outputs) == [expected(name, p, 10) for p in prompts(3)]
    assert [output.spec for output in outputs] == [None] * 3
    replays = llm.get_graph_report().replays
    assert replays["target.decode"] == 9
    assert replays.get("target.verify", 0) == 0


@at_each_depth
@each(CASES)
def test_aborting_anywhere_frees_rows_and_pages_and_harms_nobody(name, index, overlap):
    llm = drafting(name, index, async_scheduling=overlap, max_num_batched_tokens=24, cudagraph_mode="FULL", poison=True)
    core, asked = llm.engine.core, prompts(10)
    ended: dict[str, list[int]] = {}
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(24))
    for step in range(5):
        core.abort(str(2 * step + 1))  # waiting, in prefill or decoding, by now
        for sequence, _ in core.step():
            if sequence.finish_reason:
                ended[sequence.request_id] = list(sequence.output_ids)
    ended |= run_through(llm)
    assert sorted(ended) == [str(i) for i in range(0, 10, 2)]
    assert_all_free(llm)
    if not DRAFTERS[name].forced_acceptance:
        assert all(tokens == expected(name, asked[int(i)], 24) for i, tokens in ended.items())


@each(LOSSLESS)
def test_a_batch_that_shrinks_through_the_captured_sizes(name, index):
    """B10: 12 requests of 3, 6, .. 36 tokens; every draft is a token of the model after every step."""
    llm = engine(
        speculative_config=config(name, index),
        cudagraph_capture_sizes=(1, 2, 4, 8, 16),
        max_num_seqs=16,
        max_prefill_rows=16,
        max_num_batched_tokens=256,
        cudagraph_mode="FULL_DECODE_ONLY",
        poison=True,
    )
    core, asked = llm.engine.core, prompts(12)
    state, vocab = core.worker.state, llm.engine.model_config.vocab_size
    seen = set()

    def check() -> None:
        seen.add(len(core.scheduler.running))
        drafts = state.drafts_MK
        assert ((drafts >= -1) & (drafts < vocab)).all()
        assert drafts[state.padding_row].eq(-1).all()

    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(3 * (i + 1)))
    ended = run_through(llm, check)
    assert ended == {str(i): expected(name, prompt, 3 * (i + 1)) for i, prompt in enumerate(asked)}
    assert {1, 12} <= seen
    steps = ("target.verify", "target.decode")  # where nothing is drafted for any row, a step is plain decoding
    assert len({row.rows for row in llm.get_graph_report().rows if row.phase in steps and row.replays}) >= 4
    assert_all_free(llm)


@each(LOSSLESS)
def test_rows_without_temperature_are_greedy_beside_others_that_sample(name, index):
    """B22, for each drafter."""
    llm = drafting(name, index, poison=True)
    asked = prompts(4)
    params = [greedy(20), sampled(1.0), greedy(20), sampled(0.7)]
    outputs = answers(llm.generate(asked, params))
    assert [outputs[0], outputs[2]] == [expected(name, asked[0], 20), expected(name, asked[2], 20)]


def sampled(temperature: float = 1.0, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": temperature, "max_tokens": 20, "seed": 7, **options})


@pytest.mark.cases(where=lambda name, index: not remembers(name, index))
@each(LOSSLESS)
def test_a_seed_gives_the_same_tokens_alone_and_beside_neighbours(name, index):
    llm = drafting(name, index, poison=True)
    asked = prompts(5)
    mine = sampled(max_tokens=8)
    alone = answers(llm.generate(asked[2], mine))[0]
    again = answers(llm.generate(asked[2], mine))[0]
    neighbours = [sampled(0.8, top_k=20), greedy(4), mine, greedy(8), sampled(1.3, top_p=0.9, max_tokens=6)]
    beside = answers(llm.generate(asked, neighbours))[2]
    assert alone == again == beside
    other = sampled(min_p=0.5, max_tokens=8)
    assert alone != answers(llm.generate(asked[2], other))[0], "the parameters reach the sampler"


@each(LOSSLESS)
def test_no_noise_is_used_for_two_positions(name, index):
    """Tokens are nearly uniform at this temperature, so noise that comes again shows as tokens that come again."""
    llm = drafting(name, index, cudagraph_mode="FULL")
    (tokens,) = answers(llm.generate(prompts(1)[0], sampled(10_000.0, max_tokens=60)))
    for distance in range(1, 9):
        again = sum(one == other for one, other in zip(tokens, tokens[distance:], strict=False))
        assert again <= 4, (distance, "expected is one in 160")


@each(FORCED)
def test_forced_acceptance_has_the_length_that_was_asked_for(name, index):
    llm = drafting(name, index, max_num_batched_tokens=64)
    settings = config(name, index)
    outputs = llm.generate(prompts(7), greedy(100, ignore_eos=True))
    metrics = llm.get_metrics()
    # some 280 steps of standard deviation about 1.2
    assert metrics["mean_acceptance_length"] == pytest.approx(settings["synthetic_acceptance_length"], abs=0.25)
    assert all(len(output.outputs[0].token_ids) == 100 for output in outputs)


@pytest.mark.cases(where=can_overlap)
@each(LOSSLESS)
def test_a_row_is_reused_while_a_step_of_its_last_owner_is_in_flight(name, index):
    """Answers end where the host could not foresee it, so at depth 2 each ended row runs once more."""
    llm = drafting(
        name,
        index,
        max_num_seqs=4,
        cudagraph_capture_sizes=(4,),
        async_scheduling=True,
        max_num_batched_tokens=24,
        poison=True,
    )
    asked, params, wanted = prompts(10), [], []
    for i, prompt in enumerate(asked):
        text = expected(name, prompt, 16)
        stop = text[3 + i]
        params.append(greedy(16, stop_token_ids=(stop,)))
        wanted.append(text[: text.index(stop) + 1])
    outputs = llm.generate(asked, params)
    assert answers(outputs) == wanted
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert_all_free(llm)


@pytest.mark.cases(where=can_overlap)
@each(LOSSLESS)
def test_end_of_sequence_inside_a_block_ends_exactly_there(name, index):
    """The oracle's seventh token is declared the end; at depth 2 the next step is on its way by then."""
    prompt = prompts(6)[4]
    text = expected(name, prompt, 16)
    seventh = text[6]
    assert seventh not in text[:6]
    spec, target = config(name, index), example_target(config(name, index)) or tiny_model()
    folder = ending_at(target, seventh)
    llm = make_engine(
        folder,
        speculative_config={**spec, "model": folder} if spec.get("model") == target else spec,
        cudagraph_capture_sizes=(2, 8),
        async_scheduling=True,
    )
    for params, length in ((greedy(16), 7), (greedy(16, ignore_eos=True), 16)):
        answer = llm.generate([prompt, prompts(6)[0]], params)[0].outputs[0]
        assert answer.token_ids == text[:length]
        assert answer.finish_reason == ("stop" if length == 7 else "length")
    assert_all_free(llm)
