"""`pytest --costs`: processor seconds by file, children included once they have ended.

On a busy machine they tell more than durations. Module fixtures count where they are used first, and forks (forks.py)
nowhere.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

NUM_FILES = 25


class Costs:
    def __init__(self) -> None:
        self._spent_s = _spent_s()
        self._by_file = Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._spent_s = self._spent_s, _spent_s()
        report.processor_s = self._spent_s - before  # travels from workers with the report
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[report.nodeid.partition("::")[0]] += getattr(
            report, "processor_s", 0.0
        )  # none where a worker is lost

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"processor seconds: {self._by_file.total():.0f} in tests")
        for file, spent_s in self._by_file.most_common(NUM_FILES):
            terminalreporter.line(f"{spent_s:8.1f}  {file}")


def _spent_s() -> float:
    return sum(os.times()[:4])
