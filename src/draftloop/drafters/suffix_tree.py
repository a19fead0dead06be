"""A suffix tree of token sequences that grow: what followed, how often, the last times these tokens stood somewhere.

A run of tokens that was seen once is a leaf, no more than a pointer into its sequence, so it grows with that by
itself; only runs that came again have nodes, with counts. Sequences can be taken out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Somewhere in a sequence: the token at `index` comes next."""

    tokens: GrowingSequence
    index: int

    @property
    def next_token(self) -> int | None:
        return self.tokens.ids[self.index] if self.index < len(self.tokens.ids) else None

    def step(self) -> Run:
        return Run(self.tokens, self.index + 1)


class Node:
    """A run of tokens that was seen more than once."""

    __slots__ = ("_likeliest", "children", "count", "followed")

    def __init__(self, count: int) -> None:
        self.count = count
        """Times that it was seen."""
        self.followed = 0
        """Times that something came after it."""
        self.children: dict[int, Place] = {}
        self._likeliest: int | None = None

    @property
    def likeliest(self) -> int | None:
        """The token that came after it most often."""
        if self._likeliest is None and self.children:
            self._likeliest = max(self.children, key=lambda token: _count(self.children[token]))
        return self._likeliest

    def add(self, token: int, child: Place) -> None:
        """Once more, `token` came after it."""
        self.followed += 1
        self.children[token] = child
        known = self._likeliest
        if known is not None and known != token and _count(child) > _count(self.children[known]):
            self._likeliest = token

    def drop(self, token: int) -> Place:
        """`token` came after it once less; returns what stood there."""
        self.followed -= 1
        child = self.children[token]
        if isinstance(child, Node):
            child.count -= 1
        if not isinstance(child, Node) or child.count == 0:
            del self.children[token]
        if token == self._likeliest:
            self._likeliest = None  # looked for when it is asked for
        return child


Place = Node | Run

Match = tuple[Place, int]
"""Where the last tokens of a context stood before, and how many they are. Plain, since there are very many."""


class GrowingSequence:
    """Tokens in a tree. `open` are its suffixes that stand at a node: those seen before, longest first."""

    __slots__ = ("ids", "open")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.open: list[tuple[Node, int]] = []


def _count(place: Place) -> int:
    return place.count if isinstance(place, Node) else 1


class SuffixTree:
    """All runs of at most `depth` tokens of the sequences in it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node(0)

    def append(self, sequence: GrowingSequence, token: int) -> None:
        """Let a sequence, a new one included, grow by a token."""
        ids, depth, still_open = sequence.ids, self.depth, []
        ids.append(token)
        for node, length in (*sequence.open, (self.root, 0)):
            child = node.children.get(token)
            if child is None:
                node.add(token, Run(sequence, len(ids)))
                continue  # from here on the leaf grows with its sequence
            if isinstance(child, Node):
                child.count += 1
            else:
                child = self._split(child, length + 1)
            node.add(token, child)
            if length + 1 < depth:
                still_open.append((child, length + 1))
        sequence.open = still_open

    def _split(self, run: Run, length: int) -> Node:
        """What was seen once is seen again: a node in the place of a leaf."""
        node = Node(2)
        if length == self.depth:
            return node
        if run.next_token is None:  # the other sequence stands right here
            run.tokens.open.append((node, length))
            run.tokens.open.sort(key=lambda match: -match[1])
        else:
            node.add(run.next_token, run.step())
        return node

    def remove(self, sequence: GrowingSequence) -> None:
        """Take a sequence out, as if it had never been there."""
        for start in range(len(sequence.ids)):
            node = self.root
            for token in sequence.ids[start : start + self.depth]:
                child = node.drop(token)
                if not isinstance(child, Node) or child.count == 0:
                    break
                node = child
        sequence.ids, sequence.open = [], []

    def advance(self, matches: Sequence[Match], token: int) -> list[Match]:
        """The matches of a context that has grown by a token, longest first."""
        found: list[Match] = []
        for place, length in (*matches, (self.root, 0)):
            if length + 1 == self.depth:
                continue
            if isinstance(place, Run):
                child = place.step() if place.next_token == token else None
            else:
                child = place.children.get(token)
            if child is not None:
                found.append((child, length + 1))
        return found


class Draft(NamedTuple):
    ids: list[int]
    score: float
    """Tokens of it that are expected to be accepted."""


def best_draft(matches: Sequence[Match], *, longest: int, factor: float, least_prob: float) -> Draft:
    """The draft with the best score: after one of the matches, always what came next most often.

    A draft has at most `longest` tokens, and at most `factor` times those of its match; it ends where it is less
    likely than `least_prob`.
    """
    best = Draft([], 0.0)
    for place, length in matches:
        limit = min(longest, int(length * factor))
        if limit <= best.score:
            continue
        draft = _follow(place, limit, least_prob)
        if draft.score > best.score:
            best = draft
    return best


def _follow(place: Place, limit: int, least_prob: float) -> Draft:
    ids: list[int] = []
    score, prob = 0.0, 1.0
    while len(ids) < limit:
        if isinstance(place, Run):
            token, share, after = place.next_token, 1.0, place.step()
        elif (token := place.likeliest) is not None:
            after = place.children[token]
            share = _count(after) / place.followed
        else:
            break
        prob *= share
        if token is None or prob < least_prob:
            break
        ids.append(token)
        score, place = score + prob, after
    return Draft(ids, score)
