"""The log goes to stderr, once, and stdout stays clean."""

from __future__ import annotations

from draftloop.observability import log


def test_setup_twice_logs_once(capsys):
    log.setup("INFO")
    log.setup("WARNING")
    logger = log.get_logger("draftloop.engine.core")
    logger.warning("low on pages")
    logger.info("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("WARNING draftloop.engine.core: low on pages\n")
