"""Options of the commands: the fields of the config dataclasses, docstrings included."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, Token

from draftloop.config import EngineConfig, SpeculativeConfig
from draftloop.config.fields import field_docs, field_types
from draftloop.errors import ConfigError
from draftloop.models.resolve import ALIASES, shipped
from draftloop.request import SamplingParams

# What drafts for a model unless the user says otherwise, once it is shipped. Three drafts: on two CPU cores MT-bench
# takes 1.50x of plain decoding's tokens per second with them, and 1.40x with five (docs/numbers/shipped-drafters.md).
SHIPPED_SPECULATION: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3},
}
# For every other model: needs no second one, and gains wherever the answer repeats the prompt or itself.
LOOKUP_SPECULATION: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}

_ENGINE = Group.create_ordered("Engine")
_SPECULATION = Group.create_ordered("Speculation")
_SAMPLING = Group.create_ordered("Sampling")


_SEVERAL = {"lora_modules"}
"""Lists of texts that may follow their option all at once: what else follows is no such text, and refused."""


def _list_of(kind: type, what: str) -> Parameter:
    """An option that takes `1,8,32` and `1 8 32` alike."""

    def convert(type_: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
        texts = [text for token in tokens for text in token.value.split(",") if text]
        if not texts:
            raise ValueError(f"give {what}")
        try:
            return tuple(map(kind, texts))
        except ValueError:
            raise ValueError(f"{','.join(texts)!r} are not {what}") from None

    return Parameter(converter=convert, consume_multiple=1, n_tokens=1, negative="")


FLAG = Annotated[bool, Parameter(negative="", show_default=False)]
LORA = Annotated[str | None, Parameter(help="The adapter that answers: one of --lora-modules.")]
PROMPT = Parameter(name=["--prompt", "-p"], negative="", show_default=False, allow_leading_hyphen=True)
NUMBERS = _list_of(int, "whole numbers, such as 1,8,32")
DECIMALS = _list_of(float, "numbers, such as 0,1")
NAMES = _list_of(str, "at least one name")
RESULTS = Path("bench")
"""Where measurements are written unless the user says otherwise: below the folder that the command runs in."""


# Beside their own.
_SHORT_NAMES = {
    "tensor_parallel_size": ["--tensor-parallel-size", "-tp"],
    "data_parallel_size": ["--data-parallel-size", "-dp"],
    "pipeline_parallel_size": ["--pipeline-parallel-size", "-pp"],
}


def make_option(name: str, annotation: Any, default: Any, group: Group, help: str) -> inspect.Parameter:
    """One command-line option, with the spelling that cyclopts derives: max_num_seqs -> --max-num-seqs."""
    extra = Parameter(group=group, help=help, name=_SHORT_NAMES.get(name))
    if default is False:  # a flag that is off needs no --no-enforce-eager
        extra = Parameter(group=group, help=help, negative="", show_default=False)
    if annotation == tuple[str, ...]:  # given more than once, rather than emptied by an --empty-.. flag
        several = name in _SEVERAL
        extra = Parameter(group=group, help=help, negative="", show_default=False, consume_multiple=several)
    numbers = (NUMBERS,) if tuple[int, ...] in (annotation, *typing.get_args(annotation)) else ()
    full = Annotated[(annotation, *numbers, extra)]  # pyrefly: ignore[invalid-annotation]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=full)


def engine_options(**defaults: Any) -> list[inspect.Parameter]:
    docs, types_ = field_docs(EngineConfig), field_types(EngineConfig)
    options = []
    for field in dataclasses.fields(EngineConfig):
        name = field.name
        if name == "speculative_config":  # JSON, in the group of its short forms
            continue
        option = make_option(name, types_[name], defaults.get(name, field.default), _ENGINE, docs[name])
        # Also the command's one positional argument.
        options.append(option.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) if name == "model" else option)
    return options


def target_options(**defaults: Any) -> list[inspect.Parameter]:
    """The engine's options but for the model, where a command calls that --target."""
    return [option for option in engine_options(**defaults) if option.name != "model"]


