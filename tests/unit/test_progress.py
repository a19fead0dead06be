"""Progress of long work, with a terminal and without."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from draftloop.observability import progress
from draftloop.observability.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_without_a_terminal_the_log_says_how_far_it_is(lines, capsys):
    with progress_bar(total=4, description="Walking", unit="step") as bar:
        for _ in range(4):
            bar.update(1)
    assert [line[:13] for line in lines()] == [f"Walking: {share:3}%" for share in (25, 50, 75, 100)]
    assert "4/4 [00:0" in lines()[-1]
    assert capsys.readouterr().err == ""


def test_nothing_is_said_of_work_that_is_over_at_once(caplog):
    caplog.set_level(logging.INFO)
    assert list(progress_bar(["a"], description="Walking", show=False)) == ["a"]
    with progress_bar(total=4, description="Walking"):
        pass
    assert not caplog.records


def test_a_terminal_has_a_bar(lines, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    assert list(progress_bar(["a", "b"], description="Walking", unit="step")) == ["a", "b"]
    assert "Walking: 100%" in screen.getvalue()
    assert not lines()
