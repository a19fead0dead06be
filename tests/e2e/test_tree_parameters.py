"""Every sampling parameter, logprobs and grammars where drafts form a tree: what a position sees before it is its own
branch, whatever stands on others.

Trees hold what the request's answer goes on with, so that branches of all shapes are accepted; requests are random,
and judged token by token as in test_parameters.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_structured_outputs as grammars
from hypothesis import given, settings
from test_parameters import PROMPTS, batches, judge, plain_text, run, same, target

from draftloop.request import SamplingParams
from heads import head_config, tiny_head
from helpers import answers, assert_all_free, engine, greedy, make_engine, prompts
from trees import Knowing

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (2, 0, 0)]"


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def tree_engine(folder: str, head: str, **options):
    spec = {"method": "eagle3", "model": head, "speculative_token_tree": TREE}
    return make_engine(
        folder,
        speculative_config=spec,
        max_num_batched_tokens=128,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=(2, 8),
        **options,
    )


@pytest.fixture(scope="module", params=[{}, {"device_loop": 4, "async_scheduling": True}], ids=["phases", "loops"])
def judged(request, patch):
    """An engine whose trees know each answer as it would be without drafts, and how to tell them."""
    knowing = Knowing(patch)
    processors = ("parameters:Only",)
    llm = knowing.watch(tree_engine(target(), tiny_head("eagle3"), logits_processors=processors, **request.param))
    llm.engine.table.poison = True
    yield llm, knowing
    accepted = llm.get_metrics()["mean_acceptance_length"]
    llm.close()
    assert accepted > 1.3, "branches were accepted"


@settings(max_examples=8)
@given(batch=batches())
def test_every_token_is_what_the_request_asked_for_on_any_branch(judged, batch):
    llm, knowing = judged
    for index, _, _ in batch:
        knowing.texts[tuple(PROMPTS[index])] = plain_text(index)
    plain = run(llm, batch, speculation=False)
    for (index, _, faults), answer in zip(batch, plain, strict=True):
        text = [*answer.token_ids, 1, 2, 3, 4]
        wrong = [3 if faults.get(place, 0) != 0 else token for place, token in enumerate(text)]
        knowing.texts[tuple(PROMPTS[index])] = wrong
    for (index, params, _), answer, before in zip(batch, run(llm, batch), plain, strict=True):
        judge(PROMPTS[index], answer, params)
        same(answer, before)  # of sampled rows too: their noise is that of the position
    assert_all_free(llm)


def test_processed_logprobs_are_those_of_the_accepted_branch(patch):
    knowing = Knowing(patch)
    llm = knowing.watch(tree_engine(target(), tiny_head("eagle3"), logprobs_mode="processed_logprobs"))
    asked = PROMPTS[:5]
    options = {"max_tokens": 14, "logprobs": 3, "ignore_eos": True, "frequency_penalty": 0.4}
    params = [greedy(14, logprobs=2, ignore_eos=True, presence_penalty=-1)]
    params += [SamplingParams(temperature=0.6, seed=seed, top_k=30, **options) for seed in range(4)]
    plain = llm.generate(asked, params, speculation=False)
    for prompt, text in zip(asked, answers(plain), strict=True):
        knowing.texts[tuple(prompt)] = text
    for one, other in zip(llm.generate(asked, params), plain, strict=True):
        same(one.outputs[0], other.outputs[0])
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert [(t, e.rank) for t, e in mine.items()] == [(t, e.rank) for t, e in theirs.items()]
    assert llm.get_metrics()["mean_acceptance_length"] > 1.3
    llm.close()


def test_grammars_follow_every_branch(patch):
    """The tree holds valid text at ranks that change, and whatever a head of noise says beside it."""
    pytest.importorskip("xgrammar")
    knowing, config = Knowing(patch), head_config(draft_vocab_size=grammars.VOCAB, has_map=False)
    config = replace(config, model=replace(config.model, vocab_size=grammars.VOCAB))
    llm = knowing.watch(tree_engine(grammars.target(), tiny_head("eagle3-bytes", config)))
    asked, names = prompts(len(grammars.GRAMMARS), vocab=200), list(grammars.GRAMMARS)
    for prompt, name in zip(asked, names, strict=True):
        knowing.texts[tuple(prompt)] = grammars.plain_answers()[name]
    params = [grammars.obeys(name) for name in names]
    assert answers(llm.generate(asked, params)) == [grammars.plain_answers()[name] for name in names]
    assert llm.get_metrics()["mean_acceptance_length"] > 1.5
    for output, name in zip(
        llm.generate(asked, [grammars.obeys(name, temperature=1.0, seed=5) for name in names]), names, strict=True
    ):
        assert grammars.valid(name, output.outputs[0].text)
    assert_all_free(llm)
    llm.close()


def test_sources_name_the_branch(patch):
    knowing = Knowing(patch)
    llm = knowing.watch(tree_engine(target(), tiny_head("eagle3")))
    knowing.texts[tuple(PROMPTS[0])] = plain_text(0)
    core = llm.engine.core
    sequence = core.add("0", PROMPTS[0], greedy(14, ignore_eos=True), traced=True)
    while not core.idle:
        core.step()
    assert len(sequence.sources) == len(sequence.output_ids)
    assert {source.position for source in sequence.sources} >= {0, 1, 2}
    assert all(source.num_drafted <= 3 for source in sequence.sources), "a branch has at most as many as it is deep"
    for token, source in zip(sequence.output_ids, sequence.sources, strict=True):
        assert token not in source.rejected[:1]
    llm.close()


def test_engines_that_must_not_depend_on_the_batch_take_no_tree():
    from draftloop.errors import ConfigError

    spec = {"method": "eagle3", "model": tiny_head("eagle3"), "speculative_token_tree": TREE}
    with pytest.raises(ConfigError, match="deterministic is set"):
        engine(speculative_config=spec, deterministic=True)
