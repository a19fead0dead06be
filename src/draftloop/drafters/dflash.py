"""DFlash: all drafts at once, from masks that a few layers fill beside what the target has seen.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036.

Each layer's keys and values for the context are made from the target's hidden states at their positions.
A round is one pass over a block, the bonus token and K masks, at the positions from the bonus token on: it
sees the context and itself, later slots included. A mask's logits are those of the token at its position.
The block's own keys and values go behind the context's and are overwritten in the next round.

Shape suffixes: R rows, T tokens, M rows of the engine plus one, Q slots of a block, C width of the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Rounds, Target
from draftloop.drafters.block_phases import Pass, block_phases, block_rounds, block_rounds_after
from draftloop.drafters.dflash_config import BLOCK_PRESETS, DFlashConfig, Method, check_target, parse
from draftloop.drafters.dflash_files import read_mask_embedding
from draftloop.drafters.dflash_model import DFlashModel
from draftloop.drafters.files import read_shapes
from draftloop.drafters.head import HeadDrafter
from draftloop.drafters.locate import locate
from draftloop.drafters.write import WriteOptions, write_block
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Cost, Launch, Phase, Slot, Unit
from draftloop.kvcache.rows import RowState
from draftloop.models.config_file import read_config


class BlockDrafter(HeadDrafter[DFlashConfig]):
    """What DFlash and DSpark share."""

    method: ClassVar[Method]
    options = frozenset(
        {
            "model",
            "revision",
            "draft_sample_method",
            "attention_backend",
            "load_format",
            "max_model_len",
            "aux_layer_offset",
        }
    )
    samples = True

    model: DFlashModel

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if self.num_drafts > self.config.max_drafts:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_drafts}, but {str(spec.model)!r} fills blocks of "
                f"{self.config.block_size}, so that it drafts at most {self.config.max_drafts}; ask for "
                f"{self.config.max_drafts} or fewer"
            )
        self._aux_layers = self.config.aux_layers(target.config.num_layers, spec.aux_layer_offset)

    def find(self) -> DFlashConfig:
        name, target = str(self.spec.model), self.target
        found, self.folder = locate(self.spec, target, BLOCK_PRESETS, method=self.method)
        self.mask_C = None if self.folder is None else read_mask_embedding(self.folder)
        if self.folder is not None:
            found, self.names = parse(
                read_config(self.folder),
                read_shapes(self.folder),
                method=self.method,
                name=name,
                mask_embedding=self.mask_C is not None,
            )
        assert found is not None
        check_target(found, name, target.config, target.name)
        return found

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def aux_layer_offset(self) -> int | None:
        asked = self.spec.aux_layer_offset
        return int(self.config.ids_are_outputs) if asked is None else asked

    def details(self) -> list[str]:
        return [
            f"{self.spec.model} ({self.config.layout} layout, blocks of {self.config.block_size})",
            f"reads what enters layers {', '.join(map(str, self._aux_layers))}",
        ]

    def load(self, *, progress: bool) -> None:
        self.model = self.make(DFlashModel)
        self.model.settle(self.mask_C)

    # ---- phases -----------------------------------------------------------------------------

    def propose(self, state: RowState, rows_R: Tensor, bonus_R: Tensor, hidden_RKC: Tensor, *, sampled: bool) -> None:
        """Leave the drafts of a block in the row state; `hidden_RKC` is what the output head reads for each."""
        logits_NW = self.model.logits(hidden_RKC.flatten(0, 1))
        write_block(state, rows_R, logits_NW, sampled=sampled, **self.write_options)

    @property
    def write_options(self) -> WriteOptions:
        """What the logits stand for, and where drafting ends."""
        known = self.target.vocab_size
        if not self.config.has_map:
            known = min(self.model.vocabulary.size, known)
        return {
            "vocab_size": known,
            "vocabulary": self.model.vocabulary,
            "target_ids_W": self.model.target_ids_W,
            "longest": self.longest,
        }

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        (kv,) = caches
        model, page_size = self.model, self.target.page_size
        counts = dict.fromkeys((*self.counts, 0) if self.may_pass else self.counts)
        first_slot = self.config.first_slot
        num_slots = self.num_drafts + first_slot
        num_embedded = model.embed_tokens.shape[0]

        def prompt(
            launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, aux_hidden: Tensor
        ) -> Mapping[str, Tensor]:
            batch, _ = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
            model.write_context(aux_hidden, batch.positions_T, batch.slots_T, kv)
            return {}

        def context(
            launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor, *, count: int
        ) -> Mapping[str, Tensor]:
            # of rejected drafts too: those positions are the block's, which is written next
            batch, _ = tail_batch(
                state, rows, count, page_size, launch, offset=-1, emitted_R=num_emitted, num_ids=num_embedded
            )
            model.write_context(aux_hidden, batch.positions_T, batch.slots_T, kv)
            return {}

        def block(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            batch, tokens = tail_batch(state, rows, num_slots, page_size, launch, offset=-1, num_ids=num_embedded)
            bonus_R = tokens.ids_T[::num_slots]
            hidden_RQC = model(bonus_R, kv, batch)
            self.propose(state, rows, bonus_R, hidden_RQC[:, first_slot:], sampled=sampled)
            return {}

        support = self.backend_class.graph_support(self.target.device.type)
        return block_phases(
            prompt=Pass(fn=prompt, cost=model.context_cost()),
            contexts={k: Pass(fn=partial(context, count=k + 1), cost=model.context_cost()) for k in counts},
            block=Pass(fn=block, cost=self.block_cost()),
            padding_row=state.padding_row,
            num_drafts=self.num_drafts,
            num_slots=num_slots,
            aux=Slot(unit=Unit.TOKEN, dtype=self.target.dtype, shape=(self.config.aux_width,)),
            support=support,
            prompt_attends=False,
            sampled=self.sampled,
        )

    @property
    def may_pass(self) -> bool:
        """A row may be left without drafts in one step and have some in the next."""
        return False

    def block_cost(self) -> Cost:
        """What a block with its drafts must read and compute."""
        return self.model.block_cost()

    def rounds(self, *, sampled: bool) -> Rounds:
        return block_rounds(sampled=sampled and self.sampled, may_pass=self.may_pass)

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return block_rounds_after(num_drafts, self.num_drafts, sampled=sampled and self.sampled)

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return self.rounds(sampled=sampled).first if num_drafts else ()


class DFlashDrafter(BlockDrafter):
    """Drafts of one block do not know of each other: each is its mask's own choice."""

    name = "dflash"
    method = "dflash"
