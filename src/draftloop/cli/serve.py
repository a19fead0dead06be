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
from draftloop.config import EngineConfig, Environment
from draftloop.config.fields import field_docs, field_types
from draftloop.errors import ConfigError
from draftloop.server.options import ServerOptions
from draftloop.server.replica_options import ReplicaOptions

_SERVER = Group.create_ordered("Server")
_REPLICAS = Group.create_ordered("Replicas")


def _options_of(cls: type, group: Group) -> list[inspect.Parameter]:
    docs, types_ = field_docs(cls), field_types(cls)
    return [
        make_option(field.name, types_[field.name], field.default, group, docs[field.name])
        for field in dataclasses.fields(cls)
    ]


def server_options() -> list[inspect.Parameter]:
    return _options_of(ServerOptions, _SERVER)


def add_serve(app: App) -> None:
    mine = [*server_options(), *_options_of(ReplicaOptions, _REPLICAS)]
    command(app, "serve", [*engine_options(), *speculation_options(), *mine])(serve)


def serve(values: dict[str, Any]) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    Without speculation options, the drafter that is shipped for the model drafts, or else ngram; --spec-tokens 0
    turns speculation off.
    """
    mine = {field.name: values.pop(field.name) for field in dataclasses.fields(ServerOptions)}
    replicas = ReplicaOptions(**{field.name: values.pop(field.name) for field in dataclasses.fields(ReplicaOptions)})
    environment = Environment.read()
    if environment.api_key is not None:
        mine["api_key"] = (*mine["api_key"], environment.api_key)
    options = ServerOptions(**mine)
    config = config_from(values, default_speculation(values))
    if replicas.ray:
        _serve_replicas(config, options, replicas, environment.log_level)
        return
    try:
        from draftloop.server.run import serve as run
    except ImportError as error:
        raise ConfigError(
            f"serving needs packages that are not installed ({error.name}): pip install 'draftloop[serve]'"
        ) from error
    run(config, options, log_level=environment.log_level)


def _serve_replicas(config: EngineConfig, options: ServerOptions, replicas: ReplicaOptions, log_level: str) -> None:
    try:
        from draftloop.server.ray_serve import serve_replicas
    except ImportError as error:
        raise ConfigError(
            f"replicas need packages that are not installed ({error.name}): pip install 'draftloop[ray]'"
        ) from error
    serve_replicas(config, options, replicas, log_level=log_level)
