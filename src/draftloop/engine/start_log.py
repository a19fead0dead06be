"""What a start says: what was chosen and why, memory, drafter, graphs, and how long each part took."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from draftloop.config.engine import EngineConfig
from draftloop.scheduler.drafting import describe

if TYPE_CHECKING:
    from draftloop.engine.build import Engine

logger = logging.getLogger(__name__)


class Clock:
    """Seconds of each part, with what else there is to say of it in `notes`."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{name} {s:.1f} s{self.notes.get(name, '')}" for name, s in self.laps.items())


def log_start(config: EngineConfig, engine: Engine, clock: Clock) -> None:
    for choice in engine.resolved.choices:
        logger.info("%s = %s: %s", choice.name, choice.value, choice.reason)
    pool = engine.pool
    tokens = (pool.num_pages - 1) * pool.page_size
    when = " as they are used" if engine.memory.device.type == "cpu" else ""
    logger.info("cache: %d pages, %d tokens, %.0f MiB%s", pool.num_pages - 1, tokens, pool.nbytes / 2**20, when)
    for window in pool.windows:
        if window is not None:
            pages = pool.num_pages_of(window) - 1
            logger.info("cache: of them %d pages for layers that see %d tokens, and keep no more", pages, window)
    logger.info("memory: %s", engine.memory.format())
    engine.memory.check()
    logger.info("drafter: %s", engine.drafter.describe() if engine.drafter else "none")
    if len(engine.core.scheduler.drafting.counts) > 1:
        logger.info("drafts per step: %s", describe(engine.core.scheduler.drafting))
    if config.speculation and config.speculation.rejection_sample_method == "typical":
        logger.warning(
            "acceptance: typical, which is LOSSY: text at temperatures above 0 does not have the model's distribution"
        )
    logger.info("graphs: %s", engine.table.report().at_start())
    logger.info("start-up: %s", clock)
