"""`draftloop train`: its options are the dataclasses in `train/options.py`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from cyclopts import App, Group

from draftloop.cli.options import command, make_option
from draftloop.config.fields import field_docs, field_types
from draftloop.train.options import METHOD_OPTIONS, TrainOptions, method_options

_TRAINING = Group.create_ordered("Training")
_METHOD = Group.create_ordered("Of one method")


def train_options() -> list[inspect.Parameter]:
    docs, types_ = field_docs(TrainOptions), field_types(TrainOptions)
    # hours of work are begun for a model that was named, and no other
    defaults = {f.name: f.default for f in dataclasses.fields(TrainOptions)} | {"target": inspect.Parameter.empty}
    options = [make_option(name, types_[name], value, _TRAINING, docs[name]) for name, value in defaults.items()]
    for name, (methods, annotation, help) in _method_options().items():
        # left out is not the same as the default: a method refuses what it does not use
        options.append(make_option(name, annotation | None, None, _METHOD, f"{', '.join(methods)}: {help}"))
    return options


def _method_options() -> dict[str, tuple[list[str], Any, str]]:
    """Options of the training methods by name: the methods that have it, its type, docstring and defaults."""
    found: dict[str, tuple[list[str], Any, str]] = {}
    defaults: dict[str, dict[Any, list[str]]] = {}
    for method, cls in METHOD_OPTIONS.items():
        docs = field_docs(cls)
        for name, annotation in field_types(cls).items():
            found.setdefault(name, ([], annotation, docs[name]))[0].append(method)
            if (default := getattr(cls, name)) not in (None, "auto"):
                defaults.setdefault(name, {}).setdefault(default, []).append(method)
    for name, by_value in defaults.items():
        methods, annotation, help = found[name]
        said = (f"{value} ({', '.join(of)})" if len(by_value) > 1 else str(value) for value, of in by_value.items())
        found[name] = methods, annotation, f"{help} Default: {', '.join(said)}."
    return found


def options_from(values: dict[str, Any]) -> tuple[TrainOptions, Any]:
    """The options of `train` and those of its method. Raises ConfigError for a method's option given to another."""
    values = dict(values)
    given = {name: value for name in _method_options() if (value := values.pop(name)) is not None}
    options = TrainOptions(**values)
    return options, method_options(options.method, given)


def add_train(app: App) -> None:
    """Give the program its command `train`."""

    @command(app, "train", train_options())
    def train(values: dict[str, Any]) -> None:
        """Make a drafter for a model: record what it says, train on its hidden states, write what the engine loads.

        Run again, it goes on where it was left. Several GPUs: record first (--record-only), then start it with
        torchrun.
        """
        options, of_method = options_from(values)
        from draftloop.train.run import run_train

        run_train(options, of_method)
