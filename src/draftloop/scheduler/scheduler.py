"""Who runs next: rows, pages and the token budget. Plain data, no tensors.

A request is admitted when a row is free and the pages for its prompt and the first block of drafts are. It gets
more while it grows, always ahead of what the steps in flight may reach, so that nobody waits for the device. Where
pages run out, the request that should come last is preempted: it waits again, and what it has said becomes part of
its prompt.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence as Many

from draftloop.errors import RequestError
from draftloop.kvcache.pages import PageAllocator
from draftloop.scheduler.batch import Chunk, Sequence, Stage, StepPlan
from draftloop.scheduler.drafting import Drafting, FixedDrafts
from draftloop.scheduler.prefixes import Prefix, register_prefix
from draftloop.scheduler.row_pages import RowPages

NOTHING = StepPlan(chunks=(), decodes=())


class Scheduler:
    """Serves by priority, then first come, first served; prompts are cut to fit beside the decoding rows."""

    def __init__(
        self,
        groups: Many[PageAllocator],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_rows: int,
        max_model_len: int,
        num_drafts: int,
        min_prefill_rows: int = 1,
        prefix_caching: bool = False,
        drafting: Drafting | None = None,
        num_rerun: int = 1,
        prompt_sizes: Many[int] = (),
    ) -> None:
        """`groups`: pages of each group of layers, of which those that keep all tokens come first.

        `num_drafts` is the most that a step may draft; `drafting` chooses how many it does, the most by default.

        `num_rerun`: tokens at the end of a prefix found in the caches that run again, 1 or more.
        `prompt_sizes`: tokens that the graphs of prompts take, rising; none where prompts have no graphs.
        """
        self.row_pages = RowPages(
            groups, num_drafts=num_drafts, num_rerun=num_rerun, max_num_batched_tokens=max_num_batched_tokens
        )
        self.max_num_batched_tokens, self.max_prefill_rows = max_num_batched_tokens, max_prefill_rows
        self.min_prefill_rows = min_prefill_rows
        self.max_model_len, self.num_drafts = max_model_len, num_drafts
        self.prefix_caching, self.prompt_sizes = prefix_caching, prompt_sizes
        self.drafting = drafting or FixedDrafts(num_drafts)
        self.waiting: list[Sequence] = []
        """In the order in which they are served."""
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._has_pages = True
        """The request that was last to be admitted was."""
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
        for pages in self.groups:
            if (need := self.row_pages.needed(sequence, pages)) > pages.capacity:
                raise RequestError(
                    f"{sequence.num_prompt} prompt tokens and up to {sequence.max_total - sequence.num_prompt} new "
                    f"ones need {need} pages of {pages.page_size} tokens, but the cache has {pages.capacity}; "
                    f"lower max_tokens, or give the cache more memory (--kv-cache-memory-bytes)"
                )
        sequence.acceptance_histogram = [0] * (self.num_drafts + 1)
        insort(self.waiting, sequence, key=_order)

    @property
    def groups(self) -> list[PageAllocator]:
        """Who holds which page, of each group of layers."""
        return self.row_pages.groups

    @property
    def num_pages_held(self) -> int:
        """Of all groups together."""
        return sum(pages.capacity - pages.num_free for pages in self.groups)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    # ---- plans ------------------------------------------------------------------------------

    def plan(self, *, settled: bool = True) -> StepPlan:
        """The next step, which must be launched if it has chunks; empty if nothing can run.

        Without `settled` something is in flight. Nobody is preempted then: the plan is empty, so that what is in
        flight lands first, and it is known how long rows are.
        """
        while (plan := self._plan(settled=settled)) is None:
            self.preempt(self._last_running())
        return plan

    def _plan(self, *, settled: bool) -> StepPlan | None:
        """None: a request that outranks one that runs, or a prompt that goes on, waits for its pages."""
        decodes = [s for s in self.running if s.stage is Stage.DECODE]
        preempted = self.num_preemptions
        if not self._grow(decodes, settled=settled):
            return NOTHING
        if preempted != self.num_preemptions:
            decodes = [s for s in decodes if s.stage is Stage.DECODE]
        num_drafts = self.drafting.choose(decodes, self._num_joining(decodes))
        budget = self._prompt_budget(len(decodes) * (1 + num_drafts))
        chunks: list[Chunk] = []
        for sequence in (s for s in self.running if s.stage is Stage.PREFILL):
            if budget <= 0 or len(chunks) == self.max_prefill_rows:
                break
            room = self._prompt_room(sequence, decodes)
            if not room:
                return None if settled else NOTHING
            budget -= self._add_chunk(chunks, sequence, min(budget, room))
        admits = not self._gathers()
        while admits and preempted == self.num_preemptions and budget > 0 and len(chunks) < self.max_prefill_rows:
            sequence = self._next_waiting()
            if sequence is None:
                break
            self._has_pages = self._admit(sequence)
            if not self._has_pages:
                if not self._outranks(sequence):
                    break
                if settled:
                    return None
                if not chunks:
                    return NOTHING
                break
            self.waiting.remove(sequence)
            budget -= self._add_chunk(chunks, sequence, min(budget, self._prompt_room(sequence, decodes)))
        return StepPlan(chunks=tuple(chunks), decodes=tuple(decodes), num_drafts=num_drafts)

    def _num_joining(self, decodes: Many[Sequence]) -> int:
        """Rows that will decode with these when prompts have run: those that have a row, or soon will."""
        num_next = min(len(self.waiting), len(self._free_rows)) if self._has_pages else 0
        return len(self.running) - len(decodes) + num_next

    def _prompt_budget(self, num_decoding: int) -> int:
        """Prompt tokens of a step in which so many others run. Some prompt always advances.

        Where graphs of a few sizes run prompts, no more than fill one: the next size would be run half empty.
        """
        budget = max(self.max_num_batched_tokens - num_decoding, 1)
        at = bisect_right(self.prompt_sizes, budget)
        return self.prompt_sizes[at - 1] if at else budget

    def has_prompt_to_run(self) -> bool:
        """A plan would have chunks of prompts, or make room for one."""
        if any(s.stage is Stage.PREFILL for s in self.running):
            return True
        sequence = self._next_waiting()
        if sequence is None or self._gathers():
            return False
        fits = bool(self._free_rows) and self._fits(sequence, self._find_prefix(sequence))
        return fits or self._outranks(sequence)

    def _gathers(self) -> bool:
        """Prompts wait for more rows to become free, so that they run together; none that others give way to."""
        wanted = min(self.min_prefill_rows, len(self.waiting))
        if wanted <= 1 or len(self._free_rows) >= wanted or self._outranks(self.waiting[0]):
            return False
        return any(s.stage is Stage.DECODE for s in self.running)

    def _next_waiting(self) -> Sequence | None:
        """The first whose grammar is compiled."""
        return next((s for s in self.waiting if not s.is_compiling), None)

    def _prompt_room(self, sequence: Sequence, decodes: Many[Sequence]) -> int:
        """Tokens of a prompt that have pages, or get them."""
        room = self.row_pages.advance(sequence)
        if not room:
            self.row_pages.take_back(decodes)
            room = self.row_pages.advance(sequence)
        return room

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, most: int) -> int:
        """Returns how many tokens of the prompt, up to `most`, run."""
        left = sequence.num_to_prefill - sequence.num_prefilled
        count = min(most, left)
        completes = count == left
        chunks.append(
            Chunk(
                sequence=sequence,
                start=sequence.num_prefilled,
                count=count,
                completes_prompt=completes,
                emits=completes and not sequence.output_ids,
            )
        )
        return count

    def launched(self, plan: StepPlan, *, num_steps: int = 1, fed: bool = True) -> None:
        """Note that a step is on its way: its prompts advance and, when complete, decode next.

        `num_steps`: decoding steps that it may make by itself; `fed`: the drafter's caches get what the target's get.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_prefilled = chunk.end
            self.row_pages.copied(sequence)
            self._register(sequence, chunk.end)  # whoever is launched later finds it filled
            if chunk.completes_prompt:
                sequence.stage = Stage.DECODE
                sequence.steps_in_flight += chunk.emits
        for sequence in plan.decodes:
            if sequence.is_fed and not fed:
                self._register_output(sequence)
                sequence.is_fed = False
            sequence.steps_in_flight += num_steps

    def landed(self, sequences: Many[Sequence], num_steps: int) -> None:
        """It is known what these rows emitted in so many of their steps in flight."""
        for sequence in sequences:
            sequence.steps_in_flight -= num_steps

    # ---- pages ------------------------------------------------------------------------------

    def _are_pages_scarce(self) -> bool:
        """Somebody waits although there are rows."""
        return bool(self.waiting and self._free_rows) and not self._gathers()

    def _grow(self, decodes: list[Sequence], *, settled: bool) -> bool:
        """Give each row pages for its next step. False if that has to wait for what is in flight."""
        for sequence in decodes:
            self.row_pages.let_go(sequence, sequence.num_tokens - 1)  # its last token is the bonus token, or before it
        return all(self._grow_in(group, decodes, settled=settled) for group in range(len(self.groups)))

    def _grow_in(self, group: int, decodes: list[Sequence], *, settled: bool) -> bool:
        """`_grow`, of one group's pages."""
        pages, short_of = self.groups[group], self.row_pages.short
        growing = [(s, short) for s in decodes if s.stage is Stage.DECODE and (short := short_of(s, group)) > 0]
        need = sum(short for _, short in growing)
        if need > pages.num_free:
            self.row_pages.take_back([s for s in decodes if s.stage is Stage.DECODE])
        while need > pages.num_free:
            if not settled:
                return False
            self.preempt(self._last_running())
            growing = [(s, short) for s, short in growing if s.stage is Stage.DECODE]
            need = sum(short for _, short in growing)
        spare = 0 if self._are_pages_scarce() else pages.num_empty - need
        self.row_pages.grow(growing, group, spare=spare, num_running=len(self.running))
        return True

    def reserve(self, plan: StepPlan, most: int) -> int:
        """Decoding steps, up to `most`, for which a plan's rows then have pages. It has those for one already."""
        return self.row_pages.reserve(plan.decodes, most, are_scarce=self._are_pages_scarce())

    # ---- prefixes ---------------------------------------------------------------------------

    def _find_prefix(self, sequence: Sequence) -> Prefix:
        if not self.prefix_caching or sequence.reports_prompt:
            return self.row_pages.nothing()
        return self.row_pages.find(sequence)

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the pages that its first `num_tokens` fill."""
        if self.prefix_caching:
            register_prefix(sequence, num_tokens, self.groups)

    def _register_output(self, sequence: Sequence) -> None:
        """The bonus token is not in the caches yet."""
        is_fed = sequence.is_fed and (sequence.speculation or not self.num_drafts)
        if is_fed and sequence.output_ids:
            self._register(sequence, sequence.num_tokens - 1)

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed before now is found again. What runs goes on with the pages that it has."""
        for pages in self.groups:
            pages.reset()
        for sequence in self.waiting:
            sequence.page_keys.clear()

    # ---- rows -------------------------------------------------------------------------------

    def _fits(self, sequence: Sequence, prefix: Prefix) -> bool:
        return self.row_pages.fits(sequence, prefix, num_running=len(self.running))

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting request a row and pages, those found among them. False, if there are none."""
        if not self._free_rows:
            return False  # however many pages others give back
        prefix = self._find_prefix(sequence)
        if not self._fits(sequence, prefix):
            self.row_pages.take_back([s for s in self.running if s.stage is Stage.DECODE])
            if not self._fits(sequence, prefix):
                return False
        self.row_pages.admit(sequence, prefix)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_prefilled
        sequence.row = self._free_rows.pop()
        sequence.stage, sequence.is_fed = Stage.PREFILL, True
        self.running.append(sequence)
        return True

    def _outranks(self, sequence: Sequence) -> bool:
        """It waits although somebody of lower priority runs."""
        return bool(self.running) and self._last_running().priority > sequence.priority

    def _last_running(self) -> Sequence:
        return max(self.running, key=_order)

    def preempt(self, sequence: Sequence) -> None:
        """Take row and pages from a running request, which waits again. What is in flight for it counts no more."""
        self._release(sequence)
        sequence.stage = Stage.WAITING
        sequence.has_drafts = True
        if sequence.generation != self.groups[0].generation:
            sequence.page_keys.clear()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence) -> None:
        """Free what a running request holds. Later steps reuse it in the order of the device's stream."""
        self._release(sequence)
        sequence.stage = Stage.FINISHED

    def _release(self, sequence: Sequence) -> None:
        is_sound = sequence.finish_reason != "error"  # else pages may hold NaN
        if is_sound and sequence.stage is Stage.DECODE:
            self._register_output(sequence)
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self.row_pages.release(sequence, is_sound=is_sound)
        sequence.row = -1
        sequence.num_prefilled = sequence.steps_in_flight = 0

    def abort(self, sequence: Sequence) -> None:
        """Drop a request wherever it is; a second time does nothing."""
        if sequence.stage is Stage.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
            sequence.stage = Stage.FINISHED
        elif sequence.stage in (Stage.PREFILL, Stage.DECODE):
            self.finish(sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
