"""Phases that report logprobs, and what the host makes of what they report.

They run where a request of the step asks for logprobs, after the accept phase of a decoding step or a prompt,
and read the logits that it read.

Shape suffixes: R rows, T or X tokens, K drafts, V vocabulary, W its entries on one rank, P = 1 + reported likeliest
tokens, O columns of an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.attention.tree import path_slot
from draftloop.config.draft_tree import DraftTree
from draftloop.drafters.base import count_name
from draftloop.engine.flight import Emitted, InFlight, Report
from draftloop.graphs.phase import Launch, Output, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import RowState
from draftloop.models.output_head import Vocabulary
from draftloop.request import Logprob, Logprobs
from draftloop.sampling.accept_tree import TreeTables, tree_probabilities
from draftloop.sampling.commit import OUTCOME_COUNTS, target_probabilities
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.sampling.logprobs import CHUNK, raw_logprobs, token_logprobs
from draftloop.sampling.sampler import SamplingKind
from draftloop.scheduler.batch import Sequence as Request

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


def logprob_phases(
    state: RowState,
    *,
    tree: DraftTree,
    counts: Sequence[int] = (),
    outcome_width: int,
    vocabulary: Vocabulary,
    dtype: torch.dtype,
    num_top: int,
    mode: LogprobsMode,
    processors: Sequence[LogitsProcessor] = (),
) -> list[Phase]:
    """`logprobs` and `logprobs.decode` after the accept phases, `logprobs.first` after `accept.prompt`."""
    pair = (1 + num_top,)
    num_drafts, branches = tree.num_drafts, not tree.is_chain
    tables = TreeTables.of(tree, state.num_tokens_M.device)

    def logprobs(rows: Tensor, logits_XW: Tensor, k: int, num_emitted_R: Tensor) -> Tensor:
        logits_XV = vocabulary.whole(logits_XW)
        if mode == "raw_logprobs":
            return raw_logprobs(logits_XV)
        lengths_R = state.num_tokens_M.index_select(0, rows) - num_emitted_R
        kind = SamplingKind.CONSTRAINED
        if k and branches:
            probs_RQV = tree_probabilities(
                state, rows, logits_XV, tables, kind=kind, processors=processors, lengths_R=lengths_R
            )
            return probs_RQV.flatten(0, 1).log()
        probs_RQV = target_probabilities(
            state, rows, logits_XV, k, kind=kind, processors=processors, lengths_R=lengths_R
        )
        return probs_RQV.flatten(0, 1).log()

    def report(launch: Launch, rows: Tensor, logits: Tensor, outcome: Tensor, *, k: int) -> Mapping[str, Tensor]:
        first = len(OUTCOME_COUNTS)
        emitted_RQ = outcome[:, first : first + 1 + k]
        ids_XP, values_XP = token_logprobs(logprobs(rows, logits, k, outcome[:, 0]), emitted_RQ.flatten(), num_top)
        return {"logprob_ids": ids_XP, "logprobs": values_XP}

    def report_branch(
        launch: Launch, rows: Tensor, logits: Tensor, outcome: Tensor, path: Tensor
    ) -> Mapping[str, Tensor]:
        # the emitted tokens' own, where a chain's would be
        first, num_places, length = len(OUTCOME_COUNTS), 1 + num_drafts, 1 + tree.depth
        logprobs_RQV = logprobs(rows, logits, num_drafts, outcome[:, 0]).unflatten(0, (-1, num_places))
        places_RJ1 = path.long().clamp(0, num_places - 1)[:, :, None]
        logprobs_RJV = logprobs_RQV.gather(1, places_RJ1.expand(-1, -1, logprobs_RQV.shape[2]))
        emitted_RJ = outcome[:, first : first + length]
        reported = token_logprobs(logprobs_RJV.flatten(0, 1), emitted_RJ.flatten(), num_top)
        padding = (0, 0, 0, num_places - length)
        ids_XP, values_XP = (F.pad(x.unflatten(0, (-1, length)), padding).flatten(0, 1) for x in reported)
        return {"logprob_ids": ids_XP, "logprobs": values_XP}

    def report_first(
        launch: Launch, ending_rows: Tensor, prompt_logits: Tensor, first_token: Tensor
    ) -> Mapping[str, Tensor]:
        num_emitted_R = (first_token[:, 0] >= 0).to(torch.int32)
        ids_RP, values_RP = token_logprobs(
            logprobs(ending_rows, prompt_logits, 0, num_emitted_R), first_token[:, 0], num_top
        )
        return {"first_logprob_ids": ids_RP, "first_logprobs": values_RP}

    rows = rows_slot(state.padding_row)
    phases = [
        Phase(
            name=logprobs_name(k, num_drafts),
            fn=report_branch if k and branches else partial(report, k=k),
            slots={
                "rows": rows,
                "logits": Slot(unit=Unit.TOKEN, dtype=dtype, shape=(vocabulary.width,), pad=Pad.KEEP),
                "outcome": Slot(unit=Unit.ROW, dtype=torch.int32, shape=(outcome_width,), pad=Pad.KEEP),
                **({"path": path_slot(tree)} if k and branches else {}),
            },
            outputs={
                "logprob_ids": Output(unit=Unit.TOKEN, dtype=torch.int32, shape=pair),
                "logprobs": Output(unit=Unit.TOKEN, dtype=torch.float32, shape=pair),
            },
            tokens_per_row=1 + k,
        )
        for k in sorted({num_drafts, *counts, 0})
    ]
    first = Phase(
        name="logprobs.first",
        fn=report_first,
        slots={
            "ending_rows": rows,
            "prompt_logits": Slot(unit=Unit.ROW, dtype=dtype, shape=(vocabulary.width,), pad=Pad.KEEP),
            "first_token": Slot(unit=Unit.ROW, dtype=torch.int32, shape=(1,), pad=Pad.KEEP),
        },
        outputs={
            "first_logprob_ids": Output(unit=Unit.ROW, dtype=torch.int32, shape=pair),
            "first_logprobs": Output(unit=Unit.ROW, dtype=torch.float32, shape=pair),
        },
    )
    return [*phases, first]


def logprobs_name(num_drafts: int, most: int) -> str:
    """The phase that reports on a step with so many drafts, of at most `most`."""
    return count_name("logprobs", num_drafts, most) if num_drafts else "logprobs.decode"


def prompt_outputs(num_top: int) -> dict[str, Output]:
    """What a prompt's pass reports for the token after each of its tokens."""
    return {
        "prompt_logprob_ids": Output(unit=Unit.TOKEN, dtype=torch.int32, shape=(1 + num_top,)),
        "prompt_logprobs": Output(unit=Unit.TOKEN, dtype=torch.float32, shape=(1 + num_top,)),
    }


