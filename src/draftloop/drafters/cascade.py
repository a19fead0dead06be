"""Several drafters for one engine, in order: each row takes the drafts of the first that has any for it.

All of them draft after every step, each into memory of its own, and `cascade.choose` copies what is verified. So a
drafter with a cache reads every accepted token, whoever drafted it, and everything can still be captured. A row
that one without a model drafts for costs what it costs without that one: what is gained is acceptance.

A request may leave drafters out, or ask them in another order; they are still kept fed.

Shape suffixes: R rows, M rows of the engine plus one, D drafters, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import (
    ACCEPTANCE_KEYS,
    SCHEDULE_KEYS,
    Drafter,
    HostRow,
    Rounds,
    Target,
    drafter_class,
    sampled_name,
)
from draftloop.drafters.host import host_drafts_slot
from draftloop.drafters.write import write_all
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Launch, Phase, rows_slot
from draftloop.kvcache.pool import CacheSpec
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.models.decoder import Decoder, LayerCaches
from draftloop.request import SpeculativeParams

_BEGIN, _CHOOSE = "cascade.begin", "cascade.choose"


def _parts(spec: SpeculativeConfig) -> list[SpeculativeConfig]:
    """The drafters' configurations, each with the block that they share. Raises ConfigError."""
    several = spec.drafters or ()
    if len(several) < 2:
        raise ConfigError(
            f"speculative method 'cascade' needs 'drafters', a list of two or more configurations, but has "
            f"{len(several)}; for one drafter use its own method"
        )
    for part in several:
        if part.num_speculative_tokens not in (None, spec.num_speculative_tokens):
            raise ConfigError(
                f"num_speculative_tokens is {spec.num_speculative_tokens}, but {part.num_speculative_tokens} in one of "
                "'drafters': they draft for the same block; give it once, beside 'drafters'"
            )
        for key in sorted(ACCEPTANCE_KEYS | SCHEDULE_KEYS):
            if getattr(part, key) is not None:
                raise ConfigError(
                    f"{key} is {getattr(part, key)!r} in one of 'drafters', but holds for all; say it beside them"
                )
    shared = {key: getattr(spec, key) for key in ("num_speculative_tokens", *SCHEDULE_KEYS)}
    return [replace(part, **shared) for part in several]


