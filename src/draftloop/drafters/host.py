"""Drafters that work on the host, between steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftloop.drafters.base import Drafter, HostRow, Rounds
from draftloop.drafters.write import write_all
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Launch, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import NO_DRAFT, RowState


class HostDrafter(Drafter):
    """Looks at each row's tokens and names what comes next; nothing else is on the device than what it said."""

    on_host = True
    reuses_prefixes = True
    follows_load = True

    @abstractmethod
    def draft(self, row: HostRow) -> Sequence[int]:
        """At most `row.max_drafts` ids, or none."""

    def draft_on_host(self, rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        drafts = [self.draft(row) for row in rows]
        longest = max(map(len, drafts), default=0)
        if longest > self.num_drafts:
            raise ConfigError(f"{self.name!r} drafted {longest} tokens; at most {self.num_drafts} were asked for")
        return drafts

    @property
    def _phase(self) -> str:
        return f"{self.name}.draft"

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        def draft(launch: Launch, rows: Tensor, host_drafts: Tensor) -> Mapping[str, Tensor]:
            write_all(state, rows, host_drafts)
            return {}

        return [
            Phase(
                name=self._phase,
                fn=draft,
                slots={
                    "rows": rows_slot(state.padding_row),
                    "host_drafts": host_drafts_slot(self.num_drafts),
                },
            )
        ]

    def rounds(self, *, sampled: bool) -> Rounds:
        return Rounds(host=(self._phase,))


def host_drafts_slot(num_drafts: int) -> Slot:
    """int32 [R, K]: what `draft_on_host` said, filled up with NO_DRAFT. The engine writes it."""
    return Slot(unit=Unit.ROW, dtype=torch.int32, shape=(num_drafts,), pad=Pad.FILL, fill=NO_DRAFT)
