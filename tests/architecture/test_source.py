"""Rules of the source that no linter knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "draftloop"
SOURCES = sorted(path for folder in (PACKAGE, ROOT / "tests", ROOT / "examples") for path in folder.rglob("*.py"))
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")])

MAX_LINES = 450

# Asking which drafter runs is how one of many lists misses a name; only drafters/ knows drafters.
ASKS_FOR_DRAFTER = re.compile(
    r"isinstance\([^)]*(?:[dD]rafter|[pP]roposer)"
    r"|\bis_(?:eagle|ngram|medusa|mtp|dflash|suffix|draft_model)\b"
    r"|\bmethod\s*(?:==|!=|\bin\b|\bnot in\b)"
    r"|match\s+[\w.]*\.method\s*:"
)


def test_nobody_asks_which_drafter_runs():
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "drafters"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if ASKS_FOR_DRAFTER.search(line.split("#")[0]):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("if isinstance(self.drafter, EagleDrafter):", True),
        ("if config.is_eagle():", True),
        ('if spec.method == "ngram":', True),
        ('if spec.method in ("eagle", "eagle3"):', True),
        ("match spec.method:", True),
        ("drafter = make_drafter(spec.method)", False),
        ("if isinstance(value, SpeculativeConfig):", False),
    ],
)
def test_the_rule_finds_what_it_should(line, asks):
    assert bool(ASKS_FOR_DRAFTER.search(line)) == asks


def test_files_stay_readable():
    counts = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = {str(path): count for path, count in counts.items() if count > MAX_LINES}
    assert not long, f"split these (over {MAX_LINES} lines): {long}"


def test_docs_point_only_into_the_project():
    """Links and code spans of docs name files that a fresh clone has."""
    found = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            target = (path.parent / link).resolve()
            if not target.is_relative_to(ROOT) or not target.exists():
                found.append(f"{path.relative_to(ROOT)}: {link}")
        # "Absolute" or upward paths belong to one machine, except those every Linux has.
        for span in re.findall(r"(?<![\w.])(?:\.\./|/(?:work|home|root|mnt|data|Users)/)[\w./-]*", text):
            if not (path.parent / span).resolve().is_relative_to(ROOT) or span.startswith("/"):
                found.append(f"{path.relative_to(ROOT)}: {span}")
        for source in re.findall(r"`((?:src|tests|docs|examples|tools)/[\w./-]+\.\w+)`", text):
            if not (ROOT / source).exists():
                found.append(f"{path.relative_to(ROOT)}: {source} does not exist")
    assert not found, "\n".join(found)
