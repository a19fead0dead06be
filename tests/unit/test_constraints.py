"""Penalties, masks, biases and bad words at every position of a block, against one token at a time in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.errors import ConfigError, RequestError
from draftloop.kvcache.constraint_rows import ConstraintRows, forbidden, num_words, pack
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.request import SamplingParams
from draftloop.sampling.constraints import constrain
from draftloop.sampling.logits_processors import (
    check_extra_args,
    load_logits_processors,
)
from parameters import Only, wanted_logits

VOCAB, ROWS, K, ENDS = 37, 3, 3, (5, 36)
CPU = torch.device("cpu")


def make_state(max_model_len: int = 24) -> RowState:
    return RowState.create(
        num_rows=ROWS,
        max_model_len=max_model_len,
        num_drafts=K,
        page_size=4,
        draft_vocab=0,
        device=CPU,
        vocab_size=VOCAB,
    )


def rules_of(state: RowState) -> ConstraintRows:
    assert state.constraints is not None
    return state.constraints


few = st.integers(0, 5)  # ids that often come again
token = st.one_of(few, st.integers(0, VOCAB - 1))
words = st.lists(st.lists(few, min_size=1, max_size=3), max_size=4)
params = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0, 1.5, -2]),
    frequency_penalty=st.sampled_from([0, 0.75, -1.25]),
    repetition_penalty=st.sampled_from([1, 1.3, 0.5]),
    logit_bias=st.dictionaries(token, st.sampled_from([-100, -1.5, 2, 7]), max_size=4),
    allowed_token_ids=st.one_of(st.none(), st.lists(token, min_size=1)),
    min_tokens=st.integers(0, 6),
)


@st.composite
def requests(draw):
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    output = draw(st.lists(token, max_size=6))
    drafts = draw(st.lists(st.one_of(few, st.sampled_from([NO_DRAFT, VOCAB, VOCAB + 40])), min_size=K, max_size=K))
    return draw(params), prompt, output, drafts, draw(words)


@settings(max_examples=150)
@given(batch=st.lists(requests(), min_size=1, max_size=ROWS), seed=st.integers(0, 99), length=st.sampled_from([24, 64]))
def test_every_position_is_as_if_its_drafts_had_been_produced_one_by_one(batch, seed, length):
    """Also where a row may be longer than the vocabulary is large."""
    state = make_state(length)
    noise = torch.Generator().manual_seed(seed)
    state.tokens_ML[:ROWS] = torch.randint(-5, 500, state.tokens_ML[:ROWS].shape, generator=noise)  # what was there
    for row, (one, prompt, output, drafts, bad_words) in enumerate(batch):
        rules_of(state).write(row, one, num_prompt=len(prompt), bad_words=bad_words, ending_ids=ENDS, stage=lambda x: x)
        tokens = prompt + output
        state.tokens_ML[row, : len(tokens)] = torch.tensor(tokens)
        state.num_tokens_M[row] = len(tokens)
        state.drafts_MK[row] = torch.tensor(drafts)
    rows = torch.tensor([*range(len(batch)), state.padding_row], dtype=torch.int32)
    logits = torch.randn(len(rows), K + 1, VOCAB, generator=noise) * 3
    given_logits = logits.clone()
    made = constrain(state, rows, logits)
    assert torch.equal(logits, given_logits), "what is reported as raw must stay raw"
    assert torch.equal(made[-1], logits[-1]), "the padding row is neutral"
    for row, (one, prompt, output, drafts, bad_words) in enumerate(batch):
        for place in range(K + 1):
            behind = drafts[:place]
            if any(not 0 <= draft < VOCAB for draft in behind):
                break  # never reached
            wanted = wanted_logits(
                logits[row, place].numpy(), prompt, output + behind, one, ends=ENDS, bad_words=bad_words
            )
            np.testing.assert_allclose(made[row, place].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_cleared_is_neutral_again():
    state = make_state()
    asked = SamplingParams(
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=2,
        logit_bias={3: 5},
        allowed_token_ids=[3],
        min_tokens=9,
    )
    rules_of(state).write(1, asked, num_prompt=1, bad_words=[[3]], ending_ids=ENDS, stage=lambda x: x)
    rules_of(state).grammar_MQW[1] = 0
    logits = torch.randn(1, K + 1, VOCAB)
    rows = torch.tensor([1], dtype=torch.int32)
    assert not torch.equal(constrain(state, rows, logits), logits)
    rules_of(state).clear(1)
    assert torch.equal(constrain(state, rows, logits), logits)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_are_packed_with_the_lowest_id_in_the_lowest_bit(allowed):
    padded = torch.tensor(allowed + [True] * (-len(allowed) % 32))
    packed = pack(padded)
    assert packed.shape == (num_words(len(allowed)),)
    for i, bit in enumerate(allowed):
        assert (int(packed[i // 32]) >> (i % 32) & 1) == bit
    assert forbidden(packed, len(allowed)).tolist() == [not bit for bit in allowed]


# ---- custom processors ----------------------------------------------------------------------


def test_a_custom_processor_sees_each_position_with_the_drafts_before_it():
    state = make_state()
    (only,) = load_logits_processors(["parameters:Only"], num_rows=ROWS + 1, vocab_size=VOCAB, device=CPU)
    asked = SamplingParams(extra_args={"only_token": 9, "only_after": 4})
    rules_of(state).write(0, asked, num_prompt=2, bad_words=[], ending_ids=[], stage=lambda x: x)
    only.admit(0, asked)
    state.num_tokens_M[:2] = torch.tensor([4, 4])  # two tokens of output
    made = constrain(state, torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, K + 1, VOCAB), [only])
    assert [x.isfinite().sum().item() for x in made[0]] == [VOCAB, VOCAB, 1, 1]
    assert made[0, 2, 9] == 0
    assert made[1].isfinite().all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:X", "names 'nowhere:X', which cannot be loaded"),
        ("parameters:Nothing", "cannot be loaded.*Nothing"),
        ("parameters:wanted_logits", "no subclass of"),
        ("parameters", "cannot be loaded"),
    ],
)
def test_a_processor_that_is_none_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        load_logits_processors([name], num_rows=1, vocab_size=2, device=CPU)


def test_arguments_that_nobody_takes_and_those_that_a_processor_refuses_are_named():
    only = Only(num_rows=2, vocab_size=VOCAB, device=CPU)
    with pytest.raises(RequestError, match=r"extra_args has 'only_tokn', .* did you mean 'only_token'\?"):
        check_extra_args(SamplingParams(extra_args={"only_tokn": 1}), [only])
    with pytest.raises(RequestError, match="there is none that takes arguments"):
        check_extra_args(SamplingParams(extra_args={"x": 1}), [])
    with pytest.raises(RequestError, match="only_token is 37; this model's ids are 0 to 36"):
        check_extra_args(SamplingParams(extra_args={"only_token": 37}), [only])
