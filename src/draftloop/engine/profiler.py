"""Chrome traces of an engine's steps, begun and ended while it serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from draftloop.engine.build import Engine
from draftloop.engine.ranges import name_steps
from draftloop.errors import RequestError
from draftloop.observability import log

MAX_S = 60.0
"""A trace that nobody ends is written then: it grows by some 10 kB a step."""

logger = log.get_logger(__name__)


class StepProfiler:
    """Records steps with their phases by name. The host launches each of them meanwhile: no profiler sees into a
    device loop."""

    def __init__(self, engine: Engine) -> None:
        self._core = engine.core
        self._profile: profile | None = None
        self._folder = Path()
        self._begin = 0.0
        self._undo: list[Callable[[], None]] = []
        self._last: str | None = None
        """File of a trace that came to its limit, and that nobody was told of."""

    def start(self, folder: Path) -> None:
        """Record from the next step on. Raises RequestError where it does already, OSError for a wrong folder."""
        if self._profile is not None:
            raise RequestError("a profile is being recorded already; stop it first")
        folder.mkdir(parents=True, exist_ok=True)
        worker = self._core.worker
        is_cuda = worker.device.type == "cuda"
        loop, worker.loop = worker.loop, None
        self._undo = [name_steps(self._core, record_function), lambda: setattr(worker, "loop", loop)]
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])], acc_events=True
        )
        self._profile.start()
        self._folder, self._begin, self._last = folder, time.monotonic(), None

    def stepped(self) -> None:
        """A step has ended."""
        if self._profile is None or time.monotonic() - self._begin <= MAX_S:
            return
        try:
            self._last = self.stop()
        except OSError as error:  # nobody has asked, and requests go on
            logger.error("the profile has come to its limit of %.0f s and cannot be written: %s", MAX_S, error)
            return
        logger.warning("the profile has come to its limit of %.0f s: %s", MAX_S, self._last)

    def stop(self) -> str:
        """Write the trace; the name of its file. Raises RequestError if there is none."""
        if self._profile is None:
            last, self._last = self._last, None
            if last is None:
                raise RequestError("no profile is being recorded; start one first")
            return last
        recorded, self._profile = self._profile, None
        for undo in self._undo:
            undo()
        if self._core.worker.device.type == "cuda":
            torch.cuda.synchronize()
        recorded.stop()
        name = f"draftloop-{datetime.now():%Y%m%d-%H%M%S-%f}.json.gz"
        recorded.export_chrome_trace(str(self._folder / name))
        return name

    def close(self) -> None:
        """Drop what is being recorded."""
        if self._profile is not None:
            self._profile.stop()
