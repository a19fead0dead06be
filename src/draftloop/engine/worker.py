"""Runs step plans on the device: has rows written, runs phases, reads back what was emitted.

Where several ranks hold one model, rank 0 plans and reads, and all do what is marked `on_every_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.distributed.followers import Followers, Order, obey, on_every_rank
from draftloop.drafters.base import Drafter, HostRow, Rounds
from draftloop.engine.acceptance import accept_name, after_accept
from draftloop.engine.device_loop import DeviceLoop
from draftloop.engine.flight import Failure, InFlight, LoopInFlight, StepInFlight, no_failure
from draftloop.engine.iteration import first_round, iteration_name, next_round
from draftloop.engine.logprobs import logprobs_name
from draftloop.engine.row_writer import RowWriter
from draftloop.engine.target import prefill_name, verify_name
from draftloop.graphs.loop import Loop
from draftloop.graphs.table import GraphTable
from draftloop.kvcache.pool import CachePool
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.sampling.sampler import SamplingKind
from draftloop.scheduler.batch import Chunk, Sequence, StepPlan
from draftloop.scheduler.step_shape import StepShape

Value = TypeVar("Value")


class Worker:
    """The device side of the engine: one row state, one graph table."""

    def __init__(
        self,
        table: GraphTable,
        state: RowState,
        drafter: Drafter | None,
        pool: CachePool,
        *,
        overlaps: bool,
        loop: DeviceLoop | None = None,
        processors: Many[LogitsProcessor] = (),
        followers: Followers | None = None,
    ) -> None:
        """`overlaps`: the next step is launched before this one's results are known."""
        self.followers = followers
        self._failure: Failure = followers.failure if followers is not None else no_failure
        self.table, self.state, self.drafter, self.loop = table, state, drafter, loop
        self.processors = processors
        self._drafter_has_caches = drafter is not None and bool(drafter.cache_specs())
        self.overlaps = overlaps
        self.device = state.num_tokens_M.device
        self.tree = drafter.tree if drafter else DraftTree.chain(0)
        self.num_drafts = self.tree.num_drafts
        self.observes = drafter is not None and drafter.observes
        self._follows_load = drafter is not None and len(drafter.counts) > 1
        self._on_host = drafter is not None and drafter.needs_host(drafter.spec)
        self.rows = RowWriter(table.buffers, state, drafter, pool, processors=processors, followers=followers)

    def shape(self, plan: StepPlan) -> StepShape:
        """What the plan needs to run. A drafter that works on the host is asked for its drafts now.

        Where it has none for any row, or nothing was drafted before, a step costs what plain decoding costs.
        """
        chunks, decodes = plan.chunks, plan.decodes
        num_drafts = self._scheduled(plan) if any(s.speculation and s.has_drafts for s in decodes) else 0
        if self._on_host:
            found = self._ask_host(decodes, most=num_drafts)
            if not found and not self._rounds(self._kind(decodes)).next:
                num_drafts = 0  # and nobody else drafts
        return StepShape(
            prompt_tokens=sum(chunk.count for chunk in chunks),
            prompt_reports=any(chunk.sequence.reports_prompt for chunk in chunks),
            first_rows=sum(chunk.completes_prompt and chunk.sequence.speculation for chunk in chunks),
            decode_rows=len(decodes),
            num_drafts=num_drafts,
            redrafts=any(sequence.speculation for sequence in decodes),
            is_stepwise=any(sequence.stepwise for sequence in decodes),
        )

    def steps_at_once(self, plan: StepPlan, shape: StepShape) -> int:
        """Steps that the device could make of this plan by itself; 1: it cannot repeat it."""
        stepwise = shape.is_stepwise or any(sequence.traced for sequence in plan.decodes)
        if self.loop is None or stepwise or not self._is_as_planned(plan, shape):
            return 1
        return self.loop.max_iterations if self.loop.covers(self._iteration(plan), plan) else 1

    @torch.inference_mode()
    def launch(self, plan: StepPlan, shape: StepShape, num_steps: int = 1) -> InFlight:
        """Run a step, or a loop of steps. Nothing here waits for the device.

        `shape` covers what the plan needs, and may be larger: a rank runs what others need with padding rows.
        """
        self.order_after_loop()
        self.rows.map_pages([*plan.decodes, *(chunk.sequence for chunk in plan.chunks)])
        if num_steps > 1:
            self.rows.select([sequence.row for sequence in plan.decodes])
            for sequence in plan.decodes:
                sequence.has_drafts = True  # for all that the host will know when the loop ends
            loop = self._repeat(self._iteration(plan), len(plan.decodes), num_steps)
            return LoopInFlight(plan, loop, num_steps, self._failure)
        flight = StepInFlight(plan, self.device, self._failure)
        if shape.prompt_tokens:
            self._run_prompts(plan.chunks, shape, flight)
        if shape.decode_rows:
            self._run_decodes(plan.decodes, shape, flight)
        if self._follows_load and not plan.num_drafts:
            for sequence in plan.decodes:
                sequence.has_drafts = True  # for all that is known when there are to be drafts again
        elif self.num_drafts and not self.overlaps and not self._on_host:
            flight.copy("has_drafts", self.state.drafts_MK[:, 0] != NO_DRAFT)
        flight.launched()
        return flight

    def _iteration(self, plan: StepPlan) -> str:
        return iteration_name(self._kind(plan.decodes), self._scheduled(plan), self.num_drafts)

    def _scheduled(self, plan: StepPlan) -> int:
        """Drafts of a step whose rows have some. Ranks that step together have the same, with rows or without."""
        return plan.num_drafts if self._follows_load else self.num_drafts

    def _is_as_planned(self, plan: StepPlan, shape: StepShape) -> bool:
        """The step verifies what was to be, and the drafter's round for that follows it."""
        return shape.num_drafts == self._scheduled(plan) and (shape.redrafts or not self.num_drafts)

    def _kind(self, sequences: Iterable[Sequence]) -> SamplingKind:
        return SamplingKind.of(sequence.params for sequence in sequences)

    @on_every_rank()
    def order_after_loop(self) -> None:
        """As `Recorder.order_after_loop`."""
        self.table.recorder.order_after_loop()

    @on_every_rank(at_once=True)
    def run(self, phase: str, rows: int, **sizes: int) -> Mapping[str, Tensor]:
        """As `GraphTable.run`."""
        return self.table.run(phase, rows, None, **sizes)

    @on_every_rank(at_once=True)
    def _repeat(self, iteration: str, rows: int, num_steps: int) -> Loop:
        assert self.loop is not None
        return self.loop.launch(iteration, rows, num_steps)

    @on_every_rank(at_once=True)
    def everywhere(self, function: Callable[..., Value], *args: Any) -> Value:
        """`function(worker, *args)` on every rank, in the order of launches; a function of a module."""
        return function(self, *args)

    def obey(self, orders: Iterable[Order]) -> None:
        """As a follower: do what rank 0 does."""
        with torch.inference_mode():
            obey(orders, self, self.rows)

    def explain(self) -> None:
        """After an error: raises RankError if it has come of another rank's end."""
        if self.followers is not None:
            self.followers.explain()

    def close(self) -> None:
        """Let go of the followers, if there are any."""
        if self.followers is not None:
            self.followers.release()

    def _run_prompts(self, chunks: Many[Chunk], shape: StepShape, flight: StepInFlight) -> None:
        for chunk in chunks:
            if not chunk.sequence.held[0].num_mapped:
                self.rows.admit(chunk.sequence)
        rows = [chunk.sequence.row for chunk in chunks]
        bounds = [0]
        for chunk in chunks:
            bounds.append(bounds[-1] + chunk.count)
        num_rows, num_tokens = len(rows), bounds[-1]
        self.rows.select(rows)
        self.rows.write("query_starts", bounds)
        self.rows.write("kv_lens", [chunk.end for chunk in chunks])
        run = self.run
        run_ragged = partial(run, tokens=num_tokens, tokens_across_ranks=shape.prompt_tokens)
        outputs = run_ragged(prefill_name(report=shape.prompt_reports), num_rows)
        if any(chunk.sequence.reports_prompt for chunk in chunks):
            flight.copy("prompt_logprob_ids", outputs["prompt_logprob_ids"])
            flight.copy("prompt_logprobs", outputs["prompt_logprobs"])
        if self.observes:
            flight.copy("prompt_hidden", outputs["aux_hidden"])
        ending = [chunk.sequence for chunk in chunks if chunk.completes_prompt]
        emitting = [chunk.sequence for chunk in chunks if chunk.emits]
        kind = self._kind(ending)
        if emitting:
            padding = self.state.padding_row
            self.rows.write("ending_rows", [c.sequence.row if c.emits else padding for c in chunks])
            outputs = run(accept_name("accept.prompt", kind), num_rows)
            flight.copy("first_token", outputs["first_token"])
            if any(sequence.params.logprobs is not None for sequence in emitting):
                outputs = run("logprobs.first", num_rows)
                flight.copy("first_logprob_ids", outputs["first_logprob_ids"])
                flight.copy("first_logprobs", outputs["first_logprobs"])
        for phase in self._rounds(kind).prompt:
            run_ragged(phase, num_rows)
        if shape.first_rows and self.drafter is not None:
            drafting = [sequence.row for sequence in ending if sequence.speculation]
            self.rows.select(drafting)
            for phase in first_round(self.drafter, kind, self._scheduled(flight.plan)):
                run(phase, len(drafting), rows_across_ranks=shape.first_rows)

    def _run_decodes(self, sequences: Many[Sequence], shape: StepShape, flight: StepInFlight) -> None:
        num_rows, num_drafts = len(sequences), shape.num_drafts
        kind = self._kind(sequences)
        run = partial(self.run, rows_across_ranks=shape.decode_rows)
        self.rows.select([sequence.row for sequence in sequences])
        flight.is_as_planned = as_planned = self._is_as_planned(flight.plan, shape)
        whole = iteration_name(kind, num_drafts, self.num_drafts)
        as_one = as_planned and not shape.is_stepwise
        if as_one and self.table.covers(whole, shape.decode_rows):
            self._copy_drafts(sequences, num_drafts, flight)
            flight.copy("outcome", run(whole, num_rows)["outcome"])
            return
        rounds = self._rounds(kind)
        for phase in rounds.host if num_drafts else ():
            run(phase, num_rows)
        self._copy_drafts(sequences, num_drafts, flight)
        following = [sequence for sequence in sequences if sequence.grammar is not None]
        read_drafts = self._start_reading_drafts(following, num_drafts) if following else None
        outputs = run(verify_name(num_drafts, self.num_drafts), num_rows)
        if self.observes:
            flight.copy("hidden", outputs["aux_hidden"].unflatten(0, (num_rows, 1 + num_drafts)))
        if read_drafts is not None:
            self.rows.write_masks(following, read_drafts())  # while the target verifies
        accepted = run(accept_name("accept", kind, num_drafts, self.num_drafts), num_rows)
        flight.copy("outcome", accepted["outcome"])
        for phase in after_accept(self.tree) if num_drafts else ():
            run(phase, num_rows)
        if any(sequence.params.logprobs is not None for sequence in sequences):
            outputs = run(logprobs_name(num_drafts, self.num_drafts), num_rows)
            flight.copy("logprob_ids", outputs["logprob_ids"].unflatten(0, (num_rows, 1 + num_drafts)))
            flight.copy("logprobs", outputs["logprobs"].unflatten(0, (num_rows, 1 + num_drafts)))
        after = ()
        if self.drafter is not None and as_planned:
            after = next_round(self.drafter, kind, num_drafts)
        elif shape.redrafts:
            after = rounds.next if rounds.plain is None else rounds.plain
        for phase in after:
            run(phase, num_rows)
        flight.feeds_drafter = as_planned or after == rounds.next or not self._drafter_has_caches

    def _copy_drafts(self, sequences: Many[Sequence], num_drafts: int, flight: StepInFlight) -> None:
        """For rows that are traced: what is about to be verified, which the step overwrites."""
        if num_drafts and any(sequence.traced for sequence in sequences):
            rows_R = self.table.buffers["rows"][: len(sequences)]
            flight.copy("drafts", self.state.drafts_MK.index_select(0, rows_R)[:, :num_drafts])

    def _ask_host(self, sequences: Many[Sequence], *, most: int) -> bool:
        """Let the drafter draft on the host, up to `most` for each. False if it has nothing for any row."""
        assert self.drafter is not None
        drafts = self.drafter.draft_on_host([self._host_row(s, most) for s in sequences]) if most else []
        drafts = [*drafts, *[()] * (len(sequences) - len(drafts))]
        self.rows.write("host_drafts", [[*ids, *[NO_DRAFT] * (self.num_drafts - len(ids))] for ids in drafts])
        return any(drafts)

    def _start_reading_drafts(self, sequences: Many[Sequence], num_drafts: int) -> Callable[[], list[list[int]]]:
        """Copy these rows' drafts to the host; what is returned waits for them."""
        if not num_drafts:
            return lambda: [[] for _ in sequences]
        rows = self.rows.stage(torch.tensor([sequence.row for sequence in sequences]))
        drafts_RK = self.state.drafts_MK.index_select(0, rows.to(self.device, non_blocking=True))[:, :num_drafts]
        if self.device.type != "cuda":
            return drafts_RK.tolist
        host_RK = torch.empty(drafts_RK.shape, dtype=drafts_RK.dtype, pin_memory=True)
        host_RK.copy_(drafts_RK, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> list[list[int]]:
            arrived.synchronize()
            return host_RK.tolist()

        return read

    def _rounds(self, kind: SamplingKind) -> Rounds:
        return self.drafter.rounds(sampled=kind is not SamplingKind.GREEDY) if self.drafter else Rounds()

    def _host_row(self, sequence: Sequence, most: int) -> HostRow:
        token_ids = sequence.token_ids
        room = sequence.max_total - len(token_ids) - 1
        return HostRow(
            number=sequence.number,
            request_id=sequence.request_id,
            token_ids=token_ids,
            num_prompt=sequence.num_prompt,
            max_drafts=max(min(sequence.max_drafts, most, room), 0),
        )
