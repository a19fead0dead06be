"""One function makes a graph's key for capture and for dispatch: what is captured is found, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_phases import block_phase, ragged_phase, simple_phase

from draftloop.graphs.phase import GraphMode, Key
from draftloop.graphs.table import GraphTable
from helpers import MODES, make_table

LADDERS = st.lists(st.integers(1, 24), min_size=1, max_size=6, unique=True).map(sorted)


def block_tables(ladder: list[int], lengths: list[int], setting: str, **options) -> GraphTable:
    phases = [block_phase(f"verify.{q}", q, **options) for q in lengths]
    return make_table([*phases, ragged_phase()], rows=ladder, tokens=ladder, setting=setting, capture=False)


@settings(max_examples=60)
@given(
    ladder=LADDERS,
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True),
    setting=st.sampled_from(MODES),
    limit=st.none() | st.integers(1, 24),
)
def test_every_dispatch_is_captured_and_every_capture_is_reachable(ladder, lengths, setting, limit):
    table = block_tables(ladder, lengths, setting, max_rows=limit)
    captured = set(table.keys())
    found: set[Key] = set()
    for name, phase in table.phases.items():
        for size in range(1, max(ladder) + 4):
            key = table.key_for(name, 1 if phase.ragged else size, size)
            if key is not None:
                assert key.phase == name
                assert (key.tokens if phase.ragged else key.rows) >= size, "a graph smaller than the batch"
                found.add(key)
    assert found == captured


@settings(max_examples=40)
@given(ladder=LADDERS, rows=st.integers(1, 30))
def test_the_smallest_graph_that_holds_the_batch_serves_it(ladder, rows):
    key = block_tables(ladder, [3], "FULL").key_for("verify.3", rows)
    fits = [size for size in ladder if size >= rows]
    assert (key and key.rows) == (min(fits) if fits else None)


@pytest.mark.parametrize("rows", range(1, 25))
def test_a_batch_in_a_gap_of_the_ladder_is_padded_up_within_full(rows):
    """B03: with K=2, 4 rows between captured sizes take the next FULL graph, not a piecewise one."""
    ladder = [1, 2, 3, 6, 8, 16, 24]
    table = make_table(
        [block_phase("verify", 3)], rows=ladder, tokens=[8, 64], setting="FULL_AND_PIECEWISE", capture=False
    )
    key = table.key_for("verify", rows)
    assert key is not None
    assert key.mode is GraphMode.FULL
    assert key.rows == min(size for size in ladder if size >= rows)
    assert key.tokens == 3 * key.rows
    if rows == 4:
        assert (key.rows, key.tokens) == (6, 18)


def test_several_query_lengths_do_not_hide_each_other():
    """B03: a schedule of K gives several verify phases; each (query length, size) is reachable."""
    lengths, ladder = {7: 8, 5: 32, 4: 128}, [1, 2, 4, 8, 16, 32, 64, 128]
    table = make_table(
        [block_phase(f"verify.{q}", q, max_rows=most) for q, most in lengths.items()], rows=ladder, capture=False
    )
    nine = table.key_for("verify.5", 9)
    assert nine == Key(phase="verify.5", mode=GraphMode.FULL, rows=16, tokens=80)
    captured = {(key.phase, key.rows) for key in table.keys()}  # noqa: SIM118  not a dict
    assert captured == {(f"verify.{q}", size) for q, most in lengths.items() for size in ladder if size <= most}
    for key in table.keys():  # noqa: SIM118
        assert table.key_for(key.phase, key.rows) == key


@pytest.mark.parametrize("setting", MODES)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_uniform_batches_within_the_ladder_always_hit_and_larger_ones_never(num_drafts, setting):
    """B04: keys are stored and looked up in one unit, rows."""
    ladder = [1, 2, 4, 8]
    table = block_tables(ladder, [1 + num_drafts], setting)
    captured = set(table.keys())
    for rows in range(1, 40):
        key = table.key_for(f"verify.{1 + num_drafts}", rows)
        if setting == "NONE" or rows > 8:
            assert key is None
        else:
            assert key in captured


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_ragged_batch_needs_room_for_its_tokens_and_its_rows(rows):
    table = make_table([ragged_phase()], tokens=[8, 16], prefill_rows=2, capture=False)
    for tokens in range(rows, 20):
        key = table.key_for("ragged", rows, tokens)
        if rows > 2 or tokens > 16:
            assert key is None
        else:
            assert key is not None
            assert (key.rows, key.tokens) == (2, 8 if tokens <= 8 else 16)


def test_capture_sizes_that_are_no_multiples_of_the_block_are_rows():
    """B06: sizes [1, 2, 4, 8] with K=2 are row counts; the token counts follow."""
    table = make_table([block_phase("verify", 3)], rows=[1, 2, 4, 8])
    report = table.report()
    assert [(row.rows, row.tokens) for row in report.rows] == [(1, 3), (2, 6), (4, 12), (8, 24)]


@pytest.mark.parametrize("limit", [1, 4, 6])
def test_a_phase_may_end_the_ladder_early(limit):
    table = make_table([simple_phase(max_rows=limit)], rows=[1, 2, 4, 8], capture=False)
    sizes = sorted(key.rows for key in table.keys())  # noqa: SIM118  not a dict
    assert sizes == [size for size in (1, 2, 4, 8) if size <= limit]
    assert table.uncovered() == {"double": f"8 rows exceed the largest captured size {sizes[-1]}"}


def test_capture_goes_from_large_to_small():
    """Small graphs then fit into the memory that large ones have left in the pool."""
    table = make_table([block_phase(), ragged_phase()], rows=[1, 2, 4], tokens=[4, 64], capture=False)
    tokens = [key.tokens for key in table.keys()]  # noqa: SIM118  not a dict
    assert tokens == sorted(tokens, reverse=True)
    seen = []
    table.capture(lambda key, total: seen.append((key, total)))
    assert seen == [(key, len(tokens)) for key in table.keys()]  # noqa: SIM118
