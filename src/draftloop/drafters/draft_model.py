"""A second, smaller language model drafts token by token.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.

Of the tokens that a step emits the model has been fed all but the last two, which it drafted: the bonus token, and in
front of it the last draft where all were accepted. So after an acceptance its first pass runs over a row's last two
tokens, whatever was accepted. Where others' drafts may have been verified it runs over the whole block; rejected tail
tokens run too, and later passes write over what they leave.

Shape suffixes: R rows, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.attention.registry import attention_backend
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target, count_name, describe_limit, draft_group, sampled_name
from draftloop.drafters.files import read_shapes
from draftloop.drafters.kinds import READ, check_kind, plain_name
from draftloop.drafters.write import write_next
from draftloop.errors import ConfigError
from draftloop.graphs.phase import GraphMode, Launch, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.pool import CacheSpec
from draftloop.kvcache.rows import RowState
from draftloop.models.config_file import read_config
from draftloop.models.decoder import Decoder, LayerCaches, attention_shapes, cache_specs
from draftloop.models.loader import load_config, load_model, resolve_model
from draftloop.models.shards import share
from draftloop.models.vocabulary import same_tokenizer

MAX_VOCAB_PADDING = 1024
"""Models of one tokenizer may pad their vocabulary to different sizes, but not by more than this."""


class DraftModelDrafter(Drafter):
    """Any model with the target's tokenizer, the target itself included."""

    name = "draft_model"
    options = frozenset(
        {
            "model",
            "revision",
            "draft_sample_method",
            "attention_backend",
            "load_format",
            "quantization",
            "max_model_len",
        }
    )
    samples = True
    reuses_prefixes = True
    follows_load = True
    in_parallel = "pard"

    model: Decoder

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if spec.model is None:
            raise ConfigError(f"speculative method {self.name!r} needs 'model', the drafting model")
        self.load_format = spec.load_format or target.load_format
        self.source = resolve_model(spec.model, revision=spec.revision, load_format=self.load_format)
        self.folder = self.source.folder
        self._check_kind()
        self.config = load_config(self.source, quantization=spec.quantization)
        self._check_vocabulary()
        self.group = draft_group(spec, target, self.config)
        self.layers = share(self.config, self.group.size)
        """Their sizes on this rank."""
        self.longest = self.length_limit(self.config.max_position_embeddings)
        self.backend_class = attention_backend(spec.attention_backend or "auto", target.device.type)

    def _check_kind(self) -> None:
        """A head for another method often calls itself by the name of a whole model."""
        folder = self.source.folder
        if folder is not None and any(folder.glob("*.safetensors")):
            names = map(plain_name, read_shapes(folder))
            check_kind("draft_model", read_config(folder, *READ), names, name=str(self.spec.model))

    def _check_vocabulary(self) -> None:
        ours, theirs = self.config.vocab_size, self.target.vocab_size
        if abs(ours - theirs) > MAX_VOCAB_PADDING or not same_tokenizer(self.source.folder, self.target.folder):
            raise ConfigError(
                f"draft model {self.spec.model!r} ({ours} ids) and target {self.target.name!r} ({theirs} ids) have "
                f"different tokenizers, so drafted ids would mean other words; take a draft model of the same family"
            )

    def describe(self) -> str:
        return ", ".join([super().describe(), str(self.spec.model), *describe_limit(self.longest)])

    def load(self, *, progress: bool) -> None:
        target = self.target
        shapes = attention_shapes(self.layers, page_size=target.page_size, dtype=target.dtype)
        for shape in shapes:
            self.backend_class.check(shape, target.device.type)
        self.model = load_model(
            self.source,
            self.config,
            self.backend_class(shapes[0], target.device),
            device=target.device,
            dtype=target.dtype,
            max_positions=target.max_positions,
            load_format=self.load_format,
            seed=target.seed,
            group=self.group,
            show_progress=None if progress else False,
        )

    def cache_specs(self) -> list[CacheSpec]:
        return cache_specs(self.layers, self.target.dtype)

    def prompt_phase(self, state: RowState, kv: LayerCaches) -> Phase:
        """Over a chunk of a prompt: its keys and values."""
        model, page_size, num_embedded = self.model, self.target.page_size, self.config.vocab_size

        def known(ids: Tensor) -> Tensor:
            # an id that only the target knows (special tokens past our vocabulary) has no embedding here
            return torch.where(ids < num_embedded, ids, 0).clamp(min=0)

        def prompt(launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor) -> Mapping[str, Tensor]:
            batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
            model(known(state.tokens_ML[row_T, batch.positions_T]), kv, batch)
            return {}

        support = self.backend_class.graph_support(self.target.device.type)
        return Phase(
            name="draft.prompt",
            fn=prompt,
            slots={
                "rows": rows_slot(state.padding_row),
                "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
                "kv_lens": Slot(unit=Unit.ROW, dtype=torch.int32),
            },
            tokens_per_row=None,
            modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *([GraphMode.FULL] if support.ragged else [])}),
            reason=support.reason,
        )

    def feed_phases(self, state: RowState, kv: LayerCaches) -> list[Phase]:
        """Where a step may have no drafts: over the one token that it emitted."""
        if 0 not in self.counts:
            return []
        model, num_embedded = self.model, self.config.vocab_size

        def feed(launch: Launch, rows: Tensor, num_emitted: Tensor) -> Mapping[str, Tensor]:
            batch, tokens = tail_batch(
                state, rows, 1, self.target.page_size, launch, offset=0, emitted_R=num_emitted, num_ids=num_embedded
            )
            model(tokens.ids_T, kv, batch)
            return {}

        support = self.backend_class.graph_support(self.target.device.type)
        slots = {
            "rows": rows_slot(state.padding_row),
            "num_emitted": Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP),
        }
        return [
            Phase(
                name="draft.feed",
                fn=feed,
                slots=slots,
                modes=frozenset({GraphMode.NONE, *([GraphMode.FULL] if support.uniform else [])}),
                reason=support.reason or "one token per row is captured whole or not at all",
                cost=model.cost(),
            )
        ]

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        kv = self.model.layer_caches(caches)
        model, page_size = self.model, self.target.page_size
        num_embedded = self.config.vocab_size
        vocab_size = min(num_embedded, self.target.vocab_size)

        def draft(rows: Tensor, hidden_RC: Tensor, *, sampled: bool, first: bool) -> Mapping[str, Tensor]:
            write_next(
                state,
                rows,
                model.logits(hidden_RC),
                vocab_size=vocab_size,
                sampled=sampled,
                first=first,
                vocabulary=model.vocabulary,
                longest=self.longest,
            )
            return {}

        def prefill(
            launch: Launch, rows: Tensor, num_emitted: Tensor | None = None, *, block: int, sampled: bool
        ) -> Mapping[str, Tensor]:
            # the last tokens, or from a step's first new one on: what is past the last one is hidden from it
            offset = -block if num_emitted is None else 0
            batch, tokens = tail_batch(
                state, rows, block, page_size, launch, offset=offset, emitted_R=num_emitted, num_ids=num_embedded
            )
            hidden_TC, _ = model(tokens.ids_T, kv, batch)
            return draft(rows, hidden_TC[tokens.last_R], sampled=sampled, first=True)

        def decode(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            # the last draft, or the bonus token where there is none yet
            batch, tokens = tail_batch(state, rows, 1, page_size, launch, offset=-1, drafted=True, num_ids=num_embedded)
            hidden_TC, _ = model(tokens.ids_T, kv, batch)
            return draft(rows, hidden_TC, sampled=sampled, first=False)

        support = self.backend_class.graph_support(self.target.device.type)
        full = {GraphMode.FULL} if support.uniform else set()
        rows = rows_slot(state.padding_row)
        slots, blocks = {"rows": rows}, {self.num_drafts: 2}
        if not self.drafts_alone:
            # nothing of the padding row follows from it
            slots["num_emitted"] = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)
            blocks = {k: k + 1 for k in self.counts if k}
        phases = [self.prompt_phase(state, kv), *self.feed_phases(state, kv)]
        for sampled in (False, True) if self.sampled else (False,):
            phases += [
                *(
                    Phase(
                        name=count_name(sampled_name("draft.prefill", sampled), k, self.num_drafts),
                        fn=partial(prefill, block=block, sampled=sampled),
                        slots=slots,
                        tokens_per_row=block,
                        modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full}),
                        reason=support.reason,
                        cost=model.cost(),
                    )
                    for k, block in blocks.items()
                ),
                Phase(
                    name=sampled_name("draft.decode", sampled),
                    fn=lambda launch, s=sampled, **slots: decode(launch, sampled=s, **slots),
                    slots={"rows": rows},
                    # never piecewise: that pads tokens, and attention would read past its rows
                    modes=frozenset({GraphMode.NONE, *full}),
                    reason=support.reason or "one token per row is captured whole or not at all",
                    cost=model.cost(),
                ),
            ]
        return phases

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        prefill, decode = sampled_name("draft.prefill", sampled), sampled_name("draft.decode", sampled)
        return Rounds(
            prompt=("draft.prompt",),
            first=(decode,) * self.num_drafts,
            next=(prefill, *(decode,) * (self.num_drafts - 1)),
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if not num_drafts:
            return ("draft.feed",)
        prefill, *chain = self.rounds(sampled=sampled).next
        if not self.drafts_alone:
            prefill = count_name(prefill, num_drafts, self.num_drafts)
        return (prefill, *chain[: num_drafts - 1])

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        # one at least: it feeds the bonus token
        return self.rounds(sampled=sampled).first[: max(num_drafts, 1)]
