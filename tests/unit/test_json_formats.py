"""Patterns of string formats, against the standard library; and what a schema becomes."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re

import pytest

from draftloop.sampling.json_formats import PATTERNS, with_patterns


def is_valid(format: str, text: str) -> bool:
    try:
        datetime.date.fromisoformat(text) if format == "date" else ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


DATES = [
    f"{year:04}-{month:02}-{day:02}"
    for year in (0, 1, 4, 10, 100, 200, 400, 1000, 1900, 1996, 1999, 2000, 2020, 2023, 2024, 2100, 2400, 9999)
    for month in range(14)
    for day in range(34)
]
BYTES = ["0", "1", "9", "00", "01", "10", "99", "100", "199", "200", "249", "250", "255", "256", "300", "1000", ""]
ADDRESSES = [f"{a}.{b}.0.{a}" for a in BYTES for b in BYTES] + ["1.2.3", "1.2.3.4.5", "1.2.3.x"]


@pytest.mark.parametrize(("format", "texts"), [("date", DATES), ("ipv4", ADDRESSES)])
def test_a_pattern_matches_what_is_valid_and_nothing_else(format, texts):
    found = [re.search(PATTERNS[format], text) is not None for text in texts]
    assert found == [is_valid(format, text) for text in texts]
    assert len(set(found)) == 2


def test_only_formats_of_strings_are_replaced_and_patterns_of_ones_own_stay():
    day, own = {"type": "string", "format": "date"}, {"type": "string", "format": "date", "pattern": "^2"}
    schema = {
        "properties": {"a": day, "enum": day, "format": {"type": "integer"}, "b": {"anyOf": [own, {"const": day}]}},
        "format": {"x": 1},
    }
    changed = json.loads(with_patterns(json.dumps(schema)))
    for name in ("a", "enum"):
        assert changed["properties"][name] == {"type": "string", "pattern": PATTERNS["date"]}
        changed["properties"][name] = day
    assert changed == schema


@pytest.mark.parametrize(
    ("format", "good", "bad"), [("ipv4", "10.0.0.255", "010.0.0.1"), ("date", "2024-02-29", "2023-02-29")]
)
def test_xgrammar_takes_the_pattern(format, good, bad):
    xgrammar = pytest.importorskip("xgrammar")
    text = with_patterns(json.dumps({"type": "string", "format": format}))
    info = xgrammar.TokenizerInfo([chr(i) for i in range(128)], stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(xgrammar.Grammar.from_json_schema(text))
    for value, fits in ((good, True), (bad, False)):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert (all(matcher.accept_token(ord(c)) for c in json.dumps(value)) and matcher.accept_token(0)) == fits
