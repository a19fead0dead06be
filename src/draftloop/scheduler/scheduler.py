"""Who runs next: rows, pages and the token budget. Plain data, no tensors.

A request is admitted when a row and all pages that it can ever need are free, so a running
request never waits for memory and nothing is preempted.
"""

from __future__ import annotations

from collections import deque

from draftloop.errors import RequestError
from draftloop.kvcache.pages import PageAllocator
from draftloop.scheduler.batch import Chunk, Sequence, Stage, StepPlan


class Scheduler:
    """First come, first served; prompts are cut to fit beside the decoding rows."""

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_rows: int,
        max_model_len: int,
        num_drafts: int,
    ) -> None:
        self.pages = pages
        self.max_num_batched_tokens, self.max_prefill_rows = max_num_batched_tokens, max_prefill_rows
        self.max_model_len, self.num_drafts = max_model_len, num_drafts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Raises RequestError if it could never run."""
        limit = self.max_model_len
        if not sequence.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        if sequence.num_prompt >= limit:
            raise RequestError(
                f"the prompt has {sequence.num_prompt} tokens; with max_model_len {limit} it may have at most "
                f"{limit - 1}, since one token must fit after it. Shorten it, or raise --max-model-len"
            )
        room = limit - sequence.num_prompt
        sequence.max_total = sequence.num_prompt + min(sequence.params.max_tokens or room, room)
        need = self.pages_needed(sequence)
        if need > self.pages.capacity:
            raise RequestError(
                f"{sequence.num_prompt} prompt tokens and up to {sequence.max_total - sequence.num_prompt} new ones "
                f"need {need} pages of {self.pages.page_size} tokens, but the cache has {self.pages.capacity}; "
                f"lower max_tokens, or give the cache more memory (--kv-cache-memory-bytes)"
            )
        sequence.acceptance_histogram = [0] * (self.num_drafts + 1)
        self.waiting.append(sequence)

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages for the longest this request can get, and for drafts that reach past its end."""
        return self.pages.pages_for(sequence.max_total + self.num_drafts)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def plan(self) -> StepPlan:
        """The next step; empty if nothing can run."""
        decodes = tuple(s for s in self.running if s.stage is Stage.DECODE)
        budget = self.max_num_batched_tokens - len(decodes) * (1 + self.num_drafts)
        budget = max(budget, 1)  # prompts always advance, however many rows decode
        chunks: list[Chunk] = []
        for sequence in (s for s in self.running if s.stage is Stage.PREFILL):
            budget = self._add_chunk(chunks, sequence, budget)
        while budget > 0 and len(chunks) < self.max_prefill_rows:
            sequence = next((s for s in self.waiting if s.grammar is None or s.grammar.ready), None)
            if sequence is None or not self._admit(sequence):
                break
            self.waiting.remove(sequence)
            budget = self._add_chunk(chunks, sequence, budget)
        return StepPlan(chunks=tuple(chunks), decodes=decodes)

    def _admit(self, sequence: Sequence) -> bool:
        need = self.pages_needed(sequence)
        if not self._free_rows or need > self.pages.num_free:
            return False
        sequence.row = self._free_rows.pop()
        sequence.pages = self.pages.allocate(need)
        sequence.stage = Stage.PREFILL
        self.running.append(sequence)
        return True

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        count = min(budget, sequence.num_prompt - sequence.num_prefilled)
        if count > 0 and len(chunks) < self.max_prefill_rows:
            chunks.append(Chunk(sequence=sequence, start=sequence.num_prefilled, count=count))
            return budget - count
        return budget

    def launched(self, plan: StepPlan) -> None:
        """Note that a step is on its way: its prompts advance and, when complete, decode next."""
        for chunk in plan.chunks:
            chunk.sequence.num_prefilled = chunk.end
            if chunk.completes_prompt:
                chunk.sequence.stage = Stage.DECODE

    def finish(self, sequence: Sequence) -> None:
        """Free what a running request holds. Later steps reuse it in the order of the device's stream."""
        sequence.stage = Stage.FINISHED
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self.pages.free(sequence.pages)
        sequence.pages = []

    def abort(self, sequence: Sequence) -> None:
        """Drop a request wherever it is; a second time does nothing."""
        if sequence.stage is Stage.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
            sequence.stage = Stage.FINISHED
        elif sequence.stage in (Stage.PREFILL, Stage.DECODE):
            self.finish(sequence)
