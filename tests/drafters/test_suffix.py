"""Suffix decoding: trees that count right, drafts by their counts, and memory that is bounded."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.drafters.base import HostRow
from draftloop.drafters.suffix import ArcticTrees, Limits, OwnTrees
from draftloop.drafters.suffix_tree import GrowingSequence, Match, Node, Run, SuffixTree, best_draft
from draftloop.errors import ConfigError
from helpers import answers, engine, greedy, make_engine, oracle, prompts

DEPTH = 4


def runs(sequences: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    """How often each run of at most `depth` tokens stands in the sequences."""
    found: Counter[tuple[int, ...]] = Counter()
    for ids in sequences:
        for start in range(len(ids)):
            found.update(tuple(ids[start:end]) for end in range(start + 1, min(start + depth, len(ids)) + 1))
    return found


def counts(node: Node, depth: int, before: tuple[int, ...] = ()) -> Counter[tuple[int, ...]]:
    """The same, read from a tree."""
    found: Counter[tuple[int, ...]] = Counter()
    if len(before) == depth:
        return found
    for token, child in node.children.items():
        here = (*before, token)
        if isinstance(child, Node):
            found[here] = child.count
            assert child.followed == sum(c.count if isinstance(c, Node) else 1 for c in child.children.values())
            found += counts(child, depth, here)
        else:
            rest = child.tokens.ids[child.index : child.index + depth - len(here)]
            found.update((*here, *rest[:end]) for end in range(len(rest) + 1))
    return found


# few tokens, so that runs come again; an operation is (sequence, token), or takes the sequence out
OPERATIONS = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 2), st.just(None))), max_size=60)


@settings(max_examples=300)
@given(OPERATIONS, st.integers(2, 5))
def test_a_tree_counts_every_run_of_what_is_in_it(operations, depth):
    tree, live, texts = SuffixTree(depth), {}, {}
    for key, token in operations:
        if token is None:
            if key in live:
                tree.remove(live.pop(key))
                del texts[key]
            continue
        tree.append(live.setdefault(key, GrowingSequence()), token)
        texts.setdefault(key, []).append(token)
        assert counts(tree.root, depth) == runs(list(texts.values()), depth)
    for sequence in live.values():
        tree.remove(sequence)
    assert tree.root.children == {}
    assert tree.root.followed == 0


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_open_suffixes_and_advanced_matches_are_all_that_stood_before(ids):
    tree, sequence = SuffixTree(DEPTH), GrowingSequence()
    for token in ids:
        tree.append(sequence, token)
    expected = [n for n in range(min(DEPTH - 1, len(ids)), 0, -1) if runs([ids], DEPTH)[tuple(ids[-n:])] > 1]
    assert [length for _, length in sequence.open] == expected

    other, context, matches = SuffixTree(DEPTH), GrowingSequence(), []
    for token in [0, 1, 2, 0, 1, 1, 0]:
        other.append(context, token)
    for token in ids:
        matches = other.advance(matches, token)
    there = runs([context.ids], DEPTH)
    assert [length for _, length in matches] == [
        n for n in range(DEPTH - 1, 0, -1) if there[tuple(ids[-n:])] and n <= len(ids)
    ]


def tree_of(*texts: list[int], depth: int = 8) -> SuffixTree:
    tree = SuffixTree(depth)
    for text in texts:
        sequence = GrowingSequence()
        for token in text:
            tree.append(sequence, token)
    return tree


def matches_of(tree: SuffixTree, context: list[int]) -> list[Match]:
    matches: list[Match] = []
    for token in context:
        matches = tree.advance(matches, token)
    return matches


def test_a_draft_is_what_came_next_most_often():
    matches = matches_of(tree_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 6]), [9, 1, 2])
    draft = best_draft(matches, longest=4, factor=9, least_prob=0)
    assert draft.ids == [3, 5]
    assert draft.score == pytest.approx(3 / 4 + 3 / 4 * 2 / 3)


@pytest.mark.parametrize(
    ("limits", "ids"),
    [
        ({}, [3, 4, 5, 6, 7]),
        ({"longest": 2}, [3, 4]),
        ({"longest": 0}, []),
        ({"factor": 1.0}, [3, 4]),  # two tokens match
        ({"factor": 1.5}, [3, 4, 5]),
        ({"factor": 0.4}, []),
    ],
)
def test_drafts_are_as_long_as_their_match_allows(limits, ids):
    matches = matches_of(tree_of([1, 2, 3, 4, 5, 6, 7]), [1, 2])
    assert best_draft(matches, **{"longest": 9, "factor": 9.0, "least_prob": 0.1, **limits}).ids == ids


def test_a_draft_ends_where_it_is_unlikely():
    matches = matches_of(tree_of(*([1, 2, 3, i] for i in range(10, 14))), [1])
    for least, ids in ((0.3, [2, 3]), (0.25, [2, 3, 10])):
        assert best_draft(matches, longest=9, factor=9, least_prob=least).ids == ids


def test_the_better_score_wins_and_not_the_longer_match():
    # after (1, 2) four things came; after (2) alone, mostly one
    matches = matches_of(tree_of([1, 2, 3], [1, 2, 4], [1, 2, 5], *[[9, 2, 7, 8, 6]] * 9), [1, 2])
    assert best_draft(matches, longest=3, factor=3, least_prob=0).ids == [7, 8, 6]


# ---- requests -------------------------------------------------------------------------------


def limits(**changes) -> Limits:
    return Limits(**{"depth": 8, "cached_requests": 2, "factor": 2.0, "least_prob": 0.1, **changes})


def row(number: int, prompt: list[int], answer: list[int], max_drafts: int = 4) -> HostRow:
    return HostRow(
        number=number,
        request_id=str(number),
        token_ids=prompt + answer,
        num_prompt=len(prompt),
        max_drafts=max_drafts,
    )


def ask(trees, *rows: HostRow) -> list[list[int]]:
    trees.keep({r.number for r in rows})
    return [list(trees.draft(r)) for r in rows]


def test_a_request_learns_from_its_prompt_and_from_the_answers_of_others():
    trees = OwnTrees(limits())
    assert ask(trees, row(0, [1, 2, 3, 4, 1, 2], []))[0][:2] == [3, 4]
    assert ask(trees, row(0, [1, 2, 3, 4, 1, 2], [50, 51, 52])) == [[]]
    assert ask(trees, row(1, [7], [50, 51])) == [[52]], "from an answer that has ended"
    assert ask(trees, row(1, [7], [50, 51]), row(2, [3], [4])) == [[52], []], "prompts are their request's own"
    assert ask(trees, row(1, [7], [50, 51, 60, 61]), row(2, [3], [4, 60])) == [[], [61]], "from one that runs"


def test_without_cached_requests_a_request_learns_from_itself_alone():
    trees = OwnTrees(limits(cached_requests=0))
    ask(trees, row(0, [1], [50, 51, 52]))
    assert ask(trees, row(1, [7], [50, 51]), row(2, [8, 9, 8], [])) == [[], [9, 8]]
    assert trees.answers.root.children == {}


def test_memory_is_bounded_by_the_cached_requests_and_the_oldest_goes_first():
    trees, rng = OwnTrees(limits(cached_requests=3)), random.Random(0)

    def size(place: Node | Run) -> int:
        return 1 + (sum(map(size, place.children.values())) if isinstance(place, Node) else 0)

    sizes = []
    for number in range(40):
        ask(trees, row(number, [1], [number, *(rng.randrange(50, 60) for _ in range(30))]))
        sizes.append(size(trees.answers.root))
        assert len(trees.running) == 1
        assert len(trees.ended) <= 3
    assert max(sizes[20:]) < 1.2 * max(sizes[4:20])
    firsts = {token for token in trees.answers.root.children if token < 50}
    assert firsts == {36, 37, 38, 39}


def test_the_arctic_backend_is_asked_as_its_interface_says(monkeypatch):
    calls = []

    class Cache:
        def __init__(self, *given) -> None:
            calls.append(("new", *given))

        def __getattr__(self, name):
            def call(*given, **named):
                calls.append((name, *given, *named.values()))
                return SimpleNamespace(token_ids=[5, 6])

            return call

    package, module = ModuleType("arctic_inference"), ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = Cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arctic_inference", package)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    trees = ArcticTrees(limits(depth=3))
    assert ask(trees, row(0, [1, 2], [3, 4])) == [[5, 6]]
    assert ask(trees, row(0, [1, 2], [3, 4, 5], 0), row(1, [8], [9])) == [[], [5, 6]]
    ask(trees, row(1, [8], [9, 9]))
    assert calls == [
        ("new", 3, 2),
        ("start_request", 0, [1, 2]),
        ("add_active_response", 0, [3, 4]),
        ("speculate", 0, [2, 3, 4], 4, 2.0, 0.1),
        ("add_active_response", 0, [5]),
        ("start_request", 1, [8]),
        ("add_active_response", 1, [9]),
        ("speculate", 1, [8, 9], 4, 2.0, 0.1),
        ("stop_request", 0),
        ("add_active_response", 1, [9]),
        ("speculate", 1, [8, 9, 9], 4, 2.0, 0.1),
    ]


def test_the_arctic_backend_drafts_as_ours_where_counts_leave_no_doubt():
    pytest.importorskip("arctic_inference.suffix_decoding")
    for trees in (OwnTrees(limits()), ArcticTrees(limits())):
        ask(trees, row(0, [1], [50, 51, 52, 53, 54, 55]))
        assert ask(trees, row(1, [7], [50, 51]), row(2, [1, 2, 3, 1, 2], [])) == [[52, 53, 54, 55], [3, 1, 2]]


# ---- the engine -----------------------------------------------------------------------------


def suffix_engine(**spec):
    spec = {"method": "suffix", "num_speculative_tokens": 4, **spec}
    llm = make_engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL")
    llm.engine.table.poison = True
    return llm


def test_an_answer_that_was_given_before_is_drafted_whole():
    llm = suffix_engine()
    prompt = prompts(6)[5]
    assert answers(llm.generate(prompt, greedy(40))) == [oracle(prompt, 40)]
    before = llm.get_metrics()["spec_decode_num_accepted_tokens"]
    assert answers(llm.generate(prompt, greedy(40))) == [oracle(prompt, 40)]
    assert llm.get_metrics()["spec_decode_num_accepted_tokens"] - before > 20


def test_drafts_shorter_than_a_block_leave_the_rest_of_it_empty_and_unembedded():
    """B52: one row has a full draft, one a short one, one none; no id outside of the model is embedded."""
    llm = engine(
        speculative_config={"method": "scripted", "script": short_drafts, "num_speculative_tokens": 4},
        cudagraph_capture_sizes=(4,),
        poison=True,
    )
    core, state = llm.engine.core, llm.engine.core.worker.state
    asked = prompts(3)
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(16))
    lengths = set()
    while not core.idle:
        core.step()
        for sequence in core.scheduler.running:
            drafts = state.drafts_MK[sequence.row].tolist()
            num = sum(draft >= 0 for draft in drafts)
            assert drafts[num:] == [-1] * (4 - num)
            lengths.add(num)
    assert lengths == {0, 2, 4}
    metrics = llm.get_metrics()
    assert metrics["spec_decode_num_draft_tokens"] < 4 * metrics["spec_decode_num_drafts"]


def short_drafts(request_id: str, token_ids: list[int], k: int) -> list[int]:
    return [3] * (2 * int(request_id))


def test_steps_for_which_nobody_drafts_are_plain_decoding():
    llm = suffix_engine(suffix_decoding_max_spec_factor=0.0)
    asked = prompts(3)
    assert answers(llm.generate(asked, greedy(12))) == [oracle(p, 12) for p in asked]
    replays, metrics = llm.get_graph_report().replays, llm.get_metrics()
    assert replays["target.decode"] == 11
    assert replays.get("target.verify", 0) == replays.get("suffix.draft", 0) == 0
    assert metrics["spec_decode_num_steps_without_drafts"] == 33


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_tree_depth", 1, "suffix_decoding_max_tree_depth is 1; it must be an integer >= 2"),
        ("max_cached_requests", -1, "max_cached_requests is -1; it must be an integer >= 0"),
        ("max_spec_factor", -0.5, "max_spec_factor is -0.5; it must be a number >= 0"),
        ("min_token_prob", 1.5, r"min_token_prob is 1.5; it must be a number in \[0, 1\]"),
        ("backend", "own ", "suffix_decoding_backend is 'own '; it must be one of 'own', 'arctic'"),
    ],
)
def test_options_out_of_range_are_refused(option, value, message):
    with pytest.raises(ConfigError, match=message):
        suffix_engine(**{f"suffix_decoding_{option}": value})


def test_a_backend_that_is_not_there_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(
        ConfigError, match=r"'arctic', but arctic-inference cannot be imported .* 'draftloop\[suffix\]'"
    ):
        suffix_engine(suffix_decoding_backend="arctic")
