"""The phases that follow the target's passes: which drafts stand, and what a row emits.

Shape suffixes: R rows, K drafts, V vocabulary, W its entries on one rank, X rows or their positions, O columns of an
outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.tree import path_slot
from draftloop.config.draft_tree import DraftTree
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, count_name
from draftloop.graphs.phase import Launch, Output, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kernels.compact_kv import compact_kv
from draftloop.kvcache.rows import RowState
from draftloop.models.output_head import Vocabulary
from draftloop.sampling.accept import accept_sampled_rows, accept_synthetic_rows, conditional_rates
from draftloop.sampling.accept_tree import TreeTables, accept_tree_greedy, accept_tree_sampled
from draftloop.sampling.block_verification import accept_block_rows
from draftloop.sampling.commit import (
    OUTCOME_COUNTS,
    Rule,
    accept_rows_greedy,
    accept_rows_sampled,
    accept_rows_synthetic,
)
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.sampling.sampler import SamplingKind
from draftloop.sampling.typical import TYPICAL_ALPHA, TYPICAL_THRESHOLD, accept_typical_rows


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How drafts are accepted."""

    rule: Rule = accept_sampled_rows
    """Of sampled rows."""
    synthetic_rates: list[float] | None = None
    """Instead, of all rows, by coin: the share of each height's drafts, where those before them were accepted."""

    @classmethod
    def of(cls, spec: SpeculativeConfig | None, drafter: Drafter | None) -> Acceptance:
        """As the configuration says it. Raises ConfigError for rates that cannot be."""
        if spec is None or drafter is None:
            return cls()
        return cls(rule=_rule(spec, drafter), synthetic_rates=_synthetic_rates(spec, drafter))


def _rule(spec: SpeculativeConfig, drafter: Drafter) -> Rule:
    rule = spec.rejection_sample_method or ("block" if drafter.sampled else "standard")
    if rule == "typical":
        return partial(
            accept_typical_rows,
            threshold=spec.typical_acceptance_threshold or TYPICAL_THRESHOLD,
            alpha=spec.typical_acceptance_alpha or TYPICAL_ALPHA,
        )
    return accept_block_rows if rule == "block" else accept_sampled_rows


def _synthetic_rates(spec: SpeculativeConfig, drafter: Drafter) -> list[float] | None:
    if not drafter.forced_acceptance and spec.rejection_sample_method != "synthetic":
        return None
    return conditional_rates(
        drafter.tree.depth,
        synthetic_acceptance_rates=spec.synthetic_acceptance_rates,
        synthetic_acceptance_length=spec.synthetic_acceptance_length,
    )


@dataclass(frozen=True, kw_only=True)
class _Acceptor:
    """What the phases of acceptance run."""

    state: RowState
    acceptance: Acceptance
    vocabulary: Vocabulary
    processors: Sequence[LogitsProcessor]
    several_drafters: bool
    tables: TreeTables
    rates_K: Tensor | None
    """`Acceptance.synthetic_rates`, on the device."""
    width: int
    """Tokens of a row's outcome."""

    def block(
        self, launch: Launch, rows: Tensor, logits: Tensor, *, k: int, kind: SamplingKind
    ) -> Mapping[str, Tensor]:
        """After a chain of `k` drafts."""
        num_emitted_R, outcome_RO = self._accept(logits, rows, k, kind, width=self.width)
        if self.several_drafters:
            outcome_RO = torch.cat([outcome_RO, self.state.drafted_by_M[rows][:, None]], 1)
        return {"num_emitted": num_emitted_R, "outcome": outcome_RO}

    def branch(self, launch: Launch, rows: Tensor, logits: Tensor, *, kind: SamplingKind) -> Mapping[str, Tensor]:
        """After a tree of drafts."""
        asked = (self.tables, self.rates_K)
        if kind is SamplingKind.GREEDY:
            emitted = accept_tree_greedy(self.state, rows, logits, *asked, vocabulary=self.vocabulary)
        else:
            logits = self.vocabulary.whole(logits)
            emitted = accept_tree_sampled(self.state, rows, logits, *asked, kind=kind, processors=self.processors)
        return dict(zip(("num_emitted", "outcome", "path"), emitted, strict=True))

    def prompt(
        self, launch: Launch, ending_rows: Tensor, prompt_logits: Tensor, *, kind: SamplingKind
    ) -> Mapping[str, Tensor]:
        """After a prompt: its first token."""
        _, outcome_RO = self._accept(prompt_logits, ending_rows, 0, kind, width=1)
        self.state.num_drafted_M.index_fill_(0, ending_rows.long(), 0)
        return {"first_token": outcome_RO[:, len(OUTCOME_COUNTS) :]}

    def _accept(
        self, logits_XW: Tensor, rows: Tensor, k: int, kind: SamplingKind, *, width: int
    ) -> tuple[Tensor, Tensor]:
        state, vocabulary = self.state, self.vocabulary
        coins_K = self.rates_K[:k] if k and self.rates_K is not None else None
        if kind is SamplingKind.GREEDY:
            if coins_K is not None:
                return accept_rows_synthetic(state, rows, logits_XW, k, coins_K, vocabulary=vocabulary, width=width)
            return accept_rows_greedy(state, rows, logits_XW, k, vocabulary=vocabulary, width=width)
        rule = self.acceptance.rule if coins_K is None else partial(accept_synthetic_rows, rates_K=coins_K)
        return accept_rows_sampled(
            state, rows, vocabulary.whole(logits_XW), k, kind=kind, processors=self.processors, rule=rule, width=width
        )


