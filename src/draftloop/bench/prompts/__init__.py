"""Prompts for tests and benchmarks: mt_bench, humaneval and gsm8k, 80 each. See LICENCES.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from draftloop.errors import ConfigError, nearest

NAMES = ("mt_bench", "humaneval", "gsm8k")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation to benchmark or test with."""

    question_id: int
    category: str
    turns: tuple[str, ...]
    """What the user says, in order; the model's answers come in between."""
    reference: tuple[str, ...] = ()


def load_prompts(name: str, count: int | None = None) -> list[Prompt]:
    """All prompts of one set, or `count` of them, spread evenly over it and so over its categories.

    Raises ConfigError for an unknown name, and for more prompts than there are.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown prompt set {name!r}{nearest(name, NAMES)} Known: {', '.join(NAMES)}")
    lines = files(__name__).joinpath(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    if count is None:
        count = len(lines)
    if not 0 < count <= len(lines):
        raise ConfigError(f"{count} prompts of {name!r} are asked for; it has {len(lines)}")
    return [_parse(json.loads(lines[index * len(lines) // count])) for index in range(count)]


def _parse(row: dict) -> Prompt:
    return Prompt(
        question_id=row["question_id"],
        category=row["category"],
        turns=tuple(row["turns"]),
        reference=tuple(row.get("reference", ())),
    )
