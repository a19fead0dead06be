"""The target's passes: prompts, and the verification of drafts.

Shape suffixes: R rows, T tokens, K drafts, C hidden size, V vocabulary, W its entries on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch, GraphSupport
from draftloop.attention.batches import ragged_batch, tail_batch, with_windows
from draftloop.attention.tree import TreePass, tree_batch
from draftloop.config.draft_tree import DraftTree
from draftloop.drafters.base import count_name
from draftloop.engine.logprobs import prompt_outputs, prompt_report
from draftloop.graphs.phase import GraphMode, Launch, Output, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import RowState
from draftloop.models.decoder import Decoder, LayerCaches


@dataclass(frozen=True, kw_only=True)
class PagedTarget:
    """The target over its pages: what one pass needs beside the tokens."""

    model: Decoder
    caches: LayerCaches
    state: RowState
    page_size: int
    support: GraphSupport
    """What of its attention can be captured."""
    aux_layers: tuple[int, ...] = ()
    """Layers whose inputs a pass leaves in `aux_hidden`."""
    window_tables: Mapping[int, Tensor] = field(default_factory=dict)
    """int32 [M, N] each: page tables of layers that let go of what is behind their window, by that."""

    def forward(
        self, ids_T: Tensor, batch: AttentionBatch, rows: Tensor, num_per_row: int = 1
    ) -> tuple[Tensor, list[Tensor]]:
        """The states after the final norm, [T, C], and what enters each of `aux_layers`.

        `rows`: whose tokens they are, each one's `num_per_row` in a row.
        """
        batch = self._with_adapters(batch, rows, num_per_row)
        if self.window_tables:
            batch = with_windows(batch, self.window_tables, rows, self.page_size)
        return self.model(ids_T, self.caches, batch, aux_layers=self.aux_layers)

    def aux_hidden(self, aux: list[Tensor]) -> dict[str, Tensor]:
        """The output `aux_hidden`, if there is one."""
        return {"aux_hidden": torch.cat(aux, -1)} if self.aux_layers else {}

    def aux_outputs(self) -> dict[str, Output]:
        """Declares `aux_hidden`."""
        if not self.aux_layers:
            return {}
        width = (len(self.aux_layers) * self.model.config.hidden_size,)
        return {"aux_hidden": Output(unit=Unit.TOKEN, dtype=self.model.dtype, shape=width)}

    def logits_output(self, unit: Unit) -> Output:
        """This rank's part of the logits."""
        return Output(unit=unit, dtype=self.model.dtype, shape=(self.model.vocabulary.width,))

    def _with_adapters(self, batch: AttentionBatch, rows: Tensor, num_per_row: int) -> AttentionBatch:
        if self.state.adapter_M is None:
            return batch
        adapters_R = self.state.adapter_M.index_select(0, rows)
        # of one row `flatten` alone makes a view: one number, which kernels would read past
        return replace(batch, adapters_T=adapters_R[:, None].expand(-1, num_per_row).contiguous().flatten())


def prompt_phases(target: PagedTarget, *, num_top_logprobs: int = 0) -> list[Phase]:
    """Declare the passes over chunks of prompts.

    `target.prefill`            -> logits of each chunk's last token
    `target.prefill.logprobs`   reports on all others too
    """
    model, state, vocabulary = target.model, target.state, target.model.vocabulary

    def whole_logits(hidden_TC: Tensor) -> Tensor:
        return vocabulary.whole(model.logits(hidden_TC))

    def prefill(
        launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, *, report: bool = False
    ) -> Mapping[str, Tensor]:
        batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, target.page_size, launch)
        ids_T = state.tokens_ML[row_T, batch.positions_T]
        hidden_TC, aux = target.forward(ids_T, batch, row_T)
        last_R = (query_starts[1:] - 1).clamp(min=0)
        outputs = {"prompt_logits": model.logits(hidden_TC[last_R]), **target.aux_hidden(aux)}
        if report:
            next_T = state.tokens_ML[row_T, batch.positions_T + 1]
            outputs |= prompt_report(hidden_TC, next_T, whole_logits, num_top_logprobs)
        return outputs

    prompts = Phase(
        name=prefill_name(),
        fn=prefill,
        slots={
            "rows": rows_slot(state.padding_row),
            "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
            "kv_lens": Slot(unit=Unit.ROW, dtype=torch.int32),
        },
        outputs={"prompt_logits": target.logits_output(Unit.ROW), **target.aux_outputs()},
        tokens_per_row=None,
        modes=_modes(full=target.support.ragged),
        reason=target.support.reason,
    )
    with_report = replace(
        prompts,
        name=prefill_name(report=True),
        fn=partial(prefill, report=True),
        outputs={**prompts.outputs, **prompt_outputs(num_top_logprobs)},
        modes=frozenset({GraphMode.NONE}),
        reason="prompt logprobs are rare, and take a prompt's logits in parts",
    )
    return [prompts, with_report]


def verify_phases(target: PagedTarget, tree: DraftTree, *, counts: Sequence[int] = ()) -> list[Phase]:
    """Declare the passes of decoding rows. `counts`: numbers of drafts that steps verify beside the most.

    `target.verify`   bonus token and drafts of each row -> logits of every position, on each rank those of its part
                      of the vocabulary; each of `counts` has one of its own
    `target.decode`   the same without drafts, for batches in which nobody speculates
    """
    model, state, num_ids = target.model, target.state, target.model.vocabulary.size
    block = TreePass.block(tree, model.lm_head.device)

    def verify(launch: Launch, rows: Tensor, *, k: int) -> Mapping[str, Tensor]:
        if k and not tree.is_chain:
            batch, tokens = tree_batch(state, rows, block, target.page_size, launch, num_ids=num_ids)
        else:
            batch, tokens = tail_batch(state, rows, 1 + k, target.page_size, launch, offset=-1, num_ids=num_ids)
        hidden_TC, aux = target.forward(tokens.ids_T, batch, rows, 1 + k)
        return {"logits": model.logits(hidden_TC, out_TW=launch.outputs.get("logits")), **target.aux_hidden(aux)}

    rows = rows_slot(state.padding_row)
    return [
        Phase(
            name=verify_name(k, tree.num_drafts),
            fn=partial(verify, k=k),
            slots={"rows": rows},
            outputs={"logits": target.logits_output(Unit.TOKEN), **target.aux_outputs()},
            tokens_per_row=1 + k,
            modes=_modes(full=target.support.uniform),
            reason=target.support.reason,
            cost=model.cost(),
        )
        for k in sorted({tree.num_drafts, *counts, 0}, reverse=True)
    ]


def _modes(*, full: bool) -> frozenset[GraphMode]:
    """`full`: attention can be captured too."""
    return frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *([GraphMode.FULL] if full else [])})


def prefill_name(*, report: bool = False) -> str:
    """The phase of prompts; `report`: with the logprobs of their tokens."""
    return "target.prefill.logprobs" if report else "target.prefill"


def verify_name(num_drafts: int, most: int) -> str:
    """The verify phase of so many drafts, of at most `most`; without drafts it is plain decoding."""
    return count_name("target.verify", num_drafts, most) if num_drafts else "target.decode"
