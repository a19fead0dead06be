"""What drafters declare that make all drafts of a round in one pass, from states that the target leaves before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from draftloop.attention.base import GraphSupport
from draftloop.drafters.base import Rounds, count_name, sampled_name
from draftloop.graphs.phase import ALL_MODES, Cost, GraphMode, Pad, Phase, PhaseFunction, Slot, Unit, rows_slot


class Pass(NamedTuple):
    """A phase's function, and what it must read and compute."""

    fn: PhaseFunction
    cost: Cost = Cost()


def block_phases(
    *,
    prompt: Pass,
    contexts: Mapping[int, Pass],
    block: Pass,
    padding_row: int,
    num_drafts: int,
    num_slots: int,
    aux: Slot,
    support: GraphSupport,
    prompt_attends: bool,
    sampled: bool,
) -> list[Phase]:
    """Declare what is run.

    `draft.prompt`   the target's states of prompt chunks
    `draft.context`  those of a verified block: of `contexts`, by its number of drafts, at most `num_drafts`
    `draft.plain`    where that is 0: those of the one token of a step without drafts
    `draft.block`    `num_slots` tokens of each row -> its drafts; with `sampled`, a variant that draws them:
                     its function takes `sampled`

    Of the first two only a prompt may attend, and so be bound by what the attention backend can capture.
    """
    rows = rows_slot(padding_row)
    counts = Slot(unit=Unit.ROW, dtype=torch.int32)
    prompt_full = support.ragged or not prompt_attends
    phases = [
        Phase(
            name="draft.prompt",
            fn=prompt.fn,
            slots={
                "rows": rows,
                "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
                "kv_lens": counts,
                "aux_hidden": aux,
            },
            tokens_per_row=None,
            modes=ALL_MODES if prompt_full else ALL_MODES - {GraphMode.FULL},
            reason=support.reason if prompt_attends else "",
            cost=prompt.cost,
        ),
        *(
            Phase(
                name=context_name(count, num_drafts),
                fn=context.fn,
                slots={"rows": rows, "num_emitted": counts, "aux_hidden": aux},
                tokens_per_row=count + 1,
                cost=context.cost,
            )
            for count, context in contexts.items()
        ),
    ]
    for drawn in (False, True) if sampled else (False,):
        phases.append(
            Phase(
                name=sampled_name("draft.block", drawn),
                fn=lambda launch, s=drawn, **slots: block.fn(launch, sampled=s, **slots),
                slots={"rows": rows},
                tokens_per_row=num_slots,
                modes=ALL_MODES if support.uniform else ALL_MODES - {GraphMode.FULL},
                reason=support.reason,
                cost=block.cost,
            )
        )
    return phases


def block_rounds(*, sampled: bool, may_pass: bool = False) -> Rounds:
    """When they run; `sampled`: drafts of this batch are drawn; `may_pass`: there is a phase `draft.plain`."""
    block = sampled_name("draft.block", sampled)
    return Rounds(
        prompt=("draft.prompt",),
        first=(block,),
        next=("draft.context", block),
        # rows without drafts are past their limit, or declined them: they never draft again
        plain=("draft.plain", block) if may_pass else (),
    )


def context_name(num_drafts: int, most: int) -> str:
    """The phase that takes the target's states of a block of `num_drafts`, of at most `most`."""
    return count_name("draft.context", num_drafts, most) if num_drafts else "draft.plain"


def block_rounds_after(num_drafts: int, most: int, *, sampled: bool) -> tuple[str, ...]:
    """`Drafter.rounds_after`: whole blocks are drafted, of which fewer are verified."""
    block = (sampled_name("draft.block", sampled),) if num_drafts else ()
    return (context_name(num_drafts, most), *block)
