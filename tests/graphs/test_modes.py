"""Which mode a phase runs in: what was asked for, or less; never more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_phases import block_phase, modes, ragged_phase

from draftloop.graphs.phase import ALL_MODES, GraphMode, ModeSetting, settle_mode
from helpers import make_table

TABLE = {
    # setting: (uniform, ragged, uniform but FULL or nothing, ragged without FULL, nothing at all)
    "NONE": ("NONE", "NONE", "NONE", "NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE", "NONE", "PIECEWISE", "NONE"),
    "FULL": ("FULL", "FULL", "FULL", "NONE", "NONE"),
    "FULL_DECODE_ONLY": ("FULL", "NONE", "FULL", "NONE", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE", "FULL", "PIECEWISE", "NONE"),
}

PHASES = (
    block_phase("uniform"),
    ragged_phase("ragged"),
    block_phase("chain", 1, modes=modes("NONE", "FULL"), reason="one token per row"),
    ragged_phase("lengths_on_host", modes=modes("NONE", "PIECEWISE"), reason="lengths are planned on the host"),
    block_phase("host", 1, modes=modes("NONE"), reason="it runs on the host"),
)


@pytest.mark.parametrize("setting", TABLE)
def test_each_setting_means_what_the_table_says(setting):
    assert tuple(settle_mode(phase, ModeSetting(setting))[0].value for phase in PHASES) == TABLE[setting]


def test_all_settings_are_in_the_table():
    assert set(TABLE) == {setting.value for setting in ModeSetting}


@pytest.mark.parametrize("setting", TABLE)
def test_what_does_not_run_as_a_graph_has_a_reason(setting):
    for phase in PHASES:
        mode, reason = settle_mode(phase, ModeSetting(setting))
        if mode is GraphMode.NONE:
            assert reason, phase.name
        if setting != "NONE" and phase.name == "host":
            assert reason == "it runs on the host" or setting in reason


@given(
    setting=st.sampled_from(list(ModeSetting)),
    allowed=st.sets(st.sampled_from(list(GraphMode)), min_size=1),
    ragged=st.booleans(),
)
def test_a_mode_is_never_widened(setting, allowed, ragged):
    make = ragged_phase if ragged else block_phase
    mode, _ = settle_mode(make("phase", modes=frozenset(allowed)), setting)
    named = set(setting.value.replace("_DECODE_ONLY", "").split("_AND_")) | {"NONE"}
    assert mode.value in named, "a mode that the setting does not name"
    assert mode is GraphMode.NONE or mode in allowed, "a mode that the phase does not allow"
    if setting is ModeSetting.FULL_DECODE_ONLY and ragged:
        assert mode is GraphMode.NONE, "FULL_DECODE_ONLY became FULL"
    if ragged and setting is ModeSetting.FULL_AND_PIECEWISE:
        assert mode is not GraphMode.FULL


@pytest.mark.parametrize("setting", ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL"])
def test_a_decode_phase_is_full_or_nothing(setting):
    """Piecewise pads tokens but not rows: a backend with one token per row would read past its metadata."""
    table = make_table(
        [block_phase("chain", 1, modes=modes("NONE", "FULL"), reason="one token per row")], setting=setting
    )
    found = {key.mode for key in table.keys()}  # noqa: SIM118  not a dict
    assert found == ({GraphMode.FULL} if setting != "PIECEWISE" else set())
    if setting == "PIECEWISE":
        (row,) = table.report().rows
        assert (row.captured, row.mode, row.reason) == (False, "NONE", "one token per row")


def test_modes_default_to_everything():
    assert block_phase().modes == ALL_MODES == frozenset(GraphMode)
