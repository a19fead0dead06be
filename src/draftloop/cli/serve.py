"""`draftloop serve`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from cyclopts import App, Group

from draftloop.cli.options import (
    command,
    config_from,
    default_speculation,
    engine_options,
    make_option,
    speculation_options,
)
from draftloop.config import Environment
from draftloop.config.fields import field_docs, field_types
from draftloop.errors import ConfigError
from draftloop.server.options import ServerOptions

_SERVER = Group.create_ordered("Server")


def server_options() -> list[inspect.Parameter]:
    docs, types_ = field_docs(ServerOptions), field_types(ServerOptions)
    return [
        make_option(field.name, types_[field.name], field.default, _SERVER, docs[field.name])
        for field in dataclasses.fields(ServerOptions)
    ]


def add_serve(app: App) -> None:
    command(app, "serve", [*engine_options(), *speculation_options(), *server_options()])(serve)


def serve(values: dict[str, Any]) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    Without speculation options, the drafter that is shipped for the model drafts, or else ngram; --spec-tokens 0
    turns speculation off.
    """
    mine = {field.name: values.pop(field.name) for field in dataclasses.fields(ServerOptions)}
    environment = Environment.read()
    if environment.api_key is not None:
        mine["api_key"] = (*mine["api_key"], environment.api_key)
    options = ServerOptions(**mine)
    config = config_from(values, default_speculation(values))
    try:
        from draftloop.server.run import serve as run
    except ImportError as error:
        raise ConfigError(
            f"serving needs packages that are not installed ({error.name}): pip install 'draftloop[serve]'"
        ) from error
    run(config, options, log_level=environment.log_level)
