"""Drafts that mean nothing, accepted by coin: the engine's own cost, without a trained drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target
from draftloop.drafters.write import write_all
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Launch, Phase, rows_slot
from draftloop.kvcache.rows import RowState


class SyntheticDrafter(Drafter):
    """Proposes the bonus token again and again; how many are accepted is given."""

    name = "synthetic"
    forced_acceptance = True
    reuses_prefixes = True
    follows_load = True

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if spec.synthetic_acceptance_rates is None and spec.synthetic_acceptance_length is None:
            raise ConfigError(
                "speculative method 'synthetic' needs synthetic_acceptance_rates or synthetic_acceptance_length"
            )

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        def draft(launch: Launch, rows: Tensor) -> Mapping[str, Tensor]:
            last_R1 = (state.num_tokens_M[rows] - 1).long()[:, None]
            bonus_R1 = state.tokens_ML[rows].gather(1, last_R1)
            write_all(state, rows, bonus_R1.expand(-1, self.num_drafts))
            return {}

        rows = rows_slot(state.padding_row)
        return [Phase(name="synthetic.draft", fn=draft, slots={"rows": rows})]

    def rounds(self, *, sampled: bool) -> Rounds:
        return Rounds(first=("synthetic.draft",), next=("synthetic.draft",))
