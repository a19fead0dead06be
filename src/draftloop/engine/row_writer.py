"""What the host knows of requests, written to their rows on the device. Nothing here waits for it.

Where several ranks hold one model, all do what is marked `on_every_rank`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.distributed.followers import Followers, on_every_rank
from draftloop.drafters.base import Drafter
from draftloop.graphs.buffers import Buffers
from draftloop.kvcache.pool import CachePool
from draftloop.kvcache.rows import MAX_STOP_IDS, NO_DRAFT, NO_STOP, NULL_PAGE, RowState
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.scheduler.batch import Sequence


class RowWriter:
    """Writes requests, their pages and what grammars allow to the row state, and the slots that the host fills."""

    def __init__(
        self,
        buffers: Buffers,
        state: RowState,
        drafter: Drafter | None,
        pool: CachePool,
        *,
        processors: Many[LogitsProcessor],
        followers: Followers | None,
    ) -> None:
        self._buffers, self._state, self._drafter, self._pool = buffers, state, drafter, pool
        self._processors, self.followers = processors, followers
        self._device = state.num_tokens_M.device
        self._tree = drafter.tree if drafter else DraftTree.chain(0)
        self._selected: list[int] = []
        self._constrained_rows: set[int] = set()

    def admit(self, sequence: Sequence) -> None:
        """Give a row its request."""
        self._admit(_plain(sequence) if self.followers is not None else sequence)
        for held in sequence.held:
            held.num_mapped, held.num_stale = held.end, 0
        if sequence.grammar is not None:
            self.write_masks([sequence], [[]])

    @on_every_rank()
    def _admit(self, sequence: Sequence) -> None:
        """Tokens, pages, limits and parameters of a request go to its row."""
        state, row, params = self._state, sequence.row, sequence.params
        tokens = torch.tensor(sequence.token_ids, dtype=torch.int32)
        tables_UMN = state.page_tables_UMN
        pages_UN = torch.full((tables_UMN.shape[0], tables_UMN.shape[2]), NULL_PAGE, dtype=torch.int32)
        for pages_N, held in zip(pages_UN, sequence.held, strict=True):
            pages_N[held.first : held.end] = torch.tensor(held.ids, dtype=torch.int32)
        state.tokens_ML[row, : tokens.shape[0]].copy_(self.stage(tokens), non_blocking=True)
        tables_UMN[:, row].copy_(self.stage(pages_UN), non_blocking=True)
        own_page = sequence.num_prefilled // self._pool.page_size
        for window, held in zip(self._pool.windows, sequence.held, strict=True):
            if held.copied is not None:
                self._pool.copy_page(held.copied, held.ids[own_page - held.first], window=window)
        state.stop_ids_MS[row].copy_(self.stage(_stop_ids(sequence)), non_blocking=True)
        state.drafts_MK[row].fill_(NO_DRAFT)
        for column, value in (
            (state.num_tokens_M, sequence.num_tokens),
            (state.max_tokens_M, sequence.max_total),
            (state.num_drafted_M, 0),
            (state.draft_limit_M, sequence.max_drafts),
            (state.temperature_M, params.temperature),
            (state.top_k_M, params.top_k),
            (state.top_p_M, params.top_p),
            (state.min_p_M, params.min_p),
            (state.seed_M, sequence.seed),
        ):
            column[row].fill_(value)
        if state.adapter_M is not None:
            state.adapter_M[row].fill_(sequence.adapter.slot if sequence.adapter else 0)
        if self._drafter is not None:
            self._drafter.admit(row, params.speculative)
        self._admit_constraints(sequence)

    def _admit_constraints(self, sequence: Sequence) -> None:
        rules, row, params = self._state.constraints, sequence.row, sequence.params
        assert rules is not None
        for processor in self._processors:
            processor.admit(row, params)
        if params.constrained:
            self._constrained_rows.add(row)
            rules.write(
                row,
                params,
                num_prompt=sequence.num_prompt,
                bad_words=sequence.bad_words,
                ending_ids=sequence.ending_ids,
                stage=self.stage,
            )
        elif row in self._constrained_rows:
            self._constrained_rows.remove(row)
            rules.clear(row)

    def map_pages(self, sequences: Many[Sequence]) -> None:
        """Tell the device of pages that rows got, and of those that they lost, since the last step.

        Rows that are new to it are left out, and entries behind a window as they are: nobody reads them.
        """
        _, num_rows, width = self._state.page_tables_UMN.shape
        places: list[int] = []
        pages: list[int] = []
        for sequence in sequences:
            for group, held in enumerate(sequence.held):
                if held.num_mapped and (held.num_mapped < held.end or held.num_stale > held.end):
                    start, new = held.map(NULL_PAGE)
                    start += (group * num_rows + sequence.row) * width
                    places += range(start, start + len(new))
                    pages += new
        if places:
            self._put_pages(places, pages)

    @on_every_rank()
    def _put_pages(self, places: list[int], pages: list[int]) -> None:
        both_2X = self.stage(torch.tensor([places, pages])).to(self._device, non_blocking=True)
        self._state.page_tables_UMN.view(-1).index_copy_(0, both_2X[0], both_2X[1].int())

    def write_masks(self, sequences: Many[Sequence], drafts: Many[list[int]]) -> None:
        """What their grammars allow at each position; all that was emitted so far must be known."""
        assert self._state.constraints is not None
        grammar_MQW = self._state.constraints.grammar_MQW
        masks_RQW = torch.empty(len(sequences), 1 + len(drafts[0]), grammar_MQW.shape[2], dtype=torch.int32)
        for sequence, row_drafts, masks_QW in zip(sequences, drafts, masks_RQW, strict=True):
            assert sequence.grammar is not None
            whole = len(row_drafts) == self._tree.num_drafts
            for path in self._tree.leaf_paths if whole else [tuple(range(1 + len(row_drafts)))]:
                masks_JW = masks_QW[list(path)]
                sequence.grammar.fill_masks([row_drafts[place - 1] for place in path[1:]], masks_JW)
                masks_QW[list(path)] = masks_JW
        self._put_masks([sequence.row for sequence in sequences], masks_RQW)

    @on_every_rank()
    def _put_masks(self, rows: list[int], masks_RQW: Tensor) -> None:
        assert self._state.constraints is not None
        grammar_MQW = self._state.constraints.grammar_MQW
        rows_R = self.stage(torch.tensor(rows)).to(self._device, non_blocking=True)
        masks_RQW = self.stage(masks_RQW).to(self._device, non_blocking=True)
        grammar_MQW[:, : masks_RQW.shape[1]].index_copy_(0, rows_R, masks_RQW)

    def select(self, rows: list[int]) -> None:
        """These rows run next. Numbers stay where they are while the same rows run on: a steady step copies nothing."""
        if rows != self._selected:
            self.write("rows", rows)
            self._selected = rows

    @on_every_rank()
    def write(self, name: str, values: Many[int] | Many[Many[int]]) -> None:
        """Fill a slot of the coming phases."""
        shape = self._buffers[name].shape[1:]
        self._buffers.write(name, self.stage(torch.tensor(values, dtype=torch.int32).view(len(values), *shape)))

    def stage(self, value: Tensor) -> Tensor:
        """In memory of the host from which the device copies by itself."""
        return value.pin_memory() if self._device.type == "cuda" else value


def _plain(sequence: Sequence) -> Sequence:
    """What other processes need to know of it."""
    return replace(sequence, grammar=None, page_keys=[], logprobs=[], prompt_logprobs=[], sources=[], text_ends=[])


def _stop_ids(sequence: Sequence) -> Tensor:
    """int32 [S]: ids that end the request, as many as the device keeps. The host looks for all of them anyway."""
    ids = sequence.ending_ids[:MAX_STOP_IDS]
    return torch.tensor([*ids, *[NO_STOP] * (MAX_STOP_IDS - len(ids))], dtype=torch.int32)
