"""The page of field cases names tests that exist, and the cases that tests name are on it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field_cases.md"
NUMBERS = (
    *(1, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 18, 19, 22, 23, 24, 25, 27, 29),
    *(30, 31, 32, 35, 36, 37, 40, 42, 43, 44, 45, 47, 48, 49, 51, 52, 53, 55, 56, 57, 58, 59, 60),
)
CASES = [f"B{number:02}" for number in NUMBERS]


def rows() -> dict[str, list[str]]:
    """The cells of each case."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| B\d\d ", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({row[0] for row in cells}) == len(cells), "a case has one line"
    return {row[0]: row[1:] for row in cells}


@functools.cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")}


def test_every_case_has_one_line():
    assert list(rows()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_case_names_tests_that_exist_or_says_that_they_are_missing(case):
    fault, tests, outcome = rows()[case]
    assert fault
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert bool(named) != outcome.startswith("missing"), "either tests, or a word about why there are none"
    for file, name in named:
        assert name in functions_of(ROOT / file), f"{file} has no test {name}"


def test_what_tests_say_that_they_show_is_on_the_page():
    found = rows()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, node in functions_of(file).items():
            cases = set(re.findall(r"\bB\d\d\b", ast.get_docstring(node) or ""))
            cases |= {f"B{number}" for number in re.findall(r"_b(\d\d)_", name)}
            for case in cases & found.keys():
                assert not found[case][2].startswith("missing"), f"{file.name}::{name} shows {case}; put it on {PAGE}"
