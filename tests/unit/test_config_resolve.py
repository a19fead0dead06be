"""Every "auto" and every clash, settled by one pure function."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.config import EngineConfig, Facts, resolve
from draftloop.config.resolve import Resolved, dense_ladder, doubling_ladder, token_ladder
from draftloop.errors import ConfigError


def settle(settings: dict[str, Any] | None = None, **facts: Any) -> Resolved:
    known = {"cuda_available": False, "model_max_len": 8192, "model_dtype": "bfloat16"}
    return resolve(EngineConfig(**settings or {}), facts=Facts(**known | facts))


def test_defaults_on_a_cpu():
    got = settle()
    assert (got.device, got.dtype, got.graph_mode) == ("cpu", "float32", "FULL_DECODE_ONLY")
    assert (got.max_model_len, got.max_num_batched_tokens, got.block_size) == (8192, 256, 16)
    assert got.row_buckets == (1, 2, 4, 8, 16)
    assert got.token_buckets == (16, 32, 64, 128, 256)
    assert got.pipeline_depth == 1


def test_defaults_on_a_gpu():
    got = settle({"max_num_seqs": 50}, cuda_available=True)
    assert (got.device, got.dtype, got.graph_mode) == ("cuda", "bfloat16", "FULL_AND_PIECEWISE")
    assert got.max_num_batched_tokens == 2048
    assert got.row_buckets == (*range(1, 33), 40, 48, 50)
    assert got.token_buckets[-1] == 2048
    assert got.pipeline_depth == 2


def test_float32_checkpoint_keeps_its_type_on_a_gpu():
    assert settle(cuda_available=True, model_dtype="float32").dtype == "float32"


def test_every_auto_has_a_reason():
    got = settle()
    reasons = {choice.name: choice.reason for choice in got.choices}
    assert all(reasons.values())
    assert reasons["cudagraph_mode"] == "prompts gain nothing from a tape on a CPU"
    assert {"device", "dtype", "max_model_len", "max_num_batched_tokens", "block_size"} <= reasons.keys()


def test_what_the_user_gave_is_kept_and_needs_no_reason():
    settings = {
        "device": "cpu",
        "dtype": "bfloat16",
        "max_model_len": 100,
        "max_num_batched_tokens": 7,
        "block_size": 32,
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": (4, 2, 4),
        "async_scheduling": True,
    }
    got = settle(settings, cuda_available=True)
    assert (got.device, got.dtype, got.max_model_len, got.block_size) == ("cpu", "bfloat16", 100, 32)
    assert (got.graph_mode, got.row_buckets, got.token_buckets) == ("PIECEWISE", (2, 4), (7,))
    assert got.pipeline_depth == 2
    assert got.choices == ()


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        ({"device": "cuda"}, {}, "device is 'cuda', but there is no usable GPU"),
        ({"max_model_len": 9000}, {}, "max_model_len is 9000, above the model's own 8192"),
        ({"max_model_len": 4}, {"num_speculative_tokens": 4}, "num_speculative_tokens is 4, but .* 4 tokens"),
        ({"enforce_eager": True, "cudagraph_mode": "FULL"}, {}, "enforce_eager .*cudagraph_mode is 'FULL'"),
        ({"enforce_eager": True, "require_graphs": True}, {}, "enforce_eager .*require_graphs"),
        ({"cudagraph_mode": "NONE", "require_graphs": True}, {}, "cudagraph_mode is 'NONE', but require_graphs"),
        (
            {"cudagraph_capture_sizes": (1, 8), "require_graphs": True},
            {},
            "ends at 8, below max_num_seqs 16",
        ),
        ({"async_scheduling": True}, {"host_drafter": True}, "async_scheduling is set, but this drafter"),
    ],
)
def test_clashes_are_refused(settings, facts, message):
    with pytest.raises(ConfigError, match=message):
        settle(settings, **facts)


def test_enforce_eager_captures_nothing():
    assert settle({"enforce_eager": True}, cuda_available=True).graph_mode == "NONE"
    assert settle({"enforce_eager": True, "cudagraph_mode": "NONE"}).graph_mode == "NONE"


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("cuda", [True, False])
def test_the_mode_asked_for_is_the_mode_in_force(mode, cuda):
    assert settle({"cudagraph_mode": mode}, cuda_available=cuda).graph_mode == mode


def test_attention_that_waits_for_the_device_overlaps_nothing_unless_asked():
    got = settle(cuda_available=True, waiting_attention=True)
    assert got.pipeline_depth == 1
    assert any("waits for the device in every pass" in choice.reason for choice in got.choices)


def test_host_drafter_waits_for_each_step():
    got = settle(cuda_available=True, host_drafter=True)
    assert got.pipeline_depth == 1
    assert any(c.name == "pipeline_depth" and "host" in c.reason for c in got.choices)
    assert settle({"async_scheduling": False}, cuda_available=True).pipeline_depth == 1


def test_short_models_need_no_large_prefill_budget():
    assert settle({"max_model_len": 8, "max_num_seqs": 2}).max_num_batched_tokens == 16


@given(st.integers(1, 600))
def test_ladders_rise_and_reach_the_largest(most):
    for ladder in (dense_ladder(most), doubling_ladder(1, most), token_ladder(most)):
        assert ladder[-1] == most
        assert list(ladder) == sorted(set(ladder))
    assert dense_ladder(most)[: min(most, 32)] == tuple(range(1, min(most, 32) + 1))


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        ({"cudagraph_mode": "PIECEWISE"}, {}, "iteration_graph is set, but cudagraph_mode 'PIECEWISE' has no full gra"),
        ({}, {"host_drafter": True}, "iteration_graph is set, but this drafter works on the host between steps"),
    ],
)
def test_an_iteration_graph_that_cannot_be_is_refused(settings, facts, message):
    with pytest.raises(ConfigError, match=message):
        settle({"iteration_graph": True, **settings}, **facts)
