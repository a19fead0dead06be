"""Takes reasoning and tool calls out of a model's text while it comes.

A piece of the stream may hold any number of tokens, so everything here works on text: however the text is cut,
the pieces joined are the same.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from draftloop.sampling.json_formats import map_schemas
from draftloop.server.text import possible_start

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


NO_JSON = (ValueError, RecursionError)
"""What reading a model's text as JSON may end with: it may be none, or nested without end."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A function that the model wants to be called."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = msgspec.field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class Parts(msgspec.Struct):
    """What a piece of text consists of."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class Parser(Protocol):
    """Made for one answer."""

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        """Take the next piece of the text; what may still turn out to be a tag is kept back."""
        ...


class PlainParser:
    """Everything is content."""

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        return Parts(content=text)


class TagParser:
    """Reasoning between <think> and </think>, calls as JSON between <tool_call> and </tool_call> (Hermes, Qwen)."""

    def __init__(self, *, reasoning: bool, tools: bool, in_reasoning: bool = False) -> None:
        """`in_reasoning`: the prompt has opened it already."""
        self._openers = [THINK] * reasoning + [CALL] * tools
        self._tag: str | None = THINK if in_reasoning else None
        """Inside of which section it is."""
        self._text = ""
        """Not handed out yet."""
        self._skips_space = False
        """What follows a section begins with line ends of the template."""

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        self._text += text
        parts = Parts()
        while self._advance(parts, is_last):
            pass
        return parts

    def _advance(self, parts: Parts, is_last: bool) -> bool:
        """Hand out what is sure. False once nothing more is."""
        if self._skips_space:
            self._text = self._text.lstrip("\n")
            if not self._text:
                return False
            self._skips_space = False
        if self._tag == CALL:
            return self._take_call(parts, is_last)
        marks = [END_THINK] if self._tag == THINK else self._openers
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        at, mark = min(found) if found else (len(self._text), None)
        if mark is None and not is_last:
            at -= possible_start(self._text, marks)
        piece = self._text[:at]
        if self._tag == THINK:
            parts.reasoning += piece
        else:
            parts.content += piece
        self._text = self._text[at + len(mark or "") :]
        if mark is None:
            return False
        self._skips_space = True
        self._tag = None if self._tag == THINK else mark
        return True

    def _take_call(self, parts: Parts, is_last: bool) -> bool:
        """A call is handed out whole. What is no call stays in the text."""
        at = self._text.find(END_CALL)
        if at < 0 and not is_last:
            return False
        inside = self._text if at < 0 else self._text[:at]
        self._text = "" if at < 0 else self._text[at + len(END_CALL) :]
        call = read_call(inside)
        if call is not None:
            parts.tool_calls.append(call)
        else:
            parts.content += CALL + "\n" + inside + ("" if at < 0 else END_CALL)
        self._tag, self._skips_space = None, call is not None
        return True


class ForcedCallParser:
    """The whole text is calls, since a grammar forces it to be: an array of them, or the arguments of `name`."""

    def __init__(self, name: str | None = None) -> None:
        self._name, self._text = name, ""

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        self._text += text
        if not is_last:
            return Parts()
        if self._name is not None:
            if (arguments := _json_object(self._text)) is None:  # cut by max_tokens
                return Parts(content=self._text)
            return Parts(tool_calls=[ToolCall(name=self._name, arguments=arguments)])
        try:
            calls = [call for value in json.loads(self._text) if (call := _call(value)) is not None]
        except NO_JSON:
            return Parts(content=self._text)
        return Parts(tool_calls=calls)


class ReasoningThen:
    """Reasoning first; another parser reads the content after it."""

    def __init__(self, parser: Parser, *, in_reasoning: bool) -> None:
        self._reasoning = TagParser(reasoning=True, tools=False, in_reasoning=in_reasoning)
        self._parser = parser

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        first = self._reasoning.feed(text, is_last=is_last)
        rest = self._parser.feed(first.content, is_last=is_last)
        return Parts(content=rest.content, reasoning=first.reasoning, tool_calls=rest.tool_calls)


def forced_calls_schema(tools: Sequence[dict[str, Any]], name: str | None, *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of what a `ForcedCallParser` reads: `name`'s arguments, or one call or more to any tool.

    Raises ValueError for parameters that are nested without end.
    """
    schemas = {tool["name"]: tool.get("parameters") or {"type": "object"} for tool in tools}
    if name is not None:
        return schemas[name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": known}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, known in enumerate(schemas)
    ]
    places = {str(place): _moved(schema, f"#/$defs/{place}") for place, schema in enumerate(schemas.values())}
    array: dict[str, Any] = {"$defs": places, "type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return array if parallel else {**array, "maxItems": 1}


def _moved(schema: dict[str, Any], root: str) -> dict[str, Any]:
    """A JSON schema as part of another, at `root`, where its own references lead from then on."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        is_own = isinstance(reference, str) and reference.startswith("#")
        return {**part, "$ref": root + reference[1:]} if is_own else part

    return map_schemas(schema, move)


def read_call(text: str) -> ToolCall | None:
    """`{"name": .., "arguments": {..}}`; None for anything else."""
    try:
        return _call(json.loads(text))
    except NO_JSON:
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(name=value["name"], arguments=arguments)
    return ToolCall(name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def _json_object(text: str) -> str | None:
    try:
        return text.strip() if isinstance(json.loads(text), dict) else None
    except NO_JSON:
        return None
