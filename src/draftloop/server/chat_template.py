"""Chat templates in a sandbox: they come with models, and may not reach anything but their arguments.

The names that templates expect are those of Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftloop.errors import RequestError

MAX_LENGTH = 1 << 20
"""Characters of a template."""


class _Generation(Extension):
    """`{% generation %}` marks what a model has said, for training; here it is left out."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


class ChatTemplate:
    """Raises RequestError for a template that is not Jinja, or that cannot render what it is given."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        if len(source) > MAX_LENGTH:
            raise RequestError(f"the chat template has {len(source)} characters; at most {MAX_LENGTH} are taken")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = environment.globals  # pyrefly: ignore[bad-assignment]
        names.update(raise_exception=_refuse, strftime_now=_now, namespace=_Namespace)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **more: Any,
    ) -> str:
        """The text of a conversation. With `continue_final_message` it ends inside the last message."""
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other; leave one out")
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **more},
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"messages do not fit the chat template: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise RequestError(f"messages do not fit the chat template: {type(error).__name__}: {error}") from error
        return _up_to_final_message(text, messages) if continue_final_message else text


def _up_to_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    last = messages[-1].get("content")
    if not isinstance(last, str) or not last.strip():
        raise RequestError("continue_final_message needs a last message with a text; leave it out")
    at = text.rfind(last.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message cannot be used: the chat template changes the last message; leave it out"
        )
    return text[: at + len(last.strip())] + (last[len(last.rstrip()) :])


class _Namespace(jinja2.utils.Namespace):
    """A template's variables. Names that begin with an underscore would change what Python does with it."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args  # `self` may be the name of a variable
        found = dict(*given, **values)
        for name in found:
            _check_variable(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_variable(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_variable(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a variable of a namespace is called {name!r}, which is unsafe")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