class CascadeDrafter(Drafter):
    """Owns other drafters; the first that has something for a row wins."""

    name = "cascade"
    options = frozenset({"drafters"})
    samples = True
    follows_load = True

    _states: list[RowState | None]
    """What each draws up its drafts in: the row state, but with drafts of its own. None: on the host."""
    _ranks_MD: Tensor
    """int32: each row's order of the drafters, from 0; D for those that do not draft for it."""
    _names: list[dict[str, str]]
    """What each calls its phases, and what they are called here."""

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        parts = _parts(spec)
        classes = [drafter_class(part) for part in parts]
        for cls in classes:
            if not cls.drafts or cls.forced_acceptance or cls is CascadeDrafter:
                raise ConfigError(f"{cls.name!r} cannot be one of several drafters; leave it out")
        self.parts = [cls(part, target) for cls, part in zip(classes, parts, strict=True)]
        for part in self.parts:
            part.drafts_alone = False
        self._only_one("work on the host", [part for part in self.parts if part.on_host])
        self._only_one("draw their drafts", [part for part in self.parts if part.sampled], remedy="greedy")
        reading = [part for part in self.parts if part.aux_layers]
        self._only_one("read the target's states", reading)
        self._reading = reading[0] if reading else None
        self.folder = next((part.folder for part in self.parts if part.folder), None)

    @staticmethod
    def _only_one(what: str, parts: Sequence[Drafter], *, remedy: str = "") -> None:
        if len(parts) > 1:
            also = f", or let all but one of them draft with draft_sample_method {remedy!r}" if remedy else ""
            names = " and ".join(part.name for part in parts)
            raise ConfigError(f"of several drafters at most one may {what}, but {names} do; leave one out{also}")

    # ---- what the parts are, together -------------------------------------------------------

    @classmethod
    def needs_host(cls, spec: SpeculativeConfig) -> bool:
        return any(drafter_class(part).needs_host(part) for part in _parts(spec))

    @classmethod
    def reads_target(cls, spec: SpeculativeConfig) -> bool:
        return any(drafter_class(part).reads_target(part) for part in _parts(spec))

    @classmethod
    def can_reuse_prefixes(cls, spec: SpeculativeConfig) -> bool:
        return all(drafter_class(part).can_reuse_prefixes(part) for part in _parts(spec))

    @classmethod
    def remembers(cls, spec: SpeculativeConfig) -> bool:
        return any(drafter_class(part).remembers(part) for part in _parts(spec))

    @classmethod
    def overhang(cls, spec: SpeculativeConfig) -> int:
        return max(drafter_class(part).overhang(part) for part in _parts(spec))

    @property
    def drafters(self) -> tuple[str, ...]:
        names: list[str] = []
        for part in self.parts:
            again = names.count(part.name)
            names.append(f"{part.name}.{again}" if again else part.name)
        return tuple(names)

    @property
    def sampled(self) -> bool:
        return any(part.sampled for part in self.parts)

    @property
    def num_rerun(self) -> int:
        return max(part.num_rerun for part in self.parts)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._reading.aux_layers if self._reading else ()

    @property
    def aux_layer_offset(self) -> int | None:
        return self._reading.aux_layer_offset if self._reading else None

    def describe(self) -> str:
        return f"{self.name}: " + "; else ".join(part.describe() for part in self.parts)

    def borrow(self, target: Decoder) -> None:
        for part in self.parts:
            part.borrow(target)

    def load(self, *, progress: bool) -> None:
        for part in self.parts:
            part.load(progress=progress)

    def cache_specs(self) -> list[CacheSpec]:
        return [spec for part in self.parts for spec in part.cache_specs()]

    def read_target(self, caches: LayerCaches) -> None:
        for part in self.parts:
            part.read_target(caches)

    def row_memory(self) -> Mapping[str, Tensor]:
        found = {"ranks_MD": self._ranks_MD}
        for name, part, own in zip(self.drafters, self.parts, self._states, strict=True):
            memory = dict(part.row_memory())
            if own is not None:
                memory |= {"drafts_MK": own.drafts_MK, "num_drafted_M": own.num_drafted_M}
            found |= {f"{name}.{key}": value for key, value in memory.items()}
        return found

    def admit(self, row: int, params: SpeculativeParams | None) -> None:
        asked = (params.drafters if params else None) or self.drafters
        for index, name in enumerate(self.drafters):
            self._ranks_MD[row, index].fill_(asked.index(name) if name in asked else len(self.parts))
        for part in self.parts:
            part.admit(row, params)

    def draft_on_host(self, rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        (part,) = (part for part in self.parts if part.on_host)
        return part.draft_on_host(rows)

    def close(self) -> None:
        for part in self.parts:
            part.close()

    # ---- phases -----------------------------------------------------------------------------

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        self._states, self._names = [], []
        order_D = torch.arange(len(self.parts), dtype=torch.int32, device=state.drafts_MK.device)
        self._ranks_MD = order_D.repeat(state.padding_row + 1, 1)
        phases: list[Phase] = []
        for name, part in zip(self.drafters, self.parts, strict=True):
            if part.on_host:  # what it drafts comes in `host_drafts`
                self._states.append(None)
                self._names.append({})
                continue
            num_caches = len(part.cache_specs())
            own_caches, caches = caches[:num_caches], caches[num_caches:]
            own = replace(
                state,
                drafts_MK=torch.full_like(state.drafts_MK, NO_DRAFT),
                num_drafted_M=torch.zeros_like(state.num_drafted_M),
            )
            made, taken = part.phases(own, own_caches), {phase.name for phase in phases}
            names = {phase.name: f"{name}.{phase.name}" if phase.name in taken else phase.name for phase in made}
            phases += [replace(phase, name=names[phase.name]) for phase in made]
            self._states.append(own)
            self._names.append(names)
        return [*phases, *self._own_phases(state)]

    def _own_phases(self, state: RowState) -> list[Phase]:
        states, ranks_MD, num_drafters = list(self._states), self._ranks_MD, len(self.parts)
        on_device = [own for own in states if own is not None]
        sampling = next((index for index, part in enumerate(self.parts) if part.sampled), -1)

        def begin(launch: Launch, rows: Tensor) -> Mapping[str, Tensor]:
            for own in on_device:
                own.drafts_MK.index_fill_(0, rows.long(), NO_DRAFT)
                own.num_drafted_M.index_fill_(0, rows.long(), 0)
            return {}

        def choose(
            launch: Launch, rows: Tensor, host_drafts: Tensor | None = None, *, sampled: bool
        ) -> Mapping[str, Tensor]:
            rows_R = rows.long()
            found = [host_drafts if own is None else own.drafts_MK[rows_R] for own in states]
            found_RDK = torch.stack(found, 1)  # type: ignore[arg-type]
            rank_RD = torch.where(found_RDK[:, :, 0] != NO_DRAFT, ranks_MD[rows_R], num_drafters)
            least_R, drafted_by_R = rank_RD.min(1)
            where_R1K = drafted_by_R[:, None, None].expand(-1, 1, found_RDK.shape[2])
            drafts_RK = found_RDK.gather(1, where_R1K).squeeze(1)
            drafts_RK = drafts_RK.masked_fill((least_R == num_drafters)[:, None], NO_DRAFT)
            write_all(state, rows, drafts_RK)
            state.drafted_by_M.index_copy_(0, rows_R, drafted_by_R.int())
            if sampled:
                # what was not drawn was certain, and acceptance must know
                assert state.draft_probs_MKV is not None
                drawn_RKV = state.draft_probs_MKV[rows_R]
                certain_RKV = torch.zeros_like(drawn_RKV).scatter_(2, drafts_RK.clamp(min=0).long()[..., None], 1)
                drawn_RKV = torch.where(drafted_by_R.eq(sampling)[:, None, None], drawn_RKV, certain_RKV)
                state.draft_probs_MKV.index_copy_(0, rows_R, drawn_RKV)
            return {}

        rows = rows_slot(state.padding_row)
        slots = {"rows": rows}
        if len(on_device) < len(states):
            slots["host_drafts"] = host_drafts_slot(self.num_drafts)
        return [
            Phase(name=_BEGIN, fn=begin, slots={"rows": rows}),
            *(
                Phase(
                    name=sampled_name(_CHOOSE, sampled),
                    fn=lambda launch, s=sampled, **given: choose(launch, sampled=s, **given),
                    slots=slots,
                )
                for sampled in ((False, True) if self.sampled else (False,))
            ),
        ]

    def rounds(self, *, sampled: bool) -> Rounds:
        each = [part.rounds(sampled=sampled) for part in self.parts]
        joined, choose = self._joined, (sampled_name(_CHOOSE, sampled and self.sampled),)
        last = self._choice(sampled=sampled)
        return Rounds(
            prompt=joined([rounds.prompt for rounds in each]),
            first=(_BEGIN, *joined([rounds.first for rounds in each]), *last),
            next=(*joined([rounds.next for rounds in each]), *last),
            host=() if last else choose,
            plain=(*joined([r.next if r.plain is None else r.plain for r in each]), *last),
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if num_drafts == self.num_drafts:
            return self.rounds(sampled=sampled).next
        each = self._joined([part.rounds_after(num_drafts, sampled=sampled) for part in self.parts])
        return (_BEGIN, *each, *(self._choice(sampled=sampled) if num_drafts else ()))

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        each = self._joined([part.first_rounds(num_drafts, sampled=sampled) for part in self.parts])
        return (_BEGIN, *each, *(self._choice(sampled=sampled) if num_drafts else ()))

    def _choice(self, *, sampled: bool) -> tuple[str, ...]:
        """Where a part drafts on the host, the choice is made when that has drafted."""
        return () if any(part.on_host for part in self.parts) else (sampled_name(_CHOOSE, sampled and self.sampled),)

    def _joined(self, several: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The phases of all parts, by their names here."""
        return tuple(names[name] for names, some in zip(self._names, several, strict=True) for name in some)
