"""Ranks that do not start: said soon, with the rank that it is about, and nothing is left running."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from draftloop.distributed import launcher
from draftloop.errors import RankError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """Every process that the launcher starts."""
    processes: list[subprocess.Popen] = []

    def start(*arguments, **options) -> subprocess.Popen:
        processes.append(original(*arguments, **options))
        return processes[-1]

    original = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


def run_instead(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    (folder / "not_a_rank.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(launcher, "MODULE", "not_a_rank")


def test_a_rank_that_ends_while_it_starts_is_said_with_its_exit_code(started, monkeypatch, tmp_path):
    run_instead(monkeypatch, tmp_path, "raise SystemExit(7)")
    with pytest.raises(RankError, match=r"rank 1 has ended before it began \(exit code 7\); see its own output"):
        launcher.meet(2, None)
    assert [process.wait(10) for process in started] == [7]


def test_ranks_that_never_come_are_waited_for_no_longer_than_is_said(started, monkeypatch, tmp_path):
    run_instead(monkeypatch, tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(launcher, "START_S", 1.0)
    with pytest.raises(RankError, match=r"ranks \[1, 2\] have not come within 1 s"):
        launcher.meet(3, None)
    assert [process.wait(10) for process in started] == [-9, -9]
