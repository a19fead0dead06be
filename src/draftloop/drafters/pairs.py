"""Drafters that run pairs of a token and a hidden state: EAGLE heads and multi-token-prediction modules.

The token at position p + 1 goes with the hidden state of position p, at position p. Where the target has seen
position p, the hidden state is the target's; along the chain it is the head's own of the step before. So after
each acceptance the first pass runs over the verified block, and the keys and values of accepted positions,
which the chain wrote from its own states, are made anew from the target's.

Drafts may also form a tree (drafters/tree.py): each pass after the first then runs all drafts of one height.
Which phases there are is here; what each one computes, in drafters/pair_passes.py.

Shape suffixes: M rows of the engine plus one, I states that each keeps, X numbers per token that the target hands
over, C width of the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftloop.attention.base import GraphSupport
from draftloop.attention.tree import path_slot
from draftloop.drafters.base import Rounds, count_name, sampled_name
from draftloop.drafters.head import HeadConfig, HeadDrafter
from draftloop.drafters.pair_passes import PairHead, PairPasses
from draftloop.drafters.tree import TreeDrafts
from draftloop.graphs.phase import GraphMode, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import RowState


class PairConfig(HeadConfig, Protocol):
    """The shape of a head."""

    @property
    def aux_width(self) -> int:
        """X: numbers per token that the target hands over."""
        ...

    @property
    def has_map(self) -> bool:
        """It has a vocabulary of its own."""
        ...


def level_name(height: int) -> str:
    """The phase that runs a tree's drafts of one height."""
    return f"draft.decode.{height}"


ConfigT = TypeVar("ConfigT", bound=PairConfig)
HeadT = TypeVar("HeadT", bound=PairHead)


class PairDrafter(HeadDrafter[ConfigT], Generic[ConfigT, HeadT]):
    """Everything but which head it is, and where that comes from."""

    samples = True

    head: HeadT
    hidden_MC: Tensor
    """Per engine row, the hidden state that its next chain step takes; of a tree, several of each row."""

    @property
    def sampled(self) -> bool:
        return super().sampled and self.tree.is_chain  # a tree's drafts are the likeliest ones

    # ---- phases -----------------------------------------------------------------------------

    def row_memory(self) -> Mapping[str, Tensor]:
        if self.tree.is_chain:
            return {"hidden_MC": self.hidden_MC}
        inner = sum(count > 0 for count in self.tree.num_children[1:])
        return {"hidden_MIC": self.hidden_MC.unflatten(0, (-1, 1 + inner))}

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        passes = self._make_passes(state, caches)
        support = self.backend_class.graph_support(self.target.device.type)
        full_ragged = {GraphMode.FULL} if support.ragged else set()
        rows = rows_slot(state.padding_row)
        aux = Slot(unit=Unit.TOKEN, dtype=self.target.dtype, shape=(self.config.aux_width,))
        prompt = Phase(
            name="draft.prompt",
            fn=passes.prompt,
            slots={
                "rows": rows,
                "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
                "kv_lens": Slot(unit=Unit.ROW, dtype=torch.int32),
                "aux_hidden": aux,
            },
            tokens_per_row=None,
            modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full_ragged}),
            reason=support.reason,
        )
        # nothing of the padding row follows from what it emitted
        num_emitted = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)
        verified = {"rows": rows, "num_emitted": num_emitted, "aux_hidden": aux}
        phases = [prompt]
        for sampled in (False, True) if self.sampled else (False,):
            phases.append(
                Phase(
                    name=sampled_name("draft.first", sampled),
                    fn=partial(passes.first, sampled=sampled),
                    slots={"rows": rows},
                )
            )
            phases += self._block_phases(passes, verified, support, sampled=sampled)
            phases += self._step_phases(passes, rows, support, sampled=sampled)
        if 0 in self.counts:
            phases.append(Phase(name="draft.feed", fn=passes.feed, slots=verified))
        return phases

    def _make_passes(self, state: RowState, caches: Sequence[Tensor]) -> PairPasses:
        (kv_L2PSGD,) = caches
        head, target = self.head, self.target
        num_known = target.vocab_size if self.config.has_map else min(head.vocabulary.size, target.vocab_size)
        tree = None if self.tree.is_chain else TreeDrafts(self.tree, state, target.device)
        num_states = (state.padding_row + 1) * (tree.num_states if tree else 1)
        self.hidden_MC = torch.zeros(
            num_states, self.config.model.hidden_size, dtype=target.dtype, device=target.device
        )
        return PairPasses(
            head=head,
            kv_L2PSGD=kv_L2PSGD,
            page_size=target.page_size,
            state=state,
            hidden_MC=self.hidden_MC,
            tree=tree,
            options={
                "vocab_size": num_known,
                "vocabulary": head.vocabulary,
                "target_ids_W": head.target_ids_W,
                "longest": self.longest,
            },
        )

    def _block_phases(
        self, passes: PairPasses, slots: Mapping[str, Slot], support: GraphSupport, *, sampled: bool
    ) -> list[Phase]:
        """After steps of each number of drafts, the pass over what they verified."""
        if passes.tree:
            slots = {**slots, "path": path_slot(self.tree)}
        full = {GraphMode.FULL} if support.uniform else set()
        phases = []
        for k in filter(None, self.counts):
            block = 1 + min(k, self.tree.depth)
            phases.append(
                Phase(
                    name=count_name(sampled_name("draft.prefill", sampled), k, self.num_drafts),
                    fn=partial(passes.verified, block=block, sampled=sampled),
                    slots=slots,
                    tokens_per_row=k + 1,
                    modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full}),
                    reason=support.reason,
                    cost=self.head.cost(fused=True, tokens_per_row=block),
                )
            )
        return phases

    def _step_phases(self, passes: PairPasses, rows: Slot, support: GraphSupport, *, sampled: bool) -> list[Phase]:
        """From one draft of a chain to the next, or from each height of a tree to the next.

        The latter runs as many tokens of each row as that height has places with children.
        """
        # never piecewise: that pads tokens, and attention would read past its rows
        step = Phase(
            name=sampled_name("draft.decode", sampled),
            fn=partial(passes.step, sampled=sampled),
            slots={"rows": rows},
            modes=frozenset({GraphMode.NONE, *([GraphMode.FULL] if support.uniform else [])}),
            reason=support.reason or "one token per row is captured whole or not at all",
            cost=self.head.cost(fused=False),
        )
        if not passes.tree:
            return [step]
        return [
            replace(
                step,
                name=level_name(height),
                fn=partial(passes.level, level=level),
                tokens_per_row=len(level.targets_P),
                reason=step.reason.replace("one token per row", "a level of a tree"),
            )
            for height, level in enumerate(passes.tree.levels)
            if height
        ]

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        chain = (sampled_name("draft.decode", sampled),) * (self.num_drafts - 1)
        if not self.tree.is_chain:
            chain = tuple(level_name(height) for height in range(1, self.tree.depth))
        return Rounds(
            prompt=("draft.prompt",),
            first=(sampled_name("draft.first", sampled), *chain),
            next=(sampled_name("draft.prefill", sampled), *chain),
            # rows without drafts are past their limit, or declined them: they never draft again
            plain=(),
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if not num_drafts:
            return ("draft.feed",)
        prefill, *chain = self.rounds(sampled=sampled).next
        return (count_name(prefill, num_drafts, self.num_drafts), *chain[: num_drafts - 1])

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        first = self.rounds(sampled=sampled).first
        return first[:num_drafts] if self.tree.is_chain else first
