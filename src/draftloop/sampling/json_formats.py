"""String formats of JSON schemas whose grammar in xgrammar is wider than the format: patterns in their place.

Its `ipv4` takes leading zeros, and its `date` takes days that a month does not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
MAX_DEPTH = 200
"""Of schemas in schemas."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keys that hold no schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keys that hold schemas under names of the user's, which mean nothing."""


def with_patterns(schema: str) -> str:
    """The same JSON schema, as text, with patterns in the place of these formats where it brings none of its own."""
    return json.dumps(map_schemas(json.loads(schema), _with_pattern))


def _with_pattern(part: dict[str, Any]) -> dict[str, Any]:
    pattern = PATTERNS.get(part["format"]) if isinstance(part.get("format"), str) else None
    if pattern is None or part.get("type") != "string" or "pattern" in part:
        return part
    return {**{key: value for key, value in part.items() if key != "format"}, "pattern": pattern}


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A JSON schema, or what holds some, of which each part that is a schema itself was changed.

    Raises ValueError for one that is nested deeper than `MAX_DEPTH`.
    """

    def walk(part: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested deeper than {MAX_DEPTH}")
        if isinstance(part, list):
            return [walk(one, depth + 1) for one in part]
        if not isinstance(part, dict):
            return part
        found: dict[str, Any] = {}
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, dict):
                found[key] = {name: walk(one, depth + 1) for name, one in value.items()}
            else:
                found[key] = value if key in _VALUES else walk(value, depth + 1)
        return change(found)

    return walk(schema, 0)
