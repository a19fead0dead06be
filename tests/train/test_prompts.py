"""Prompts from a file, row by row, and prompts that the target invents."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftloop.errors import ConfigError
from draftloop.train.prompts import OPENINGS, invention, random_prompt, read_prompts

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<user>", "<assistant>", "<system>", "<end>", "hello", "there", "yes", "no", "<unk>"]
USER, ASSISTANT, SYSTEM, END, HELLO, THERE, YES = range(7)


def make(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    made.chat_template = template
    return made


def read(tmp_path, *rows, tokenizer=None):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_prompts(path, tokenizer or make())


HELLO_PROMPT = [USER, HELLO, END, ASSISTANT]


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, HELLO_PROMPT),
        ({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]}, HELLO_PROMPT),
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]}, HELLO_PROMPT),
        (
            {"messages": [{"role": "system", "content": "no"}, {"role": "user", "content": "hello"}]},
            [SYSTEM, 7, END, *HELLO_PROMPT],
        ),
        ({"prompt": "hello"}, HELLO_PROMPT),
        ({"text": "hello there"}, [HELLO, THERE]),
    ],
)
def test_rows_are_chat_or_text(tmp_path, row, ids):
    assert read(tmp_path, row) == [ids]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is neither chat nor text"),
        ({"question": "hello"}, "is neither chat nor text; it must be an object with one of messages, conversations"),
        ({"prompt": ""}, "prompt is ''; it must be a text that is not empty"),
        ({"text": 5}, "text is 5; it must be a text"),
        ({"messages": "hello"}, "messages must be a list of turns"),
        ({"messages": [{"role": "user"}]}, "content is None; it must be a text"),
        ({"messages": [{"role": "owl", "content": "hello"}]}, "a turn has role 'owl'; it must be one of assistant"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "messages has no turn of a user"),
    ],
)
def test_a_row_that_is_neither_is_named_by_its_line(tmp_path, row, message):
    with pytest.raises(ConfigError, match=r"prompts.jsonl, line 3\b.*") as raised:
        read(tmp_path, {"text": "hello"}, "", row)
    assert message in str(raised.value)


def test_a_row_that_the_template_refuses_is_named_by_its_line(tmp_path):
    refusing = make("{{ raise_exception('no user may speak') }}")
    with pytest.raises(ConfigError, match=r"line 1 does not fit the target's chat template: no user may speak"):
        read(tmp_path, {"prompt": "hello"}, tokenizer=refusing)


def test_without_a_template_turns_are_joined(tmp_path):
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "user", "content": "there"}]}
    assert read(tmp_path, row, tokenizer=make(None)) == [[HELLO, THERE]]


def test_an_empty_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no prompts"):
        read(tmp_path, "")
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_prompts(tmp_path / "nowhere.jsonl", make())
    with pytest.raises(ConfigError, match="the target has no tokenizer"):
        read_prompts(tmp_path / "nowhere.jsonl", None)


def test_a_prompt_is_invented_between_the_users_header_and_the_end_of_the_turn():
    found = invention(make())
    assert found is not None
    assert (found.before, found.after) == ([USER], [END, ASSISTANT])
    assert END in found.stops


def test_invented_prompts_begin_in_many_ways():
    found = invention(make())
    assert found is not None
    lines = OPENINGS.read_text().splitlines()
    assert len(found.openings) == len(set(lines)) >= 300
    assert all(found.openings)
    assert not any(line != line.strip() for line in lines), "the next token brings its own space"


@pytest.mark.parametrize("template", [None, "{% for m in messages %}hello{% endfor %}"])
def test_without_a_usable_template_nothing_is_invented(template):
    assert invention(make(template)) is None


def test_random_prompts_begin_with_the_start_token_and_hold_no_special_one():
    made = [random_prompt(random.Random(n), bos=3, vocab_size=8, special=frozenset({0, 1, 2, 3})) for n in range(60)]
    assert {len(prompt) for prompt in made} == {2, 3, 4, 5}
    assert all(prompt[0] == 3 and set(prompt[1:]) <= {4, 5, 6, 7} for prompt in made)
    assert random_prompt(random.Random(0), bos=None, vocab_size=8, special=frozenset())[0] < 8
