"""EAGLE: a small head drafts from the target's own hidden states.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024 (method
`eagle`; EAGLE-2 changed how its trees grow, not the head), and "EAGLE-3: Scaling up Inference Acceleration
of Large Language Models via Training-Time Test", 2025 (method `eagle3`). Drafts are chains.

The head runs pairs: the token at position p + 1 with the hidden state of position p, at position p. Where
the target has seen position p, the hidden state is the target's; along the chain it is the head's own of
the step before. So after each acceptance the first pass runs over the verified block, and the keys and
values of accepted positions, which the chain wrote from its own states, are made anew from the target's.

Shape suffixes: R rows, T tokens, M rows of the engine plus one, Q = 1 + K tokens of a block, C width of the head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target, sampled_name
from draftloop.drafters.eagle_config import HEAD_PRESETS, EagleConfig, Method, check_target, parse
from draftloop.drafters.eagle_model import EagleHead
from draftloop.drafters.files import read_shapes
from draftloop.drafters.fill import fill, fill_dummy
from draftloop.drafters.locate import locate
from draftloop.drafters.write import write_next
from draftloop.graphs.phase import GraphMode, Launch, Pad, Phase, Slot, Unit
from draftloop.kernels.rms_norm import Store
from draftloop.kvcache.pool import CacheSpec
from draftloop.kvcache.rows import RowState
from draftloop.models.dense import DenseDecoder, attention_shape, cache_spec
from draftloop.models.resolve import read_json

logger = logging.getLogger(__name__)


class _Eagle(Drafter):
    """What both methods share."""

    method: ClassVar[Method]
    options = frozenset(
        {"model", "revision", "draft_sample_method", "attention_backend", "load_format", "max_model_len"}
    )
    samples = True

    head: EagleHead
    hidden_MC: Tensor
    """Per engine row, the hidden state that its next chain step takes."""

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self.config, self.names = self._find()
        check_target(self.config, str(spec.model), target.config, target.name)
        self._aux_layers = self.config.aux_layers(target.config.num_layers, spec.aux_layer_offset)
        # beyond what it was trained for a head drafts badly; its rows stop drafting, and are verified on
        self.longest = min(spec.max_model_len or self.config.model.max_position_embeddings, target.max_model_len)
        name = resolve_attention_name(spec.attention_backend or "auto", target.device.type)
        self.backend_class = attention_backend(name, target.device.type)

    def _find(self) -> tuple[EagleConfig, dict[str, str]]:
        """The head's shape and the names of its tensors. Reads no weights; raises ConfigError."""
        preset, self.folder = locate(self.spec, self.target, HEAD_PRESETS, method=self.method)
        if self.folder is None:
            assert preset is not None
            return preset, {}
        config = read_json(self.folder / "config.json")
        return parse(config, read_shapes(self.folder), method=self.method, name=str(self.spec.model))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def aux_layer_offset(self) -> int | None:
        if self.config.fuses_embedding:
            return None
        asked = self.spec.aux_layer_offset
        return int(self.config.ids_are_outputs) if asked is None else asked

    def describe(self) -> str:
        parts = [super().describe(), f"{self.spec.model} ({self.config.layout} layout)"]
        if not self.config.fuses_embedding:
            parts.append(f"reads what enters layers {', '.join(map(str, self._aux_layers))}")
        if self.longest < self.target.max_model_len:
            parts.append(f"rows stop drafting at {self.longest} tokens")
        return ", ".join(parts)

    # ---- weights ----------------------------------------------------------------------------

    def borrow(self, target: DenseDecoder) -> None:
        self._embed_tokens, self._lm_head = target.embed_tokens, target.lm_head
        for table, own in (("embed_tokens", self.config.own_embeddings), ("lm_head", self.config.own_head)):
            if not own:
                logger.info("%s has no %s: it uses the target's", self.spec.model, table)

    def load(self, *, progress: bool) -> None:
        target, config = self.target, self.config
        # the head's own weights and cache: nothing of how the target is quantised or cached applies to them
        shape = attention_shape(config.model, page_size=target.page_size, dtype=target.dtype)
        self.backend_class.check(shape, target.device.type)
        self.head = EagleHead(
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
            fill_dummy(self.head, vocab_size=target.vocab_size, seed=target.seed)
        else:
            fill(self.head, self.folder, self.names, vocab_size=target.vocab_size, name=str(self.spec.model))
        self.head.settle()

    def cache_specs(self) -> list[CacheSpec]:
        return [cache_spec(self.config.model, self.target.dtype)]

    # ---- phases -----------------------------------------------------------------------------

    def row_memory(self) -> Mapping[str, Tensor]:
        return {"hidden_MC": self.hidden_MC}

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        (kv,) = caches
        head, page_size, block = self.head, self.target.page_size, self.num_drafts + 1
        num_rows, width = state.padding_row + 1, self.config.model.hidden_size
        hidden_MC = self.hidden_MC = torch.zeros(num_rows, width, dtype=self.target.dtype, device=self.target.device)
        longest = self.longest if self.longest < self.target.max_model_len else None
        num_embedded = head.embed_tokens.shape[0]
        num_known = (
            self.target.vocab_size if self.config.has_map else min(head.lm_head.shape[0], self.target.vocab_size)
        )

        def known(ids: Tensor) -> Tensor:
            # an id past our table (the target's may be padded further), and NO_DRAFT, have no embedding: any will do
            return ids.clamp(0, num_embedded - 1)

        def draft(rows: Tensor, head_input_RC: Tensor, *, sampled: bool, first: bool) -> Mapping[str, Tensor]:
            logits_RW = head.logits(head_input_RC)
            write_next(
                state,
                rows,
                logits_RW,
                vocab_size=num_known,
                sampled=sampled,
                first=first,
                target_ids_W=head.target_ids_W,
                longest=longest,
            )
            return {}

        def prompt(
            launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, aux_hidden: Tensor
        ) -> Mapping[str, Tensor]:
            batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
            # the next prompt token, or the first token of the answer, which has been emitted by now
            ids_T = known(state.tokens_ML[row_T, batch.positions_T + 1])
            last_R = (query_starts[1:] - 1).clamp(min=0).long()
            head(ids_T, head.fuse(aux_hidden), kv, batch, keep_R=last_R, store=Store(hidden_MC, rows))
            return {}

        def first(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            return draft(rows, head.head_input(hidden_MC[rows]), sampled=sampled, first=True)

        def prefill(
            launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor, *, sampled: bool
        ) -> Mapping[str, Tensor]:
            # The verified block, each position with the token after it. Past what was emitted these are leftovers;
            # causal attention hides them from the row's last token.
            batch, tokens = tail_batch(
                state,
                rows,
                block,
                page_size,
                launch,
                offset=-1,
                emitted_R=num_emitted,
                ahead=1,
                num_ids=num_embedded,
            )
            store = Store(hidden_MC, rows)
            head_input_RC = head(tokens.ids_T, head.fuse(aux_hidden), kv, batch, keep_R=tokens.last_R, store=store)
            return draft(rows, head_input_RC, sampled=sampled, first=True)

        def decode(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            # the last draft is at num_tokens + num_drafted - 1, and its pair one before that
            batch, tokens = tail_batch(
                state, rows, 1, page_size, launch, offset=-2, drafted=True, ahead=1, num_ids=num_embedded
            )
            store = Store(hidden_MC, rows)
            head_input_RC = head(tokens.ids_T, hidden_MC, kv, batch, hidden_rows_T=rows, store=store)
            return draft(rows, head_input_RC, sampled=sampled, first=False)

        support = self.backend_class.graph_support(self.target.device.type)
        full = {GraphMode.FULL} if support.uniform else set()
        rows = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=state.padding_row)
        kv_lens = Slot(unit=Unit.ROW, dtype=torch.int32)
        num_emitted = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)  # nothing of the padding row follows from it
        aux = Slot(unit=Unit.TOKEN, dtype=self.target.dtype, shape=(self.config.aux_width,))
        phases = [
            Phase(
                name="draft.prompt",
                fn=prompt,
                slots={
                    "rows": rows,
                    "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
                    "kv_lens": kv_lens,
                    "aux_hidden": aux,
                },
                tokens_per_row=None,
                modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *([GraphMode.FULL] if support.ragged else [])}),
                reason=support.reason,
            )
        ]
        for sampled in (False, True) if self.sampled else (False,):
            phases += [
                Phase(
                    name=sampled_name("draft.first", sampled),
                    fn=lambda launch, s=sampled, **slots: first(launch, sampled=s, **slots),
                    slots={"rows": rows},
                ),
                Phase(
                    name=sampled_name("draft.prefill", sampled),
                    fn=lambda launch, s=sampled, **slots: prefill(launch, sampled=s, **slots),
                    slots={"rows": rows, "num_emitted": num_emitted, "aux_hidden": aux},
                    tokens_per_row=block,
                    modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full}),
                    reason=support.reason,
                    cost=head.cost(fused=True, tokens_per_row=block),
                ),
                Phase(
                    name=sampled_name("draft.decode", sampled),
                    fn=lambda launch, s=sampled, **slots: decode(launch, sampled=s, **slots),
                    slots={"rows": rows},
                    # never piecewise: that pads tokens, and attention would read past its rows
                    modes=frozenset({GraphMode.NONE, *full}),
                    reason=support.reason or "one token per row is captured whole or not at all",
                    cost=head.cost(fused=False),
                ),
            ]
        return phases

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        chain = (sampled_name("draft.decode", sampled),) * (self.num_drafts - 1)
        return Rounds(
            prompt=("draft.prompt",),
            first=(sampled_name("draft.first", sampled), *chain),
            next=(sampled_name("draft.prefill", sampled), *chain),
            # rows without drafts are past their limit, or declined them: they never draft again
            plain=(),
        )


class EagleDrafter(_Eagle):
    """EAGLE-1 and EAGLE-2 heads: they read what the target's output head reads."""

    name = "eagle"
    method = "eagle"


class Eagle3Drafter(_Eagle):
    """EAGLE-3 heads: they read the residual stream at three (or more) places of the target."""

    name = "eagle3"
    method = "eagle3"
    options = _Eagle.options | {"aux_layer_offset"}
