"""Blocks that begin at places of packed documents, and what their slots see.

A block is an anchor, which is a token of the text, and masks after it. Its slots see the tokens before the
anchor in its document, as the context, and each other.

Shape suffixes: B rows, L tokens of a row, A anchors, Q slots of a block, S = A * Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.train.method import Batch


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Where blocks begin."""

    index_BA: Tensor
    """int64: index of the anchor in its row."""
    valid_BA: Tensor
    """bool: rows with few places have fewer anchors than others."""
    batch: Batch

    @classmethod
    def draw(cls, batch: Batch, count: int) -> Anchors:
        """At random, from places that the target generated, and after which there is a token to be learnt."""
        places_BL = batch.follows(1) & batch.learn_BL
        noise_BL = torch.rand(places_BL.shape, device=places_BL.device).masked_fill(~places_BL, -1)
        drawn = noise_BL.topk(min(count, places_BL.shape[1]), dim=1)
        return cls(index_BA=drawn.indices, valid_BA=drawn.values >= 0, batch=batch)

    def at(self, values_BLx: Tensor, offset_Q: Tensor) -> Tensor:
        """[B, A, Q, ..]: values of the places `offset_Q` after each anchor; past the row's end, of its last."""
        place_BAQ = (self.index_BA[..., None] + offset_Q).clamp(max=values_BLx.shape[1] - 1)
        rows_B11 = torch.arange(values_BLx.shape[0], device=values_BLx.device)[:, None, None]
        return values_BLx[rows_B11, place_BAQ]

    def learn(self, offset_Q: Tensor) -> Tensor:
        """bool [B, A, Q]: the token there is of the anchor's document and to be learnt."""
        batch, first = self.batch, self.at(self.batch.document_BL, torch.zeros_like(offset_Q[:1]))
        inside_BAQ = self.index_BA[..., None] + offset_Q < batch.document_BL.shape[1]
        same_BAQ = self.at(batch.document_BL, offset_Q) == first
        return inside_BAQ & same_BAQ & self.at(batch.learn_BL, offset_Q) & self.valid_BA[..., None]

    def mask(self, num_slots: int) -> Tensor:
        """bool [B, S, L + S]: what each slot sees of the row's context and of all slots."""
        batch, (rows, count) = self.batch, self.index_BA.shape
        place_L = torch.arange(batch.document_BL.shape[1], device=self.index_BA.device)
        document_BA = batch.document_BL.gather(1, self.index_BA)
        before_BAL = place_L < self.index_BA[..., None]
        context_BAL = before_BAL & (batch.document_BL[:, None] == document_BA[..., None])
        block_S = torch.arange(count * num_slots, device=place_L.device) // num_slots
        own_BSS = (block_S[:, None] == block_S).expand(rows, -1, -1)
        return torch.cat((context_BAL.repeat_interleave(num_slots, 1), own_BSS), -1)

    def blocks(self, num_slots: int) -> Any:
        """The same as a block mask of flex_attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        index_BA, document_BL = self.index_BA, self.batch.document_BL
        document_BA = document_BL.gather(1, index_BA)
        rows, length = document_BL.shape
        num_queries = index_BA.shape[1] * num_slots

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            anchor = q // num_slots
            place = k.clamp(max=length - 1)
            context = (k < index_BA[b, anchor]) & (document_BL[b, place] == document_BA[b, anchor])
            return torch.where(k < length, context, (k - length) // num_slots == anchor)

        return create_block_mask(seen, rows, None, num_queries, length + num_queries, device=document_BL.device)
