"""Settings are checked where they are given; each error says key, value and what would fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from draftloop.config import EngineConfig, SpeculativeConfig
from draftloop.config.fields import field_docs
from draftloop.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_sequences": 3}, "unknown engine setting 'max_num_sequences'; did you mean 'max_num_seqs'?"),
        ({"zzz": 3}, "unknown engine setting 'zzz'; known: model, "),
        ({"seed": "1"}, "seed is '1'; it must be an integer"),
        ({"seed": -1}, r"seed is -1; it must be in \[0, 2\*\*63\)"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be an integer >= 1"),
        ({"max_prefill_rows": 0}, "max_prefill_rows is 0; it must be an integer >= 1"),
        (
            {"min_prefill_rows": 17},
            r"min_prefill_rows is 17; it must be in \[1, 16\], what max_prefill_rows and max_num_seqs",
        ),
        ({"max_model_len": 0}, "max_model_len is 0; it must be an integer >= 1"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens is -5; it must be an integer >= 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0; it must be an integer >= 1"),
        ({"block_size": 8}, "block_size is 8; it must be 16, 32 or 64"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization is 1.5; it must be in \(0, 1\]"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan; it must be a finite number"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; it must be one of 'auto', 'float32', 'bfloat16', 'float16'"),
        ({"device": "tpu"}, "device is 'tpu'; it must be one of 'auto', 'cpu', 'cuda'"),
        ({"cudagraph_mode": "full"}, "cudagraph_mode is 'full'; it must be one of 'auto', 'NONE', 'PIECEWISE'"),
        ({"load_format": "gguf"}, "load_format is 'gguf'; it must be one of"),
        ({"model": ""}, "model is ''; it must be a hub id"),
        ({"model": 3}, "model is 3; it must be a text"),
        ({"enforce_eager": 1}, "enforce_eager is 1; it must be true or false"),
        ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes is .*at least one row count"),
        ({"cudagraph_capture_sizes": [0, 1]}, r"cudagraph_capture_sizes is \(0, 1\); it must be .*>= 1"),
        ({"cudagraph_capture_sizes": [1, 64]}, r"is \(1, 64\); .*up to max_num_seqs, 16 \(the unit is rows"),
        ({"cudagraph_capture_sizes": [1, "a"]}, "it must be a list, each of it an integer"),
        ({"cudagraph_capture_sizes": "1,2"}, "it must be a list, each of it an integer"),
        ({"speculative_config": 3}, "speculative_config is 3; it must be a mapping"),
    ],
)
def test_engine_setting_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_mapping(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ngram", "num_spec_tokens": 3}, "'num_spec_tokens'; did you mean 'num_speculative_tokens'?"),
        ({"method": 3}, "speculative_config key method is 3; it must be a text"),
        ({"method": "ngram", "num_speculative_tokens": -1}, r"num_speculative_tokens is -1; it must be in \[0, 32\]"),
        ({"method": "ngram", "num_speculative_tokens": 33}, r"num_speculative_tokens is 33; it must be in \[0, 32\]"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0; it must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": "2"}, "num_speculative_tokens is '2'; it must be an integer"),
        ({}, "neither a method nor a model"),
        ({"num_speculative_tokens": 3}, "neither a method nor a model"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min is 0; it must be an integer >= 1"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "at most prompt_lookup_max, 2"),
        ({"method": "x", "max_model_len": 0}, "max_model_len is 0; it must be an integer >= 1"),
        ({"method": "x", "draft_sample_method": "random"}, "must be one of 'greedy', 'probabilistic'"),
        (
            {"method": "x", "rejection_sample_method": "usual"},
            "must be one of 'standard', 'block', 'typical', 'synthetic'",
        ),
        ({"method": "scripted", "script": "fn"}, "script is 'fn'; it must be a function"),
        (
            {"method": "synthetic", "synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5},
            "both synthetic_acceptance_rates and synthetic_acceptance_length; leave one out",
        ),
        ({"method": "synthetic", "synthetic_acceptance_rates": [1.5]}, r"list of numbers in \[0, 1\]"),
        ({"method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6]}, "a list that never rises"),
        ({"method": "synthetic", "synthetic_acceptance_rates": "high"}, "a list, each of it a finite number"),
        (
            {"method": "synthetic", "synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2},
            "one number per speculative token, 2",
        ),
        (
            {"method": "synthetic", "synthetic_acceptance_length": 4.5, "num_speculative_tokens": 3},
            r"synthetic_acceptance_length is 4.5; .*here \[1, 4\]",
        ),
        ({"method": "synthetic", "synthetic_acceptance_length": 0.5}, r"here \[1, 33\]"),
    ],
)
def test_speculative_key_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_mapping(values)
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_mapping(speculative_config=values)


def test_no_speculation_and_zero_tokens_are_the_same():
    assert SpeculativeConfig.from_mapping(None) is None
    assert EngineConfig().speculation is None
    assert EngineConfig.from_mapping(speculative_config={"num_speculative_tokens": 0}).speculation is None
    assert (
        EngineConfig.from_mapping(speculative_config={"method": "ngram", "num_speculative_tokens": 0}).speculation
        is None
    )


@pytest.mark.parametrize("k", [1, 32])
def test_limits_of_k_are_allowed(k):
    config = EngineConfig.from_mapping(speculative_config={"method": "ngram", "num_speculative_tokens": k})
    assert config.speculation is not None
    assert config.speculation.num_speculative_tokens == k


def test_natural_python_values_are_taken(tmp_path: Path):
    import torch

    config = EngineConfig.from_mapping(
        model=tmp_path,
        dtype=torch.bfloat16,
        cudagraph_capture_sizes=[4, 1],
        gpu_memory_utilization=1,
        speculative_config={"method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5]},
    )
    assert config.model == str(tmp_path)
    assert config.dtype == "bfloat16"
    assert config.cudagraph_capture_sizes == (4, 1)
    assert config.speculative_config is not None
    assert config.speculative_config.synthetic_acceptance_rates == (0.9, 0.5)
    script = SpeculativeConfig(method="scripted", script=lambda request_id, token_ids, k: [])
    assert EngineConfig(speculative_config=script).speculation is script


@pytest.mark.parametrize("cls", [EngineConfig, SpeculativeConfig])
def test_configs_are_frozen_keyword_only_and_documented(cls):
    assert cls.__dataclass_params__.frozen
    for field in dataclasses.fields(cls):
        assert field.kw_only
        assert field_docs(cls).get(field.name, "").endswith((".", ";", "'.")), f"{field.name} has no docstring"
