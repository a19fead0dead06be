"""Numbers of drafts that change while requests run: the same text, and drafters that were fed all the while."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocks import wide_block
from draftloop.config.speculative import SpeculativeConfig
from draftloop.distributed.group import ALONE
from draftloop.distributed.launcher import Ranks
from draftloop.drafters.base import DRAFTERS, drafter_class, load_drafters
from draftloop.errors import ConfigError
from draftloop.scheduler.drafting import AdaptiveDrafts
from example_drafters import example_configs
from heads import wide_head
from helpers import answers, assert_all_free, engine, example_target, greedy, make_engine, oracle, prompts, tiny_model
from medusa_heads import medusa_config, tiny_medusa
from parallel import wide_peagle

load_drafters()
FOLLOWING = [
    pytest.param(config, id=f"{name}-{index}")
    for name, configs in sorted(example_configs().items())
    for index, config in enumerate(configs)
    if DRAFTERS[name].follows_load and not DRAFTERS[name].forced_acceptance and "speculative_token_tree" not in config
]
LENGTHS = (20, 40, 60, 80)


def works_on_host(config: dict[str, Any]) -> bool:
    spec = SpeculativeConfig.from_mapping(config)
    return drafter_class(spec).needs_host(spec)


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
    steps = llm.get_metrics()["steps_by_num_drafts"]
    assert all(steps[count] > 0 for count in (0, 1, config["num_speculative_tokens"])), steps
    assert_all_free(llm)
    llm.close()


@pytest.mark.parametrize("mode", ["NONE", "FULL", "loop"])
def test_acceptance_is_whole_again_after_steps_without_drafts(mode):
    """B07: the target drafts for itself, so that any key or value that is missing would cost acceptance.

    B51: a step runs the drafter as often as it has drafts, not as often as the most.
    """
    self_draft = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
    how = {"cudagraph_mode": "FULL", "device_loop": 7} if mode == "loop" else {"cudagraph_mode": mode}
    llm = make_engine(speculative_config=by_rows(self_draft), cudagraph_capture_sizes=(2, 8), **how)
    asked = prompts(3)
    outputs = llm.generate(asked, [greedy(24), greedy(60), greedy(100)])
    assert answers(outputs) == [oracle(p, n) for p, n in zip(asked, (24, 60, 100), strict=True)]
    metrics = llm.get_metrics()
    steps, report = metrics["steps_by_num_drafts"], llm.get_graph_report()
    assert min(steps.values()) > 0
    cut = 3 * len(asked)  # the last block of a request ends at its limit
    assert metrics["spec_decode_num_accepted_tokens"] >= metrics["spec_decode_num_draft_tokens"] - cut
    if mode != "loop":
        passes = {name: report.replays[name] + report.eager_runs[name] for name in report.replays}
        assert (passes["draft.feed"], passes["draft.prefill"]) == (steps[0], steps[1] + steps[3])
        assert passes["draft.decode"] == 3 + 2 * steps[3], "three drafts after the prompts"
    llm.close()


@pytest.mark.parametrize("config", [case for case in FOLLOWING if not works_on_host(case.values[0])])
def test_steps_without_drafts_feed_the_drafter(config):
    """What is drafted after them is what a row drafts that has just begun with the same tokens."""
    llm = make_engine(
        speculative_config=by_rows(config),
        cudagraph_mode="NONE",
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    core, drafts_MK = llm.engine.core, llm.engine.core.worker.state.drafts_MK
    *_, last = [core.add(str(i), p, greedy(n)) for i, (p, n) in enumerate(zip(prompts(3), (9, 12, 60), strict=True))]
    while not (last.output_ids and core.scheduler.running == [last]):
        core.step()
    steps = core.scheduler.drafting.steps_by_count
    assert steps[0] > 4
    while steps[config["num_speculative_tokens"]] < 2:
        core.step()
    fed, num_tokens = drafts_MK[last.row].tolist(), last.num_tokens
    core.preempt(last.request_id)
    core.step()
    assert last.num_tokens == num_tokens
    assert drafts_MK[last.row].tolist() == fed
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("device_loop", ["off", 7])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3", "dflash", "dspark", "peagle", "medusa"])
def test_text_does_not_depend_on_the_schedule_on_a_gpu(name, device_loop):
    model = tiny_model("wide", hidden=256)
    config = {"method": name, "num_speculative_tokens": 3, "model": wide_drafter(name)}
    if name == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    shared = {"device": "cuda", "dtype": "float32"}
    plain = make_engine(model, **shared, cudagraph_mode="NONE", max_num_seqs=1, max_prefill_rows=1)
    drafting = {"speculative_config": by_rows(config), "cudagraph_capture_sizes": (2, 8), "device_loop": device_loop}
    llm = make_engine(model, **shared, **drafting, require_graphs=True)
    asked, params = prompts(4), [greedy(n) for n in LENGTHS]
    llm.engine.table.poison = True
    assert answers(llm.generate(asked, params)) == answers(plain.generate(asked, params))
    assert min(llm.get_metrics()["steps_by_num_drafts"].values()) > 0
    report = llm.get_graph_report()
    not_captured = {row.phase for row in report.rows if row.asked == "NONE"}
    assert {phase for phase, runs in report.eager_runs.items() if runs} <= not_captured
    assert_all_free(llm)
    llm.close()
    plain.close()


def wide_drafter(name: str) -> str | None:
    if name == "draft_model":
        return tiny_model("wide-near", hidden=256, noise=0.06)
    if name == "medusa":
        return tiny_medusa("wide", medusa_config(hidden_size=256))
    if name == "peagle":
        return wide_peagle()
    return wide_head(name) if name == "eagle3" else wide_block(name)


@pytest.mark.gpu
def test_acceptance_is_whole_again_after_steps_without_drafts_on_a_gpu():
    """As on a CPU; what is rejected is a draft whose logits nearly tie with another's in a pass of another width."""
    model = tiny_model("wide", hidden=256)
    spec = by_rows({"method": "draft_model", "model": model, "num_speculative_tokens": 3})
    llm = make_engine(model, speculative_config=spec, device="cuda", dtype="float32", cudagraph_capture_sizes=(2, 8))
    llm.generate(prompts(3), [greedy(24), greedy(60), greedy(100)])
    metrics = llm.get_metrics()
    assert min(metrics["steps_by_num_drafts"].values()) > 0
    assert metrics["spec_decode_num_accepted_tokens"] >= metrics["spec_decode_num_draft_tokens"] - 3 * 3 - 3
    llm.close()


