"""The target's phases: prompts, verification, acceptance.

Shape suffixes: R rows, T tokens, K drafts, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftloop.attention.base import GraphSupport
from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.graphs.phase import GraphMode, Launch, Output, Pad, Phase, Slot, Unit
from draftloop.kvcache.rows import RowState
from draftloop.models.decoder import Decoder, LayerCaches
from draftloop.sampling.commit import (
    OUTCOME_COUNTS,
    accept_rows_greedy,
    accept_rows_sampled,
    accept_rows_synthetic,
)
from draftloop.sampling.sampler import SamplingKind


def target_phases(
    model: Decoder,
    kv: LayerCaches,
    state: RowState,
    *,
    num_drafts: int,
    page_size: int,
    support: GraphSupport,
    aux_layers: tuple[int, ...] = (),
    synthetic_rates: list[float] | None = None,
) -> list[Phase]:
    """Declare what the target runs.

    `target.prefill`   chunks of prompts -> logits of each chunk's last token
    `target.verify`    bonus token and drafts of each row -> logits of every position
    `target.decode`    the same without drafts, for batches in which nobody speculates
    `accept`           logits -> emitted tokens; the rows are that much longer
    `accept.prompt`    the same for the first token after a prompt

    The accept phases come in three kinds (`SamplingKind`), so that a batch pays for what it asks.
    """
    device, dtype = model.lm_head.device, model.lm_head.dtype

    def aux_output(aux: list[Tensor]) -> dict[str, Tensor]:
        return {"aux_hidden": torch.cat(aux, -1)} if aux_layers else {}

    def prefill(launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor) -> Mapping[str, Tensor]:
        batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, page_size, launch)
        ids_T = state.tokens_ML[row_T, batch.positions_T]
        hidden_TC, aux = model(ids_T, kv, batch, aux_layers=aux_layers)
        last_R = (query_starts[1:] - 1).clamp(min=0)
        return {"prompt_logits": model.logits(hidden_TC[last_R]), **aux_output(aux)}

    def verify(launch: Launch, rows: Tensor, *, k: int) -> Mapping[str, Tensor]:
        batch, tokens = tail_batch(state, rows, 1 + k, page_size, launch, offset=-1, num_ids=model.config.vocab_size)
        hidden_TC, aux = model(tokens.ids_T, kv, batch, aux_layers=aux_layers)
        return {"logits": model.logits(hidden_TC, out_TV=launch.outputs.get("logits")), **aux_output(aux)}

    rates_K = None if synthetic_rates is None else torch.tensor(synthetic_rates, device=device)

    def rule(logits_XV: Tensor, rows: Tensor, k: int, kind: SamplingKind, *, width: int = 1) -> tuple[Tensor, Tensor]:
        if rates_K is not None and k:
            return accept_rows_synthetic(state, rows, logits_XV, k, rates_K, width=width)
        if kind is SamplingKind.GREEDY:
            return accept_rows_greedy(state, rows, logits_XV, k, width=width)
        truncate = kind is SamplingKind.TRUNCATED
        return accept_rows_sampled(state, rows, logits_XV, k, truncate=truncate, width=width)

    def accept(launch: Launch, rows: Tensor, logits: Tensor, *, k: int, kind: SamplingKind) -> Mapping[str, Tensor]:
        num_emitted_R, outcome_RO = rule(logits, rows, k, kind, width=1 + num_drafts)
        return {"num_emitted": num_emitted_R, "outcome": outcome_RO}

    def accept_prompt(
        launch: Launch, ending_rows: Tensor, prompt_logits: Tensor, *, kind: SamplingKind
    ) -> Mapping[str, Tensor]:
        _, outcome_RO = rule(prompt_logits, ending_rows, 0, kind)
        state.num_drafted_M.index_fill_(0, ending_rows.long(), 0)
        return {"first_token": outcome_RO[:, len(OUTCOME_COUNTS) :]}

    rows = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.FILL, fill=state.padding_row)
    vocab = (model.config.vocab_size,)
    aux = {}
    if aux_layers:
        width = (len(aux_layers) * model.config.hidden_size,)
        aux = {"aux_hidden": Output(unit=Unit.TOKEN, dtype=dtype, shape=width)}
    full_uniform = {GraphMode.FULL} if support.uniform else set()
    full_ragged = {GraphMode.FULL} if support.ragged else set()
    phases = [
        Phase(
            name="target.prefill",
            fn=prefill,
            slots={
                "rows": rows,
                "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
                "kv_lens": Slot(unit=Unit.ROW, dtype=torch.int32),
            },
            outputs={"prompt_logits": Output(unit=Unit.ROW, dtype=dtype, shape=vocab), **aux},
            tokens_per_row=None,
            modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full_ragged}),
            reason=support.reason,
        ),
    ]
    counts = Output(unit=Unit.ROW, dtype=torch.int32)
    slots = {"rows": rows, "logits": Slot(unit=Unit.TOKEN, dtype=dtype, shape=vocab, pad=Pad.KEEP)}
    outcome = {
        "num_emitted": counts,
        "outcome": Output(unit=Unit.ROW, dtype=torch.int32, shape=(len(OUTCOME_COUNTS) + 1 + num_drafts,)),
    }
    for k in sorted({num_drafts, 0}, reverse=True):
        phases.append(
            Phase(
                name=verify_name(k),
                fn=lambda launch, k=k, **slots: verify(launch, k=k, **slots),
                slots={"rows": rows},
                outputs={"logits": Output(unit=Unit.TOKEN, dtype=dtype, shape=vocab), **aux},
                tokens_per_row=1 + k,
                modes=frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *full_uniform}),
                reason=support.reason,
                cost=model.cost(),
            )
        )
        phases += [
            Phase(
                name=accept_name("accept", kind, k),
                fn=lambda launch, k=k, kind=kind, **slots: accept(launch, k=k, kind=kind, **slots),
                slots=slots,
                outputs=outcome,
                tokens_per_row=1 + k,
            )
            for kind in SamplingKind
        ]
    phases += [
        Phase(
            name=accept_name("accept.prompt", kind),
            fn=lambda launch, kind=kind, **slots: accept_prompt(launch, kind=kind, **slots),
            slots={
                "ending_rows": rows,
                "prompt_logits": Slot(unit=Unit.ROW, dtype=dtype, shape=vocab, pad=Pad.KEEP),
            },
            outputs={"first_token": Output(unit=Unit.ROW, dtype=torch.int32, shape=(1,))},
        )
        for kind in SamplingKind
    ]
    return phases


def verify_name(num_drafts: int) -> str:
    """The verify phase; without drafts it is plain decoding."""
    return "target.verify" if num_drafts else "target.decode"


def accept_name(phase: str, kind: SamplingKind, num_drafts: int = 1) -> str:
    """The accept phase for rows with or without drafts and for what their requests ask for."""
    return phase + ("" if num_drafts else ".decode") + ("" if kind is SamplingKind.GREEDY else f".{kind.value}")
