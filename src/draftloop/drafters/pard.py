"""PARD: a draft model that was trained on to fill masks, so that it makes all drafts in one pass.

Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost Parallel Draft Model Adaptation", arXiv 2504.18583.

Shape suffixes: R rows, S slots of each, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftloop.attention.batches import tail_batch
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Rounds, Target, sampled_name
from draftloop.drafters.draft_model import DraftModelDrafter
from draftloop.drafters.masks import mask_token, masked_block, num_slots
from draftloop.drafters.write import write_block
from draftloop.graphs.phase import ALL_MODES, GraphMode, Launch, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import RowState
from draftloop.models.config_file import read_config


class PardDrafter(DraftModelDrafter):
    """Independent of the target, as any draft model."""

    name = "pard"
    in_parallel = "pard"

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self.mask_id = self.config.vocab_size - 1  # of a shape without a checkpoint
        if self.folder is not None:
            config = read_config(self.folder)
            self.mask_id = mask_token(config, self.config.vocab_size, name=str(spec.model))

    @classmethod
    def overhang(cls, spec: SpeculativeConfig) -> int:
        return num_slots(cls.count_drafts(spec))

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        model, num_drafts = self.model, self.num_drafts
        kv = model.layer_caches(caches)
        num_embedded = self.config.vocab_size
        vocab_size = min(num_embedded, self.target.vocab_size)

        def block(
            launch: Launch, rows: Tensor, num_emitted: Tensor | None = None, *, slots: int, sampled: bool
        ) -> Mapping[str, Tensor]:
            # from the first token that was emitted; after a prompt that is the one that followed it
            batch, tokens = tail_batch(
                state,
                rows,
                slots,
                self.target.page_size,
                launch,
                offset=0 if num_emitted is not None else -1,
                emitted_R=num_emitted,
                num_ids=num_embedded,
            )
            new_R = torch.ones_like(rows) if num_emitted is None else num_emitted
            masked = masked_block(new_R, num_drafts, slots)
            ids_T = tokens.ids_T.masked_fill(masked.masked_RS.flatten(), self.mask_id)
            hidden_TC, _ = model(ids_T, kv, batch)
            logits_NW = model.logits(hidden_TC.index_select(0, masked.drafting_N))
            write_block(
                state,
                rows,
                logits_NW,
                vocab_size=vocab_size,
                sampled=sampled,
                vocabulary=model.vocabulary,
                longest=self.longest,
            )
            return {}

        support = self.backend_class.graph_support(self.target.device.type)
        rows = rows_slot(state.padding_row)
        num_emitted = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)  # nothing of the padding row follows from it
        phases = [self.prompt_phase(state, kv), *self.feed_phases(state, kv)]
        for sampled in (False, True) if self.sampled else (False,):
            for name, slots, inputs in (
                ("draft.first", num_drafts, {"rows": rows}),
                ("draft.block", num_slots(num_drafts), {"rows": rows, "num_emitted": num_emitted}),
            ):
                phases.append(
                    Phase(
                        name=sampled_name(name, sampled),
                        fn=lambda launch, n=slots, s=sampled, **given: block(launch, slots=n, sampled=s, **given),
                        slots=inputs,
                        tokens_per_row=slots,
                        modes=ALL_MODES if support.uniform else ALL_MODES - {GraphMode.FULL},
                        reason=support.reason,
                        cost=model.cost(),
                    )
                )
        return phases

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        return Rounds(
            prompt=("draft.prompt",),
            first=(sampled_name("draft.first", sampled),),
            next=(sampled_name("draft.block", sampled),),
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        # the block begins with what was emitted, however many drafts were verified
        return self.rounds(sampled=sampled).next if num_drafts else ("draft.feed",)

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return self.rounds(sampled=sampled).first  # it feeds the bonus token, whatever is drafted
