"""String formats of JSON schemas whose grammar in xgrammar is wider than the format: patterns in their place.

Its `ipv4` takes leading zeros, and its `date` takes days that a month does not have.
"""

from __future__ import annotations

import json
from typing import Any

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_LONG, _SHORT = "(0[13578]|1[02])-(29|3[01])", "(0[469]|11)-(29|30)"

PATTERNS = {
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "date": f"^({_YEAR}-((0[1-9]|1[0-2])-{_DAY}|{_LONG}|{_SHORT})|{_LEAP}-02-29)$",
}
"""Format -> what all of its strings match, and nothing else does."""
JSON_VALUES = ("enum", "const", "default", "examples")
"""Keys of a schema that hold no schemas."""


def with_patterns(schema: str) -> str:
    """The same JSON schema, as text, with patterns in the place of these formats where it brings none of its own."""
    return json.dumps(_replaced(json.loads(schema)))


def _replaced(part: Any) -> Any:
    if isinstance(part, list):
        return [_replaced(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {key: value if key in JSON_VALUES else _replaced(value) for key, value in part.items()}
    pattern = PATTERNS.get(part["format"]) if isinstance(part.get("format"), str) else None
    if pattern is not None and part.get("type") == "string" and "pattern" not in part:
        del found["format"]
        found["pattern"] = pattern
    return found