# Short form of each speculative_config key that most people need.
_SHORT_FORMS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "aux_layer_offset": "aux_layer_offset",
}


def speculation_options(*, with_model: bool = True) -> list[inspect.Parameter]:
    """Without --spec-model where a command has --drafter."""
    docs, types_ = field_docs(SpeculativeConfig), field_types(SpeculativeConfig)
    text = Parameter(name=["--speculative-config", "-sc"], group=_SPECULATION, accepts_keys=False)
    help = field_docs(EngineConfig)["speculative_config"]
    annotation = Annotated[str | None, text, Parameter(help=help)]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter("speculative_config", kind, default=None, annotation=annotation)]
    for short, key in _SHORT_FORMS.items():
        if not with_model and key == "model":
            continue
        options.append(make_option(short, types_[key], None, _SPECULATION, f"Short for its {key}. {docs[key]}"))
    return options


def sampling_options() -> list[inspect.Parameter]:
    docs, types_ = field_docs(SamplingParams), field_types(SamplingParams)
    defaults = {"temperature": 0.0, "max_tokens": 256, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return [make_option(name, types_[name], value, _SAMPLING, docs[name]) for name, value in defaults.items()]


def command(parent: App, name: str, options: Iterable[inspect.Parameter]) -> Callable:
    """Register a command that takes `options` as one dict, and its own keyword-only parameters as they are."""

    def register(body: Callable) -> Callable:
        hints = typing.get_type_hints(body, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(body).parameters.values())[1:]]

        signature = inspect.Signature(sorted([*options, *own], key=lambda p: p.kind))

        def command(*args: Any, **given: Any) -> None:
            bound = signature.bind(*args, **given)
            bound.apply_defaults()
            values = dict(bound.arguments)
            mine = {p.name: values.pop(p.name) for p in own}
            body(values, **mine)

        command.__doc__ = body.__doc__
        command.__signature__ = signature  # pyrefly: ignore[missing-attribute]
        parent.command(command, name=name)
        return body

    return register


def speculation_from(values: dict[str, Any], default: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Take the speculation options out of `values` and join them. Raises ConfigError where two name one key."""
    text = values.pop("speculative_config", None)
    short = {key: value for name, key in _SHORT_FORMS.items() if (value := values.pop(name, None)) is not None}
    given: dict[str, Any] = {}
    if text is not None:
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--speculative-config is not JSON ({error}): {text}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"--speculative-config is {text}; it must be a JSON object")
    for name, key in _SHORT_FORMS.items():
        if key in short and key in given:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} and --speculative-config both name {key!r}; leave one out")
    joined = given | short
    if default and not {"method", "model"} & joined.keys():
        joined = default | joined
    return joined or None


def at_least_one(**options: int | None) -> None:
    """Raises ConfigError for the first option, by its name in Python, that is below 1; None is not given."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def at_least_two(output_tokens: int) -> None:
    """Raises ConfigError for answers of one token, which have no time between tokens."""
    if output_tokens < 2:
        raise ConfigError(f"--output-tokens is {output_tokens}; it must be at least 2")


def default_speculation(values: dict[str, Any]) -> dict[str, Any]:
    """What drafts for the model that `values` name, where they name no drafter."""
    model = next((alias for alias, hub_id in ALIASES.items() if hub_id == values["model"]), values["model"])
    found = SHIPPED_SPECULATION.get(model)
    if found is None or found["model"] not in shipped() or values["load_format"] == "dummy":
        return LOOKUP_SPECULATION
    return found


def config_from(values: dict[str, Any], default: dict[str, Any] | None = None) -> EngineConfig:
    values = dict(values)
    return EngineConfig.from_mapping(speculative_config=speculation_from(values, default), **values)
