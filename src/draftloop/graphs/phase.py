"""What repeats, declared: a phase, its static inputs and outputs, and the size it is captured at.

Whoever runs a step over and over declares it as a `Phase`; the graph table does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import torch
from torch import Tensor


class GraphMode(StrEnum):
    """How one phase runs."""

    NONE = "NONE"
    """Eager."""
    PIECEWISE = "PIECEWISE"
    """Captured segments; attention runs between them."""
    FULL = "FULL"
    """One captured graph."""


ALL_MODES = frozenset(GraphMode)


class ModeSetting(StrEnum):
    """What the user asks for; vLLM's names and meaning."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def uniform(self) -> GraphMode:
        """The mode of batches in which every row has the same number of tokens."""
        if self in (ModeSetting.NONE, ModeSetting.PIECEWISE):
            return GraphMode(self.value)
        return GraphMode.FULL

    @property
    def ragged(self) -> GraphMode:
        """The mode of prompt batches, whose lengths differ."""
        if self is ModeSetting.FULL:
            return GraphMode.FULL
        if self in (ModeSetting.PIECEWISE, ModeSetting.FULL_AND_PIECEWISE):
            return GraphMode.PIECEWISE
        return GraphMode.NONE

    @property
    def allows_piecewise(self) -> bool:
        return self in (ModeSetting.PIECEWISE, ModeSetting.FULL_AND_PIECEWISE)


class Unit(Enum):
    """What a buffer's first dimension counts."""

    ROW = "row"
    TOKEN = "token"
    ROW_BOUND = "row + 1"
    """Boundaries between rows: one more than there are rows."""

    def count(self, rows: int, tokens: int) -> int:
        return {Unit.ROW: rows, Unit.TOKEN: tokens, Unit.ROW_BOUND: rows + 1}[self]


class Pad(Enum):
    """What the entries past the live ones hold when a graph is replayed."""

    ZERO = "zero"
    FILL = "fill"
    LAST = "last"
    """The last live entry again (boundaries: padded rows are empty)."""
    KEEP = "keep"
    """Anything: no result of a live row may depend on it. Poison mode puts NaN there."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One static input: its size, its type, and what its padding holds."""

    unit: Unit
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    """Dimensions after the first."""
    pad: Pad = Pad.ZERO
    fill: float | int = 0


def rows_slot(padding_row: int) -> Slot:
    """Which rows of the engine run: int32, one each. Padding runs the row that is nobody's."""
    return Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=padding_row)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One static output. A later phase with a slot of the same name reads it in place."""

    unit: Unit
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run of a phase: its (padded) size, and how attention calls are to be run in it."""

    rows: int
    tokens: int
    attend: Callable[[Callable[[], None]], None]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The static outputs, by name. What a phase writes there itself and returns is not copied."""


PhaseFunction = Callable[..., Mapping[str, Tensor]]
"""`fn(launch, **slots) -> outputs`; the same function is captured and run eager."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run of a phase must at least do; the floor of its time follows from it."""

    weight_bytes: int = 0
    """Read once, however many rows run; without experts."""
    cache_bytes: int = 0
    """Read per row and token of context."""
    flops: int = 0
    """Per token that runs."""
    expert_bytes: int = 0
    """One expert of every layer that has them, read if any token goes through it."""
    num_experts: int = 0
    """Of a layer, those that are here."""
    experts_per_token: float = 0.0
    """Of those, how many a token hits; of engines that share them, one token of each."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A step that somebody runs over and over."""

    name: str
    fn: PhaseFunction
    slots: Mapping[str, Slot]
    outputs: Mapping[str, Output] = field(default_factory=dict)
    tokens_per_row: int | None = 1
    """Tokens of every row; None where rows differ (prompts)."""
    modes: frozenset[GraphMode] = ALL_MODES
    """What the phase can run as. NONE among them: an uncovered size may run eager."""
    max_rows: int | None = None
    reason: str = ""
    """Why `modes` is not everything; shown in the coverage report."""
    cost: Cost = Cost()
    sparse: bool = False
    """Captured at fewer sizes: it is one of several variants that share the batches."""
    parts: tuple[Phase, ...] = ()
    """Phases of the same table that this one runs in order; see `chain`."""

    @property
    def ragged(self) -> bool:
        return self.tokens_per_row is None


def chain(name: str, parts: Sequence[Phase]) -> Phase:
    """One phase that runs others in order, as one graph: what one part leaves, the next ones read.

    It has no code of its own, and is full or nothing. Its slots are those that no earlier part
    fills. All parts are uniform; whatever counts tokens has the first part's tokens per row.
    """
    slots: dict[str, Slot] = {}
    outputs: dict[str, Output] = {}
    for part in parts:
        slots |= {slot: spec for slot, spec in part.slots.items() if slot not in outputs}
        outputs |= part.outputs
        assert not part.ragged, part.name
        assert GraphMode.FULL in part.modes, part.name
        assert part.tokens_per_row == parts[0].tokens_per_row or all(
            spec.unit is not Unit.TOKEN for spec in [*part.slots.values(), *part.outputs.values()]
        ), part.name
    rows = [part.max_rows for part in parts if part.max_rows is not None]
    return Phase(
        name=name,
        fn=_no_code,
        slots=slots,
        outputs=outputs,
        tokens_per_row=parts[0].tokens_per_row,
        modes=frozenset({GraphMode.FULL}),
        max_rows=min(rows, default=None),
        sparse=any(part.sparse for part in parts),
        reason="a chain of phases is captured whole or not at all",
        parts=tuple(parts),
    )


def _no_code(launch: Launch, **slots: Tensor) -> Mapping[str, Tensor]:
    raise AssertionError("a chain is run part by part")


@dataclass(frozen=True, order=True, kw_only=True)
class Key:
    """Names one captured graph."""

    phase: str
    mode: GraphMode
    rows: int
    tokens: int


def settle_mode(phase: Phase, setting: ModeSetting) -> tuple[GraphMode, str]:
    """The mode a phase runs in under a user's setting, and why, where it is not the one asked for.

    A mode is lowered, never widened: what the setting does not name is not used.
    """
    asked = setting.ragged if phase.ragged else setting.uniform
    if asked in phase.modes:
        return asked, "" if asked is not GraphMode.NONE else f"cudagraph_mode is {setting.value}"
    why = phase.reason or f"the phase does not allow {asked.value}"
    if asked is GraphMode.FULL and setting.allows_piecewise and GraphMode.PIECEWISE in phase.modes:
        return GraphMode.PIECEWISE, why
    return GraphMode.NONE, why
