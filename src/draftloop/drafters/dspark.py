"""DSpark: a block as in DFlash, and behind it heads that let each draft know the one before.

Source: "DSpark", arXiv 2607.05147. Slot j of the block predicts the token after its position, so that the bonus
token's own slot counts; a Markov head corrects each draft's logits by the token before it, one after the other.

A confidence head, where there is one, leaves for each draft how likely it is to be accepted if all before it
are: `row_memory()["confidence_MK"]`. With `confidence_threshold` a row's drafts end where the product falls below it.

Shape suffixes: R rows, M rows of the engine plus one, K drafts, C width of the drafter, N rank of the Markov
head, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Target
from draftloop.drafters.dflash import BlockDrafter
from draftloop.drafters.write import WriteOptions, write_all, write_next
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Cost, Phase
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.models.output_head import Vocabulary


class DSparkDrafter(BlockDrafter):
    """Drafts of one block are chosen left to right."""

    name = "dspark"
    method = "dspark"
    options = BlockDrafter.options | {"confidence_threshold"}

    confidence_MK: Tensor

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        heads, self.threshold = self.config.heads, spec.confidence_threshold
        if self.threshold is not None and not (heads and heads.confidence):
            raise ConfigError(
                f"confidence_threshold is {self.threshold}, but {spec.model!r} has no confidence head; leave it out"
            )

    @property
    def may_pass(self) -> bool:
        return self.threshold is not None

    def describe(self) -> str:
        heads = self.config.heads
        assert heads is not None
        markov = (
            f"{heads.markov_kind} Markov head of rank {heads.markov_rank}" if heads.markov_kind else "no Markov head"
        )
        confidence = ", confidence head" if heads.confidence else ""
        if self.threshold is not None:
            confidence += f", drafts end below {self.threshold:g}"
        return f"{super().describe()}, {markov}{confidence}"

    def row_memory(self) -> Mapping[str, Tensor]:
        return {"confidence_MK": self.confidence_MK}

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        self.confidence_MK = torch.zeros(state.drafts_MK.shape, device=state.drafts_MK.device)
        return super().phases(state, caches)

    def propose(self, state: RowState, rows_R: Tensor, bonus_R: Tensor, hidden_RKC: Tensor, *, sampled: bool) -> None:
        heads = self.model.heads
        assert heads is not None
        # what the heads add is of the whole vocabulary
        vocabulary = self.model.vocabulary
        logits_NW = vocabulary.whole(self.model.logits(hidden_RKC.flatten(0, 1)))
        options: WriteOptions = {**self.write_options, "vocabulary": Vocabulary(vocabulary.size)}
        logits_RKW = logits_NW.unflatten(0, hidden_RKC.shape[:2])
        config, token_R, previous_RN = heads.config, bonus_R, None
        memory_RN = hidden_RKC.new_zeros(hidden_RKC.shape[0], config.markov_rank)
        confidence = []
        for draft, (logits_RW, hidden_RC) in enumerate(zip(logits_RKW.unbind(1), hidden_RKC.unbind(1), strict=True)):
            if config.markov_kind:
                previous_RN = heads.embed(token_R)
                correction_RW, memory_RN = heads.correct(previous_RN, hidden_RC, memory_RN)
                logits_RW = logits_RW + correction_RW
            write_next(state, rows_R, logits_RW, first=draft == 0, sampled=sampled, **options)
            # NO_DRAFT where a row may draft no more, and then what follows is not written either
            token_R = state.drafts_MK[:, draft].index_select(0, rows_R)
            if config.confidence:
                confidence.append(heads.confidence(hidden_RC, previous_RN))
        if not confidence:
            return
        confidence_RK = torch.stack(confidence, 1)
        self.confidence_MK.index_copy_(0, rows_R.long(), confidence_RK)
        if self.threshold is not None:
            # a confidence follows from the drafts before its own alone: what is left out for it says nothing of the
            # draft itself, so those that are drawn keep their distribution
            keeps_RK = confidence_RK.cumprod(1) >= self.threshold
            drafts_RK = state.drafts_MK.index_select(0, rows_R)
            write_all(state, rows_R, torch.where(keeps_RK, drafts_RK, NO_DRAFT))

    def block_cost(self) -> Cost:
        block, heads = super().block_cost(), self.model.heads
        assert heads is not None
        per_step = heads.num_streamed()
        # steps wait for each other, and each streams the heads anew
        streamed = per_step * self.num_drafts * self.target.dtype.itemsize
        return replace(block, weight_bytes=block.weight_bytes + streamed, flops=block.flops + 2 * per_step)
