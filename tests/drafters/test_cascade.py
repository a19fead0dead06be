"""Several drafters at once: each row has the drafts of the first with any, all are kept fed, each is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_reference import Reference, hf_model, hf_states

from draftloop.errors import ConfigError, RequestError
from draftloop.request import SamplingParams
from example_drafters import repeat_suffix
from heads import head_config, head_weights, tiny_head, wide_head
from helpers import (
    VOCAB,
    answering,
    answers,
    engine,
    greedy,
    lookup_reference,
    make_engine,
    near_draft,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

K = 3
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
EAGLE = {"method": "eagle3", "model": tiny_head("eagle3")}
DRAFT_MODEL = {"method": "draft_model", "model": near_draft()}
SCRIPTED = {"method": "scripted", "script": repeat_suffix}


def cascade(*drafters: dict[str, Any], k: int = K, **spec: Any) -> dict[str, Any]:
    return {"method": "cascade", "drafters": list(drafters), "num_speculative_tokens": k, **spec}


def eagle_drafts(tokens: list[int]) -> list[int]:
    config, model = head_config("eagle3"), hf_model(tiny_model())
    other = Reference(config, head_weights(config), model.model.embed_tokens.weight, model.lm_head.weight)
    streams, _ = hf_states(tiny_model(), tokens)
    return other.chain(tokens, torch.cat([streams[i] for i in config.layer_ids or ()], -1), K)[0]


def model_drafts(tokens: list[int]) -> list[int]:
    return oracle(tokens, K, model=near_draft())


@pytest.mark.parametrize("whole", [False, True], ids=["apart", "one_graph"])
@pytest.mark.parametrize(
    ("second", "would_draft"), [(EAGLE, eagle_drafts), (DRAFT_MODEL, model_drafts)], ids=["eagle3", "draft_model"]
)
def test_each_row_has_the_drafts_of_the_first_that_has_any(second, would_draft, whole):
    """Blocks of either drafter are accepted to any length (by coin), and the second still drafts from a cache that
    has every token, though it has drafted others."""
    spec = cascade(NGRAM, second, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)
    llm = engine(
        speculative_config=spec,
        cudagraph_capture_sizes=(2, 8),
        max_num_batched_tokens=24,
        async_scheduling=False,
        iteration_graph=whole,
        poison=True,
    )
    core, state = llm.engine.core, llm.engine.core.worker.state
    own_MK = llm.engine.drafter.row_memory()[f"{second['method']}.drafts_MK"]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(24))
    seen = set()

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            found, own = lookup_reference(tokens, K, 1, 3), would_draft(tokens)
            assert own_MK[sequence.row].tolist() == own
            by = int(found[0] < 0)
            assert state.drafts_MK[sequence.row].tolist() == (own if by else found)
            assert state.drafted_by_M[sequence.row] == by
            seen.add(by)

    run_through(llm, check)
    assert seen == {0, 1}
    if whole:
        replays = llm.get_graph_report().replays
        assert replays["iteration"] > 0
        assert replays.get("target.verify", 0) == 0, "all of it is one graph"


def test_what_the_host_drafts_comes_first_and_the_head_reads_on():
    spec = cascade(SCRIPTED, EAGLE, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), max_num_batched_tokens=24, poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    asked, seen = prompts(3), set()
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(24))
    known: dict[int, list[int]] = {}

    def check() -> None:
        # what was verified in this step was chosen for the tokens known before it
        for sequence in core.scheduler.running:
            if tokens := known.get(sequence.number):
                said = repeat_suffix("", tokens, K)
                expected = said + [-1] * (K - len(said)) if said else eagle_drafts(tokens)
                assert state.drafts_MK[sequence.row].tolist() == expected
                seen.add(bool(said))
            if sequence.output_ids:
                known[sequence.number] = sequence.token_ids

    run_through(llm, check)
    assert seen == {True, False}


def test_what_was_not_drawn_counts_as_certain():
    llm = engine(speculative_config=cascade(NGRAM, EAGLE), cudagraph_capture_sizes=(2, 8), poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=12, seed=i))
    seen = set()

    def check() -> None:
        for sequence in answering(core):
            probs, drafts = state.draft_probs_MKV[sequence.row], state.drafts_MK[sequence.row]
            certain = torch.nn.functional.one_hot(drafts.clamp(min=0).long(), VOCAB).float()
            by = int(state.drafted_by_M[sequence.row])
            assert torch.equal(probs, certain) == (by == 0)
            torch.testing.assert_close(probs.sum(-1), torch.ones(K))
            seen.add(by)

    run_through(llm, check)
    assert seen == {0, 1}


@pytest.mark.parametrize("whole", [False, True], ids=["apart", "one_graph"])
def test_a_request_says_which_drafters_it_asks_and_in_which_order(whole):
    wishes = [None, ("eagle3",), ("ngram",), ("eagle3", "ngram"), ("ngram", "eagle3")]
    llm = engine(
        speculative_config=cascade(NGRAM, EAGLE),
        cudagraph_capture_sizes=(2, 5),
        async_scheduling=False,
        iteration_graph=whole,
        max_num_seqs=len(wishes),
        max_prefill_rows=len(wishes),
        poison=True,
    )
    core, state, asked = llm.engine.core, llm.engine.core.worker.state, prompts(2 * len(wishes))
    seen: dict[int, set[int]] = {index: set() for index in range(len(asked))}
    for i, prompt in enumerate(asked):  # the second half finds rows that others have left, and has no wishes
        wish = wishes[i] if i < len(wishes) else None
        core.add(str(i), prompt, greedy(20, speculative=wish and {"drafters": list(wish)}))

    def check() -> None:
        for sequence in core.scheduler.running:
            if not sequence.output_ids:
                continue
            tokens, index = sequence.token_ids, int(sequence.request_id)
            wish = (wishes[index] if index < len(wishes) else None) or ("ngram", "eagle3")
            drafts = {"ngram": lookup_reference(tokens, K, 1, 3), "eagle3": eagle_drafts(tokens)}
            by = next((name for name in wish if drafts[name][0] >= 0), None)
            assert state.drafts_MK[sequence.row].tolist() == (drafts[by] if by else [-1] * K)
            if by:
                assert state.drafted_by_M[sequence.row] == ("ngram", "eagle3").index(by)
                seen[index].add(by)

    ended = run_through(llm, check)
    assert ended == {str(i): oracle(prompt, 20) for i, prompt in enumerate(asked)}
    assert [seen[1], seen[3]] == [{"eagle3"}, {"eagle3"}]
    assert seen[2] <= {"ngram"}
    assert set.union(*(seen[i] for i in range(5, 10))) == {"ngram", "eagle3"}
    parts = llm.get_metrics()["spec_decode_by_drafter"]
    assert all(part["num_drafts"] for part in parts.values())


@pytest.mark.gpu
def test_requests_choose_their_drafters_on_a_gpu():
    settings = {"device": "cuda", "dtype": "float32", "cudagraph_capture_sizes": (2, 8)}
    target, asked = tiny_model("wide", hidden=256), prompts(6)
    head = {"method": "eagle3", "model": wide_head("eagle3")}
    plain = make_engine(target, cudagraph_mode="NONE", **settings)
    llm = make_engine(target, speculative_config=cascade(NGRAM, head), cudagraph_mode="FULL_AND_PIECEWISE", **settings)
    wishes = [["eagle3"], ["eagle3", "ngram"], ["ngram"], None, None, ["eagle3"]]
    params = [
        greedy(24, speculative={"num_tokens": 1 + i % K, **({"drafters": wish} if wish else {})})
        for i, wish in enumerate(wishes)
    ]
    outputs = llm.generate(asked, params)
    assert answers(outputs) == answers(plain.generate(asked, greedy(24)))
    for i, output in enumerate(outputs):
        assert output.spec is None or not any(output.spec.acceptance_histogram[2 + i % K :])
    parts = llm.get_metrics()["spec_decode_by_drafter"]
    assert parts["eagle3"]["num_drafts"] > 0
    llm.generate(asked, [greedy(24, speculative={"drafters": ["ngram"]})] * 6)
    assert llm.get_metrics()["spec_decode_by_drafter"]["eagle3"] == parts["eagle3"]
    plain.close()
    llm.close()


def test_a_wish_for_a_drafter_of_another_engine_is_refused():
    llm = engine(speculative_config=cascade(NGRAM, EAGLE), enforce_eager=True)
    with pytest.raises(RequestError, match=r"speculative.drafters names 'suffix'; this engine's drafters: ngram, eag"):
        llm.generate([1], greedy(4, speculative={"drafters": ["suffix"]}))
    with pytest.raises(
        RequestError, match=r"speculative.num_tokens is 4; this engine drafts at most 3 tokens per step"
    ):
        llm.generate([1], greedy(4, speculative={"num_tokens": 4}))


def knows(asked: list[list[int]], right: int, for_request: str):
    """A script for one request: `right` tokens of the true text, then wrong ones."""

    def script(request_id: str, token_ids: list[int], k: int) -> list[int]:
        if request_id != for_request:
            return []
        prompt = asked[int(request_id)]
        done = len(token_ids) - len(prompt)
        text = oracle(prompt, done + k)[done:]
        return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(text)]

    return script


def test_each_drafter_is_counted_by_itself():
    """Request 0 gets 2 right drafts of 3 from a script, request 1 all of them from the model itself."""
    asked = prompts(2)
    spec = cascade({"method": "scripted", "script": knows(asked, 2, "0")}, {"model": tiny_model()})
    llm = make_engine(speculative_config=spec, max_num_seqs=4, cudagraph_capture_sizes=(4,))
    outputs = llm.generate(asked, [greedy(1 + 8 * 3), greedy(1 + 6 * 4)])
    assert answers(outputs) == [oracle(p, 25) for p in asked]
    metrics = llm.get_metrics()
    assert metrics["spec_decode_by_drafter"] == {
        "scripted": {
            "num_drafts": 8,
            "num_draft_tokens": 24,
            "num_accepted_tokens": 16,
            "mean_acceptance_length": 3.0,
        },
        "draft_model": {
            "num_drafts": 6,
            "num_draft_tokens": 18,
            "num_accepted_tokens": 18,
            "mean_acceptance_length": 4.0,
        },
    }
    assert metrics["spec_decode_num_drafts"] == 14
    assert metrics["spec_decode_num_accepted_tokens"] == 34


def test_numbers_of_drafters_add_up_in_a_device_loop():
    llm = engine(speculative_config=cascade(NGRAM, EAGLE), cudagraph_capture_sizes=(2, 8), device_loop=8)
    llm.generate(prompts(7), [greedy(10 + 3 * i) for i in range(7)])
    metrics = llm.get_metrics()
    parts = metrics["spec_decode_by_drafter"]
    assert list(parts) == ["ngram", "eagle3"]
    for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(part[key] for part in parts.values()) == metrics[f"spec_decode_{key}"]
        assert all(part["num_drafts"] for part in parts.values())
    assert sum(row.iterations for row in llm.get_graph_report().loops) > 0


def test_what_was_drafted_before_steps_without_drafts_is_not_verified_after_them():
    """Nor are an earlier request's drafts. The target drafts for itself, so that all but what is stale is accepted."""
    spec = cascade({"method": "scripted", "script": lambda request_id, token_ids, k: []}, {"model": tiny_model()})
    spec["num_speculative_tokens_per_batch_size"] = [[1, 1, K], [2, 8, 0]]
    llm = make_engine(speculative_config=spec, max_num_seqs=4, cudagraph_mode="NONE")
    for _ in range(2):
        llm.generate(prompts(2), [greedy(12), greedy(36)])  # two rows draft nothing, the one that is left all
    metrics = llm.get_metrics()
    assert min(metrics["steps_by_num_drafts"].values()) > 0
    cut = 2 * K  # the last block of a request ends at its limit
    assert metrics["spec_decode_num_accepted_tokens"] >= metrics["spec_decode_num_draft_tokens"] - cut


