"""Progress of long work: a bar on a terminal, and where there is none a line of the log every minute."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from draftloop.observability.log import get_logger

logger = get_logger(__name__)

LINE_S = 60.0


class _Lines(tqdm):
    """What the bar would show, as lines of the log."""

    shown: float = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.n > max(self.initial, self.shown):
            self.shown = self.n
            logger.info("%s", str(self))


def progress_bar(
    items: Iterable[Any] | None = None, *, description: str, show: bool | None = None, **options: Any
) -> tqdm:
    """Passes `items` on and counts them, or is told by `update`. Options are tqdm's: `total`, `unit` and so on.

    `show` True: a bar wherever this runs; False: nothing.
    """
    if show is None and not sys.stderr.isatty():
        return _Lines(items, desc=description, mininterval=LINE_S, file=io.StringIO(), ascii=True, **options)
    return tqdm(items, desc=description, disable=show is False, **options)
