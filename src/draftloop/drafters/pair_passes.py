"""The passes of a head that runs pairs (drafters/pairs.py): over prompts, verified blocks, and its own drafts.

Shape suffixes: R rows, T tokens, M rows of the engine plus one (of a tree, times the states that each row keeps), P
places of a level, X numbers per token that the target hands over or rows that tokens take their states from, C width of
the head, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.attention.tree import tree_batch
from draftloop.drafters.tree import LevelTables, TreeDrafts
from draftloop.drafters.write import WriteOptions, write_next
from draftloop.graphs.phase import Cost, Launch
from draftloop.kernels.rms_norm import Store
from draftloop.kernels.row_tokens import RowTokens
from draftloop.kvcache.rows import RowState
from draftloop.models.output_head import Vocabulary


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
        written to the rows that `store` names; whether it is the normed one, the head decides.
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


@dataclass(frozen=True, kw_only=True)
class PairPasses:
    """A head over its pages; its methods are what phases run."""

    head: PairHead
    kv_L2PSGD: Tensor
    page_size: int
    state: RowState
    hidden_MC: Tensor
    """The state that the next step takes, of each row; of a tree those of its inner places."""
    tree: TreeDrafts | None
    """None for a chain."""
    options: WriteOptions

    @property
    def num_ids(self) -> int:
        """Others (the target's table may be padded further, and there is NO_DRAFT) have no embedding: any will do."""
        return self.head.embed_tokens.shape[0]

    def prompt(
        self, launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, aux_hidden: Tensor
    ) -> Mapping[str, Tensor]:
        """Over a chunk of a prompt: keys and values, and the state of its last pair."""
        batch, row_T = ragged_batch(self.state, rows, query_starts, kv_lens, self.page_size, launch)
        # the next prompt token, or the first token of the answer, which has been emitted by now
        ids_T = self.state.tokens_ML[row_T, batch.positions_T + 1].clamp(0, self.num_ids - 1)
        last_R = (query_starts[1:] - 1).clamp(min=0).long()
        hidden_TC = self.head.fuse(aux_hidden)
        self.head(ids_T, hidden_TC, self.kv_L2PSGD, batch, keep_R=last_R, store=self._store(rows))
        return {}

    def first(self, launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
        """The first draft after a prompt, from the state that it left."""
        head_input_RC = self.head.head_input(self.hidden_MC[self._state_rows(rows)])
        return self._draft(rows, head_input_RC, sampled=sampled, first=True)

    def verified(
        self,
        launch: Launch,
        rows: Tensor,
        num_emitted: Tensor,
        aux_hidden: Tensor,
        path: Tensor | None = None,
        *,
        block: int,
        sampled: bool,
    ) -> Mapping[str, Tensor]:
        """Over the `block` verified positions, each with the token after it, and the first draft behind them.

        Past what was emitted these are leftovers; causal attention hides them from the row's last token.
        """
        if self.tree and path is not None:
            aux_hidden = self.tree.accepted(aux_hidden, path)
        batch, tokens = self._emitted(launch, rows, block, num_emitted)
        store, hidden_TC = self._store(rows), self.head.fuse(aux_hidden)
        head_input_RC = self.head(tokens.ids_T, hidden_TC, self.kv_L2PSGD, batch, keep_R=tokens.last_R, store=store)
        return self._draft(rows, head_input_RC, sampled=sampled, first=True)

    def feed(self, launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor) -> Mapping[str, Tensor]:
        """After a step without drafts: keys and values alone."""
        batch, tokens = self._emitted(launch, rows, 1, num_emitted)
        self.head.feed(tokens.ids_T, self.head.fuse(aux_hidden), self.kv_L2PSGD, batch)
        return {}

    def step(self, launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
        """The next draft of a chain, from the head's own state."""
        # the last draft is at num_tokens + num_drafted - 1, and its pair one before that
        batch, tokens = tail_batch(
            self.state, rows, 1, self.page_size, launch, offset=-2, drafted=True, ahead=1, num_ids=self.num_ids
        )
        store = Store(self.hidden_MC, rows)
        head_input_RC = self.head(tokens.ids_T, self.hidden_MC, self.kv_L2PSGD, batch, hidden_rows_T=rows, store=store)
        return self._draft(rows, head_input_RC, sampled=sampled, first=False)

    def level(self, launch: Launch, rows: Tensor, *, level: LevelTables) -> Mapping[str, Tensor]:
        """All drafts of a tree that stand behind those of one height."""
        assert self.tree is not None
        assert level.attends is not None
        batch, tokens = tree_batch(self.state, rows, level.attends, self.page_size, launch, num_ids=self.num_ids)
        sources_T, targets_T = self.tree.states(rows, level.sources_P), self.tree.states(rows, level.targets_P)
        store = Store(self.hidden_MC, targets_T)
        head_input_TC = self.head(
            tokens.ids_T, self.hidden_MC, self.kv_L2PSGD, batch, hidden_rows_T=sources_T, store=store
        )
        self.tree.write(level, rows, self.head.logits(head_input_TC), **self.options)
        return {}

    def _emitted(
        self, launch: Launch, rows: Tensor, num_per_row: int, num_emitted: Tensor
    ) -> tuple[AttentionBatch, RowTokens]:
        """The positions that the target has just run, each with the token after it."""
        return tail_batch(
            self.state,
            rows,
            num_per_row,
            self.page_size,
            launch,
            offset=-1,
            emitted_R=num_emitted,
            ahead=1,
            num_ids=self.num_ids,
        )

    def _draft(self, rows: Tensor, head_input_RC: Tensor, *, sampled: bool, first: bool) -> Mapping[str, Tensor]:
        logits_RW = self.head.logits(head_input_RC)
        if self.tree:
            self.tree.write(self.tree.levels[0], rows, logits_RW, **self.options)
        else:
            write_next(self.state, rows, logits_RW, sampled=sampled, first=first, **self.options)
        return {}

    def _state_rows(self, rows: Tensor) -> Tensor:
        return rows * self.tree.num_states if self.tree else rows

    def _store(self, rows: Tensor) -> Store:
        return Store(self.hidden_MC, self._state_rows(rows))