@pytest.mark.gpu
def test_costs_are_measured_and_adaptive_text_is_that_of_plain_decoding_on_a_gpu():
    model = tiny_model("wide", hidden=256)
    spec = {"method": "draft_model", "model": wide_drafter("draft_model"), "num_speculative_tokens": 3}
    shared = {"device": "cuda", "dtype": "float32"}
    plain = make_engine(model, **shared, cudagraph_mode="NONE", max_num_seqs=1, max_prefill_rows=1)
    adaptive = {**spec, "adaptive": True}
    llm = make_engine(model, **shared, speculative_config=adaptive, cudagraph_capture_sizes=(2, 8))
    drafting = llm.engine.core.scheduler.drafting
    assert isinstance(drafting, AdaptiveDrafts)
    costs = drafting.times.costs
    assert set(costs.ms) == {(rows, count) for rows in (2, 8) for count in range(4)}
    assert all(0 < ms < 100 for ms in costs.ms.values())
    asked = prompts(12)
    assert answers(llm.generate(asked, greedy(60))) == answers(plain.generate(asked, greedy(60)))
    llm.close()
    plain.close()


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


def test_only_steps_that_ran_as_planned_tell_what_such_steps_take(monkeypatch):
    """No step of rows that draft nothing does, nor one before which a prompt ran, or nobody wanted anything."""
    self_draft = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3, "adaptive": True}
    llm = make_engine(speculative_config=self_draft, cudagraph_mode="NONE")
    drafting, timed = llm.engine.core.scheduler.drafting, []
    monkeypatch.setattr(drafting, "stepped", lambda num_rows, num_drafts, ms: timed.append(ms))
    llm.generate(prompts(1), greedy(8), speculation=False)
    assert timed
    assert set(timed) == {None}
    for _ in range(2):
        timed.clear()
        llm.generate(prompts(1), greedy(16))
        assert timed[0] is None
        assert None not in timed[1:]
    llm.close()


def test_a_drafter_that_cannot_follow_is_refused():
    spec = SpeculativeConfig.from_mapping(
        {"method": "extract_hidden_states", "adaptive": True, "num_speculative_tokens": 1}
    )
    with pytest.raises(ConfigError, match="adaptive"):
        drafter_class(spec)


def test_engines_that_take_every_step_together_have_a_fixed_number_of_drafts():
    ranks = Ranks(group=ALONE, device=torch.device("cpu"), engines=ALONE, steps=ALONE)
    spec = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True}
    with pytest.raises(
        ConfigError, match=r"engines that share experts .* leave adaptive and num_speculative_tokens_per"
    ):
        make_engine(speculative_config=spec, ranks=ranks)
