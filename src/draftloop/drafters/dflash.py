"""DFlash: all drafts at once, from masks that a few layers fill beside what the target has seen.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036.

Each layer's keys and values for the context are made from the target's hidden states at their positions.
A round is one pass over a block, the bonus token and K masks, at the positions from the bonus token on: it
sees the context and itself, later slots included. A mask's logits are those of the token at its position.
The block's own keys and values go behind the context's and are overwritten in the next round.

Shape suffixes: R rows, T tokens, M rows of the engine plus one, Q slots of a block, C width of the drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, TypedDict

from torch import Tensor

from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target
from draftloop.drafters.block_phases import Pass, block_phases, block_rounds
from draftloop.drafters.dflash_config import BLOCK_PRESETS, DFlashConfig, Method, check_target, parse
from draftloop.drafters.dflash_files import read_mask_embedding
from draftloop.drafters.dflash_model import DFlashModel
from draftloop.drafters.files import read_shapes
from draftloop.drafters.fill import fill, fill_dummy
from draftloop.drafters.locate import locate
from draftloop.drafters.write import write_block
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Cost, Launch, Phase, Slot, Unit
from draftloop.kvcache.pool import CacheSpec
from draftloop.kvcache.rows import RowState
from draftloop.models.decoder import Decoder
from draftloop.models.dense import attention_shape, cache_spec
from draftloop.models.resolve import read_json

logger = logging.getLogger(__name__)


class VocabularyOptions(TypedDict):
    """Keywords of `write_block`."""

    vocab_size: int
    target_ids_W: Tensor | None
    longest: int | None


class BlockDrafter(Drafter):
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
    reuses_prefixes = True

    model: DFlashModel

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self.config = self._find()
        name = str(spec.model)
        check_target(self.config, name, target.config, target.name)
        if self.num_drafts > self.config.max_drafts:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_drafts}, but {name!r} fills blocks of {self.config.block_size}, "
                f"so that it drafts at most {self.config.max_drafts}; ask for {self.config.max_drafts} or fewer"
            )
        self._aux_layers = self.config.aux_layers(target.config.num_layers, spec.aux_layer_offset)
        # beyond what it was trained for it drafts badly; its rows stop drafting, and are verified on
        self.longest = min(spec.max_model_len or self.config.model.max_position_embeddings, target.max_model_len)
        backend = resolve_attention_name(spec.attention_backend or "auto", target.device.type)
        self.backend_class = attention_backend(backend, target.device.type)

    def _find(self) -> DFlashConfig:
        """The drafter's shape; remembers where its weights are. Reads none; raises ConfigError."""
        preset, self.folder = locate(self.spec, self.target, BLOCK_PRESETS, method=self.method)
        self.mask_C, self.names = None, dict[str, str]()
        if self.folder is None:
            assert preset is not None
            return preset
        self.mask_C = read_mask_embedding(self.folder)
        config, self.names = parse(
            read_json(self.folder / "config.json"),
            read_shapes(self.folder),
            method=self.method,
            name=str(self.spec.model),
            mask_embedding=self.mask_C is not None,
        )
        return config

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def aux_layer_offset(self) -> int | None:
        asked = self.spec.aux_layer_offset
        return int(self.config.ids_are_outputs) if asked is None else asked

    def describe(self) -> str:
        config = self.config
        parts = [
            super().describe(),
            f"{self.spec.model} ({config.layout} layout, blocks of {config.block_size})",
            f"reads what enters layers {', '.join(map(str, self._aux_layers))}",
        ]
        if self.longest < self.target.max_model_len:
            parts.append(f"rows stop drafting at {self.longest} tokens")
        return ", ".join(parts)

    # ---- weights ----------------------------------------------------------------------------

    def borrow(self, target: Decoder) -> None:
        self._embed_tokens, self._lm_head = target.embed_tokens, target.lm_head
        for table, own in (("embed_tokens", self.config.own_embeddings), ("lm_head", self.config.own_head)):
            if not own:
                logger.info("%s has no %s: it uses the target's", self.spec.model, table)

    def load(self, *, progress: bool) -> None:
        target, config = self.target, self.config
        shape = attention_shape(config.model, page_size=target.page_size, dtype=target.dtype)
        self.backend_class.check(shape, target.device.type)
        self.model = DFlashModel(
            config,
            self.backend_class(shape, target.device),
            device=target.device,
            dtype=target.dtype,
            max_positions=target.max_positions,
            embed_tokens=self._embed_tokens,
            lm_head=self._lm_head,
        )
        del self._embed_tokens, self._lm_head
        if self.folder is None:
            fill_dummy(self.model, vocab_size=target.vocab_size, seed=target.seed)
        else:
            fill(self.model, self.folder, self.names, vocab_size=target.vocab_size, name=str(self.spec.model))
        self.model.settle(self.mask_C)

    def cache_specs(self) -> list[CacheSpec]:
        return [cache_spec(self.config.model, self.target.dtype)]

    # ---- phases -----------------------------------------------------------------------------

    def propose(self, state: RowState, rows_R: Tensor, bonus_R: Tensor, hidden_RKC: Tensor, *, sampled: bool) -> None:
        """Leave the drafts of a block in the row state; `hidden_RKC` is what the output head reads for each."""
        logits_NW = self.model.logits(hidden_RKC.flatten(0, 1))
        write_block(state, rows_R, logits_NW, sampled=sampled, **self.vocabulary(logits_NW))

    def vocabulary(self, logits_NW: Tensor) -> VocabularyOptions:
        """What the logits stand for, and where drafting ends."""
        known = self.target.vocab_size if self.config.has_map else min(logits_NW.shape[1], self.target.vocab_size)
        return {
            "vocab_size": known,
            "target_ids_W": self.model.target_ids_W,
            "longest": self.longest if self.longest < self.target.max_model_len else None,
        }

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        (kv,) = caches
        model, page_size, verified = self.model, self.target.page_size, self.num_drafts + 1
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
            context=Pass(fn=partial(context, count=verified), cost=model.context_cost()),
            plain=Pass(fn=partial(context, count=1), cost=model.context_cost()) if self.may_pass else None,
            block=Pass(fn=block, cost=self.block_cost()),
            padding_row=state.padding_row,
            num_verified=verified,
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


class DFlashDrafter(BlockDrafter):
    """Drafts of one block do not know of each other: each is its mask's own choice."""

    name = "dflash"
    method = "dflash"
