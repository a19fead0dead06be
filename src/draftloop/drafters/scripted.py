"""Drafts from a Python function, for tests: all right, wrong at one place, empty, illegal."""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import HostRow, Target
from draftloop.drafters.host import HostDrafter
from draftloop.errors import ConfigError


class ScriptedDrafter(HostDrafter):
    """Asks `script(request_id, token_ids, k)` for at most k ids, between steps, on the host."""

    name = "scripted"
    options = frozenset({"script"})

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if spec.script is None:
            raise ConfigError("speculative method 'scripted' needs 'script', a function of (request_id, token_ids, k)")
        self.script = spec.script

    def draft(self, row: HostRow) -> Sequence[int]:
        return self.script(row.request_id, list(row.token_ids), self.num_drafts)
