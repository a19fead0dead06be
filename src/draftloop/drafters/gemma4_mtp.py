"""Gemma 4's multi-token-prediction assistant: it drafts from the target's own keys and values, and writes none.

Source: the published `gemma4_assistant` checkpoints and how Hugging Face transformers drafts with them.

A step takes the target's embedding of the last token and a hidden state, at first that of the target's last
position, then the assistant's own. Its layers ask the cache of the target's last layer of their kind that has one,
up to the position before the bonus token. All steps of a round stand at one position and see the same keys.

Shape suffixes: R rows, M rows of the engine plus one, B width of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.base import AttentionShape
from draftloop.attention.batches import tail_batch
from draftloop.attention.registry import attention_backend
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target, count_name, describe_limit, sampled_name
from draftloop.drafters.files import find_checkpoint, open_weights, read_shapes
from draftloop.drafters.fill import fill
from draftloop.drafters.gemma4_mtp_config import METHOD, ORDERING, check_target, parse
from draftloop.drafters.gemma4_mtp_model import Gemma4Assistant
from draftloop.drafters.write import write_next
from draftloop.errors import ConfigError
from draftloop.graphs.phase import GraphMode, Launch, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import RowState
from draftloop.models.config_file import read_config
from draftloop.models.decoder import FINAL_HIDDEN, Decoder, LayerCaches


class Gemma4MtpDrafter(Drafter):
    """No cache and no prompt pass of its own."""

    name = METHOD
    options = frozenset(
        {"model", "revision", "draft_sample_method", "attention_backend", "max_model_len", "gemma4_position"}
    )
    samples = True
    reuses_prefixes = True
    follows_load = True
    aux_layers = (FINAL_HIDDEN,)

    assistant: Gemma4Assistant
    hidden_MB: Tensor
    """Per engine row, the hidden state that its next step takes."""

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if spec.model is None:
            raise ConfigError(f"speculative method {METHOD!r} needs 'model', the folder or hub id of an assistant")
        self.folder = find_checkpoint(spec.model, spec.revision)
        config = read_config(self.folder)
        self.config, self.names = parse(config, read_shapes(self.folder), name=spec.model)
        self.target_config = check_target(self.config, spec.model, target.config, target.name)
        self.longest = self.length_limit(self.config.model.max_position_embeddings)
        self.backend_class = attention_backend(spec.attention_backend or "auto", target.device.type)

    def describe(self) -> str:
        parts = [super().describe(), str(self.spec.model)]
        layers = dict.fromkeys(self.target_config.last_own_layer(kind) for kind in self.config.model.layer_types)
        parts.append(f"reads keys and values of target layers {', '.join(map(str, layers))}")
        return ", ".join([*parts, *describe_limit(self.longest)])

    # ---- weights ----------------------------------------------------------------------------

    def borrow(self, target: Decoder) -> None:
        self._embed = target.embed

    def load(self, *, progress: bool) -> None:
        target, name = self.target, str(self.spec.model)
        backends = {}
        for kind in self.config.kinds:
            shape = AttentionShape(
                num_heads=self.config.model.num_heads,
                num_kv_heads=self.target_config.kv_heads(kind),
                head_dim=self.target_config.head_size(kind),
                scale=self.config.model.attention_scale,
                page_size=target.page_size,
                dtype=target.dtype,
                kv_dtype=target.kv_dtype,
            )
            self.backend_class.check(shape, target.device.type)
            backends[kind] = self.backend_class(shape, target.device)
        self.assistant = Gemma4Assistant(
            self.config, backends, device=target.device, dtype=target.dtype, max_positions=target.max_positions
        )
        assert self.folder is not None
        fill(self.assistant, self.folder, self.names, vocab_size=target.vocab_size, name=name)
        if self.config.num_centroids:
            with open_weights(self.folder) as tensors:
                ordering_V = tensors.read(self.names[ORDERING]).long()
            if not torch.equal(ordering_V.sort().values, torch.arange(ordering_V.shape[0])):
                raise ConfigError(f"{ORDERING} of {name!r} does not name every id once; the export is damaged")
            self.assistant.settle(ordering_V)

    # ---- phases -----------------------------------------------------------------------------

    def read_target(self, caches: LayerCaches) -> None:
        read = [self.target_config.last_own_layer(kind) for kind in self.config.model.layer_types]
        self._caches = [caches[layer] for layer in read if layer is not None]

    def row_memory(self) -> Mapping[str, Tensor]:
        return {"hidden_MB": self.hidden_MB}

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        target, assistant = self.target, self.assistant
        width, vocab, kv, embed = self.config.target_hidden_size, target.vocab_size, self._caches, self._embed
        hidden_MB = self.hidden_MB = torch.zeros(state.padding_row + 1, width, dtype=target.dtype, device=target.device)
        # the last position that the target has written, or that of the bonus token after it
        further = 0 if self.spec.gemma4_position == "vllm" else 1

        def prompt(launch: Launch, rows: Tensor, query_starts: Tensor, aux_hidden: Tensor) -> Mapping[str, Tensor]:
            last_R = (query_starts[1:] - 1).clamp(min=0).long()
            hidden_MB.index_copy_(0, rows.long(), aux_hidden.index_select(0, last_R))
            return {}

        def select(
            launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor, *, verified: int
        ) -> Mapping[str, Tensor]:
            # of the last position that was accepted
            index_R = torch.arange(rows.shape[0], device=rows.device) * verified
            last_R = index_R + (num_emitted.long() - 1).clamp(0, verified - 1)
            hidden_MB.index_copy_(0, rows.long(), aux_hidden.index_select(0, last_R))
            return {}

        def step(launch: Launch, rows: Tensor, *, sampled: bool, first: bool) -> Mapping[str, Tensor]:
            # every step of a round sees what the target has written before the bonus token
            batch, tokens = tail_batch(state, rows, 1, target.page_size, launch, offset=-2, ahead=1, num_ids=vocab)
            if not first:
                _, tokens = tail_batch(state, rows, 1, target.page_size, launch, offset=-1, drafted=True, num_ids=vocab)
            normed_RC, hidden_RB = assistant(
                embed(tokens.ids_T), hidden_MB[rows], batch.positions_T + further, kv, batch
            )
            hidden_MB.index_copy_(0, rows.long(), hidden_RB)
            logits_RV = assistant.logits(normed_RC)
            write_next(state, rows, logits_RV, vocab_size=vocab, sampled=sampled, first=first, longest=self.longest)
            return {}

        support = self.backend_class.graph_support(target.device.type)
        rows = rows_slot(state.padding_row)
        num_emitted = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)  # nothing of the padding row follows from it
        query_starts = Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST)
        aux = Slot(unit=Unit.TOKEN, dtype=target.dtype, shape=(width,))
        cache_bytes = sum(2 * cache.shape[3] * cache.shape[4] * cache.dtype.itemsize for cache in kv)
        phases = [
            Phase(
                name="draft.prompt",
                fn=prompt,
                slots={"rows": rows, "query_starts": query_starts, "aux_hidden": aux},
                tokens_per_row=None,
            ),
            *(
                Phase(
                    name=count_name("draft.select", k, self.num_drafts),
                    fn=partial(select, verified=k + 1),
                    slots={"rows": rows, "num_emitted": num_emitted, "aux_hidden": aux},
                    tokens_per_row=k + 1,
                )
                for k in self.counts
                if k
            ),
        ]
        for sampled in (False, True) if self.sampled else (False,):
            phases += [
                Phase(
                    name=sampled_name(name, sampled),
                    fn=lambda launch, s=sampled, f=first, **slots: step(launch, sampled=s, first=f, **slots),
                    slots={"rows": rows},
                    # never piecewise: that pads tokens, and attention would read past its rows
                    modes=frozenset({GraphMode.NONE, *([GraphMode.FULL] if support.uniform else [])}),
                    reason=support.reason or "one token per row is captured whole or not at all",
                    cost=assistant.cost(cache_bytes),
                )
                for name, first in (("draft.first", True), ("draft.decode", False))
            ]
        return phases

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        first, decode = sampled_name("draft.first", sampled), sampled_name("draft.decode", sampled)
        chain = (first, *(decode,) * (self.num_drafts - 1))
        return Rounds(
            prompt=("draft.prompt",),
            first=chain,
            next=("draft.select", *chain),
            # rows without drafts are past their limit, or declined them: they never draft again
            plain=(),
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if not num_drafts:
            return ()  # there is no cache of its own
        select, *chain = self.rounds(sampled=sampled).next
        return (count_name(select, num_drafts, self.num_drafts), *chain[:num_drafts])

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return self.rounds(sampled=sampled).first[:num_drafts]
