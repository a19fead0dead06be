"""A drafter from outside of draftloop, in one file: text that repeats itself with a fixed period, as tables do.

Its package makes it known by an entry point in pyproject.toml:

    [project.entry-points."draftloop.drafters"]
    period = "my_drafter:PeriodDrafter"

Then it is a method like any other, captured into graphs like any other:

    LLM(.., speculative_config={"method": "period", "num_speculative_tokens": 4, "drafter_options": {"period": 12}})
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


class PeriodDrafter(Drafter):
    """Drafts what stood one period before; nothing for rows that are shorter. Shape suffixes: R rows, K drafts."""

    name = "period"
    options = frozenset({"drafter_options"})
    reuses_prefixes = True  # all that it knows of a row is in the row state
    follows_load = True  # and it keeps nothing from step to step

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        given = dict(spec.drafter_options or {})
        self.period = given.pop("period", None)
        if given:
            raise ConfigError(f"drafter_options has {', '.join(map(repr, given))}; 'period' takes 'period' alone")
        if not isinstance(self.period, int) or self.period < self.num_drafts:
            raise ConfigError(f"drafter_options has period {self.period!r}; it must be an int >= {self.num_drafts}")

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        index_K = torch.arange(self.num_drafts, device=self.target.device)

        def draft(launch: Launch, rows: Tensor) -> Mapping[str, Tensor]:
            # all of it on the device, and nothing of its shape depends on a value: so it can be captured
            places_RK = state.num_tokens_M[rows][:, None] - self.period + index_K
            drafts_RK = state.tokens_ML[rows].gather(1, places_RK.clamp(min=0).long())
            write_all(state, rows, torch.where(places_RK >= 0, drafts_RK, NO_DRAFT))
            return {}

        rows = rows_slot(state.padding_row)
        return [Phase(name="period.draft", fn=draft, slots={"rows": rows})]

    def rounds(self, *, sampled: bool) -> Rounds:
        return Rounds(first=("period.draft",), next=("period.draft",))
