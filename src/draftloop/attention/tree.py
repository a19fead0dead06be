"""Attention batches over trees of drafts: the block that the target verifies, and the levels that a drafter makes.

In the cache a tree's keys follow the row's tokens one by one, in the order of its places.

Shape suffixes: R rows of the pass, Q tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch, TreeMask
from draftloop.config.draft_tree import DraftTree, TreeLevel
from draftloop.graphs.phase import Launch, Pad, Slot, Unit
from draftloop.kernels.row_tokens import RowTokens, Sequences
from draftloop.kernels.tree_tokens import TreeTokens, tree_tokens
from draftloop.kvcache.rows import RowState


@dataclass(frozen=True)
class TreePass:
    """What each row of a pass brings, and what of its tree that sees; constants on the device."""

    tokens: TreeTokens
    mask: TreeMask

    @classmethod
    def block(cls, tree: DraftTree, device: torch.device) -> TreePass:
        """Bonus token and all drafts, as the target verifies them."""
        keys = [[*path] for path in tree.paths]
        drafts = range(-1, tree.num_drafts)
        return cls._make(drafts, tree.heights, keys, 0, device)

    @classmethod
    def level(cls, tree: DraftTree, level: TreeLevel, device: torch.device) -> TreePass:
        """The drafts of one height that others stand behind, one position earlier: a drafter pairs each of them with
        the state before it. Drafts without children have no key here."""
        inner = [place for place in range(1, tree.num_places) if tree.num_children[place]]
        keys = [[inner.index(ancestor) for ancestor in tree.paths[place][1:]] for place in level.places]
        drafts = [place - 1 for place in level.places]
        heights = [tree.heights[place] - 1 for place in level.places]
        return cls._make(drafts, heights, keys, level.first_inner, device)

    @classmethod
    def _make(cls, drafts, heights, keys: list[list[int]], first_key: int, device: torch.device) -> TreePass:
        masks = [sum(1 << key for key in seen) for seen in keys]
        ancestors_Q = torch.tensor([mask - (mask >> 63 << 64) for mask in masks], dtype=torch.int64, device=device)
        return cls(
            TreeTokens(
                torch.tensor(list(drafts), dtype=torch.int32, device=device),
                torch.tensor(list(heights), dtype=torch.int32, device=device),
                first_key,
            ),
            TreeMask(ancestors_Q, first_key + len(masks)),
        )


def tree_batch(
    state: RowState, rows_R: Tensor, of: TreePass, page_size: int, launch: Launch, *, num_ids: int
) -> tuple[AttentionBatch, RowTokens]:
    """Every row brings the same part of its tree; ids that are none of the `num_ids` become 0."""
    sequences = Sequences(state.tokens_ML, state.num_tokens_M, state.drafts_MK, state.page_table_MN)
    tokens = tree_tokens(rows_R, sequences, of.tokens, page_size=page_size, num_ids=num_ids)
    batch = AttentionBatch(
        rows_R=rows_R,
        query_starts_R1=tokens.query_starts_R1,
        kv_lens_R=tokens.kv_lens_R,
        positions_T=tokens.positions_T,
        slots_T=tokens.slots_T,
        page_table_MN=state.page_table_MN,
        max_query_len=of.tokens.drafts_Q.shape[0],
        uniform=True,
        tree=of.mask,
        attend=launch.attend,
    )
    return batch, tokens


def path_slot(tree: DraftTree) -> Slot:
    """The slot `path` of phases that run after the acceptance of a tree: int32 [R, J], for each row the places of the
    verified block from which its emitted tokens came."""
    return Slot(unit=Unit.ROW, dtype=torch.int32, shape=(1 + tree.depth,), pad=Pad.KEEP)
