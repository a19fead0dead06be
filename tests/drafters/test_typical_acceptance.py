"""Typical acceptance in the engine: any drafter, as graphs, greedy rows exact beside others, and said at start."""

from __future__ import annotations

import logging

import pytest

from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.request import SamplingParams
from example_drafters import example_configs
from helpers import answers, assert_all_free, engine, example_target, greedy, make_engine, oracle, prompts, tiny_model

load_drafters()
SELF_DRAFT = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
TYPICAL = {"rejection_sample_method": "typical"}


@pytest.mark.parametrize(
    "name", [name for name in sorted(DRAFTERS) if DRAFTERS[name].drafts and not DRAFTERS[name].forced_acceptance]
)
def test_greedy_rows_keep_their_text_and_seeds_their_tokens_with_every_drafter(name):
    spec = {**example_configs()[name][0], **TYPICAL}
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL", poison=True)
    asked = prompts(4)
    params = [greedy(10), SamplingParams(temperature=1.0, max_tokens=10, seed=3)] * 2
    texts = answers(llm.generate(asked, params))
    assert [texts[i] for i in (0, 2)] == [oracle(asked[i], 10, model=example_target(spec)) for i in (0, 2)]
    assert answers(llm.generate(asked[1], params[1]))[0] == texts[1]
    report = llm.get_graph_report()
    assert not {phase for phase, runs in report.eager_runs.items() if runs and phase.startswith("accept")}
    assert report.replays["accept.sampled"] > 0
    assert_all_free(llm)


def test_more_is_accepted_than_without_loss_and_the_thresholds_are_heard():
    asked, params = prompts(7), SamplingParams(temperature=1.5, max_tokens=30, seed=1)
    lengths = {}
    for name, spec in (
        ("standard", {}),
        ("typical", TYPICAL),
        ("strict", TYPICAL | {"typical_acceptance_threshold": 0.9, "typical_acceptance_alpha": 50.0}),
    ):
        llm = engine(speculative_config=SELF_DRAFT | {"draft_sample_method": "greedy"} | spec)
        llm.generate(asked, params)
        lengths[name] = llm.get_metrics()["mean_acceptance_length"]
    assert lengths["strict"] < lengths["standard"] < lengths["typical"]


def test_the_start_says_that_it_is_lossy(caplog):
    with caplog.at_level(logging.WARNING, logger="draftloop"):
        make_engine(speculative_config=SELF_DRAFT, enforce_eager=True).close()
        assert not caplog.records
        make_engine(speculative_config=SELF_DRAFT | TYPICAL, enforce_eager=True).close()
    assert "LOSSY" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_graphs_and_eager_say_the_same_on_a_gpu(deterministic):
    spec = {"method": "draft_model", "model": tiny_model("wide-near", hidden=256, noise=0.06)} | TYPICAL
    spec["num_speculative_tokens"] = 3
    asked = prompts(7)
    params = [SamplingParams(temperature=i % 3 / 2, max_tokens=20, seed=i) for i in range(7)]
    texts = []
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        llm = make_engine(
            tiny_model("wide", hidden=256),
            device="cuda",
            dtype="float32",
            speculative_config=spec,
            cudagraph_mode=mode,
            cudagraph_capture_sizes=(2, 8),
            deterministic=deterministic,
        )
        texts.append(answers(llm.generate(asked, params)))
        if deterministic:
            texts.append([answers(llm.generate(p, one))[0] for p, one in zip(asked, params, strict=True)])
        llm.close()
    assert all(text == texts[0] for text in texts)
