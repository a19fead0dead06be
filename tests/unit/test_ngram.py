"""Prompt lookup on the device against the obvious loop on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.drafters.ngram import lookup
from draftloop.kvcache.rows import NO_DRAFT
from helpers import lookup_reference

LENGTH = 24


def run(rows: list[list[int]], k: int, shortest: int, longest: int, *, garbage: int = 1) -> list[list[int]]:
    memory = torch.full((len(rows), LENGTH), garbage, dtype=torch.int32)  # what earlier requests left behind
    for index, row in enumerate(rows):
        memory[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return lookup(memory, lengths, k, shortest, longest).tolist()


@settings(max_examples=120)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH), min_size=1, max_size=4),
    k=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    garbage=st.integers(0, 2),
)
def test_lookup_finds_what_a_loop_finds(rows, k, sizes, garbage):
    shortest, longest = sizes
    assert run(rows, k, shortest, longest, garbage=garbage) == [
        lookup_reference(row, k, shortest, longest) for row in rows
    ]


def test_the_continuation_of_the_last_occurrence_is_copied():
    assert run([[5, 6, 7, 8, 9, 5, 6]], 3, 2, 2) == [[7, 8, 9]]


def test_a_longer_match_wins_over_a_more_recent_one():
    assert run([[1, 2, 3, 9, 9, 0, 3, 7, 7, 1, 2, 3]], 2, 1, 3) == [[9, 9]]


def test_of_equal_matches_the_most_recent_wins():
    assert run([[1, 2, 8, 8, 1, 2, 9, 9, 1, 2]], 2, 2, 2) == [[9, 9]]


def test_what_is_not_known_yet_is_not_drafted():
    assert run([[4, 4]], 3, 1, 1) == [[4, NO_DRAFT, NO_DRAFT]]


@pytest.mark.parametrize("row", [[1], [1, 2], [1, 2, 3, 4]])
def test_nothing_is_drafted_without_a_match(row):
    assert run([row], 3, 1, 4) == [[NO_DRAFT] * 3]


def test_a_match_shorter_than_asked_for_is_none():
    assert run([[1, 2, 3, 9, 3]], 2, 2, 3) == [[NO_DRAFT] * 2]
    assert run([[1, 2, 3, 9, 3]], 2, 1, 3) == [[9, 3]]
