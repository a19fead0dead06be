"""Numbers of drafts that change while requests run: the same text, and drafters that were fed all the while."""

from __future__ import annotations

from typing import Any

import pytest

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import DRAFTERS, drafter_class, load_drafters
from draftloop.errors import ConfigError
from helpers import (
    answers,
    assert_all_free,
    engine,
    example_configs,
    example_target,
    greedy,
    make_engine,
    oracle,
    prompts,
    tiny_model,
)

load_drafters()
FOLLOWING = [
    pytest.param(config, id=f"{name}-{index}")
    for name, configs in sorted(example_configs().items())
    for index, config in enumerate(configs)
    if DRAFTERS[name].follows_load and not DRAFTERS[name].forced_acceptance and "speculative_token_tree" not in config
]
LENGTHS = (20, 40, 60, 80)


def by_rows(config: dict[str, Any]) -> dict[str, Any]:
    """Nothing is drafted at first, then one token, then all."""
    most = config["num_speculative_tokens"]
    return {**config, "num_speculative_tokens_per_batch_size": [[1, 1, most], [2, 2, 1], [3, 8, 0]]}


@pytest.mark.parametrize("config", FOLLOWING)
def test_text_does_not_depend_on_the_schedule(config):
    llm = make_engine(speculative_config=by_rows(config), cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL")
    llm.engine.table.poison = True
    asked = prompts(4)
    outputs = llm.generate(asked, [greedy(n) for n in LENGTHS])
    model = example_target(config)
    assert answers(outputs) == [oracle(p, n, model=model) for p, n in zip(asked, LENGTHS, strict=True)]
    steps = llm.engine.core.scheduler.drafting.steps_by_count
    assert all(steps[count] > 0 for count in (0, 1, config["num_speculative_tokens"])), steps
    assert_all_free(llm)
    llm.close()


@pytest.mark.parametrize("mode", ["NONE", "FULL", "loop"])
def test_acceptance_is_whole_again_after_steps_without_drafts(mode):
    """B07: the target drafts for itself, so that any key or value that is missing would cost acceptance."""
    self_draft = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
    how = {"cudagraph_mode": "FULL", "device_loop": 7} if mode == "loop" else {"cudagraph_mode": mode}
    llm = make_engine(speculative_config=by_rows(self_draft), cudagraph_capture_sizes=(2, 8), **how)
    asked = prompts(3)
    outputs = llm.generate(asked, [greedy(24), greedy(60), greedy(100)])
    assert answers(outputs) == [oracle(p, n) for p, n in zip(asked, (24, 60, 100), strict=True)]
    drafting, metrics = llm.engine.core.scheduler.drafting, llm.get_metrics()
    assert drafting.steps_by_count[0] > 0
    assert drafting.steps_by_count[3] > 0
    cut = 3 * len(asked)  # the last block of a request ends at its limit
    assert metrics["spec_decode_num_accepted_tokens"] >= metrics["spec_decode_num_draft_tokens"] - cut
    llm.close()


def test_every_number_of_the_schedule_is_in_the_coverage_report():
    llm = engine(speculative_config=by_rows(FOLLOWING[0].values[0]), cudagraph_mode="FULL", iteration_graph=True)
    covered = {row.phase for row in llm.get_graph_report().rows if row.captured}
    assert {"target.verify", "target.verify.k1", "target.decode"} <= covered


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("draft_model", {"cudagraph_mode": "NONE"}),
        ("draft_model", {"cudagraph_mode": "FULL", "device_loop": 7}),
        pytest.param("mtp", {"cudagraph_mode": "FULL", "device_loop": 7}, id="two mtp modules"),
    ],
)
def test_adaptive_text_is_that_of_plain_decoding(method, how):
    spec = example_configs()[method][-1 if method == "mtp" else 0]
    llm = make_engine(speculative_config={**spec, "adaptive": True}, cudagraph_capture_sizes=(2, 8), **how)
    asked = prompts(5)
    assert answers(llm.generate(asked, greedy(60))) == [oracle(p, 60) for p in asked]
    assert len(llm.engine.core.scheduler.drafting.counts) > 1
    llm.close()


def test_a_drafter_that_cannot_follow_is_refused():
    spec = SpeculativeConfig.from_mapping(
        {"method": "extract_hidden_states", "adaptive": True, "num_speculative_tokens": 1}
    )
    with pytest.raises(ConfigError, match="adaptive"):
        drafter_class(spec)
