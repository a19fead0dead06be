"""Tool calls, reasoning and stop texts: however the text is cut, the same comes out."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from draftloop.server.chat import _ParserPlan
from draftloop.server.parsers import (
    ForcedCallParser,
    Parser,
    Parts,
    ReasoningThen,
    TagParser,
    forced_calls_schema,
)
from draftloop.server.protocol import ChatRequest
from draftloop.server.text import TextCursor, possible_start

TRANSCRIPT = (
    "I'll look <b>both</b> up.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def both() -> TagParser:
    return TagParser(reasoning=True, tools=True)


def join(parser: Parser, pieces: list[str]) -> Parts:
    """What the pieces of an answer give together; calls without their random ids."""
    whole = Parts()
    for piece in pieces:
        part = parser.feed(piece)
        whole = Parts(
            whole.content + part.content, whole.reasoning + part.reasoning, whole.tool_calls + part.tool_calls
        )
    part = parser.feed("", is_last=True)
    whole = Parts(whole.content + part.content, whole.reasoning + part.reasoning, whole.tool_calls + part.tool_calls)
    for call in whole.tool_calls:
        assert call.id.startswith("call_")
        call.id = ""
    return whole


def read(parser: Parser, text: str) -> Parts:
    return join(parser, [text])


def test_b37_two_calls_are_found_in_every_cut_of_the_transcript():
    """Parsers that drop calls or arguments where one piece holds several tokens."""
    once = read(both(), TRANSCRIPT)
    assert once.content == "I'll look <b>both</b> up.\n"
    assert [(call.name, json.loads(call.arguments)) for call in once.tool_calls] == [
        ("weather", {"city": "Köln", "days": [1, 2]}),
        ("time", {}),
    ]
    assert join(both(), list(TRANSCRIPT)) == once
    for at in range(len(TRANSCRIPT) + 1):
        assert join(both(), [TRANSCRIPT[:at], TRANSCRIPT[at:]]) == once


# pieces of tags, of JSON, and whole ones in any order
PARTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": 1}}',
    "<",
    "text ",
    "\n",
]


@settings(max_examples=200)
@given(text=st.lists(st.sampled_from(PARTS), max_size=10).map("".join), data=st.data())
def test_b37_any_text_gives_the_same_however_it_is_cut(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for make in (both, lambda: TagParser(reasoning=True, tools=False, in_reasoning=True)):
        assert join(make(), pieces) == read(make(), text)


@settings(max_examples=200)
@given(
    text=st.text("abc", max_size=12), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_b37_stop_texts_never_show_however_the_text_is_cut(text, stop, data):
    found = [text.find(one) for one in stop if one in text]
    final = text[: min(found)] if found else text
    cursor, shown = TextCursor(stop), ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for end in cuts:
        if any(one in text[:end] for one in stop):
            break
        shown += cursor.advance(text[:end])
        assert final.startswith(shown)
    assert shown + cursor.advance(final, is_last=True) == final


@pytest.mark.parametrize(
    ("text", "marks", "count"),
    [
        ("abc", ["cd"], 1),
        ("abc", ["bcd", "cde"], 2),
        ("abc", ["abc"], 0),
        ("abc", [], 0),
        ("", ["x"], 0),
        ("aa", ["aab"], 2),
    ],
)
def test_how_much_of_a_text_may_begin_a_mark(text, marks, count):
    assert possible_start(text, marks) == count


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "content"),
    [
        ("<think>\nhm, 1 < 2\n</think>\n\nYes.", False, "hm, 1 < 2\n", "Yes."),
        ("hm\n</think>\n\nYes.", True, "hm\n", "Yes."),
        ("hm", True, "hm", ""),
        ("Yes.", False, "", "Yes."),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning_is_told_from_the_answer(text, in_reasoning, reasoning, content):
    parser = TagParser(reasoning=True, tools=False, in_reasoning=in_reasoning)
    assert read(parser, text) == Parts(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\nno json\n</tool_call>", '<tool_call>\n{"name": 3}\n</tool_call>', '<tool_call>\n{"name": "f", "arg'],
)
def test_what_is_no_call_stays_in_the_text(text):
    found = read(both(), text)
    assert found.tool_calls == []
    assert "".join(found.content.split()) == "".join(text.split())


def test_a_call_that_is_nested_without_end_stays_in_the_text():
    text = '[{"name": "f", "arguments": ' + "[" * 100_000
    for parser in (ForcedCallParser(), ForcedCallParser("f"), TagParser(reasoning=False, tools=True)):
        parts = parser.feed(f"<tool_call>{text}" if isinstance(parser, TagParser) else text, is_last=True)
        assert (parts.tool_calls, parts.content.endswith(text)) == ([], True)


def test_a_call_that_lacks_only_its_closing_tag_counts():
    assert [call.name for call in read(both(), '<tool_call>{"name": "f", "arguments": {}}').tool_calls] == ["f"]


def test_forced_calls_are_read_from_what_their_grammar_forces():
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert [call.name for call in read(ForcedCallParser(), text).tool_calls] == ["f", "g"]
    (call,) = read(ForcedCallParser("f"), '{"a": 1}').tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    assert read(ForcedCallParser(), text[:20]) == Parts(content=text[:20])  # cut by max_tokens
    assert read(ForcedCallParser("f"), '{"a":') == Parts(content='{"a":')
    after = read(ReasoningThen(ForcedCallParser("f"), in_reasoning=True), "hm</think>\n" + '{"a": 1}')
    assert (after.reasoning, [call.name for call in after.tool_calls]) == ("hm", ["f"])


def test_the_grammar_of_forced_calls_names_the_tools():
    tools = [{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}]
    assert forced_calls_schema(tools, "f", parallel=True) == {"type": "object"}
    schema = forced_calls_schema(tools, None, parallel=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["f", "g"]
    assert "maxItems" not in forced_calls_schema(tools, None, parallel=True)


@pytest.mark.parametrize(("vocabulary", "end"), [({"</think>": 7}, 7), ({}, None)])
def test_a_grammar_begins_after_the_reasoning_where_a_token_ends_that_and_else_at_once(vocabulary, end):
    backend = Tokenizer(models.WordLevel(vocabulary))
    options = SimpleNamespace(reasoning_parser="think", tool_call_parser=None)
    serving = SimpleNamespace(options=options, tokenizer=SimpleNamespace(backend=backend))
    body = ChatRequest(messages=[{"role": "user", "content": "?"}], response_format={"type": "json_object"})
    plan = _ParserPlan(serving, body, "<|assistant|><think>\n")
    params = plan.constrain(body.sampling_params({}))
    assert params.structured_outputs.after_token_id == end
    text = "hm</think>{}" if end else "{}"
    assert read(plan.parser(), text) == Parts(content="{}", reasoning="hm" if end else "")


def test_parameters_that_are_nested_without_end_are_refused():
    deep: dict = {"type": "object"}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ValueError, match="the schema is nested deeper than 200"):
        forced_calls_schema([{"name": "f", "parameters": deep}], None, parallel=True)


def test_references_of_a_tools_schema_lead_to_its_own_definitions():
    """As pydantic writes them, two tools with definitions of one name, one of them of itself."""
    place = {"$ref": "#/$defs/Place"}
    city = {"$defs": {"Place": {"enum": ["Rome"]}}, "properties": {"at": place, "default": place}}
    tree = {
        "$defs": {"Place": {"type": "integer"}},
        "properties": {"at": {"$ref": "#/$defs/Place"}, "in": {"$ref": "#"}},
    }
    tree["properties"]["kind"] = {"const": {"$ref": "#"}}
    tools = [{"name": "city", "parameters": city}, {"name": "tree", "parameters": tree}]
    validator = jsonschema.Draft202012Validator(forced_calls_schema(tools, None, parallel=True))
    for name, arguments, fits in [
        ("city", {"at": "Rome"}, True),
        ("city", {"at": 3}, False),
        ("city", {"default": 3}, False),
        ("tree", {"at": 3, "in": {"in": {"at": 4}}, "kind": {"$ref": "#"}}, True),
        ("tree", {"at": 3, "in": {"in": {"at": "Rome"}}}, False),
        ("other", {}, False),
    ]:
        assert validator.is_valid([{"name": name, "arguments": arguments}]) == fits
