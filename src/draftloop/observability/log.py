"""Logging: one logger tree, to stderr, so that stdout holds nothing but answers."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

ROOT = "draftloop"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is its `__name__`."""
    return logging.getLogger(name)


def setup(level: str = "INFO", format: str = "text") -> None:
    """Send draftloop's log to stderr. For programs that own the process; a library leaves logging alone.

    `format` is "text", or "json": an object on each line, which holds the fields that a message brings (`extra`).
    """
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        handler.setFormatter(JsonFormatter() if format == "json" else text)
        logger.addHandler(handler)
        logger.propagate = False


_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, exception, and what `extra` holds."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is now, so that redirecting it works after setup too."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
