"""Ranks that do not start: said soon, with the rank that it is about, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftloop.distributed import launcher
from draftloop.distributed.followers import Followers, Leader
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


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """One that still waits for ranks would take connections of whatever gets its listener's number next."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def run_instead(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    (folder / "not_a_rank.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(launcher, "MODULE", "not_a_rank")


@pytest.mark.usefixtures("no_thread_stays")
def test_a_rank_that_ends_while_it_starts_is_said_with_its_exit_code(started, monkeypatch, tmp_path):
    run_instead(monkeypatch, tmp_path, "raise SystemExit(7)")
    with pytest.raises(RankError, match=r"rank 1 has ended before it began \(exit code 7\); see its own output"):
        launcher.meet(2, None)
    assert [process.wait(10) for process in started] == [7]


@pytest.mark.usefixtures("no_thread_stays")
def test_ranks_that_never_come_are_waited_for_no_longer_than_is_said(started, monkeypatch, tmp_path):
    run_instead(monkeypatch, tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(launcher, "START_S", 1.0)
    with pytest.raises(RankError, match=r"ranks \[1, 2\] have not come within 1 s"):
        launcher.meet(3, None)
    assert [process.wait(10) for process in started] == [-9, -9]


def test_strangers_who_connect_and_go_take_no_ranks_place(started, monkeypatch, tmp_path):
    code = """
import pickle, sys
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
rank, size, folder, secret = pickle.load(sys.stdin.buffer)
Client(f"{folder}/leader").close()
with suppress(AuthenticationError):
    Client(f"{folder}/leader", authkey=b"a guess")
connection = Client(f"{folder}/leader", authkey=secret)
connection.send_bytes(pickle.dumps(rank))
connection.poll(None)
"""
    run_instead(monkeypatch, tmp_path, code)
    followers = launcher.meet(2, None).followers
    assert followers is not None
    followers.release()
    assert [process.wait(10) for process in started] == [0]


def test_rank_0_is_closed_when_the_others_have_ended():
    """They may still be in a sum that it has already."""
    here, there = multiprocessing.Pipe()
    followers, ended = Followers([here]), threading.Event()

    def follow() -> None:
        for _ in Leader(there).orders():
            pass
        time.sleep(0.3)
        ended.set()
        there.close()

    threading.Thread(target=follow).start()
    followers.release()
    assert ended.is_set()


def test_a_rank_that_does_not_end_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("draftloop.distributed.followers.END_S", 0.2)
    here, _there = multiprocessing.Pipe()
    began = time.monotonic()
    Followers([here]).release()
    assert 0.2 <= time.monotonic() - began < 5