def prompt_report(
    hidden_TC: Tensor, next_tokens_T: Tensor, logits_of: Callable[[Tensor], Tensor], num_top: int
) -> dict[str, Tensor]:
    """Compute `prompt_outputs`, some tokens at a time."""
    parts = [
        token_logprobs(raw_logprobs(logits_of(hidden_nC)), tokens_n, num_top)
        for hidden_nC, tokens_n in zip(hidden_TC.split(CHUNK), next_tokens_T.split(CHUNK), strict=True)
    ]
    ids_TP, values_TP = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return {"prompt_logprob_ids": ids_TP, "prompt_logprobs": values_TP}


class LogprobReader:
    """Makes of reports what requests are given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def add(self, request: Request, tokens: list[int], report: Report | None) -> None:
        """Of tokens that are about to be taken; those past the request's end are dropped with them."""
        num_top = request.params.logprobs
        if num_top is not None:
            assert report is not None, "a step with a row that asks for logprobs did not report them"
            for token, ids_P, values_P in zip(tokens, *report, strict=False):
                request.logprobs.append(self._read(token, ids_P, values_P, num_top))

    def add_prompts(self, flight: InFlight, emitted: Emitted) -> None:
        """Of the prompt tokens that stand behind those of this step."""
        if emitted.prompt_logprobs is None:
            return
        ids_TP, values_TP = emitted.prompt_logprobs
        start = 0
        for chunk in flight.plan.chunks:
            request, num_top = chunk.sequence, chunk.sequence.params.prompt_logprobs
            if num_top is not None and flight.still_runs(request):
                known = len(request.prompt_logprobs)  # some may be from before a preemption
                for position in range(max(known, chunk.start + 1), min(chunk.end + 1, request.num_prompt)):
                    at, token = start + position - chunk.start - 1, request.prompt_ids[position]
                    request.prompt_logprobs.append(self._read(token, ids_TP[at], values_TP[at], num_top))
            start += chunk.count

    def _read(self, token: int, ids_P: Tensor, values_P: Tensor, num_top: int) -> Logprobs:
        """`token` and the `num_top` likeliest; a token that is both comes once."""
        ids, values = ids_P[: 1 + num_top].tolist(), values_P[: 1 + num_top].tolist()
        found = {token: Logprob(logprob=values[0], rank=ids[0], decoded_token=self._text(token))}
        for place, (likely, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
            if likely >= 0:
                found.setdefault(likely, Logprob(logprob=value, rank=place, decoded_token=self._text(likely)))
        return found

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]
