"""Prompt lookup: what followed the last time these tokens stood here.

Source: Saxena, "Prompt Lookup Decoding", 2023. Everything runs on the device.

Shape suffixes: R rows, L sequence length, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target
from draftloop.drafters.write import write_all
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Launch, Phase, rows_slot
from draftloop.kvcache.rows import NO_DRAFT, RowState


def lookup(tokens_RL: Tensor, num_tokens_R: Tensor, num_drafts: int, shortest: int, longest: int) -> Tensor:
    """int32 [R, K]: tokens after an earlier occurrence of each row's longest matching suffix.

    Suffixes of `longest` down to `shortest` tokens are tried; NO_DRAFT where nothing matches and
    past the end of what is known.
    """
    length = tokens_RL.shape[1]
    end_R1 = num_tokens_R[:, None].long()
    index_L = torch.arange(length, device=tokens_RL.device)
    # run_RL[r, i]: how many tokens ending before position i equal the tokens ending the sequence
    run_RL = torch.zeros_like(tokens_RL)
    all_RL = torch.ones_like(tokens_RL)
    for back in range(1, longest + 1):
        suffix_R1 = tokens_RL.gather(1, (end_R1 - back).clamp(min=0))
        same_RL = (tokens_RL == suffix_R1) & (index_L < end_R1)
        # token at i - back must equal the suffix's token at end - back
        shifted_RL = torch.nn.functional.pad(same_RL, (back, 0))[:, :length]
        all_RL = all_RL * shifted_RL
        run_RL = run_RL + all_RL
    # a match must be followed by a known token, so it may not be the suffix itself
    usable_RL = (run_RL >= shortest) & (index_L < end_R1)
    # the longest match wins, then the one with more to copy, then the most recent
    copies_RL = (end_R1 - index_L).clamp(max=num_drafts)
    score_RL = (run_RL.long() * (num_drafts + 1) + copies_RL) * length + index_L
    score_RL = torch.where(usable_RL, score_RL, -1)
    best_R1, start_R1 = score_RL.max(1, keepdim=True)
    places_RK = start_R1 + torch.arange(num_drafts, device=tokens_RL.device)
    found_RK = (best_R1 >= 0) & (places_RK < end_R1)
    return torch.where(found_RK, tokens_RL.gather(1, places_RK.clamp(max=length - 1)), NO_DRAFT).int()


class NgramDrafter(Drafter):
    """Copies from the row's own tokens; costs nearly nothing and needs no model."""

    name = "ngram"
    options = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
    reuses_prefixes = True
    follows_load = True

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self.longest = spec.prompt_lookup_max or max(spec.prompt_lookup_min or 0, 4)
        self.shortest = spec.prompt_lookup_min or min(2, self.longest)
        if self.longest >= target.max_model_len:
            raise ConfigError(
                f"prompt_lookup_max is {self.longest}, but sequences have at most {target.max_model_len} tokens"
            )

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        def draft(launch: Launch, rows: Tensor) -> Mapping[str, Tensor]:
            found_RK = lookup(
                state.tokens_ML[rows], state.num_tokens_M[rows], self.num_drafts, self.shortest, self.longest
            )
            write_all(state, rows, found_RK)
            return {}

        rows = rows_slot(state.padding_row)
        return [Phase(name="ngram.draft", fn=draft, slots={"rows": rows})]

    def rounds(self, *, sampled: bool) -> Rounds:
        return Rounds(first=("ngram.draft",), next=("ngram.draft",))
