"""Reads a config dataclass: the type, choices and docstring of each field, and whether a value fits.

One place, so that Python callers, JSON and the command line get the same errors and the same help.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from draftloop.errors import ConfigError, nearest

ConfigT = TypeVar("ConfigT")

_PLAIN = {str: "a text", bool: "true or false", int: "an integer", float: "a finite number"}


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The resolved type of each field, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field; it is the field's `--help` too."""
    docs = {name: text for base in cls.__bases__ if is_dataclass(base) for name, text in field_docs(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    for node, after in itertools.pairwise(body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


def build(cls: type[ConfigT], kind: str, values: Mapping[str, Any]) -> ConfigT:
    """Make a config from keywords. Raises ConfigError naming the nearest key for an unknown one."""
    known = field_types(cls)
    for name in values:
        if name not in known:
            hint = nearest(name, known)
            if hint == ".":
                hint = f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown {kind} {name!r}{hint}")
    return cls(**values)


def check_fields(config: Any, prefix: str = "") -> None:
    """Refuse values that do not fit their field's type. Raises ConfigError with key, value and what fits."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            raise ConfigError(f"{prefix}{name} is {value!r}; it must be {describe(hint)}")


def check(ok: bool, config: Any, name: str, limit: str, prefix: str = "") -> None:
    """Raise ConfigError with key, value and limit unless `ok`."""
    if not ok:
        raise ConfigError(f"{prefix}{name} is {getattr(config, name)!r}; it must be {limit}")


def describe(hint: Any) -> str:
    """What fits a type, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [describe(a) for a in args if a is not type(None)]
        return " or ".join(inner)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return f"a list, each of it {describe(args[0])}"
    if origin is collections.abc.Callable:
        return "a function"
    if origin is collections.abc.Mapping:
        return "a mapping"
    if is_dataclass(hint):
        return "a mapping"
    return _PLAIN[hint]


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, a) for a in args)
    if hint is type(None):
        return value is None
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is collections.abc.Mapping:
        return isinstance(value, collections.abc.Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
