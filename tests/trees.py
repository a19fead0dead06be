"""Trees of drafts for tests."""

from __future__ import annotations

import random

import pytest
import torch

from draftloop.attention.tree import TreePass
from draftloop.config.draft_tree import DraftTree
from draftloop.drafters import tree as tree_module
from draftloop.engine.llm import LLM
from draftloop.kernels.write_children import Children, write_children_torch
from draftloop.kernels.write_draft import DraftRows
from draftloop.kvcache.rows import NO_DRAFT
from draftloop.scheduler.batch import Sequence

SIXTEEN = (
    "[(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), "
    "(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)]"
)
SMALL = DraftTree.of_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0)])


def random_choices(seed: int, *, most: int = 63, most_children: int = 5) -> list[tuple[int, ...]]:
    """A tree grown at random; some are chains, and some as large as they may be."""
    source = random.Random(seed)
    size = source.choice([source.randint(1, most), source.randint(1, min(most, 12))])
    children: dict[tuple[int, ...], int] = {(): 0}
    bushy = source.random()
    while len(children) <= size:
        last = [*children][-1]
        parent = source.choice([*children]) if source.random() < bushy else last
        if children[parent] < most_children and len(parent) < 30:
            child = (*parent, children[parent])
            children[parent] += 1
            children[child] = 0
    choices = [choice for choice in children if choice]
    source.shuffle(choices)
    return choices


def random_tree(seed: int, most: int = 63) -> DraftTree:
    return DraftTree.of_choices(random_choices(seed, most=most))


def tree_passes(tree: DraftTree, device: torch.device) -> list[TreePass]:
    return [TreePass.block(tree, device), *(TreePass.level(tree, level, device) for level in tree.levels[1:])]


class Knowing:
    """Puts what an answer goes on with among a tree's drafts, at a rank that changes from place to place.

    So long branches of all kinds are accepted. `texts` is what follows each prompt, by prompt. Made before the engine
    is; `watch` it then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.known_ML = torch.full((9, 256), NO_DRAFT, dtype=torch.int32)
        """By engine row and position."""
        monkeypatch.setattr(tree_module, "write_children", self._write)

    def _write(self, rows_R, logits_NW, state: DraftRows, children: Children, target_ids_W, *, longest) -> None:
        write_children_torch(rows_R, logits_NW, state, children, target_ids_W, longest=longest)
        rows = rows_R.long()
        position_R = state.num_tokens_M[rows].long() + children.height - 1
        token_R1 = self.known_ML[rows, position_R.clamp(max=255)][:, None]
        counts_P = children.counts_P.long()
        rank_RP = (position_R[:, None] * 5 + children.firsts_P) % counts_P
        where_RP = children.firsts_P + rank_RP
        now_RP = state.drafts_MK[rows[:, None], where_RP]
        new_RP = torch.where((now_RP == NO_DRAFT) | (token_R1 == NO_DRAFT), now_RP, token_R1)
        state.drafts_MK.index_put_((rows[:, None], where_RP), new_RP)

    def watch(self, llm: LLM) -> LLM:
        rows, admit = llm.engine.core.worker.rows, llm.engine.core.worker.rows.admit

        def admitted(sequence: Sequence) -> None:
            admit(sequence)
            text = [*sequence.prompt_ids, *self.texts.get(tuple(sequence.prompt_ids), [])][:256]
            self.known_ML[sequence.row] = NO_DRAFT
            self.known_ML[sequence.row, : len(text)] = torch.tensor(text, dtype=torch.int32)

        rows.admit = admitted
        return llm
