"""Assorted JSON schemas, each of bounded length, and what to ask for them. The same number gives the same schema."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_TOPICS = {
    "a book in a library": ("title", "author", "year", "language", "shelf", "loaned"),
    "a city": ("name", "country", "population", "coastal", "mayor", "climate"),
    "an order in a web shop": ("order_id", "status", "quantity", "gift", "carrier", "priority"),
    "a bird": ("species", "colour", "wingspan_cm", "migratory", "diet", "habitat"),
    "a recipe": ("dish", "servings", "minutes", "vegetarian", "course", "difficulty"),
    "a support ticket": ("ticket", "severity", "open", "team", "channel", "age_days"),
    "a film": ("title", "genre", "length_minutes", "rating", "in_colour", "studio"),
    "a train journey": ("origin", "destination", "changes", "platform", "delayed", "class"),
    "a sensor reading": ("sensor", "unit", "value", "valid", "site", "mode"),
    "a patient's visit": ("ward", "reason", "urgent", "age", "referral", "room"),
}
_WORDS = ("red", "green", "small", "large", "north", "south", "early", "late", "basic", "premium", "none", "other")

_PATTERNS = ("^[A-Z]{2}-[0-9]{4}$", "^(jan|feb|mar) [0-3][0-9]$", "^[a-f0-9]{6}$", r"^v[0-9]{1,2}\.[0-9]{1,2}$")


@dataclass(frozen=True, kw_only=True)
class SchemaPrompt:
    """One thing to ask."""

    kind: str
    """Which feature of JSON schemas it is about."""
    prompt: str
    schema: Schema


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(_WORDS, rng.randint(2, 5))}


def _integer(rng: random.Random) -> Schema:
    low = rng.choice((0, 1, -5, 100))
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((1, 9, 50, 1900))}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _text(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 14)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(("date", "uuid", "ipv4"))}


def _nullable(rng: random.Random) -> Schema:
    return {"anyOf": [{"type": "null"}, rng.choice((_integer, _enum, _boolean))(rng)]}


def _array(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    items = rng.choice((_enum, _integer, _boolean, _pattern))(rng)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(1, 3)}


def _object(rng: random.Random, names: tuple[str, ...], *makers: Callable[[random.Random], Schema]) -> Schema:
    chosen = rng.sample(names, rng.randint(2, min(4, len(names))))
    required = chosen[: rng.randint(1, len(chosen))]
    properties = {name: rng.choice(makers)(rng) for name in chosen}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _flat(rng: random.Random, names: tuple[str, ...]) -> Schema:
    return _object(rng, names, _enum, _integer, _boolean)


def _union(rng: random.Random, names: tuple[str, ...]) -> Schema:
    options = []
    for label in ("simple", "full"):
        option = _flat(rng, names)
        option["properties"] = {"kind": {"const": label}, **option["properties"]}
        option["required"] = ["kind", *option["required"]]
        options.append(option)
    return {"anyOf": options}


def _referring(rng: random.Random, names: tuple[str, ...]) -> Schema:
    return {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}},
        "required": ["first", "second"],
        "additionalProperties": False,
        "$defs": {"part": _flat(rng, names)},
    }


def _call(rng: random.Random, names: tuple[str, ...]) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"enum": ["create", "update", "remove"]}, "arguments": _flat(rng, names)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


KINDS: dict[str, Callable[[random.Random, tuple[str, ...]], Schema]] = {
    "flat": _flat,
    "texts": lambda rng, names: _object(rng, names, _text),
    "patterns": lambda rng, names: _object(rng, names, _pattern),
    "formats": lambda rng, names: _object(rng, names, _format),
    "arrays": lambda rng, names: _object(rng, names, _array),
    "nullable": lambda rng, names: _object(rng, names, _nullable),
    "nested": lambda rng, names: _object(rng, names, lambda rng: _flat(rng, names), _enum),
    "union": _union,
    "references": _referring,
    "calls": _call,
}
"""What schemas are about -> how one is made of the names of a topic's properties."""


def schema_prompts(count: int, *, seed: int = 0) -> list[SchemaPrompt]:
    """`count` prompts, of all kinds in turn."""
    made = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = list(KINDS)[number % len(KINDS)]
        topic, names = rng.choice(list(_TOPICS.items()))
        schema = KINDS[kind](rng, names)
        # the schema itself is left out: what is valid is so because of the grammar
        made.append(SchemaPrompt(kind=kind, prompt=f"Describe {topic} as JSON.", schema=schema))
    return made
