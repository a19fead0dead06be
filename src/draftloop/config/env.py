"""Every environment variable that draftloop reads, in one table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from draftloop.errors import ConfigError, nearest

PREFIX = "DRAFTLOOP_"

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The `DRAFTLOOP_*` variables, typed. A field's variable is its name in capitals with the prefix."""

    log_level: LogLevel = "INFO"
    """How much is logged to stderr: DEBUG, INFO, WARNING or ERROR."""
    log_format: LogFormat = "text"
    """How a line of the log looks: text, or json, an object on each line."""
    cache_root: Path
    """Folder of converted models; by default draftloop/ in the user's cache folder."""
    api_key: str | None = None
    """Key that clients of `draftloop serve` must send, beside those of --api-key."""
    poison: bool = False
    """Fill padding, free pages and graph-owned memory with NaN before every replay (tests)."""
    nvtx: bool = False
    """Name every step and phase for nsys, as NVTX ranges."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read the process environment. Raises ConfigError for an unknown variable or a value that does not fit."""
        environ = os.environ if environ is None else environ
        known = [PREFIX + name.upper() for name in cls.__dataclass_fields__]
        for name in sorted(environ):
            if name.startswith(PREFIX) and name not in known:
                raise ConfigError(f"unknown environment variable {name!r}{nearest(name, known)}")
        # An empty variable counts as unset, as in most shells' scripts.
        given = {name: environ[name] for name in known if environ.get(name)}
        level = given.get(PREFIX + "LOG_LEVEL", "INFO").upper()
        if level not in get_args(LogLevel):
            raise ConfigError(f"{PREFIX}LOG_LEVEL is {level!r}; it must be one of {', '.join(get_args(LogLevel))}")
        log_format = given.get(PREFIX + "LOG_FORMAT", "text").lower()
        if log_format not in get_args(LogFormat):
            raise ConfigError(
                f"{PREFIX}LOG_FORMAT is {log_format!r}; it must be one of {', '.join(get_args(LogFormat))}"
            )
        root = given.get(PREFIX + "CACHE_ROOT")
        return cls(
            log_level=level,  # pyrefly: ignore[bad-argument-type]
            log_format=log_format,  # pyrefly: ignore[bad-argument-type]
            cache_root=Path(root).expanduser() if root else _user_cache(environ) / "draftloop",
            api_key=given.get(PREFIX + "API_KEY"),
            poison=_flag(given, "POISON"),
            nvtx=_flag(given, "NVTX"),
        )


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(PREFIX + name, "0").lower()
    if value not in ("0", "1", "false", "true"):
        raise ConfigError(f"{PREFIX}{name} is {value!r}; it must be 0 or 1")
    return value in ("1", "true")


def _user_cache(environ: Mapping[str, str]) -> Path:
    if folder := environ.get("XDG_CACHE_HOME"):
        return Path(folder)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user of a number alone, as containers have them
        raise ConfigError(f"this user has no home directory to keep models in; set {PREFIX}CACHE_ROOT") from None