def test_two_drafters_of_one_name_keep_apart():
    spec = cascade(
        {"model": near_draft(), "draft_sample_method": "greedy"},
        {"model": tiny_model(), "draft_sample_method": "greedy"},
        k=2,
    )
    llm = make_engine(speculative_config=spec, max_num_seqs=4, cudagraph_capture_sizes=(4,))
    assert llm.engine.drafter.drafters == ("draft_model", "draft_model.1")
    assert answers(llm.generate(prompts(3), greedy(20))) == [oracle(p, 20) for p in prompts(3)]
    assert llm.get_metrics()["spec_decode_by_drafter"]["draft_model.1"]["num_drafts"] == 0, "the first always has some"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (cascade(NGRAM), "needs 'drafters', a list of two or more configurations, but has 1"),
        ({"method": "cascade", "num_speculative_tokens": 2}, "but has 0; for one drafter use its own method"),
        (cascade(NGRAM, EAGLE | {"num_speculative_tokens": 5}), "is 3, but 5 in one of 'drafters'.* give it once"),
        (cascade(SCRIPTED, {"method": "suffix"}), "at most one may work on the host, but scripted and suffix do"),
        (
            cascade(EAGLE, {"model": tiny_model()}),
            "at most one may draw their drafts, but eagle3 and draft_model do; .* draft_sample_method 'greedy'",
        ),
        (
            cascade(EAGLE, EAGLE | {"draft_sample_method": "greedy"}),
            "at most one may read the target's states, but eagle3 and eagle3 do",
        ),
        (
            cascade(NGRAM, {"method": "synthetic", "synthetic_acceptance_length": 2}),
            "synthetic_acceptance_length is 2.* in one",
        ),
        (cascade(NGRAM, {"method": "ngram", "adaptive": True, "num_speculative_tokens": 3}), "say it beside them"),
        (cascade(NGRAM, cascade(NGRAM, EAGLE)), "'cascade' cannot be one of several drafters"),
        (
            cascade(NGRAM, {"method": "extract_hidden_states", "layer_ids": [0], "output_dir": "x"}),
            "'extract_hidden_states'",
        ),
        (cascade(NGRAM, {"method": "ngrm"}), "did you mean 'ngram'"),
        (cascade(NGRAM, {"method": "ngram", "model": "x"}), "'ngram' does not use 'model'"),
        (cascade(NGRAM, 3), "drafters is .*; it must be a list, each of it a mapping"),
        ({**NGRAM, "num_speculative_tokens": 2, "drafters": [NGRAM]}, "'ngram' does not use 'drafters'"),
    ],
)
def test_what_cannot_work_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config=spec)


def test_the_log_names_each():
    described = make_engine(speculative_config=cascade(NGRAM, EAGLE), enforce_eager=True).engine.drafter.describe()
    assert described.startswith("cascade: ngram, K=3, greedy drafts; else eagle3, K=3, sampled drafts")
