"""The state that a row keeps on the device for as long as its request lives.

Phases are given row numbers and find everything else here, so the host can launch the next
iteration without knowing how many tokens the last one accepted.

Shape suffixes: M rows of the engine, plus one; L longest sequence, plus the draft overhang;
K draft length; N pages per row; S stop ids; U groups of layers; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.kvcache.constraint_rows import ConstraintRows

NO_DRAFT = -1
"""Marks a draft slot in which nothing was drafted. It is never embedded."""

NULL_PAGE = 0
"""The page that belongs to nobody: padding writes there, and unassigned table entries point to it."""


NO_STOP = -1
"""Fills up a row's stop ids; it is no token."""

MAX_STOP_IDS = 8
"""Stop ids of a row that the device knows. The host knows all of them."""


@dataclass(frozen=True, kw_only=True)
class RowState:
    """Everything the device knows of each row.

    The last row, `padding_row`, belongs to nobody: padded batch entries name it. It holds one
    token, no pages, and never changes.
    """

    tokens_ML: Tensor
    """int32: prompt and emitted tokens. The last one is the *bonus token*: emitted, but not yet in the cache."""
    num_tokens_M: Tensor
    """int32: how many of them are valid."""
    max_tokens_M: Tensor
    """int32: the row's length limit; acceptance stops there."""
    stop_ids_MS: Tensor
    """int32: tokens after which a device loop hands the row back to the host."""
    drafts_MK: Tensor
    """int32: drafts to verify next, NO_DRAFT where there is none."""
    num_drafted_M: Tensor
    """int32: drafts made so far in this round of a drafter that makes them one by one."""
    draft_limit_M: Tensor
    """int32: drafts that the row's request allows; 0 switches its speculation off."""
    drafted_by_M: Tensor
    """int32: which of several drafters made the drafts."""
    draft_probs_MKV: Tensor | None
    """float32: distribution that each draft was drawn from; None where drafters draft greedily."""
    page_table_MN: Tensor
    """int32: pages of the row, in order; NULL_PAGE where none is assigned. Of the first group of layers, which has all
    caches that keep every token, if there are any."""
    page_tables_UMN: Tensor
    """The same of each group (`kvcache.pool`), the first among them. Where a group has a window, entries behind it may
    name pages that the row has no more."""
    temperature_M: Tensor
    top_k_M: Tensor
    top_p_M: Tensor
    min_p_M: Tensor
    seed_M: Tensor
    adapter_M: Tensor | None = None
    """int32: which adapter (LoRA) changes the target for the row, from 1; 0: none. None: no row may have one."""
    constraints: ConstraintRows | None = None
    """None: no row may have any."""

    @property
    def padding_row(self) -> int:
        return self.num_tokens_M.shape[0] - 1

    @classmethod
    def create(
        cls,
        *,
        num_rows: int,
        max_model_len: int,
        num_drafts: int,
        page_size: int,
        draft_vocab: int,
        device: torch.device,
        overhang: int = 0,
        num_groups: int = 1,
        vocab_size: int = 0,
        has_adapters: bool = False,
    ) -> RowState:
        """Allocate for `num_rows` requests of at most `max_model_len` tokens.

        A pass may reach `overhang` positions past that, at least K + 1; what it finds there is dropped.

        `draft_vocab` > 0 also keeps the distribution of each draft, and `vocab_size` > 0 what changes logits.
        """
        rows = num_rows + 1
        length = max_model_len + max(num_drafts + 1, overhang)
        pages = -(-length // page_size)

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        constraints = None
        if vocab_size:
            constraints = ConstraintRows.create(
                num_rows=rows, num_positions=1 + num_drafts, vocab_size=vocab_size, device=device
            )
        page_tables_UMN = full(num_groups, rows, pages, value=NULL_PAGE)
        return cls(
            constraints=constraints,
            adapter_M=full(rows) if has_adapters else None,
            tokens_ML=full(rows, length),
            num_tokens_M=full(rows, value=1),
            max_tokens_M=full(rows, value=1),
            stop_ids_MS=full(rows, MAX_STOP_IDS, value=NO_STOP),
            drafts_MK=full(rows, num_drafts, value=NO_DRAFT),
            num_drafted_M=full(rows),
            draft_limit_M=full(rows),
            drafted_by_M=full(rows),
            draft_probs_MKV=full(rows, num_drafts, draft_vocab, dtype=torch.float32) if draft_vocab else None,
            page_table_MN=page_tables_UMN[0],
            page_tables_UMN=page_tables_UMN,
            temperature_M=full(rows, dtype=torch.float32),
            top_k_M=full(rows),
            top_p_M=full(rows, value=1, dtype=torch.float32),
            min_p_M=full(rows, dtype=torch.float32),
            seed_M=full(rows, dtype=torch.int64),
        )
