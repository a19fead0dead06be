"""Every drafter as tests run it, over the tiny model unless it has a target of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from blocks import tiny_block
from draftloop.config import SpeculativeConfig
from draftloop.drafters.base import DRAFTERS, load_drafters
from gemma4 import gemma4_assistant
from heads import mtp_target, tiny_head
from helpers import _folder, near_draft, tiny_model
from medusa_heads import tiny_medusa
from parallel import tiny_pard, tiny_peagle


def repeat_suffix(request_id: str, token_ids: list[int], k: int) -> list[int]:
    """A script that is sometimes right, often wrong, and sometimes has nothing to say."""
    return [] if len(token_ids) % 5 == 0 else [token_ids[-2] if len(token_ids) > 1 else 0] * (1 + len(token_ids) % k)


def example_configs() -> Mapping[str, list[dict[str, Any]]]:
    """For every drafter, the configurations that its tests run. A new drafter adds a line here."""
    return {
        "ngram": [{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}],
        "draft_model": [
            {"method": "draft_model", "model": near_draft(), "num_speculative_tokens": 3},
            {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 2},
        ],
        "cascade": [
            {
                "method": "cascade",
                "drafters": [
                    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
                    {"method": "eagle3", "model": tiny_head("eagle3")},
                ],
                "num_speculative_tokens": 3,
            },
            {
                "method": "cascade",
                "drafters": [
                    {"method": "scripted", "script": repeat_suffix},
                    {"method": "medusa", "model": tiny_medusa("medusa")},
                ],
                "num_speculative_tokens": 3,
            },
        ],
        "dflash": [{"method": "dflash", "model": tiny_block("dflash"), "num_speculative_tokens": 3}],
        "dspark": [{"method": "dspark", "model": tiny_block("dspark", method="dspark"), "num_speculative_tokens": 3}],
        "eagle": [{"method": "eagle", "model": tiny_head("eagle", method="eagle"), "num_speculative_tokens": 3}],
        "eagle3": [
            {"method": "eagle3", "model": tiny_head("eagle3"), "num_speculative_tokens": 3},
            {
                "method": "eagle3",
                "model": tiny_head("eagle3"),
                "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]",
                "num_speculative_tokens": 9,
            },
        ],
        "extract_hidden_states": [
            {
                "method": "extract_hidden_states",
                "layer_ids": [0, 2],
                "output_dir": str(_folder() / "states"),
                "shard_tokens": 100,
                "num_speculative_tokens": 1,
            }
        ],
        "gemma4_mtp": [{"method": "gemma4_mtp", "model": gemma4_assistant(ordered=True), "num_speculative_tokens": 3}],
        "mtp": [{"method": "mtp", "model": mtp_target("deepseek", "", n), "num_speculative_tokens": 3} for n in (1, 2)],
        "medusa": [{"method": "medusa", "model": tiny_medusa("medusa"), "num_speculative_tokens": 3}],
        "pard": [{"method": "pard", "model": tiny_pard(), "num_speculative_tokens": 3}],
        "peagle": [{"method": "peagle", "model": tiny_peagle("peagle"), "num_speculative_tokens": 3}],
        "scripted": [{"method": "scripted", "script": repeat_suffix, "num_speculative_tokens": 3}],
        "suffix": [
            {"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_cached_requests": 0},
            {
                "method": "suffix",
                "num_speculative_tokens": 4,
                "suffix_decoding_max_tree_depth": 4,
                "suffix_decoding_max_cached_requests": 2,
                "suffix_decoding_max_spec_factor": 2.0,
                "suffix_decoding_min_token_prob": 0.0,
            },
        ],
        "synthetic": [{"method": "synthetic", "synthetic_acceptance_length": 2.5, "num_speculative_tokens": 3}],
    }


def each_drafter(*, only: Callable[[str, int], bool] = lambda name, index: True) -> list[ParameterSet]:
    """The examples as parameters `name` and `index`; `only` those of which it is true."""
    load_drafters()
    return [
        pytest.param(name, index, id=f"{name}-{index}" if index else name)
        for name in sorted(DRAFTERS)
        for index in range(len(example_configs().get(name, [0])))
        if only(name, index)
    ]


def remembers(name: str, index: int) -> bool:
    """Does this example of a drafter draft from earlier requests too?"""
    return _asked(name, index, "remembers")


def works_on_host(name: str, index: int) -> bool:
    """Does this example of a drafter need each step's tokens on the host?"""
    return _asked(name, index, "needs_host")


def reuses_prefixes(name: str, index: int) -> bool:
    """Does what is found of earlier prompts serve this example of a drafter too?"""
    return _asked(name, index, "can_reuse_prefixes")


def _asked(name: str, index: int, what: str) -> bool:
    """False of a drafter without an example, about which a test complains."""
    examples = example_configs().get(name)
    return examples is not None and getattr(DRAFTERS[name], what)(SpeculativeConfig.from_mapping(examples[index]))
