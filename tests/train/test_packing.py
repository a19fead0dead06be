"""Documents into rows: nothing lost, nothing twice, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.errors import ConfigError
from draftloop.train.method import Batch
from draftloop.train.packing import Packer, batch_fields, held_out_steps, pack, split
from draftloop.train.recording import Document, Documents

ROW = 16


def documents(lengths: list[int], *, given: int = 1) -> Documents:
    """Document i holds i, i, .. so that tokens show where they come from; every second one is greedy."""
    made = [
        Document(token_ids=[index] * length, num_given=min(given, length), temperature=float(index % 2))
        for index, length in enumerate(lengths)
    ]
    return Documents.of(made, vocab_size=1000)


@settings(max_examples=60)
@given(st.lists(st.integers(1, ROW), min_size=1, max_size=200))
def test_every_document_is_in_one_row_and_rows_do_not_overflow(lengths):
    rows = pack(lengths, ROW)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= ROW for row in rows)


def test_rows_are_well_filled():
    lengths = np.random.default_rng(0).integers(1, ROW, 2000).tolist()
    assert sum(lengths) / (ROW * len(pack(lengths, ROW))) > 0.95


def packer(lengths: list[int], *, seed: int = 0, rows: int = 2, **options) -> Packer:
    found = documents(lengths, **options)
    return Packer(found, np.arange(len(found)), row_tokens=ROW, rows_per_step=rows, seed=seed)


def test_a_row_says_where_documents_begin_and_what_is_to_be_learnt():
    rows = packer([5, 7], rows=1, given=2).rows([[1, 0], []])
    assert rows.token_ids_BL[0].tolist() == [1] * 7 + [0] * 5 + [0] * 4
    assert rows.document_BL[0].tolist() == [1] * 7 + [2] * 5 + [0] * 4
    assert rows.position_BL[0].tolist() == [*range(7), *range(5), 0, 0, 0, 0]
    assert rows.learn_BL[0].tolist() == [False] * 2 + [True] * 5 + [False] * 2 + [True] * 3 + [False] * 4
    assert not rows.document_BL[1].any()
    assert rows.num_learnt == 8


def test_what_is_longer_than_a_row_loses_its_end():
    assert packer([40, 3, 3], rows=1).rows([[0]]).document_BL.tolist() == [[1] * ROW]


def test_the_same_seed_gives_the_same_steps_and_epochs_differ():
    lengths = np.random.default_rng(1).integers(1, ROW, 60).tolist()
    one, two, other = packer(lengths), packer(lengths), packer(lengths, seed=1)
    per_epoch = one.steps_per_epoch
    steps = [step.token_ids_BL for step in one.steps(0, 2 * per_epoch)]
    assert len(steps) == 2 * per_epoch
    # a step can be asked for without those before it, as after a resume
    assert all(step.equal(again.token_ids_BL) for step, again in zip(steps[3:], two.steps(3), strict=False))
    assert not torch.equal(steps[0], steps[per_epoch])
    assert not torch.equal(steps[0], other.step(0).token_ids_BL)


def test_held_out_documents_are_greedy_and_come_once():
    found = documents([4] * 100)
    trained, held_out = split(found, 60, seed=0)
    assert sorted([*trained, *held_out]) == list(range(100))
    assert (found.temperature[held_out] == 0).all()
    steps = held_out_steps(found, held_out, row_tokens=ROW, rows=3)
    assert sorted(index for step in steps for row in step.documents for index in row) == held_out.tolist()
    assert {len(step.documents) for step in steps} == {3}


def test_nothing_is_trained_on_that_begins_like_what_is_measured():
    said = [[1, 2, 3, 4], [1, 2, 3, 4], *[[index, 9, 9, 9] for index in range(2, 40)]]
    found = Documents.of([Document(token_ids=ids, num_given=1, temperature=0.0) for ids in said], vocab_size=50)
    both = set()
    for seed in range(20):
        trained, held_out = split(found, 12, seed=seed)
        assert not {*trained} & {*held_out}
        assert not ({0, 1} & {*held_out} and {0, 1} & {*trained})
        both |= {0, 1} & {*held_out}
    assert both, "one of the twins is held out now and then"


def test_too_little_to_train_on_is_an_error():
    with pytest.raises(ConfigError, match="6 tokens fill 1 rows of 16, but a step takes 2; record more"):
        packer([3, 3])
    with pytest.raises(ConfigError, match="held-out-tokens is 60, but there are 40 tokens"):
        split(documents([4] * 10), 60, seed=0)


def test_a_tenth_of_a_short_recording_is_held_out():
    trained, held_out = split(documents([4] * 100), None, seed=0)
    assert (len(trained), len(held_out)) == (90, 10)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 5))
def test_what_follows_is_of_the_same_document_and_to_be_learnt(lengths, distance, given_tokens):
    made = [Document(token_ids=[1] * n, num_given=min(given_tokens, n), temperature=0.0) for n in lengths]
    source = Documents.of(made, vocab_size=10)
    packed = Packer(source, np.arange(len(made)), row_tokens=27, rows_per_step=1, seed=0).rows([list(range(len(made)))])
    nothing = torch.zeros(1, 27, 0)
    batch = Batch(**batch_fields(packed), aux_BLX=nothing, hidden_BLC=nothing)
    expected, start = [False] * 27, 0
    for length in lengths:
        for place in range(length - distance):
            expected[start + place] = place + distance >= min(given_tokens, length)
        start += length
    assert batch.follows(distance)[0].tolist() == expected
