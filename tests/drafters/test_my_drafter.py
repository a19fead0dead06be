"""examples/my_drafter.py: a drafter that another package brings along, found by its entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_all_drafters as suite

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import DRAFTERS, drafter_class, load_drafters
from draftloop.errors import ConfigError
from draftloop.graphs.phase import ModeSetting
from helpers import answers, engine, greedy, make_engine, oracle

EXAMPLES = Path(__file__).parents[2] / "examples"
SPEC = {"method": "period", "num_speculative_tokens": 3, "drafter_options": {"period": 4}}


def install(folder: Path, entry: str, *, name: str = "my-drafter") -> None:
    """What an installer leaves of a package: its name and entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[draftloop.drafters]\n{entry}\n")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are found in; afterwards nobody knows of what was in it."""
    load_drafters()
    before = dict(DRAFTERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    load_drafters.cache_clear()
    yield tmp_path
    for name in DRAFTERS.keys() - before.keys():
        del DRAFTERS[name]
    sys.modules.pop("my_drafter", None)
    load_drafters.cache_clear()


@pytest.fixture
def installed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(path, "period = my_drafter:PeriodDrafter")
    load_drafters()
    monkeypatch.setattr(suite, "example_configs", lambda: {"period": [SPEC]})


def test_it_is_a_method_like_any_other(installed):
    assert DRAFTERS["period"].__module__ == "my_drafter"
    llm = engine(speculative_config=SPEC, cudagraph_capture_sizes=(2, 8), iteration_graph=True, poison=True)
    prompt = [7, 8, 9, 10] * 5
    assert answers(llm.generate([prompt, [3]], greedy(40))) == [oracle(prompt, 40), oracle([3], 40)]
    metrics, replays = llm.get_metrics(), llm.get_graph_report().replays
    assert metrics["spec_decode_num_draft_tokens"] > 0
    assert replays["iteration"] > 0
    assert "period, K=3" in llm.engine.drafter.describe()


def test_it_drafts_what_stood_one_period_before(installed):
    llm = engine(speculative_config=SPEC, cudagraph_capture_sizes=(2,), max_num_seqs=2, async_scheduling=False)
    core, state = llm.engine.core, llm.engine.core.worker.state
    core.add("0", [5], greedy(12))
    while not core.idle:
        core.step()
        for sequence in core.scheduler.running:
            tokens = sequence.token_ids
            places = [len(tokens) - 4 + i for i in range(3)]
            expected = [tokens[place] if place >= 0 else -1 for place in places]
            assert state.drafts_MK[sequence.row].tolist() == expected


def test_it_passes_the_suite_of_our_own(installed):
    """docs/add_a_drafter.md ends with this suite; so does a drafter's author elsewhere."""
    suite.test_every_drafter_has_an_example("period")
    suite.test_greedy_text_is_that_of_the_plain_engine("period", 0, ModeSetting.FULL)
    suite.test_chunked_prompts_beside_decoding_rows("period", 0, True)
    suite.test_coverage_is_complete_and_nothing_that_may_be_a_graph_runs_eager("period", 0)
    suite.test_a_request_may_decline_speculation_beside_others("period", 0)
    suite.test_a_batch_that_shrinks_through_the_captured_sizes("period", 0)


def test_it_is_one_of_several(installed):
    spec = {"method": "cascade", "num_speculative_tokens": 3, "drafters": [SPEC, {"method": "ngram"}]}
    llm = make_engine(speculative_config=spec, max_num_seqs=2, cudagraph_capture_sizes=(2,))
    prompt = [7, 8, 9, 10] * 5
    assert answers(llm.generate(prompt, greedy(20))) == [oracle(prompt, 20)]
    assert llm.get_metrics()["spec_decode_by_drafter"]["period"]["num_drafts"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 2}, "period 2; it must be an int >= 3"),
        (None, "period None"),
        ({"period": 4, "phase": 1}, "drafter_options has 'phase'"),
    ],
)
def test_its_options_are_its_own(installed, options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config={**SPEC, "drafter_options": options})


def test_without_its_package_nobody_knows_it():
    with pytest.raises(ConfigError, match="unknown speculative method 'period'"):
        make_engine(speculative_config=SPEC)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "period = nowhere:PeriodDrafter",
            "'period' of package 'broken' .nowhere:PeriodDrafter. cannot be loaded: No module named 'nowhere'",
        ),
        ("period = my_drafter:Nothing", "cannot be loaded: .* no attribute 'Nothing'"),
        ("other = my_drafter:PeriodDrafter", "'other' of package 'broken' .* brings no drafter of that name"),
        ("ngram = json:loads", "'ngram' of package 'broken' .* brings no drafter of that name"),
    ],
)
def test_a_package_that_is_broken_is_named(path, entry, message):
    install(path, entry, name="broken")
    with pytest.raises(ConfigError, match=message):
        drafter_class(SpeculativeConfig(method="ngram", num_speculative_tokens=2))


def test_options_for_drafters_from_outside_are_refused_by_ours():
    with pytest.raises(ConfigError, match="'ngram' does not use 'drafter_options'"):
        make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "drafter_options": {}})
    with pytest.raises(ConfigError, match="drafter_options is 3; it must be a mapping"):
        make_engine(speculative_config={**SPEC, "drafter_options": 3})
