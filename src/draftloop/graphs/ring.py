"""The ring through which a device loop passes its iterations to the host, while it runs.

Host and device share pinned memory and tell each other how far they are; reading takes no CUDA call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING_SLOTS = 64
"""Iterations that the device may be ahead of the host. Not a limit of a loop's length."""

SPIN_S, SLEEP_S, CHECK_S = 20e-6, 50e-6, 20e-3
"""How long a wait spins, then sleeps between looks, and how often it asks whether the loop is alive."""


class Word(IntEnum):
    """Places in the words that both sides share. Host's and device's are on cache lines of their own."""

    READ = 0
    """Host: iterations taken out of the ring."""
    INTERRUPT = 1
    """Host: the launch that is to stop; 0 is none."""
    LAUNCH = 2
    """Host: number of this launch, counted from 1."""
    LIMIT = 3
    """Host: the launch ends once this many iterations are published."""
    PUBLISHED = 8
    """Device: iterations put into the ring, over all launches."""


class Stop(IntEnum):
    """Why a loop ended with an iteration, the first reason that holds; NONE where it went on."""

    NONE = 0
    ROW_ENDED = 1
    """A row came to a stop id or its length limit."""
    INTERRUPTED = 2
    COUNT = 3
    """It has made as many iterations as it was launched for."""
    RING_FULL = 4
    """The next iteration would overwrite one that the host has not read."""


class Ring:
    """`num_slots` iterations of [rows, width] int32 each, and the words that both sides share.

    One loop runs at a time, and the next is launched when all that the last one published is read.
    """

    def __init__(self, rows: int, width: int, *, device: torch.device, num_slots: int = RING_SLOTS) -> None:
        pinned = device.type == "cuda"
        self.rows, self.width, self.num_slots = rows, width, num_slots
        self.words_W = torch.zeros(16, dtype=torch.int64, pin_memory=pinned)
        slot_size = -(-(1 + rows * width) // 16) * 16  # whole cache lines
        self.slots_NS = torch.zeros(num_slots, slot_size, dtype=torch.int32, pin_memory=pinned)
        self.number: Tensor = torch.zeros(1, dtype=torch.int64, device=device)
        """The device's own count of published iterations."""
        self._words: NDArray[np.int64] = self.words_W.numpy()
        self._slots: NDArray[np.int32] = self.slots_NS.numpy()

    # ---- host -------------------------------------------------------------------------------

    def begin(self, max_iterations: int) -> None:
        """Say what the loop that is launched next may do."""
        words = self._words
        assert words[Word.READ] == words[Word.PUBLISHED], "a loop is launched while another one's iterations wait"
        words[Word.LIMIT] = words[Word.PUBLISHED] + max_iterations
        words[Word.LAUNCH] += 1

    def interrupt(self) -> None:
        """End the running loop after the iteration that it is in. No later launch is touched."""
        self._words[Word.INTERRUPT] = self._words[Word.LAUNCH]

    @property
    def published(self) -> int:
        """Iterations that loops have made, whether read or not."""
        return int(self._words[Word.PUBLISHED])

    def take(self, failure: Callable[[], BaseException | None]) -> tuple[Stop, NDArray[np.int32]]:
        """Wait for the next iteration: why the loop ended with it, and a copy of its [rows, width].

        `failure` says why no more iterations will come, None while they may. It is raised.
        """
        read = int(self._words[Word.READ])
        begin = checked = time.perf_counter()
        while self._words[Word.PUBLISHED] == read:
            now = time.perf_counter()
            if now - checked > CHECK_S:
                checked, error = now, failure()
                if error is not None and self._words[Word.PUBLISHED] == read:
                    raise error
            if now - begin > SPIN_S:
                time.sleep(SLEEP_S)
        slot = self._slots[read % self.num_slots].copy()
        self._words[Word.READ] = read + 1
        return Stop(slot[0]), slot[1 : 1 + self.rows * self.width].reshape(self.rows, self.width)

    # ---- the device's side, on a CPU --------------------------------------------------------

    def publish(self, outcome_RW: NDArray[np.int32], *, row_ended: bool) -> Stop:
        """Pass an iteration to the host and decide whether another one follows; `next_iteration` of loop.cu."""
        words, index = self._words, int(self._words[Word.PUBLISHED])
        slot = self._slots[index % self.num_slots]
        slot[1 : 1 + outcome_RW.size] = outcome_RW.reshape(-1)
        if row_ended:
            reason = Stop.ROW_ENDED
        elif words[Word.INTERRUPT] >= words[Word.LAUNCH]:
            reason = Stop.INTERRUPTED
        elif index + 1 >= words[Word.LIMIT]:
            reason = Stop.COUNT
        elif index + 1 - words[Word.READ] >= self.num_slots:
            reason = Stop.RING_FULL
        else:
            reason = Stop.NONE
        slot[0] = reason
        words[Word.PUBLISHED] = index + 1
        return reason