def accept_phases(
    state: RowState,
    tree: DraftTree,
    acceptance: Acceptance,
    *,
    counts: Sequence[int] = (),
    vocabulary: Vocabulary,
    dtype: torch.dtype,
    several_drafters: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> list[Phase]:
    """Declare acceptance, in kinds (`SamplingKind`), so that a batch pays for what it asks.

    `accept`          logits -> emitted tokens; the rows are that much longer. Each of `counts`, the numbers of drafts
                      that steps verify beside the most, has one of its own
    `accept.decode`   the same after a step without drafts
    `accept.prompt`   the same for the first token after a prompt

    With `several_drafters` the last column of an outcome says which of them drafted. `dtype` is that of logits.
    """
    device, num_drafts, rates = state.num_tokens_M.device, tree.num_drafts, acceptance.synthetic_rates
    acceptor = _Acceptor(
        state=state,
        acceptance=acceptance,
        vocabulary=vocabulary,
        processors=processors,
        several_drafters=several_drafters,
        tables=TreeTables.of(tree, device),
        rates_K=None if rates is None else torch.tensor(rates, device=device),
        width=1 + num_drafts,
    )
    rows, part = rows_slot(state.padding_row), (vocabulary.width,)
    outcome = {"num_emitted": _numbers(), "outcome": _numbers(outcome_width(num_drafts, several_drafters))}
    phases = []
    for k in sorted({num_drafts, *counts, 0}, reverse=True):
        branches = k > 0 and not tree.is_chain
        phases += [
            Phase(
                name=accept_name("accept", kind, k, num_drafts),
                fn=partial(acceptor.branch, kind=kind) if branches else partial(acceptor.block, k=k, kind=kind),
                slots={"rows": rows, "logits": Slot(unit=Unit.TOKEN, dtype=dtype, shape=part, pad=Pad.KEEP)},
                outputs={**outcome, "path": _numbers(1 + tree.depth)} if branches else outcome,
                tokens_per_row=1 + k,
            )
            for kind in SamplingKind
        ]
    phases += [
        Phase(
            name=accept_name("accept.prompt", kind),
            fn=partial(acceptor.prompt, kind=kind),
            slots={
                "ending_rows": rows,
                "prompt_logits": Slot(unit=Unit.ROW, dtype=dtype, shape=part, pad=Pad.KEEP),
            },
            outputs={"first_token": _numbers(1)},
        )
        for kind in SamplingKind
    ]
    return phases


def _numbers(columns: int | None = None) -> Output:
    """One of each row, or so many."""
    return Output(unit=Unit.ROW, dtype=torch.int32, shape=() if columns is None else (columns,))


def compact_phases(state: RowState, tree: DraftTree, caches: Sequence[tuple[Tensor, Tensor]]) -> list[Phase]:
    """Declare `target.compact`, where drafts form a tree.

    After `accept` the keys and values of the accepted branch, of all `caches` with their page tables, move to where
    those of a chain are.
    """
    if tree.is_chain:
        return []

    def compact(launch: Launch, rows: Tensor, num_emitted: Tensor, path: Tensor) -> Mapping[str, Tensor]:
        for kv_L2PSGD, page_table_MN in caches:
            compact_kv(kv_L2PSGD, rows, path, num_emitted, state.num_tokens_M, page_table_MN)
        return {}

    slots = {
        "rows": rows_slot(state.padding_row),
        "num_emitted": Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP),
        "path": path_slot(tree),
    }
    return [Phase(name=COMPACT, fn=compact, slots=slots)]


def outcome_width(num_drafts: int, several_drafters: bool) -> int:
    """Columns of an outcome: counts, tokens, and which of several drafters drafted."""
    return len(OUTCOME_COUNTS) + 1 + num_drafts + several_drafters


COMPACT = "target.compact"
"""The phase after `accept` where drafts form a tree."""


def after_accept(tree: DraftTree) -> tuple[str, ...]:
    """Phases that bring an accepted block in order, before anybody reads the target's cache again."""
    return () if tree.is_chain else (COMPACT,)


def accept_name(phase: str, kind: SamplingKind, num_drafts: int = 0, most: int = 0) -> str:
    """The accept phase for rows with so many drafts, of at most `most`, and for what their requests ask for."""
    if phase == "accept":
        phase = count_name(phase, num_drafts, most) if num_drafts else "accept.decode"
    return phase + ("" if kind is SamplingKind.GREEDY else f".{kind.value}")
