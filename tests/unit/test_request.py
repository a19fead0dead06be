"""What a request may ask for: every value that cannot be meant is refused, with its name and what fits."""

from __future__ import annotations

from dataclasses import fields

import pytest

from draftloop.engine.check_request import RequestChecker
from draftloop.errors import RequestError
from draftloop.request import SamplingParams, StructuredOutputsParams
from refused import OUT_OF_RANGE, leaves


@pytest.mark.parametrize(("name", "value", "limit"), OUT_OF_RANGE)
def test_every_bad_value_is_refused_with_its_name_and_what_fits(name, value, limit):
    with pytest.raises(RequestError, match=limit) as refused:
        SamplingParams(**{name: value})
    assert str(refused.value).startswith(f"{name} is ")
    assert all(leaf in str(refused.value) for leaf in leaves(value))


def test_every_parameter_has_a_value_that_is_refused():
    assert {name for name, _, _ in OUT_OF_RANGE} == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 2, "temperature": 0}, "n is 2; it must be 1 at temperature 0"),
        ({"stop": "x", "detokenize": False}, "stop is .* where detokenize is off"),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos is True.* has to end"),
        ({"structured_outputs": {}}, "has none; give exactly one"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "has json and regex; give exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "no key 'regexp'; did you mean 'regex'"),
        ({"structured_outputs": {"choice": ["a", ""]}}, r"structured_outputs.choice is \('a', ''\)"),
        ({"structured_outputs": {"regex": "a", "after_token_id": -1}}, "after_token_id is -1"),
        ({"speculative": {"num_token": 2}}, "speculative has no key 'num_token'; did you mean 'num_tokens'"),
        ({"speculative": {"num_tokens": -1}}, "speculative.num_tokens is -1; it must be an integer >= 0"),
        ({"speculative": {"num_tokens": True}}, "speculative.num_tokens is True"),
        ({"speculative": {"drafters": []}}, "speculative.drafters is .* at least one"),
        ({"speculative": {"drafters": ["a", "a"]}}, "speculative.drafters is .* each once"),
        ({"speculative": {"drafters": "ngram"}}, "speculative.drafters is 'ngram'; it must be a list"),
    ],
)
def test_what_contradicts_itself_is_refused(params, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_what_callers_naturally_pass_is_taken():
    params = SamplingParams(
        stop="x",
        bad_words="a b",
        logit_bias={"7": 1, 8: -2.5},
        allowed_token_ids=[3],
        structured_outputs={"regex": "a"},
    )
    assert params.stop == ("x",)
    assert params.bad_words == ("a b",)
    assert params.logit_bias == {7: 1, 8: -2.5}
    assert params.allowed_token_ids == (3,)
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    assert params.structured_outputs.kind == "regex"


@pytest.mark.parametrize(
    ("params", "constrained"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 0.5, "logprobs": 3, "stop_token_ids": [1]}, False),
        ({"logit_bias": {}, "repetition_penalty": 1.0, "min_tokens": 0}, False),
        ({"presence_penalty": -1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"min_tokens": 1}, True),
        ({"bad_words": "a"}, True),
        ({"structured_outputs": {"json_object": True}}, True),
    ],
)
def test_only_what_changes_logits_makes_a_batch_pay_for_it(params, constrained):
    assert SamplingParams(**params).constrained is constrained


def test_more_biased_ids_than_there_is_room_for_are_refused():
    check = RequestChecker(vocab_size=2000, max_model_len=64, max_logprobs=0, tokenizer=None, processors=())
    check.check(SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)))
    with pytest.raises(RequestError, match="logit_bias has 1025 token ids; at most 1024 are taken"):
        check.check(SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)))
