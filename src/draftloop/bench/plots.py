"""Pictures beside the numbers."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def pyplot() -> Any | None:
    """matplotlib, drawing to files; None, and a word about it, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("no picture is drawn: that needs matplotlib; pip install 'draftloop[bench]'")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
