"""What the requests of a steady batch ask for, so that sampled iterations can be held against greedy ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from draftloop.request import SamplingParams


class SamplingMix(StrEnum):
    """Who asks for what."""

    GREEDY = "greedy"
    """Nobody for anything."""
    SAMPLED = "sampled"
    """All requests for temperature 1."""
    ALL_PARAMETERS_HALF = "all-parameters-half"
    """Every second request for every parameter that needs neither a tokenizer nor the host in each step."""

    def params(self, index: int, *, max_tokens: int, vocab_size: int) -> SamplingParams:
        """Of the batch's request number `index`; none of them ends early."""
        asked: dict[str, Any] = {"temperature": 0.0}
        if self is SamplingMix.SAMPLED:
            asked = {"temperature": 1.0, "seed": index}
        elif self is SamplingMix.ALL_PARAMETERS_HALF and index % 2 == 0:
            asked = {
                "temperature": 0.8,
                "top_k": 50,
                "top_p": 0.95,
                "min_p": 0.01,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "repetition_penalty": 1.1,
                "logit_bias": dict.fromkeys(range(0, vocab_size, -(-vocab_size // 300)), 1.0),
                "allowed_token_ids": list(range(vocab_size // 2)),
                "min_tokens": max_tokens,
                "seed": index,
            }
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **asked)
