"""What the target is asked: prompts of a file, or prompts that it invents itself.

The prompts of the benchmarks are in neither.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.errors import ConfigError

logger = logging.getLogger(__name__)

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
PLACEHOLDER = "\u2603placeholder\u2603"
OPENINGS = Path(__file__).with_name("openings.txt")
"""How people begin what they ask. Left alone, a model invents the same few prompts again and again, and a drafter
learns their answers by heart."""
MOST_RANDOM = 4
"""Random tokens that a prompt for a target without chat template begins with, at most."""


@dataclass(frozen=True, kw_only=True)
class Invention:
    """How a target invents a prompt: it goes on after `before`, and one of `openings`, until one of `stops`; then
    `after` is added."""

    before: list[int]
    openings: list[list[int]]
    stops: tuple[int, ...]
    after: list[int]


def invention(tokenizer: Any) -> Invention | None:
    """By continuing the header of a user's turn in the chat template; None where there is no template."""
    if not has_template(tokenizer):
        return None
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PLACEHOLDER}], add_generation_prompt=True, tokenize=False
    )
    if text.count(PLACEHOLDER) != 1:
        return None  # a template that leaves out, or repeats, what the user says
    before, after = text.split(PLACEHOLDER)
    suffix = tokenizer.encode(after, add_special_tokens=False)
    stops = {suffix[0], *tokenizer.all_special_ids}
    return Invention(
        before=tokenizer.encode(before, add_special_tokens=False),
        openings=[tokenizer.encode(line, add_special_tokens=False) for line in OPENINGS.read_text().splitlines()],
        stops=tuple(sorted(stops)),
        after=suffix,
    )


def random_prompt(rng: random.Random, *, bos: int | None, vocab_size: int, special: frozenset[int]) -> list[int]:
    """For targets without a chat template: the start token, where there is one, and 1 to 4 random tokens."""
    words: list[int] = []
    wanted = rng.randint(1, MOST_RANDOM)
    while len(words) < wanted:
        if (token := rng.randrange(vocab_size)) not in special:
            words.append(token)
    return ([] if bos is None else [bos]) + words


def has_template(tokenizer: Any) -> bool:
    return tokenizer is not None and bool(getattr(tokenizer, "chat_template", None))


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts in a JSON-lines file.

    A row is chat, `{"messages": [{"role", "content"}, ..]}` or `{"conversations": [{"from", "value"}, ..]}`,
    of which everything up to the last user's turn is asked; `{"prompt": ".."}`, which is asked; or
    `{"text": ".."}`, which is continued as it stands. Without a chat template texts are joined by blank
    lines. Raises ConfigError naming the line of a row that is neither.
    """
    if tokenizer is None:
        raise ConfigError(
            f"the target has no tokenizer, so that prompts from {str(path)!r} cannot be read; leave --data out"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {str(path)!r}: {error}") from error
    if not has_template(tokenizer):
        logger.info("the target has no chat template: the turns of a prompt are joined by blank lines")
    found = [_prompt(line, tokenizer, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{str(path)!r} holds no prompts")
    return found


def _prompt(line: str, tokenizer: Any, where: str) -> list[int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); each line must hold one object") from None
    keys = ("messages", "conversations", "prompt", "text")
    if not isinstance(row, Mapping) or not (named := [key for key in keys if key in row]):
        raise ConfigError(f"{where} is neither chat nor text; it must be an object with one of {', '.join(keys)}")
    key = named[0]
    if key == "text":
        return tokenizer.encode(_text(row[key], key, where))
    if key == "prompt":
        messages = [{"role": "user", "content": _text(row[key], key, where)}]
    else:
        messages = _messages(row[key], key, where)
    if not has_template(tokenizer):
        return tokenizer.encode("\n\n".join(message["content"] for message in messages))
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # jinja raises what the template says
        raise ConfigError(f"{where} does not fit the target's chat template: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


def _messages(turns: Any, key: str, where: str) -> list[dict[str, str]]:
    """Turns up to the last of the user's, in the names that templates know."""
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ConfigError(f"{where}: {key} must be a list of turns")
    messages = []
    for turn in turns:
        turn = turn if isinstance(turn, Mapping) else {}
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role not in ROLES:
            raise ConfigError(f"{where}: a turn has role {role!r}; it must be one of {', '.join(sorted(ROLES))}")
        messages.append({"role": ROLES[role], "content": _text(content, "content", where)})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ConfigError(f"{where}: {key} has no turn of a user, so that there is nothing to answer")
    return messages


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a text that is not empty")
    return value
