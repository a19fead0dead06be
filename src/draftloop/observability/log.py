"""Logging: one logger tree, to stderr, so that stdout holds nothing but answers."""

from __future__ import annotations

import logging
import sys

ROOT = "draftloop"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is its `__name__`."""
    return logging.getLogger(name)


def setup(level: str = "INFO") -> None:
    """Send draftloop's log to stderr. For programs that own the process; a library leaves logging alone."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is now, so that redirecting it works after setup too."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
