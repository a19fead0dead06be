"""P-EAGLE: an EAGLE-3 head that was trained on masks, so that it makes all drafts in one pass.

Source: "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", arXiv 2602.01469.

It runs pairs as EAGLE heads do (drafters/pairs.py): the token at position p + 1 with the target's states of
position p, at position p. Behind the last pair stand pairs of the mask token and a trained state, `mask_hidden`,
each of which drafts the token two positions later. So nothing of the head's own states is ever fed back.

Shape suffixes: R rows, S slots of each, T tokens, M rows of the engine plus one, Q = 1 + K verified positions,
C width of the head, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Rounds
from draftloop.drafters.block_phases import Pass, block_phases, block_rounds, block_rounds_after
from draftloop.drafters.eagle import Eagle3Drafter
from draftloop.drafters.eagle_config import MASK_HIDDEN
from draftloop.drafters.files import open_weights
from draftloop.drafters.masks import masked_block, num_slots
from draftloop.drafters.write import write_block
from draftloop.graphs.phase import Cost, Launch, Phase, Slot, Unit
from draftloop.kvcache.rows import RowState


class PEagleDrafter(Eagle3Drafter):
    """All but what a round runs is EAGLE-3's."""

    name = "peagle"
    method = "peagle"
    in_parallel = "peagle"
    options = Eagle3Drafter.options - {"speculative_token_tree"}

    fused_MQC: Tensor
    """Per engine row, what `fc` makes of the target's states of its new positions, of which there are `num_new_M`."""
    num_new_M: Tensor
    mask_C: Tensor
    """The same of `mask_hidden`."""

    @classmethod
    def overhang(cls, spec: SpeculativeConfig) -> int:
        return num_slots(cls.count_drafts(spec))

    def load(self, *, progress: bool) -> None:
        super().load(progress=progress)
        mask_X = torch.zeros(self.config.aux_width)
        if self.folder is not None:
            with open_weights(self.folder) as tensors:
                mask_X = tensors.read(self.names[MASK_HIDDEN]).flatten()
        self.mask_C = self.head.fuse(mask_X.to(self.target.device, self.target.dtype)[None])[0]

    def row_memory(self) -> Mapping[str, Tensor]:
        return {"fused_MQC": self.fused_MQC, "num_new_M": self.num_new_M}

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        (kv,) = caches
        head, num_drafts = self.head, self.num_drafts
        device, dtype, page_size = self.target.device, self.target.dtype, self.target.page_size
        num_rows, width, mask_id = state.padding_row + 1, self.config.model.hidden_size, self.config.mask_token_id
        assert mask_id is not None
        fused_MQC = self.fused_MQC = torch.zeros(num_rows, num_drafts + 1, width, dtype=dtype, device=device)
        num_new_M = self.num_new_M = torch.ones(num_rows, dtype=torch.int32, device=device)
        num_embedded, slots = head.embed_tokens.shape[0], num_slots(num_drafts)
        num_known = self.target.vocab_size if self.config.has_map else min(head.vocabulary.size, self.target.vocab_size)

        def prompt(
            launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, aux_hidden: Tensor
        ) -> Mapping[str, Tensor]:
            batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
            # an id past our table (the target's may be padded further) has no embedding: any will do
            ids_T = state.tokens_ML[row_T, batch.positions_T + 1].clamp(0, num_embedded - 1)
            last_R = (query_starts[1:] - 1).clamp(min=0).long()
            fused_TC = head.fuse(aux_hidden)
            head(ids_T, fused_TC, kv, batch, keep_R=last_R)
            fused_MQC[:, 0].index_copy_(0, rows.long(), fused_TC.index_select(0, last_R))
            num_new_M.index_fill_(0, rows.long(), 1)
            return {}

        def context(
            launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor, *, verified: int
        ) -> Mapping[str, Tensor]:
            fused_RQC = head.fuse(aux_hidden).view(-1, verified, width)
            fused_MQC[:, :verified].index_copy_(0, rows.long(), fused_RQC)
            num_new_M.index_copy_(0, rows.long(), num_emitted)
            return {}

        def feed(launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor) -> Mapping[str, Tensor]:
            batch, tokens = tail_batch(
                state, rows, 1, page_size, launch, offset=-1, emitted_R=num_emitted, ahead=1, num_ids=num_embedded
            )
            head.feed(tokens.ids_T, head.fuse(aux_hidden), kv, batch)
            return {}

        def block(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            new_R = num_new_M[rows]
            batch, tokens = tail_batch(
                state, rows, slots, page_size, launch, offset=-1, emitted_R=new_R, ahead=1, num_ids=num_embedded
            )
            masked = masked_block(new_R, num_drafts, slots)
            ids_T = tokens.ids_T.masked_fill(masked.masked_RS.flatten(), mask_id)
            slot_S = torch.arange(slots, device=device).clamp(max=num_drafts)
            fused_RSC = fused_MQC[rows.long()[:, None], slot_S]
            fused_RSC = torch.where(masked.masked_RS[..., None], self.mask_C, fused_RSC)
            head_input_NC = head(ids_T, fused_RSC.flatten(0, 1), kv, batch, keep_R=masked.drafting_N)
            write_block(
                state,
                rows,
                head.logits(head_input_NC),
                vocab_size=num_known,
                sampled=sampled,
                vocabulary=head.vocabulary,
                target_ids_W=head.target_ids_W,
                longest=self.longest,
            )
            return {}

        support = self.backend_class.graph_support(self.target.device.type)
        fc = Cost(weight_bytes=head.fc.numel() * head.fc.dtype.itemsize, flops=2 * head.fc.numel())
        return block_phases(
            prompt=Pass(fn=prompt),
            contexts={k: Pass(fn=partial(context, verified=k + 1) if k else feed, cost=fc) for k in self.counts},
            block=Pass(fn=block, cost=head.cost(fused=False, tokens_per_row=slots)),
            padding_row=state.padding_row,
            num_drafts=num_drafts,
            num_slots=slots,
            aux=Slot(unit=Unit.TOKEN, dtype=dtype, shape=(self.config.aux_width,)),
            support=support,
            prompt_attends=True,
            sampled=self.sampled,
        )

    def rounds(self, *, sampled: bool) -> Rounds:
        return block_rounds(sampled=sampled and self.sampled)

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return block_rounds_after(num_drafts, self.num_drafts, sampled=sampled and self.sampled)

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return self.rounds(sampled=sampled).first if num_drafts else ()
