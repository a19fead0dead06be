"""Values that no request may have: parameter, value, and what the error says would fit. At least one of each parameter.

The Python API and the server are both held to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAN = float("nan")

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, ">= 0"),
    ("temperature", NAN, "finite"),
    ("top_p", 0, r"in \(0, 1\]"),
    ("top_k", -2, "0 or -1"),
    ("min_p", 1.5, r"in \[0, 1\]"),
    ("presence_penalty", 2.1, r"in \[-2, 2\]"),
    ("presence_penalty", "1", r"in \[-2, 2\]"),
    ("frequency_penalty", -3, r"in \[-2, 2\]"),
    ("frequency_penalty", NAN, r"in \[-2, 2\]"),
    ("repetition_penalty", 0, "above 0"),
    ("logit_bias", {-1: 2.0}, "ids >= 0"),
    ("logit_bias", {"x": 2.0}, "ids >= 0"),
    ("logit_bias", {5: 101}, r"in \[-100, 100\]"),
    ("logit_bias", [5], "a mapping"),
    ("allowed_token_ids", [], "token ids"),
    ("allowed_token_ids", [-4], "token ids"),
    ("bad_words", [""], "non-empty"),
    ("bad_words", [5], "non-empty"),
    ("min_tokens", -1, ">= 0"),
    ("min_tokens", 17, "at most max_tokens, 16"),
    ("seed", -1, r"in \[0"),
    ("n", 0, ">= 1"),
    ("n", 1.5, "integer"),
    ("max_tokens", 0, ">= 1"),
    ("logprobs", -1, ">= 0"),
    ("logprobs", True, ">= 0"),
    ("prompt_logprobs", -1, ">= 0"),
    ("truncate_prompt_tokens", 0, "or -1"),
    ("stop", [""], "non-empty"),
    ("stop_token_ids", [-1], ">= 0"),
    ("extra_args", 3, "a mapping"),
    ("speculative", 3, "a dict"),
    ("structured_outputs", 3, "a dict"),
    # what the device's 32 bits cannot hold
    ("top_k", 2**31, "at most"),
    ("max_tokens", 2**31, "at most"),
    ("stop_token_ids", [2**31], "token ids"),
    ("temperature", 1e300, "at most"),
    ("temperature", 10**400, "at most"),
    ("repetition_penalty", 1e300, "at most"),
    ("include_stop_str_in_output", "maybe", "true or false"),
    ("ignore_eos", 2, "true or false"),
    ("skip_special_tokens", "maybe", "true or false"),
    ("detokenize", None, "true or false"),
    ("stop", 5, "a text or a list"),
    ("allowed_token_ids", 7, "a list"),
    ("stop_token_ids", "ab", "a list"),
]


def leaves(value: Any) -> list[str]:
    """What an error must quote of a value, however it writes lists."""
    if isinstance(value, Mapping):
        return [leaf for pair in value.items() for leaf in leaves(list(pair))]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    return [str(value)]
