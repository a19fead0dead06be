"""What benchmarks ask, and what drafts: both from what a command line says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftloop.bench.check_drafter import method_of
from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError, nearest
from draftloop.models.presets import PRESETS
from draftloop.models.resolve import ALIASES, LoadFormat, shipped

NONE = "none"
"""The drafter's name for plain decoding."""


def render(llm: LLM, texts: Sequence[str], *, max_tokens: int) -> list[list[int]]:
    """Token ids of user messages through the chat template, or of plain texts where the model has none.

    Raises ConfigError for a model without tokenizer, and if a prompt with `max_tokens` of answer is too long.
    """
    tokenizer, name = llm.get_tokenizer(), llm.config.model
    if tokenizer is None:
        raise ConfigError(f"the benchmark asks in words, but {name!r} has no tokenizer; name one with --tokenizer")
    if getattr(tokenizer, "chat_template", None):
        found = [llm._render([{"role": "user", "content": text}]) for text in texts]
    else:
        found = [tokenizer.encode(text) for text in texts]
    longest, limit = max(map(len, found), default=0), llm.engine.resolved.max_model_len
    if longest + max_tokens > limit:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, which with {max_tokens} of answer exceed max_model_len {limit}; "
            "lower --max-tokens, or ask fewer prompts with --num-prompts"
        )
    return found


def drafter_settings(text: str, *, method: str | None = None, load_format: LoadFormat = "auto") -> dict[str, Any]:
    """Keys of a speculative configuration from `NAME` or `NAME:K`.

    The name is a method that needs no checkpoint (`ngram:4`), or a checkpoint (`smollm2-135m-eagle3:5`), whose method
    is read off its files unless it is given. Raises ConfigError for names that are neither.
    """
    load_drafters()
    head, colon, count = text.rpartition(":")
    name, settings = (head, {"num_speculative_tokens": int(count)}) if colon and count.isdecimal() else (text, {})
    drafter = DRAFTERS.get(name)
    if drafter is None:
        _check_checkpoint(name)
        return {"method": method or method_of(name, load_format=load_format), "model": name, **settings}
    if "model" in drafter.options:
        raise ConfigError(f"drafter {text!r} names a method that needs a checkpoint; name its folder or hub id instead")
    return {"method": name, **settings}


def _check_checkpoint(name: str) -> None:
    """A name that is no path, hub id, or model known by its name, may be a misspelt method."""
    known = [*shipped(), *ALIASES, *PRESETS]
    if "/" not in name and name not in known and not Path(name).exists():
        methods = [method for method, drafter in DRAFTERS.items() if "model" not in drafter.options]
        raise ConfigError(
            f"unknown drafter {name!r}{nearest(name, [*known, *methods])} It is a folder, a hub id, a drafter that is "
            f"shipped ({', '.join(shipped())}), or a method that needs no checkpoint, such as ngram"
        )
