"""The environment variables are one typed table."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftloop.config import Environment
from draftloop.errors import ConfigError


def test_defaults():
    env = Environment.read({"HOME": "/x", "XDG_CACHE_HOME": "/caches", "DRAFTLOOP_POISON": ""})
    assert (env.log_level, env.cache_root, env.poison) == ("INFO", Path("/caches/draftloop"), False)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="no home directory to keep models in; set DRAFTLOOP_CACHE_ROOT"):
        Environment.read({})
    assert Environment.read({"DRAFTLOOP_CACHE_ROOT": "/data"}).cache_root == Path("/data")


def test_given_values():
    env = Environment.read(
        {"DRAFTLOOP_LOG_LEVEL": "debug", "DRAFTLOOP_CACHE_ROOT": "/data", "DRAFTLOOP_POISON": "1"},
    )
    assert (env.log_level, env.cache_root, env.poison) == ("DEBUG", Path("/data"), True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "DRAFTLOOP_POISSON",
            "1",
            "unknown environment variable 'DRAFTLOOP_POISSON'; did you mean 'DRAFTLOOP_POISON'?",
        ),
        ("DRAFTLOOP_LOG_LEVEL", "LOUD", "DRAFTLOOP_LOG_LEVEL is 'LOUD'; it must be one of DEBUG, INFO"),
        ("DRAFTLOOP_POISON", "maybe", "DRAFTLOOP_POISON is 'maybe'; it must be 0 or 1"),
    ],
)
def test_refused(name, value, message):
    with pytest.raises(ConfigError, match=message):
        Environment.read({name: value})
