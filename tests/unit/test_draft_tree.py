"""Trees of drafts: what a choice of them means, and what is wrong with one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.config.draft_tree import MAX_TREE_DRAFTS, DraftTree, parse_choices
from draftloop.config.speculative import SpeculativeConfig
from draftloop.errors import ConfigError
from trees import random_choices

TEXT = "[(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0)]"


def config(tree, **others) -> SpeculativeConfig:
    return SpeculativeConfig(method="eagle3", speculative_token_tree=tree, **others)


def test_choices_come_as_vllm_s_text_or_as_lists_in_any_order():
    tree = config(TEXT).tree
    assert tree is not None
    assert tree == config("[[0], [0, 0], [1], [0, 0, 0], [0, 1], [1, 0]]").tree
    assert tree == config([[1, 0], [0], [0, 1], [1], [0, 0, 0], [0, 0]]).tree
    assert tree.parents == (0, 0, 1, 1, 2, 3)
    assert tree.heights == (0, 1, 1, 2, 2, 2, 3)
    assert tree.leaf_paths == ((0, 1, 4), (0, 2, 5), (0, 1, 3, 6))
    assert [(level.places, level.num_children, level.first_draft, level.first_inner) for level in tree.levels] == [
        ((0,), (2,), 0, 0),
        ((1, 2), (2, 1), 2, 0),
        ((3,), (1,), 5, 2),
    ]


def test_the_number_of_drafts_follows_from_the_tree():
    assert config(TEXT).num_speculative_tokens == 6
    assert config(TEXT, num_speculative_tokens=6).enabled
    for number in (0, 5, 7):
        with pytest.raises(ConfigError, match=f"num_speculative_tokens is {number}; it must be left out, or 6"):
            config(TEXT, num_speculative_tokens=number)


def test_a_tree_without_branches_is_a_chain():
    tree = config("[(0,), (0, 0), (0, 0, 0)]").tree
    assert tree == DraftTree.chain(3)
    assert tree.is_chain
    assert not config(TEXT).tree.is_chain
    assert DraftTree.chain(0).is_chain


@given(st.integers(0, 10**6))
def test_each_place_stands_behind_lower_ones_and_levels_name_every_draft_once(seed):
    choices = random_choices(seed)
    tree = DraftTree.of_choices(choices)
    assert tree.num_drafts == len(choices)
    assert tree.depth == max(map(len, choices))
    drafts, inner = [], []
    for height, level in enumerate(tree.levels):
        assert level.first_draft == len(drafts)
        if height:
            assert level.first_inner == len(inner)
            inner += level.places
        for place, count in zip(level.places, level.num_children, strict=True):
            children = [child for child in range(1, tree.num_places) if tree.parents[child - 1] == place]
            assert len(children) == count
            drafts += [child - 1 for child in children]
    assert drafts == list(range(tree.num_drafts))
    for place, path in enumerate(tree.paths):
        assert list(path) == sorted(path)
        assert (path[0], path[-1]) == (0, place)
        assert all(tree.parents[b - 1] == a for a, b in pairwise(path))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("[(0,), (", "cannot be read"),
        ("[" * 5000, "cannot be read"),
        ("3", "give a list of drafts"),
        ([[0], 1], "give a list of drafts"),
        ([[0], [0, "a"]], "give a list of drafts"),
        ([[0], [-1]], "give a list of drafts"),
        ([[True]], "give a list of drafts"),
        ("[]", "has no drafts"),
        ("[()]", "names (), which is the bonus token"),
        ("[(0,), (1,), (0,)]", "names (0,) twice"),
        ("[(0,), (0, 1), (0, 0, 0)]", "has (0, 1) without its likelier sibling (0, 0)"),
        ("[(1,)]", "has (1,) without its likelier sibling (0,)"),
        ("[(0,), (1, 0)]", "has (1, 0) without what it stands behind, (1,)"),
        ([[rank] for rank in range(MAX_TREE_DRAFTS + 1)], "has 64 drafts; a tree has at most 63"),
        ([[0] * length for length in range(1, 34)], "is 33 drafts deep; a tree is at most 32 deep"),
    ],
)
def test_each_fault_has_its_own_error(tree, message):
    with pytest.raises(ConfigError) as error:
        config(tree)
    assert message in str(error.value)
    assert "speculative_token_tree" in str(error.value)


def test_the_largest_tree_is_taken():
    assert config([[rank] for rank in range(MAX_TREE_DRAFTS)]).num_speculative_tokens == MAX_TREE_DRAFTS


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method is 'probabilistic'"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method is 'block'"),
        ({"synthetic_acceptance_length": 5.0}, r"in \[1, depth of the tree \+ 1\], here \[1, 4\]"),
        ({"synthetic_acceptance_rates": (0.5, 0.4)}, "one number per height of the tree, 3"),
    ],
)
def test_what_cannot_be_had_with_a_tree_is_refused_and_can_be_with_a_chain(others, message):
    with pytest.raises(ConfigError, match=message):
        config(TEXT, **others)
    if "synthetic" not in str(others):
        config("[(0,), (0, 0)]", **others)


def test_several_drafters_make_chains():
    with pytest.raises(ConfigError, match="several drafters make chains"):
        SpeculativeConfig(
            method="cascade",
            drafters=({"method": "ngram"}, {"method": "eagle3", "model": "m", "speculative_token_tree": TEXT}),
            num_speculative_tokens=6,
        )


def test_parsing_leaves_the_order_alone():
    assert parse_choices("[(1,), (0,)]") == ((1,), (0,))


def test_a_branch_goes_on_with_the_likeliest_drafts_where_the_accepted_ones_end():
    tree = config(TEXT).tree
    assert tree is not None
    drafts = [10, 20, 30, 40, 50, 60]
    assert tree.branch(drafts, []) == [10, 30, 60]
    assert tree.branch(drafts, [20]) == [20, 50]
    assert tree.branch(drafts, [10, 40]) == [10, 40]
    assert DraftTree.chain(3).branch([1, 2, -1], [1]) == [1, 2, -1]
