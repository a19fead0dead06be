"""Static buffers, one per name. A phase's output and a later phase's slot of that name are the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from draftloop.graphs.phase import Output, Pad, Phase, Slot, Unit
from draftloop.graphs.tape import poison_


class Buffers:
    """Memory for every name that the phases declare, sized by the largest padded use."""

    def __init__(self, sized: Iterable[tuple[Phase, int, int]], device: torch.device) -> None:
        """`sized` gives each phase with its largest padded (rows, tokens).

        Raises ValueError where two phases declare one name with different types or shapes.
        """
        need: dict[str, tuple[int, tuple[int, ...], torch.dtype, str]] = {}
        for phase, rows, tokens in sized:
            for name, spec in [*phase.slots.items(), *phase.outputs.items()]:
                count = spec.unit.count(rows, tokens)
                size, shape, dtype, owner = need.get(name, (0, spec.shape, spec.dtype, phase.name))
                if (shape, dtype) != (spec.shape, spec.dtype):
                    raise ValueError(
                        f"buffer {name!r} is {dtype} {shape} in phase {owner!r}, but {spec.dtype} {spec.shape} "
                        f"in phase {phase.name!r}; give one of them another name"
                    )
                need[name] = max(size, count), shape, dtype, owner
        self._memory = {
            name: torch.zeros((count, *shape), dtype=dtype, device=device)
            for name, (count, shape, dtype, _) in need.items()
        }
        self._live: dict[str, int] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._memory[name]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def views(self, specs: Mapping[str, Slot | Output], rows: int, tokens: int) -> dict[str, Tensor]:
        """The leading part of each buffer, for one size."""
        return {name: self._memory[name][: spec.unit.count(rows, tokens)] for name, spec in specs.items()}

    def write(self, name: str, value: Tensor) -> None:
        """Copy into the buffer. What lies past the value is padding from now on."""
        memory = self._memory[name]
        if value.shape[1:] != memory.shape[1:] or value.shape[0] > memory.shape[0]:
            raise ValueError(f"buffer {name!r} holds {tuple(memory.shape)}; cannot take {tuple(value.shape)}")
        memory[: value.shape[0]].copy_(value, non_blocking=True)
        self._live[name] = value.shape[0]

    def produced(self, phase: Phase, rows: int, tokens: int) -> None:
        """Note that a phase has written its outputs for this many live rows and tokens."""
        for name, spec in phase.outputs.items():
            self._live[name] = spec.unit.count(rows, tokens)

    def require(self, phase: Phase, rows: int, tokens: int) -> None:
        """Raises ValueError for a slot that nobody has written at this size: it would be stale."""
        for name, slot in phase.slots.items():
            count, live = slot.unit.count(rows, tokens), self._live.get(name, 0)
            if live != count:
                raise ValueError(
                    f"{phase.name}: slot {name!r} holds {live} live entries, {count} are needed "
                    f"for {rows} rows and {tokens} tokens; pass it as an input or run the phase that makes it"
                )

    def pad(self, phase: Phase, live: tuple[int, int], padded: tuple[int, int], *, poison: bool) -> None:
        """Give the entries past the live (rows, tokens) the value that each slot declares."""
        for name, slot in phase.slots.items():
            first, last = slot.unit.count(*live), slot.unit.count(*padded)
            if first == last:
                continue
            rest = self._memory[name][first:last]
            if slot.pad is Pad.ZERO:
                rest.zero_()
            elif slot.pad is Pad.FILL:
                rest.fill_(slot.fill)
            elif slot.pad is Pad.LAST:
                assert first > 0 or slot.unit is not Unit.ROW_BOUND
                rest.copy_(self._memory[name][first - 1].expand_as(rest)) if first else rest.zero_()
            elif poison:
                poison_(rest)

    def poison_outputs(self, phase: Phase) -> None:
        for name in phase.outputs:
            if name not in phase.slots:  # a phase may write over what it read
                poison_(self._memory[name])
