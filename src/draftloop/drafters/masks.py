"""Drafting in parallel: behind a row's new tokens stand masks, and each is drafted where it stands, in one pass.

A row has 1 to 1 + K new tokens, and needs K - 1 masks behind the last of them. The pass has 2K slots for every row:
the new tokens, and masks in all others. Attention is causal, so masks too many change nothing; the keys and values
that masks leave are written over by the next pass, which starts at the first token that is new by then.

Shape suffixes: R rows, S slots of each, N = R * K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.errors import ConfigError

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where engines look for it in config.json, in this order."""


def mask_token(config: Mapping[str, Any], num_embedded: int, *, name: str) -> int:
    """The id of a checkpoint's mask. Raises ConfigError where it names none, or one that it does not embed."""
    found = next(((key, config[key]) for key in _MASK_KEYS if config.get(key) is not None), None)
    if found is None:
        raise ConfigError(
            f"{name!r} does not say which token is its mask: config.json has none of {', '.join(_MASK_KEYS)}; it was "
            "not trained to draft in parallel, or the export is incomplete"
        )
    key, token = found
    if not 0 <= token < num_embedded:
        raise ConfigError(f"{key} of {name!r} is {token}, but it embeds ids 0 to {num_embedded - 1}")
    return int(token)


def num_slots(num_drafts: int) -> int:
    """S: all that the pass runs for one row."""
    return 2 * num_drafts


class MaskedBlock(NamedTuple):
    masked_RS: Tensor
    """bool"""
    drafting_N: Tensor
    """int64: the slots that draft, among all R * S: the last new token's, and those of the masks behind it."""


def masked_block(num_new_R: Tensor, num_drafts: int, num_slots: int) -> MaskedBlock:
    """Which slots hold masks, where the first `num_new_R` of a row's are its new tokens. Those of padding are free."""
    num_new_R1 = num_new_R.long().clamp(1, num_slots - num_drafts + 1)[:, None]
    index_S = torch.arange(num_slots, device=num_new_R.device)
    starts_R1 = torch.arange(num_new_R.shape[0], device=num_new_R.device)[:, None] * num_slots
    return MaskedBlock(
        masked_RS=index_S >= num_new_R1, drafting_N=(starts_R1 + num_new_R1 - 1 + index_S[:num_drafts]).flatten()
    )
