"""The target's phases: prompts, verification, acceptance.

Shape suffixes: R rows, T tokens, K drafts, C hidden size, V vocabulary, W its entries on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch, GraphSupport
from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.attention.tree import TreePass, path_slot, tree_batch
from draftloop.config.draft_tree import DraftTree
from draftloop.drafters.base import count_name
from draftloop.engine.logprobs import prompt_outputs, prompt_report
from draftloop.graphs.phase import GraphMode, Launch, Output, Pad, Phase, Slot, Unit
from draftloop.kernels.compact_kv import compact_kv
from draftloop.kvcache.rows import RowState
from draftloop.models.decoder import Decoder, LayerCaches
from draftloop.sampling.accept import accept_sampled_rows, accept_synthetic_rows
from draftloop.sampling.accept_tree import TreeTables, accept_tree_greedy, accept_tree_sampled
from draftloop.sampling.commit import (
    OUTCOME_COUNTS,
    Rule,
    accept_rows_greedy,
    accept_rows_sampled,
    accept_rows_synthetic,
)
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.sampling.sampler import SamplingKind


def target_phases(
    model: Decoder,
    kv: LayerCaches,
    state: RowState,
    *,
    tree: DraftTree,
    counts: Sequence[int] = (),
    caches: Sequence[Tensor],
    page_size: int,
    support: GraphSupport,
    aux_layers: tuple[int, ...] = (),
    several_drafters: bool = False,
    rule: Rule = accept_sampled_rows,
    synthetic_rates: list[float] | None = None,
    num_top_logprobs: int = 0,
    processors: Sequence[LogitsProcessor] = (),
) -> list[Phase]:
    """Declare what the target runs.

    `target.prefill`   chunks of prompts -> logits of each chunk's last token; `target.prefill.logprobs`
                       reports on all others too
    `target.verify`    bonus token and drafts of each row -> logits of every position, on each rank those of its part
                       of the vocabulary
    `target.decode`    the same without drafts, for batches in which nobody speculates
    `accept`           logits -> emitted tokens; the rows are that much longer
    `accept.prompt`    the same for the first token after a prompt
    `target.compact`   after `accept`, where drafts form a tree: the accepted branch's keys and values, of all
                       `caches`, move to where those of a chain are

    `counts` are the numbers of drafts that steps verify beside the most, each with phases of its own.
    With `several_drafters` the last column of an outcome says which of them drafted.

    The accept phases come in kinds (`SamplingKind`), so that a batch pays for what it asks. `rule` accepts
    drafts of sampled rows; with `synthetic_rates` drafts are accepted by coin.
    """
    device, dtype, vocabulary = model.lm_head.device, model.lm_head.dtype, model.vocabulary
    num_drafts, branches = tree.num_drafts, not tree.is_chain
    block, tables = TreePass.block(tree, device), TreeTables.of(tree, device)

    def aux_output(aux: list[Tensor]) -> dict[str, Tensor]:
        return {"aux_hidden": torch.cat(aux, -1)} if aux_layers else {}

    def with_adapters(batch: AttentionBatch, rows: Tensor, num_per_row: int = 1) -> AttentionBatch:
        if state.adapter_M is None:
            return batch
        adapters_R = state.adapter_M.index_select(0, rows)
        # of one row `flatten` alone makes a view: one number, which kernels would read past
        return replace(batch, adapters_T=adapters_R[:, None].expand(-1, num_per_row).contiguous().flatten())

    def whole_logits(hidden_TC: Tensor) -> Tensor:
        return vocabulary.whole(model.logits(hidden_TC))

    def prefill(
        launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, *, report: bool = False
    ) -> Mapping[str, Tensor]:
        batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
        ids_T = state.tokens_ML[row_T, batch.positions_T]
        hidden_TC, aux = model(ids_T, kv, with_adapters(batch, row_T), aux_layers=aux_layers)
        last_R = (query_starts[1:] - 1).clamp(min=0)
        outputs = {"prompt_logits": model.logits(hidden_TC[last_R]), **aux_output(aux)}
        if report:
            next_T = state.tokens_ML[row_T, batch.positions_T + 1]
            outputs |= prompt_report(hidden_TC, next_T, whole_logits, num_top_logprobs)
        return outputs

    def verify(launch: Launch, rows: Tensor, *, k: int) -> Mapping[str, Tensor]:
        num_ids = vocabulary.size
        if k and branches:
            batch, tokens = tree_batch(state, rows, block, page_size, launch, num_ids=num_ids)
        else:
            batch, tokens = tail_batch(state, rows, 1 + k, page_size, launch, offset=-1, num_ids=num_ids)
        hidden_TC, aux = model(tokens.ids_T, kv, with_adapters(batch, rows, 1 + k), aux_layers=aux_layers)
        return {"logits": model.logits(hidden_TC, out_TW=launch.outputs.get("logits")), **aux_output(aux)}

    rates_K = None if synthetic_rates is None else torch.tensor(synthetic_rates, device=device)

    def accept_rows(
        logits_XW: Tensor, rows: Tensor, k: int, kind: SamplingKind, *, width: int = 1
    ) -> tuple[Tensor, Tensor]:
        coins_K = rates_K[:k] if k and rates_K is not None else None
        if kind is SamplingKind.GREEDY:
            if coins_K is not None:
                return accept_rows_synthetic(state, rows, logits_XW, k, coins_K, vocabulary=vocabulary, width=width)
            return accept_rows_greedy(state, rows, logits_XW, k, vocabulary=vocabulary, width=width)
        by, logits_XV = rule, vocabulary.whole(logits_XW)
        if coins_K is not None:
            by = partial(accept_synthetic_rows, rates_K=coins_K)
        return accept_rows_sampled(state, rows, logits_XV, k, kind=kind, processors=processors, rule=by, width=width)

    def accept(launch: Launch, rows: Tensor, logits: Tensor, *, k: int, kind: SamplingKind) -> Mapping[str, Tensor]:
        num_emitted_R, outcome_RO = accept_rows(logits, rows, k, kind, width=1 + num_drafts)
        if several_drafters:
            outcome_RO = torch.cat([outcome_RO, state.drafted_by_M[rows][:, None]], 1)
        return {"num_emitted": num_emitted_R, "outcome": outcome_RO}

    def accept_branch(launch: Launch, rows: Tensor, logits: Tensor, *, kind: SamplingKind) -> Mapping[str, Tensor]:
        if kind is SamplingKind.GREEDY:
            emitted = accept_tree_greedy(state, rows, logits, tables, rates_K, vocabulary=vocabulary)
        else:
            logits = vocabulary.whole(logits)
            emitted = accept_tree_sampled(state, rows, logits, tables, rates_K, kind=kind, processors=processors)
        return dict(zip(("num_emitted", "outcome", "path"), emitted, strict=True))

    def compact(launch: Launch, rows: Tensor, num_emitted: Tensor, path: Tensor) -> Mapping[str, Tensor]:
        for kv_L2PSGD in caches:
            compact_kv(kv_L2PSGD, rows, path, num_emitted, state.num_tokens_M, state.page_table_MN)
        return {}

    def accept_prompt(
        launch: Launch, ending_rows: Tensor, prompt_logits: Tensor, *, kind: SamplingKind
    ) -> Mapping[str, Tensor]:
        _, outcome_RO = accept_rows(prompt_logits, ending_rows, 0, kind)
        state.num_drafted_M.index_fill_(0, ending_rows.long(), 0)
        return {"first_token": outcome_RO[:, len(OUTCOME_COUNTS) :]}

    rows = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=state.padding_row)
    part = (vocabulary.width,)
    aux = {}
    if aux_layers:
        width = (len(aux_layers) * model.config.hidden_size,)
        aux = {"aux_hidden": Output(unit=Unit.TOKEN, dtype=dtype, shape=width)}
    full_uniform = {GraphMode.FULL} if support.uniform else set()
    full_ragged = {GraphMode.FULL} if support.ragged else set()
    prompts = Phase(
        name=prefill_name(),
        fn=prefill,
        slots={
            "rows": rows,
            "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
            "kv_lens": Slot(unit=Unit.ROW, dtype=torch.int32),
        },
        outputs={"prompt_logits": Output(unit=Unit.ROW, dtype=dtype, shape=part), **aux},
        tokens_per_row=None,
        modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full_ragged}),
        reason=support.reason,
    )
    phases = [
        prompts,
        replace(
            prompts,
            name=prefill_name(report=True),
            fn=partial(prefill, report=True),
            outputs={**prompts.outputs, **prompt_outputs(num_top_logprobs)},
            modes=frozenset({GraphMode.NONE}),
            reason="prompt logprobs are rare, and take a prompt's logits in parts",
        ),
    ]
    number = Output(unit=Unit.ROW, dtype=torch.int32)
    slots = {"rows": rows, "logits": Slot(unit=Unit.TOKEN, dtype=dtype, shape=part, pad=Pad.KEEP)}
    outcome = {
        "num_emitted": number,
        "outcome": Output(unit=Unit.ROW, dtype=torch.int32, shape=(outcome_width(num_drafts, several_drafters),)),
    }
    path = {"path": Output(unit=Unit.ROW, dtype=torch.int32, shape=(1 + tree.depth,))}
    for k in sorted({num_drafts, *counts, 0}, reverse=True):
        phases.append(
            Phase(
                name=verify_name(k, num_drafts),
                fn=lambda launch, k=k, **slots: verify(launch, k=k, **slots),
                slots={"rows": rows},
                outputs={"logits": Output(unit=Unit.TOKEN, dtype=dtype, shape=part), **aux},
                tokens_per_row=1 + k,
                modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full_uniform}),
                reason=support.reason,
                cost=model.cost(),
            )
        )
        phases += [
            Phase(
                name=accept_name("accept", kind, k, num_drafts),
                fn=partial(accept_branch, kind=kind) if k and branches else partial(accept, k=k, kind=kind),
                slots=slots,
                outputs=outcome | path if k and branches else outcome,
                tokens_per_row=1 + k,
            )
            for kind in SamplingKind
        ]
    if branches:
        phases.append(
            Phase(
                name=COMPACT,
                fn=compact,
                slots={
                    "rows": rows,
                    "num_emitted": Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP),
                    "path": path_slot(tree),
                },
            )
        )
    phases += [
        Phase(
            name=accept_name("accept.prompt", kind),
            fn=lambda launch, kind=kind, **slots: accept_prompt(launch, kind=kind, **slots),
            slots={
                "ending_rows": rows,
                "prompt_logits": Slot(unit=Unit.ROW, dtype=dtype, shape=part, pad=Pad.KEEP),
            },
            outputs={"first_token": Output(unit=Unit.ROW, dtype=torch.int32, shape=(1,))},
        )
        for kind in SamplingKind
    ]
    return phases


def prefill_name(*, report: bool = False) -> str:
    """The phase of prompts; `report`: with the logprobs of their tokens."""
    return "target.prefill.logprobs" if report else "target.prefill"


def outcome_width(num_drafts: int, several_drafters: bool) -> int:
    """Columns of an outcome: counts, tokens, and which of several drafters drafted."""
    return len(OUTCOME_COUNTS) + 1 + num_drafts + several_drafters


COMPACT = "target.compact"
"""The phase after `accept` where drafts form a tree."""


def after_accept(tree: DraftTree) -> tuple[str, ...]:
    """Phases that bring an accepted block in order, before anybody reads the target's cache again."""
    return () if tree.is_chain else (COMPACT,)


def verify_name(num_drafts: int, most: int) -> str:
    """The verify phase of so many drafts, of at most `most`; without drafts it is plain decoding."""
    return count_name("target.verify", num_drafts, most) if num_drafts else "target.decode"


def accept_name(phase: str, kind: SamplingKind, num_drafts: int = 0, most: int = 0) -> str:
    """The accept phase for rows with so many drafts, of at most `most`, and for what their requests ask for."""
    if phase == "accept":
        phase = count_name(phase, num_drafts, most) if num_drafts else "accept.decode"
    return phase + ("" if kind is SamplingKind.GREEDY else f".{kind.value}")
