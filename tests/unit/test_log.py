"""The log goes to stderr, once, and stdout stays clean."""

from __future__ import annotations

import logging

import pytest

from draftloop.observability import log


@pytest.fixture
def root():
    logger = logging.getLogger(log.ROOT)
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers.clear()
    yield logger
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]


def test_setup_twice_logs_once(root, capsys):
    log.setup("INFO")
    log.setup("WARNING")
    logger = log.get_logger("draftloop.engine.core")
    logger.warning("low on pages")
    logger.info("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("WARNING draftloop.engine.core: low on pages\n")
