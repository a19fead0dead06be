"""The row state's C kernels as torch operators: see kernels/row_tokens.py, write_draft.py and sampling/commit.py.

Shape suffixes: T tokens, X verified tokens, R entries, O numbers of an outcome, M rows of the engine, L positions,
K drafts, N pages per row, W draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from draftloop.kernels.native.functions import c, pointer
from draftloop.kernels.opaque import define


def _row_tokens(
    rows_R: Tensor,
    tokens_ML: Tensor,
    num_tokens_M: Tensor,
    drafts_MK: Tensor,
    page_table_MN: Tensor,
    num_drafted_M: Tensor | None,
    emitted_R: Tensor | None,
    ids_T: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_lens_R: Tensor,
    query_starts_R1: Tensor,
    last_R: Tensor,
    num_per_row: int,
    page_size: int,
    offset: int,
    ahead: int,
    num_ids: int,
) -> None:
    failed = c.dl_row_tokens(
        rows_R.data_ptr(),
        tokens_ML.data_ptr(),
        num_tokens_M.data_ptr(),
        drafts_MK.data_ptr(),
        page_table_MN.data_ptr(),
        pointer(num_drafted_M),
        pointer(emitted_R),
        ids_T.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        kv_lens_R.data_ptr(),
        query_starts_R1.data_ptr(),
        last_R.data_ptr(),
        rows_R.shape[0],
        *tokens_ML.shape,
        drafts_MK.shape[1],
        page_table_MN.shape[1],
        num_per_row,
        page_size,
        offset,
        ahead,
        num_ids,
    )
    if failed:
        raise IndexError("a row, or a position of its block, does not exist")


def _write_draft(
    rows_R: Tensor,
    tokens_R: Tensor,
    drafts_MK: Tensor,
    num_drafted_M: Tensor,
    draft_limit_M: Tensor,
    num_tokens_M: Tensor,
    target_ids_W: Tensor | None,
    first: bool,
    longest: int,
) -> None:
    failed = c.dl_write_draft(
        rows_R.data_ptr(),
        tokens_R.data_ptr(),
        drafts_MK.data_ptr(),
        num_drafted_M.data_ptr(),
        draft_limit_M.data_ptr(),
        num_tokens_M.data_ptr(),
        pointer(target_ids_W),
        rows_R.shape[0],
        *drafts_MK.shape,
        0 if target_ids_W is None else target_ids_W.shape[0],
        first,
        longest,
    )
    if failed:
        raise IndexError("a row, a token of the draft vocabulary, or the place for one more draft does not exist")


def _accept_block(
    rows_R: Tensor,
    targets_X: Tensor,
    drafts_MK: Tensor,
    tokens_ML: Tensor,
    num_tokens_M: Tensor,
    max_tokens_M: Tensor,
    num_emitted_R: Tensor,
    outcome_RO: Tensor,
    num_drafts: int,
) -> None:
    failed = c.dl_accept_block(
        rows_R.data_ptr(),
        targets_X.data_ptr(),
        drafts_MK.data_ptr(),
        tokens_ML.data_ptr(),
        num_tokens_M.data_ptr(),
        max_tokens_M.data_ptr(),
        num_emitted_R.data_ptr(),
        outcome_RO.data_ptr(),
        rows_R.shape[0],
        num_tokens_M.shape[0],
        drafts_MK.shape[1],
        tokens_ML.shape[1],
        num_drafts,
        outcome_RO.shape[1] - 3,
    )
    if failed:
        raise IndexError("a row, or the place for its tokens, does not exist")


row_tokens = define(
    "native_row_tokens(Tensor rows, Tensor tokens, Tensor num_tokens, Tensor drafts, Tensor page_table, "
    "Tensor? num_drafted, Tensor? emitted, Tensor(a!) ids, Tensor(b!) positions, Tensor(c!) slots, "
    "Tensor(d!) kv_lens, Tensor(e!) query_starts, Tensor(f!) last, int num_per_row, int page_size, int offset, "
    "int ahead, int num_ids) -> ()",
    _row_tokens,
    "CPU",
)
write_draft = define(
    "native_write_draft(Tensor rows, Tensor tokens, Tensor(a!) drafts, Tensor(b!) num_drafted, Tensor draft_limit, "
    "Tensor num_tokens, Tensor? target_ids, bool first, int longest) -> ()",
    _write_draft,
    "CPU",
)
accept_block = define(
    "native_accept_block(Tensor rows, Tensor targets, Tensor drafts, Tensor(a!) tokens, Tensor(b!) num_tokens, "
    "Tensor max_tokens, Tensor(c!) num_emitted, Tensor(d!) outcome, int num_drafts) -> ()",
    _accept_block,
    "CPU",
)
