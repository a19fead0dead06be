"""Suffix decoding: what followed most often where the last tokens stood before, here or in earlier answers.

Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", arXiv 2411.04975.

Two suffix trees are asked, one of the request's own tokens and one of all answers of late, and the draft with the
better score is taken. Drafts are as long as their match allows, so most rows have fewer than K.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import HostRow, Target
from draftloop.drafters.host import HostDrafter
from draftloop.drafters.suffix_tree import GrowingSequence, Match, SuffixTree, best_draft
from draftloop.errors import ConfigError

DEFAULT_DEPTH = 24
DEFAULT_CACHED_REQUESTS = 10_000
DEFAULT_FACTOR = 1.0
DEFAULT_LEAST_PROB = 0.1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds trees and drafts."""

    depth: int
    """Tokens of the longest run that is kept."""
    cached_requests: int
    """Answers of ended requests that are kept; 0: none but the request's own."""
    factor: float
    """Tokens that are drafted for each token that matches."""
    least_prob: float
    """A draft ends where it is less likely than this, as counted."""

    @classmethod
    def asked_for(cls, spec: SpeculativeConfig) -> Limits:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        return cls(
            depth=given(spec.suffix_decoding_max_tree_depth, DEFAULT_DEPTH),
            cached_requests=given(spec.suffix_decoding_max_cached_requests, DEFAULT_CACHED_REQUESTS),
            factor=given(spec.suffix_decoding_max_spec_factor, DEFAULT_FACTOR),
            least_prob=given(spec.suffix_decoding_min_token_prob, DEFAULT_LEAST_PROB),
        )


class SuffixDrafter(HostDrafter):
    """Copies what came next before. It needs no model."""

    name = "suffix"
    options = frozenset(
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
            "suffix_decoding_backend",
        }
    )

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self.limits = Limits.asked_for(spec)
        self.trees: Trees = (
            ArcticTrees(self.limits) if spec.suffix_decoding_backend == "arctic" else OwnTrees(self.limits)
        )

    @classmethod
    def remembers(cls, spec: SpeculativeConfig) -> bool:
        return Limits.asked_for(spec).cached_requests > 0

    def draft_on_host(self, rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        self.trees.keep({row.number for row in rows})
        return super().draft_on_host(rows)

    def draft(self, row: HostRow) -> Sequence[int]:
        return self.trees.draft(row)


class Trees(Protocol):
    """Both trees, and which request has which tokens in them."""

    def keep(self, numbers: Iterable[int]) -> None:
        """All requests but these have ended."""
        ...

    def draft(self, row: HostRow) -> Sequence[int]:
        """Learn a row's new tokens, and draft at most `row.max_drafts`."""
        ...


@dataclass(kw_only=True)
class _Request:
    tree: SuffixTree
    own: GrowingSequence = field(default_factory=GrowingSequence)
    """Prompt and answer, in the request's own tree."""
    answer: GrowingSequence = field(default_factory=GrowingSequence)
    """In the tree of all answers."""
    matches: list[Match] = field(default_factory=list)
    """Where its last tokens stand in that."""


class OwnTrees:
    """Python, about 0.4 KB for each token that is kept."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.answers = SuffixTree(limits.depth)
        self.running: dict[int, _Request] = {}
        self.ended: deque[GrowingSequence] = deque()

    def keep(self, numbers: Iterable[int]) -> None:
        for number in self.running.keys() - set(numbers):
            self.ended.append(self.running.pop(number).answer)
        while len(self.ended) > self.limits.cached_requests:
            self.answers.remove(self.ended.popleft())

    def draft(self, row: HostRow) -> Sequence[int]:
        request = self.running.get(row.number)
        if request is None:
            request = self.running[row.number] = _Request(tree=SuffixTree(self.limits.depth))
        for index in range(len(request.own.ids), len(row.token_ids)):
            self._learn(request, row.token_ids[index], of_answer=index >= row.num_prompt)
        return best_draft(
            [*request.own.open, *request.matches],
            longest=row.max_drafts,
            factor=self.limits.factor,
            least_prob=self.limits.least_prob,
        ).ids

    def _learn(self, request: _Request, token: int, *, of_answer: bool) -> None:
        request.tree.append(request.own, token)
        if self.limits.cached_requests == 0:
            return
        # before the token is in there itself, so that nothing matches where it stands
        request.matches = self.answers.advance(request.matches, token)
        if of_answer:
            self.answers.append(request.answer, token)


class ArcticTrees:
    """Those of the package `arctic-inference`, which are written in C++."""

    def __init__(self, limits: Limits) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache  # pyrefly: ignore
        except ImportError as error:
            raise ConfigError(
                f"suffix_decoding_backend is 'arctic', but arctic-inference cannot be imported ({error}); "
                "pip install 'draftloop[suffix]', or leave it out"
            ) from error
        self.limits = limits
        self.cache = SuffixDecodingCache(limits.depth, limits.cached_requests)
        self.known: dict[int, int] = {}
        """Running request -> how many of its tokens the trees have."""

    def keep(self, numbers: Iterable[int]) -> None:
        for number in self.known.keys() - set(numbers):
            self.cache.stop_request(number)
            del self.known[number]

    def draft(self, row: HostRow) -> Sequence[int]:
        known = self.known.get(row.number)
        if known is None:
            self.cache.start_request(row.number, row.token_ids[: row.num_prompt])
            known = row.num_prompt
        self.cache.add_active_response(row.number, row.token_ids[known:])
        self.known[row.number] = len(row.token_ids)
        if not row.max_drafts:
            return []
        found = self.cache.speculate(
            row.number,
            row.token_ids[-self.limits.depth :],
            max_spec_tokens=row.max_drafts,
            max_spec_factor=self.limits.factor,
            min_token_prob=self.limits.least_prob,
        )
        return list(found.token_ids)
