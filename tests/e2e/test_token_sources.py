"""Where each token came from: what the engine records is what the drafter drafted and the target decided."""

from __future__ import annotations

import pytest

from draftloop.request import TokenSource
from draftloop.scheduler.batch import Sequence
from example_drafters import repeat_suffix
from helpers import assert_all_free, engine, greedy, make_engine, near_draft, oracle, prompts, run_through, tiny_model

K = 3
MODEL = {"method": "draft_model", "model": near_draft(), "num_speculative_tokens": K}
SCRIPTED = {"method": "scripted", "script": repeat_suffix, "num_speculative_tokens": K}
DRAFTS = {
    "draft_model": lambda context: oracle(context, K, model=near_draft()),
    "scripted": lambda context: repeat_suffix("", context, K)[:K],
}
WAYS = {
    "eager": (MODEL, {"cudagraph_mode": "NONE"}),
    "phases": (MODEL, {"iteration_graph": False, "async_scheduling": False}),
    "overlapped": (MODEL, {"async_scheduling": True}),
    "iteration": (MODEL, {"iteration_graph": True, "cudagraph_capture_sizes": (2, 8)}),
    "device_loop": (MODEL, {"device_loop": 64, "cudagraph_capture_sizes": (2, 8)}),
    "on_host": (SCRIPTED, {}),
}


def run(llm, asked, max_tokens: int = 24, **which) -> list[Sequence]:
    """Requests of which every other one is traced, or as `which` says."""
    core = llm.engine.core
    sequences = [
        core.add(str(i), prompt, greedy(max_tokens), **(which or {"traced": i % 2 == 0}))
        for i, prompt in enumerate(asked)
    ]
    run_through(llm)
    assert_all_free(llm)
    return sequences


def steps(sequence: Sequence) -> list[list[tuple[int, TokenSource]]]:
    """Its tokens and their sources, cut where its steps end."""
    found: list[list[tuple[int, TokenSource]]] = [[]]
    for pair in zip(sequence.output_ids, sequence.sources, strict=True):
        found[-1].append(pair)
        if pair[1].position == 0:
            found.append([])
    return [step for step in found if step]


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_what_the_drafter_drafted_and_agree_with_the_counts(way):
    spec, settings = WAYS[way]
    llm = engine(speculative_config=spec, **settings)
    asked, draft = prompts(5), DRAFTS[spec["method"]]
    for prompt, sequence in zip(asked, run(llm, asked), strict=True):
        assert sequence.output_ids == oracle(prompt, 24)
        if not sequence.traced:
            assert sequence.sources == sequence.text_ends == []
            continue
        context, histogram, num_drafted = list(prompt), [0] * (K + 1), 0
        for number, step in enumerate(steps(sequence)):
            accepted = [token for token, source in step if source.position]
            assert [source.position for _, source in step][: len(accepted)] == list(range(1, len(accepted) + 1))
            last, is_cut = step[-1][1], step[-1][1].position > 0
            if number == 0:
                assert (len(step), last) == (1, TokenSource())  # nothing is drafted before the first token
            elif last.num_drafted:
                expected = draft(context)
                assert {source.num_drafted for _, source in step} == {len(expected)}
                drafts = [*accepted, *last.rejected]
                assert drafts == expected[: len(drafts) if is_cut else None]
                assert last.rejected[:1] != (step[-1][0],)
                histogram[len(accepted)] += 1
                num_drafted += last.num_drafted
            context += [token for token, _ in step]
        assert histogram == sequence.acceptance_histogram
        assert num_drafted == sequence.num_draft_tokens
        assert context == [*prompt, *sequence.output_ids]


def test_only_batches_with_a_traced_request_leave_the_device_loop():
    spec, settings = WAYS["device_loop"]
    llm = engine(speculative_config=spec, **settings)
    for traced, loops in ((False, True), (True, False)):
        llm.reset_graph_counts()
        run(llm, prompts(3), traced=traced)
        report = llm.get_graph_report()
        assert (sum(row.iterations for row in report.loops) > 0) is loops
        assert report.replays["iteration"] > 0, "one launch for a step all the same"


def test_a_request_that_ends_inside_its_drafts_rejects_none():
    llm = engine(speculative_config={**MODEL, "model": tiny_model()})
    for max_tokens in range(1, 2 * K + 3):
        (sequence,) = run(llm, prompts(4)[3:], max_tokens, traced=True)
        assert len(sequence.sources) == max_tokens
        assert not any(source.rejected for source in sequence.sources)


def test_texts_of_tokens_end_where_the_text_does():
    llm = make_engine(tiny_model("traced-words", words="w"), speculative_config=MODEL)
    core = llm.engine.core
    for stop, name in (((), "free"), (("w7",), "stopped")):
        sequence = core.add(name, prompts(4)[3], greedy(24, stop=stop), traced=True)
        texts = {}
        while not core.idle:
            texts |= {one.request_id: text for one, text in core.step()}
        assert len(sequence.text_ends) == len(sequence.output_ids)
        assert sequence.text_ends == sorted(sequence.text_ends)
        assert sequence.text_ends[-1] == len(texts[name])
    llm.close()


@pytest.mark.gpu
def test_a_gpu_records_what_a_cpu_does():
    wide, near = tiny_model("wide", hidden=256), tiny_model("wide-near", hidden=256, noise=0.06)
    found = []
    for device, settings in (("cpu", {}), ("cuda", {"device_loop": 64}), ("cuda", {"iteration_graph": False})):
        llm = make_engine(wide, speculative_config={**MODEL, "model": near}, device=device, dtype="float32", **settings)
        found.append([(one.output_ids, one.sources) for one in run(llm, prompts(5))])
        llm.close()
    assert found[1] == found[0]
    assert found[2] == found[0]
