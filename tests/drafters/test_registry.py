"""A drafter registers itself; what a configuration may say is checked before anything is built."""

from __future__ import annotations

import pytest

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters import base
from draftloop.drafters.base import DRAFTERS, Drafter, drafter_class, load_drafters
from draftloop.errors import ConfigError
from helpers import make_engine


def spec(**values) -> SpeculativeConfig:
    config = SpeculativeConfig.from_mapping(values)
    assert config is not None
    return config


def test_every_file_of_the_package_registers_its_drafter():
    load_drafters()
    assert {"ngram", "draft_model", "eagle", "eagle3", "scripted", "synthetic"} <= set(DRAFTERS)
    assert all(cls.name == name for name, cls in DRAFTERS.items())


def test_a_name_that_is_taken_is_refused_naming_the_owner():
    load_drafters()
    with pytest.raises(TypeError, match=r"'ngram' is already registered by draftloop\.drafters\.ngram"):
        type("Again", (Drafter,), {"name": "ngram"})


def test_a_drafter_whose_number_of_drafts_is_fixed_takes_none_that_follows_the_load(monkeypatch):
    load_drafters()
    monkeypatch.setattr(base, "DRAFTERS", dict(DRAFTERS))
    type("Steady", (Drafter,), {"name": "steady"})
    with pytest.raises(ConfigError, match="'steady' drafts the same number of tokens in every step, but adaptive is"):
        drafter_class(spec(method="steady", num_speculative_tokens=2, adaptive=True))


def test_a_shared_base_is_no_drafter():
    before = dict(DRAFTERS)
    type("Base", (Drafter,), {})
    assert before == DRAFTERS


def test_a_model_alone_means_a_draft_model():
    assert drafter_class(spec(model="x", num_speculative_tokens=2)).name == "draft_model"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngrm", "num_speculative_tokens": 2}, "unknown speculative method 'ngrm'; did you mean 'ngram'"),
        ({"method": "ngram"}, "'ngram' needs num_speculative_tokens, 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "'ngram' does not use 'model'"),
        ({"method": "scripted", "num_speculative_tokens": 2}, "needs 'script'"),
        ({"method": "synthetic", "num_speculative_tokens": 2}, "needs synthetic_acceptance_rates or"),
        ({"method": "ngram", "num_speculative_tokens": 130}, "num_speculative_tokens"),
        ({"method": "ngram", "adaptive": True}, "adaptive is True; it must be given beside num_speculative_tokens"),
    ],
)
def test_configurations_that_cannot_draft_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config=values)


def test_more_drafts_than_a_sequence_has_tokens_are_refused():
    with pytest.raises(ConfigError, match="num_speculative_tokens is 20, but the longest sequence is 16 tokens"):
        make_engine(max_model_len=16, speculative_config={"method": "ngram", "num_speculative_tokens": 20})


def test_no_drafts_at_all_is_no_speculation():
    llm = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 0}, enforce_eager=True)
    assert llm.engine.drafter is None
