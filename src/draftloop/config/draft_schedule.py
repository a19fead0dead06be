"""Which numbers of drafts a step may verify, as the speculative configuration says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from draftloop.config.draft_tree import DraftTree
from draftloop.errors import ConfigError

USUAL_COUNTS = (0, 1, 2, 3, 5, 8, 12, 16, 24, 32)
"""What `adaptive` chooses from; neighbours far apart differ little in what they give."""


class Schedule(Protocol):
    """The keys of a speculative configuration that this file reads; see there."""

    @property
    def num_speculative_tokens(self) -> int | None: ...
    @property
    def num_speculative_tokens_per_batch_size(self) -> tuple[tuple[int, ...], ...] | None: ...
    @property
    def adaptive(self) -> bool | None: ...
    @property
    def adaptive_num_tokens(self) -> tuple[int, ...] | None: ...
    @property
    def tree(self) -> DraftTree | None: ...


def draft_counts(config: Schedule, most: int) -> tuple[int, ...]:
    """The numbers of drafts that a step may verify, falling from `most`; it alone where that is fixed."""
    counts: Sequence[int] = ()
    if config.num_speculative_tokens_per_batch_size:
        counts = [count for _, _, count in config.num_speculative_tokens_per_batch_size]
    elif config.adaptive:
        counts = USUAL_COUNTS if config.adaptive_num_tokens is None else config.adaptive_num_tokens
    return tuple(sorted({most, *(count for count in counts if count < most)}, reverse=True))


def check_schedule(config: Schedule) -> None:
    """Raises ConfigError with key, value and limit."""
    table, most, choices = (
        config.num_speculative_tokens_per_batch_size,
        config.num_speculative_tokens,
        config.adaptive_num_tokens,
    )
    key = "num_speculative_tokens_per_batch_size" if table is not None else "adaptive" if config.adaptive else None
    if choices is not None and not config.adaptive:
        raise _error("adaptive_num_tokens", choices, "left out where adaptive is not set")
    if key is None:
        return
    if table is not None and config.adaptive:
        raise _error(key, table, "left out where adaptive is set: both say how many tokens are drafted")
    if config.tree is not None and not config.tree.is_chain:
        raise _error(key, getattr(config, key), "left out with a speculative_token_tree, whose shape is captured")
    if most is None:
        raise _error(key, getattr(config, key), "given beside num_speculative_tokens, the most that a step drafts")
    if choices is not None and not (choices and all(0 <= count <= most for count in choices)):
        raise _error("adaptive_num_tokens", choices, f"a list of numbers from 0 to num_speculative_tokens, {most}")
    _check_table(table or (), most)


def _check_table(table: Sequence[Sequence[int]], most: int) -> None:
    last = 0
    for entry in table:
        if len(entry) != 3 or not 1 <= entry[0] <= entry[1]:
            raise _table_error(entry, "[lowest, highest, drafts]: of 1 <= lowest <= highest rows")
        if entry[0] <= last:
            raise _table_error(entry, f"above the entry before it, which ends at {last} rows")
        if not 0 <= entry[2] <= most:
            raise _table_error(entry, f"of 0 to num_speculative_tokens, {most}, drafts")
        last = entry[1]


def _table_error(entry: Sequence[int], limit: str) -> ConfigError:
    return _error("num_speculative_tokens_per_batch_size", list(entry), limit, "an entry of ")


def _error(name: str, value: Any, limit: str, part: str = "") -> ConfigError:
    return ConfigError(f"{part}speculative_config key {name} is {value!r}; it must be {limit}")
