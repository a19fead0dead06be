"""The number of drafts under load: requests come and go on a simulated H200, the engine's own code decides."""

from __future__ import annotations

import functools
from statistics import mean

import pytest

from simulated_device import LOADS, MEASURED, adaptive, fixed, speeds


@functools.cache
def fixed_speeds(count: int) -> list[float]:
    return speeds(fixed(count))


@functools.cache
def adaptive_speeds() -> list[float]:
    return speeds(adaptive())


@pytest.mark.parametrize("count", MEASURED)
def test_the_simulation_gives_what_was_measured(count):
    ratios = [speed / measured for speed, measured in zip(fixed_speeds(count), MEASURED[count], strict=True)]
    assert mean(abs(ratio - 1) for ratio in ratios) < 0.025, ratios
    assert max(abs(ratio - 1) for ratio in ratios) < 0.04, ratios


def test_adaptive_is_nearly_as_fast_as_the_best_at_every_load():
    best = [max(column) for column in zip(*map(fixed_speeds, MEASURED), strict=True)]
    ratios = {load: mine / its for load, mine, its in zip(LOADS, adaptive_speeds(), best, strict=True)}
    assert min(ratios.values()) >= 0.98, ratios


def test_adaptive_is_faster_than_every_fixed_number_over_the_mix():
    """As many requests at each load."""

    def over_the_mix(speeds: list[float]) -> float:
        return 1 / mean(1 / speed for speed in speeds)

    assert over_the_mix(adaptive_speeds()) > max(over_the_mix(fixed_speeds(count)) for count in MEASURED)
