"""Which draft stands behind which: a tree, settled before anything is captured; a chain is its trivial case.

The block that the target verifies is the bonus token and the drafts. Its places are numbered in breadth-first order:
place 0 is the bonus token, the root, and draft i is at place 1 + i. So whatever a place stands behind has a lower
number, the children of a place are neighbours, and so are all places of one height.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftloop.errors import ConfigError

MAX_TREE_DRAFTS = 63
"""With the bonus token, as many places as a 64-bit mask has bits."""
MAX_TREE_DEPTH = 32
"""As long as a chain may be; each height is a pass of the drafter."""

Choice = tuple[int, ...]
"""A draft by the ranks on its way from the root: (0, 2) is the third likeliest child of the likeliest first draft."""

_KEY = "speculative_config key speculative_token_tree"


@dataclass(frozen=True, kw_only=True)
class TreeLevel:
    """Places of one height that have children, and those children."""

    places: tuple[int, ...]
    num_children: tuple[int, ...]
    """Of each place."""
    first_draft: int
    """The first child; all of them are `sum(num_children)` drafts in a row."""
    first_inner: int
    """How many places below the root that have children come before these."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafts, by the place that each of them stands right behind."""

    parents: tuple[int, ...]
    """Of draft i, at place 1 + i: the place of what it follows. It never falls."""

    @classmethod
    def chain(cls, num_drafts: int) -> DraftTree:
        """Each draft behind the one before."""
        return cls(tuple(range(num_drafts)))

    @classmethod
    def of_choices(cls, choices: Iterable[Choice]) -> DraftTree:
        """The tree of these drafts, in any order. Raises ConfigError for the first thing that is wrong with them."""
        ordered = sorted(choices, key=lambda choice: (len(choice), choice))
        _check(ordered)
        place = {(): 0} | {choice: at for at, choice in enumerate(ordered, 1)}
        return cls(tuple(place[choice[:-1]] for choice in ordered))

    @property
    def num_drafts(self) -> int:
        return len(self.parents)

    @property
    def num_places(self) -> int:
        return 1 + self.num_drafts

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each place: the places from the root to it, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for place, parent in enumerate(self.parents, 1):
            paths.append((*paths[parent], place))
        return tuple(paths)

    @property
    def heights(self) -> tuple[int, ...]:
        """Of each place: drafts from the root to it."""
        return tuple(len(path) - 1 for path in self.paths)

    @property
    def depth(self) -> int:
        """Most drafts that can be accepted."""
        return max(self.heights)

    @property
    def is_chain(self) -> bool:
        return self.depth == self.num_drafts

    @cached_property
    def num_children(self) -> tuple[int, ...]:
        """Of each place."""
        return tuple(self.parents.count(place) for place in range(self.num_places))

    @property
    def leaf_paths(self) -> tuple[tuple[int, ...], ...]:
        """`paths` of the places that nothing follows: each is a chain, and together they are the tree."""
        return tuple(path for path, count in zip(self.paths, self.num_children, strict=True) if not count)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """One for each height from which something is drafted."""
        levels, first_draft, first_inner = [], 0, 0
        for height in range(self.depth):
            places = tuple(p for p, h in enumerate(self.heights) if h == height and self.num_children[p])
            counts = tuple(self.num_children[place] for place in places)
            levels.append(
                TreeLevel(places=places, num_children=counts, first_draft=first_draft, first_inner=first_inner)
            )
            first_draft += sum(counts)
            first_inner += len(places) if height else 0
        return tuple(levels)

    def branch(self, drafts: Sequence[int], accepted: Sequence[int]) -> list[int]:
        """Of the drafts of all places: those that were accepted, and the likeliest ones behind the last of them."""
        place, found = 0, []
        while self.num_children[place]:
            first = self.parents.index(place) + 1
            siblings = range(first, first + self.num_children[place])
            wanted = accepted[len(found)] if len(found) < len(accepted) else drafts[first - 1]
            place = next((child for child in siblings if drafts[child - 1] == wanted), first)
            found.append(drafts[place - 1])
        return found

    def describe(self) -> str:
        """One line for the start-up log."""
        per_height = [self.heights.count(height) for height in range(1, self.depth + 1)]
        return f"tree of {self.num_drafts} drafts ({', '.join(map(str, per_height))} by height)"


def parse_choices(value: Any) -> tuple[Choice, ...]:
    """Drafts from vLLM's text, "[(0,), (0, 0), (1,)]", or from lists as JSON has them.

    Raises ConfigError where it is neither; what the drafts say together is checked by `DraftTree.of_choices`.
    """
    found = value
    if isinstance(value, str):
        try:
            found = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ConfigError(f"{_KEY} is {value!r}, which cannot be read; {_FORM}") from error
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(isinstance(choice, list | tuple) and all(map(_is_rank, choice)) for choice in found):
        raise ConfigError(f"{_KEY} is {value!r}; {_FORM}")
    return tuple(map(tuple, found))


_FORM = "give a list of drafts, each a list of ranks from 0 on, such as [(0,), (0, 0), (1,)] or [[0], [0, 0], [1]]"


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(ordered: Sequence[Choice]) -> None:
    """Of drafts in breadth-first order."""
    if not ordered:
        raise ConfigError(f"{_KEY} has no drafts; name at least (0,), or leave it out for a chain")
    if not ordered[0]:
        raise ConfigError(f"{_KEY} names (), which is the bonus token and no draft; leave it out")
    known: set[Choice] = {()}
    for choice in ordered:
        if choice in known:
            raise ConfigError(f"{_KEY} names {choice} twice; leave one out")
        if choice[:-1] not in known:
            raise ConfigError(f"{_KEY} has {choice} without what it stands behind, {choice[:-1]}; add that")
        if choice[-1] and (before := (*choice[:-1], choice[-1] - 1)) not in known:
            raise ConfigError(
                f"{_KEY} has {choice} without its likelier sibling {before}; ranks of siblings are 0, 1, 2 and so on"
            )
        known.add(choice)
    if len(ordered) > MAX_TREE_DRAFTS:
        raise ConfigError(f"{_KEY} has {len(ordered)} drafts; a tree has at most {MAX_TREE_DRAFTS}")
    if len(ordered[-1]) > MAX_TREE_DEPTH:
        raise ConfigError(f"{_KEY} is {len(ordered[-1])} drafts deep; a tree is at most {MAX_TREE_DEPTH} deep")
