"""Drafting a tree with a head that runs pairs: one pass for each height, over the drafts that others stand behind.

Shape suffixes: R rows, T tokens, M rows of the engine plus one, I = 1 + places below the root that have children,
P places of a level, J places of the longest branch, X numbers per token that the target hands over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.attention.tree import TreePass
from draftloop.config.draft_tree import DraftTree, TreeLevel
from draftloop.errors import ConfigError
from draftloop.kernels.write_children import Children, write_children
from draftloop.kernels.write_draft import DraftRows
from draftloop.kvcache.rows import RowState
from draftloop.models.output_head import Vocabulary


@dataclass(frozen=True)
class LevelTables:
    """Constants of the pass from one height to the next, on the device."""

    children: Children
    sources_P: Tensor
    """int32: which of a row's I hidden states each place takes: that of the place before it."""
    targets_P: Tensor
    """int32: which of them it leaves."""
    attends: TreePass | None
    """None at the root, which is the last token of the pass over the verified block."""

    @classmethod
    def of(cls, tree: DraftTree, level: TreeLevel, device: torch.device) -> LevelTables:
        def ints(values, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        inner = [place for place in range(tree.num_places) if place == 0 or tree.num_children[place]]
        height = tree.heights[level.places[0]]
        firsts = [level.first_draft + sum(level.num_children[:at]) for at in range(len(level.places))]
        pairs = [(at, rank) for at, count in enumerate(level.num_children) for rank in range(count)]
        before = [tree.parents[place - 1] if place else 0 for place in level.places]
        return cls(
            children=Children(
                counts_P=ints(level.num_children),
                firsts_P=ints(firsts),
                places_C=ints([at for at, _ in pairs], torch.int64),
                ranks_C=ints([rank for _, rank in pairs], torch.int64),
                most=max(level.num_children),
                height=height + 1,
            ),
            sources_P=ints(inner.index(place) for place in before),
            targets_P=ints(inner.index(place) for place in level.places),
            attends=TreePass.level(tree, level, device) if height else None,
        )


class TreeDrafts:
    """How a head's logits become the drafts of a tree. Hidden states of a row are in I rows of one memory."""

    def __init__(self, tree: DraftTree, state: RowState, device: torch.device) -> None:
        self.tree, self.state = tree, state
        self.levels = [LevelTables.of(tree, level, device) for level in tree.levels]
        self.num_states = 1 + sum(count > 0 for count in tree.num_children[1:])
        """I"""

    def write(
        self,
        level: LevelTables,
        rows_R: Tensor,
        logits_NW: Tensor,
        *,
        vocabulary: Vocabulary,
        vocab_size: int,
        target_ids_W: Tensor | None,
        longest: int | None,
    ) -> None:
        """Choose the drafts behind a level's places; `logits_NW` are those of its places, row after row. The rest is as
        in `write_next`.
        """
        state, most = self.state, level.children.most
        drafts = DraftRows(state.drafts_MK, state.num_drafted_M, state.draft_limit_M, state.num_tokens_M)
        if vocabulary.is_divided:
            choice = vocabulary.maxima(logits_NW, known=vocab_size, most=most)
        else:
            choice = logits_NW[:, :vocab_size]
        write_children(rows_R, choice, drafts, level.children, target_ids_W, longest=longest)

    def states(self, rows_R: Tensor, which_P: Tensor) -> Tensor:
        """int32 [R * P]: where these of each row's hidden states are."""
        return (rows_R[:, None] * self.num_states + which_P).flatten()

    def accepted(self, aux_TX: Tensor, path_RJ: Tensor) -> Tensor:
        """[R * J, X]: what the target handed over of each row's accepted branch, from the whole verified block."""
        num_places = self.tree.num_places
        # what a path says past its end, or of a padding row, is not used, but must be there
        places_RJ = path_RJ.long().clamp(0, num_places - 1)
        first_R1 = torch.arange(0, aux_TX.shape[0], num_places, device=aux_TX.device)[:, None]
        return aux_TX.index_select(0, (first_R1 + places_RJ).flatten())


def check_width(tree: DraftTree, draft_vocab_size: int) -> None:
    """Raises ConfigError where a place has more children than there are tokens to draft."""
    most = max(tree.num_children)
    if most > draft_vocab_size:
        raise ConfigError(
            f"speculative_token_tree has {most} drafts behind one place, but the drafter's vocabulary has "
            f"{draft_vocab_size} tokens; name at most as many"
        )
