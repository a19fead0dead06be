"""Drafts from a Python function, for tests: all right, wrong at one place, empty, illegal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, HostRow, Rounds, Target
from draftloop.drafters.write import write_all
from draftloop.errors import ConfigError
from draftloop.graphs.phase import GraphMode, Launch, Pad, Phase, Slot, Unit
from draftloop.kvcache.rows import NO_DRAFT, RowState


class ScriptedDrafter(Drafter):
    """Asks `script(request_id, token_ids, k)` for at most k ids, between steps, on the host."""

    name = "scripted"
    options = frozenset({"script"})
    on_host = True

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if spec.script is None:
            raise ConfigError("speculative method 'scripted' needs 'script', a function of (request_id, token_ids, k)")
        self.script = spec.script

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        def draft(launch: Launch, rows: Tensor, host_drafts: Tensor) -> Mapping[str, Tensor]:
            write_all(state, rows, host_drafts)
            return {}

        return [
            Phase(
                name="scripted.draft",
                fn=draft,
                slots={
                    "rows": Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=state.padding_row),
                    "host_drafts": Slot(
                        unit=Unit.ROW, dtype=torch.int32, shape=(self.num_drafts,), pad=Pad.FILL, fill=NO_DRAFT
                    ),
                },
                modes=frozenset({GraphMode.NONE}),
                reason="a script runs on the host",
            )
        ]

    def rounds(self, *, sampled: bool) -> Rounds:
        return Rounds(first=("scripted.draft",), next=("scripted.draft",))

    def host_inputs(self, rows: Sequence[HostRow]) -> Mapping[str, Tensor]:
        table = torch.full((len(rows), self.num_drafts), NO_DRAFT, dtype=torch.int32)
        for index, row in enumerate(rows):
            ids = list(self.script(row.request_id, list(row.token_ids), self.num_drafts))
            if len(ids) > self.num_drafts:
                raise ConfigError(f"the script drafted {len(ids)} tokens; at most {self.num_drafts} were asked for")
            table[index, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return {"host_drafts": table}
