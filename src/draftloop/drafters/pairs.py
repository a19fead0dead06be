"""Drafters that run pairs of a token and a hidden state: EAGLE heads and multi-token-prediction modules.

The token at position p + 1 goes with the hidden state of position p, at position p. Where the target has seen
position p, the hidden state is the target's; along the chain it is the head's own of the step before. So after
each acceptance the first pass runs over the verified block, and the keys and values of accepted positions,
which the chain wrote from its own states, are made anew from the target's.

Drafts may also form a tree (drafters/tree.py): each pass after the first then runs all drafts of one height.

Shape suffixes: R rows, T tokens, M rows of the engine plus one, X numbers per token that the target hands over
or rows that tokens take their states from, C width of the head, W draft vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.attention.tree import path_slot, tree_batch
from draftloop.drafters.base import Rounds, count_name, sampled_name
from draftloop.drafters.head import HeadConfig, HeadDrafter
from draftloop.drafters.tree import LevelTables, TreeDrafts
from draftloop.drafters.write import WriteOptions, write_next
from draftloop.graphs.phase import Cost, GraphMode, Launch, Pad, Phase, Slot, Unit
from draftloop.kernels.rms_norm import Store
from draftloop.kvcache.rows import RowState
from draftloop.models.output_head import Vocabulary


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


class PairHead(Protocol):
    """A head with its weights."""

    embed_tokens: Tensor
    vocabulary: Vocabulary
    """Of its logits."""
    target_ids_W: Tensor | None
    """int64: the target's id of each draft id, where the head has a vocabulary of its own."""

    def fuse(self, aux_TX: Tensor) -> Tensor:
        """[T, X] of the target -> [T, C], in the place of a hidden state of the head's own."""
        ...

    def __call__(
        self,
        ids_T: Tensor,
        hidden_XC: Tensor,
        kv_L2PSGD: Tensor,
        batch: AttentionBatch,
        *,
        hidden_rows_T: Tensor | None = None,
        keep_R: Tensor | None = None,
        store: Store,
    ) -> Tensor:
        """Run pairs (token at position p + 1, hidden state of position p), at position p.

        Token t goes with `hidden_XC[hidden_rows_T[t]]`, or with `hidden_XC[t]`. Returns [T, C], or [R, C] for
        the tokens `keep_R` alone: what the output head reads. The hidden state that the next step takes is
        written to the rows that `store` names.
        """
        ...

    def feed(self, ids_T: Tensor, hidden_TC: Tensor, kv_L2PSGD: Tensor, batch: AttentionBatch) -> None:
        """Leave the keys and values of such pairs, and compute nothing else."""
        ...

    def head_input(self, hidden_RC: Tensor) -> Tensor:
        """What the output head reads, from the hidden state that a pass gave to the next step."""
        ...

    def logits(self, head_input_RC: Tensor) -> Tensor:
        """[R, C] -> [R, W]."""
        ...

    def cost(self, *, fused: bool, tokens_per_row: int = 1) -> Cost:
        """What one pass must read and compute; `fused`: it starts with the target's states."""
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
        (kv,) = caches
        head, page_size, device = self.head, self.target.page_size, self.target.device
        block = self.tree.depth + 1
        tree = None if self.tree.is_chain else TreeDrafts(self.tree, state, device)
        num_states, width = (state.padding_row + 1) * (tree.num_states if tree else 1), self.config.model.hidden_size
        hidden_MC = self.hidden_MC = torch.zeros(num_states, width, dtype=self.target.dtype, device=device)
        num_embedded = head.embed_tokens.shape[0]
        num_known = self.target.vocab_size if self.config.has_map else min(head.vocabulary.size, self.target.vocab_size)

        def known(ids: Tensor) -> Tensor:
            # an id past our table (the target's may be padded further), and NO_DRAFT, have no embedding: any will do
            return ids.clamp(0, num_embedded - 1)

        options: WriteOptions = {
            "vocab_size": num_known,
            "vocabulary": head.vocabulary,
            "target_ids_W": head.target_ids_W,
            "longest": self.longest,
        }

        def state_rows(rows: Tensor) -> Tensor:
            return rows * tree.num_states if tree else rows

        def draft(rows: Tensor, head_input_RC: Tensor, *, sampled: bool, first: bool) -> Mapping[str, Tensor]:
            logits_RW = head.logits(head_input_RC)
            if tree:
                tree.write(tree.levels[0], rows, logits_RW, **options)
            else:
                write_next(state, rows, logits_RW, sampled=sampled, first=first, **options)
            return {}

        def prompt(
            launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, aux_hidden: Tensor
        ) -> Mapping[str, Tensor]:
            batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
            # the next prompt token, or the first token of the answer, which has been emitted by now
            ids_T = known(state.tokens_ML[row_T, batch.positions_T + 1])
            last_R = (query_starts[1:] - 1).clamp(min=0).long()
            head(ids_T, head.fuse(aux_hidden), kv, batch, keep_R=last_R, store=Store(hidden_MC, state_rows(rows)))
            return {}

        def first(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            return draft(rows, head.head_input(hidden_MC[state_rows(rows)]), sampled=sampled, first=True)

        def prefill(
            launch: Launch,
            rows: Tensor,
            num_emitted: Tensor,
            aux_hidden: Tensor,
            path: Tensor | None = None,
            *,
            block: int,
            sampled: bool,
        ) -> Mapping[str, Tensor]:
            if tree and path is not None:
                aux_hidden = tree.accepted(aux_hidden, path)
            # The verified block, each position with the token after it. Past what was emitted these are leftovers;
            # causal attention hides them from the row's last token.
            batch, tokens = tail_batch(
                state,
                rows,
                block,
                page_size,
                launch,
                offset=-1,
                emitted_R=num_emitted,
                ahead=1,
                num_ids=num_embedded,
            )
            store = Store(hidden_MC, state_rows(rows))
            head_input_RC = head(tokens.ids_T, head.fuse(aux_hidden), kv, batch, keep_R=tokens.last_R, store=store)
            return draft(rows, head_input_RC, sampled=sampled, first=True)

        def feed(launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor) -> Mapping[str, Tensor]:
            batch, tokens = tail_batch(
                state, rows, 1, page_size, launch, offset=-1, emitted_R=num_emitted, ahead=1, num_ids=num_embedded
            )
            head.feed(tokens.ids_T, head.fuse(aux_hidden), kv, batch)
            return {}

        def decode(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            # the last draft is at num_tokens + num_drafted - 1, and its pair one before that
            batch, tokens = tail_batch(
                state, rows, 1, page_size, launch, offset=-2, drafted=True, ahead=1, num_ids=num_embedded
            )
            store = Store(hidden_MC, rows)
            head_input_RC = head(tokens.ids_T, hidden_MC, kv, batch, hidden_rows_T=rows, store=store)
            return draft(rows, head_input_RC, sampled=sampled, first=False)

        def decode_level(launch: Launch, rows: Tensor, *, level: LevelTables) -> Mapping[str, Tensor]:
            assert tree is not None
            assert level.attends is not None
            batch, tokens = tree_batch(state, rows, level.attends, page_size, launch, num_ids=num_embedded)
            sources_T, targets_T = tree.states(rows, level.sources_P), tree.states(rows, level.targets_P)
            store = Store(hidden_MC, targets_T)
            head_input_TC = head(tokens.ids_T, hidden_MC, kv, batch, hidden_rows_T=sources_T, store=store)
            tree.write(level, rows, head.logits(head_input_TC), **options)
            return {}

        support = self.backend_class.graph_support(self.target.device.type)
        full = {GraphMode.FULL} if support.uniform else set()
        rows = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=state.padding_row)
        kv_lens = Slot(unit=Unit.ROW, dtype=torch.int32)
        num_emitted = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)  # nothing of the padding row follows from it
        aux = Slot(unit=Unit.TOKEN, dtype=self.target.dtype, shape=(self.config.aux_width,))
        phases = [
            Phase(
                name="draft.prompt",
                fn=prompt,
                slots={
                    "rows": rows,
                    "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
                    "kv_lens": kv_lens,
                    "aux_hidden": aux,
                },
                tokens_per_row=None,
                modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *([GraphMode.FULL] if support.ragged else [])}),
                reason=support.reason,
            )
        ]
        for sampled in (False, True) if self.sampled else (False,):
            phases += [
                Phase(
                    name=sampled_name("draft.first", sampled),
                    fn=lambda launch, s=sampled, **slots: first(launch, sampled=s, **slots),
                    slots={"rows": rows},
                ),
                *(
                    Phase(
                        name=count_name(sampled_name("draft.prefill", sampled), k, self.num_drafts),
                        fn=partial(prefill, block=min(k + 1, block), sampled=sampled),
                        slots={
                            "rows": rows,
                            "num_emitted": num_emitted,
                            "aux_hidden": aux,
                            **({"path": path_slot(self.tree)} if tree else {}),
                        },
                        tokens_per_row=k + 1,
                        modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full}),
                        reason=support.reason,
                        cost=head.cost(fused=True, tokens_per_row=min(k + 1, block)),
                    )
                    for k in self.counts
                    if k
                ),
            ]
            # never piecewise: that pads tokens, and attention would read past its rows
            step = Phase(
                name=sampled_name("draft.decode", sampled),
                fn=lambda launch, s=sampled, **slots: decode(launch, sampled=s, **slots),
                slots={"rows": rows},
                modes=frozenset({GraphMode.NONE, *full}),
                reason=support.reason or "one token per row is captured whole or not at all",
                cost=head.cost(fused=False),
            )
            phases += self._levels(step, decode_level, tree) if tree else [step]
        if 0 in self.counts:
            slots = {"rows": rows, "num_emitted": num_emitted, "aux_hidden": aux}
            phases.append(Phase(name="draft.feed", fn=feed, slots=slots))
        return phases

    def _levels(self, step: Phase, decode_level: Callable, tree: TreeDrafts) -> list[Phase]:
        """In a chain's place: a phase for each height from 1 on, over as many tokens of each row as it has places."""
        return [
            replace(
                step,
                name=level_name(height),
                fn=partial(decode_level, level=level),
                tokens_per_row=len(level.targets_P),
                reason=step.reason.replace("one token per row", "a level of a tree"),
            )
            for height, level in enumerate(tree.levels)
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
