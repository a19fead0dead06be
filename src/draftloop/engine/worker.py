"""Runs step plans on the device: stages what the host knows, runs phases, reads back what was emitted."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftloop.drafters.base import Drafter, HostRow, Rounds
from draftloop.engine.iteration import iteration_name
from draftloop.engine.target import OUTCOME_COUNTS, accept_name, verify_name
from draftloop.graphs.table import GraphTable
from draftloop.kvcache.rows import NO_DRAFT, NULL_PAGE, RowState
from draftloop.sampling.sampler import SamplingKind, request_seed
from draftloop.scheduler.batch import Chunk, Sequence, StepPlan


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """What one step emitted, on the host."""

    first_tokens: list[int]
    """One per chunk that completed its prompt, in order."""
    tokens: list[list[int]]
    """Per decoding row."""
    num_accepted: list[int]
    """Per decoding row: how many of its tokens are accepted drafts."""
    num_drafted: list[int]
    """Per decoding row: drafts that were verified."""
    has_drafts: list[bool] | None
    """Per engine row, whether something was drafted for the next step; None where nobody waits for it."""
    prompt_hidden: Tensor | None = None
    """[tokens of all chunks, layers * hidden size], for a drafter that observes."""
    hidden: Tensor | None = None
    """[decoding rows, tokens per row, layers * hidden size], likewise."""


class InFlight:
    """A step that has been launched; its results are on their way to the host."""

    def __init__(self, plan: StepPlan, device: torch.device) -> None:
        self.plan = plan
        self._copies: dict[str, Tensor] = {}
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def copy(self, name: str, value: Tensor) -> None:
        """Start copying a result before the next step overwrites it."""
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=self._arrived is not None)
        self._copies[name] = host.copy_(value, non_blocking=True)

    def launched(self) -> None:
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> Emitted:
        """Block until the copies are complete."""
        if self._arrived is not None:
            self._arrived.synchronize()
        states = {name: self._copies.pop(name, None) for name in ("prompt_hidden", "hidden")}
        lists = {name: value.tolist() for name, value in self._copies.items()}
        ending = [i for i, chunk in enumerate(self.plan.chunks) if chunk.completes_prompt]
        outcomes = lists.get("outcome", [])
        first = len(OUTCOME_COUNTS)
        return Emitted(
            first_tokens=[lists["first_token"][i][0] for i in ending],
            tokens=[outcome[first : first + outcome[0]] for outcome in outcomes],
            num_accepted=[outcome[1] for outcome in outcomes],
            num_drafted=[outcome[2] for outcome in outcomes],
            has_drafts=lists.get("has_drafts"),
            **states,
        )


class Worker:
    """The device side of the engine: one row state, one graph table."""

    def __init__(
        self, table: GraphTable, state: RowState, drafter: Drafter | None, *, seed: int, overlaps: bool
    ) -> None:
        """`overlaps`: the next step is launched before this one's results are known."""
        self.table, self.state, self.drafter, self.seed, self.overlaps = table, state, drafter, seed, overlaps
        self.device = state.num_tokens_M.device
        self.num_drafts = drafter.num_drafts if drafter else 0
        self.observes = drafter is not None and drafter.observes
        self._rows_written: list[int] = []

    def admit(self, sequence: Sequence) -> None:
        """Give a row its request: prompt, pages, limits and parameters."""
        state, row, params = self.state, sequence.row, sequence.params
        prompt = torch.tensor(sequence.prompt_ids, dtype=torch.int32)
        pages = torch.full((state.page_table_MN.shape[1],), NULL_PAGE, dtype=torch.int32)
        pages[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        state.tokens_ML[row, : prompt.shape[0]].copy_(self._stage(prompt), non_blocking=True)
        state.page_table_MN[row].copy_(self._stage(pages), non_blocking=True)
        state.drafts_MK[row].fill_(NO_DRAFT)
        for column, value in (
            (state.num_tokens_M, sequence.num_prompt),
            (state.max_tokens_M, sequence.max_total),
            (state.num_drafted_M, 0),
            (state.draft_limit_M, self.num_drafts if sequence.speculation else 0),
            (state.temperature_M, params.temperature),
            (state.top_k_M, params.top_k),
            (state.top_p_M, params.top_p),
            (state.min_p_M, params.min_p),
            (state.seed_M, request_seed(params, self.seed, sequence.number)),
        ):
            column[row].fill_(value)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Run a step. Nothing here waits for the device."""
        flight = InFlight(plan, self.device)
        if plan.chunks:
            self._run_prompts(plan.chunks, flight)
        if plan.decodes:
            self._run_decodes(plan.decodes, flight)
        if self.num_drafts and not self.overlaps and not self._drafts_on_host:
            flight.copy("has_drafts", self.state.drafts_MK[:, 0] != NO_DRAFT)
        flight.launched()
        return flight

    def _run_prompts(self, chunks: Many[Chunk], flight: InFlight) -> None:
        for chunk in chunks:
            if chunk.start == 0:
                self.admit(chunk.sequence)
        rows = [chunk.sequence.row for chunk in chunks]
        bounds = [0]
        for chunk in chunks:
            bounds.append(bounds[-1] + chunk.count)
        num_rows, num_tokens = len(rows), bounds[-1]
        self._write_rows(rows)
        self._write("query_starts", bounds)
        self._write("kv_lens", [chunk.end for chunk in chunks])
        run = self.table.run
        outputs = run("target.prefill", num_rows, tokens=num_tokens)
        if self.observes:
            flight.copy("prompt_hidden", outputs["aux_hidden"])
        ending = [chunk.sequence for chunk in chunks if chunk.completes_prompt]
        kind = SamplingKind.of(sequence.params for sequence in ending)
        if ending:
            padding = self.state.padding_row
            self._write("ending_rows", [c.sequence.row if c.completes_prompt else padding for c in chunks])
            outputs = run(accept_name("accept.prompt", kind), num_rows)
            flight.copy("first_token", outputs["first_token"])
        for phase in self._rounds(kind).prompt:
            run(phase, num_rows, tokens=num_tokens)
        drafting = [sequence.row for sequence in ending if sequence.speculation]
        if drafting and not self._drafts_on_host:
            self._write_rows(drafting)
            for phase in self._rounds(kind).first:
                run(phase, len(drafting))

    def _run_decodes(self, sequences: Many[Sequence], flight: InFlight) -> None:
        num_rows = len(sequences)
        kind = SamplingKind.of(sequence.params for sequence in sequences)
        # where nothing was drafted for the whole batch, it costs what plain decoding costs
        num_drafts = self.num_drafts if any(s.speculation and s.has_drafts for s in sequences) else 0
        run = partial(self.table.run, rows_across_ranks=flight.plan.rows_across_ranks)
        self._write_rows([sequence.row for sequence in sequences])
        whole = iteration_name(kind)
        if num_drafts == self.num_drafts and self.table.covers(whole, num_rows):
            flight.copy("outcome", run(whole, num_rows)["outcome"])
            return
        if num_drafts and self._drafts_on_host:
            assert self.drafter is not None
            for name, value in self.drafter.host_inputs([self._host_row(s) for s in sequences]).items():
                self.table.buffers.write(name, value)
            for phase in self._rounds(kind).next:
                run(phase, num_rows)
        outputs = run(verify_name(num_drafts), num_rows)
        if self.observes:
            flight.copy("hidden", outputs["aux_hidden"].unflatten(0, (num_rows, 1 + num_drafts)))
        flight.copy("outcome", run(accept_name("accept", kind, num_drafts), num_rows)["outcome"])
        if any(s.speculation for s in sequences) and not self._drafts_on_host:
            rounds = self._rounds(kind)
            for phase in rounds.next if num_drafts or rounds.plain is None else rounds.plain:
                run(phase, num_rows)

    @property
    def _drafts_on_host(self) -> bool:
        """Such a drafter runs right before the verify, when everything accepted so far is known."""
        return self.drafter is not None and self.drafter.on_host

    def _rounds(self, kind: SamplingKind) -> Rounds:
        return self.drafter.rounds(sampled=kind is not SamplingKind.GREEDY) if self.drafter else Rounds()

    def _host_row(self, sequence: Sequence) -> HostRow:
        token_ids = sequence.prompt_ids + sequence.output_ids
        room = sequence.max_total - len(token_ids) - 1
        allowed = self.num_drafts if sequence.speculation else 0
        return HostRow(request_id=sequence.request_id, token_ids=token_ids, max_drafts=max(min(allowed, room), 0))

    def _write_rows(self, rows: list[int]) -> None:
        """Row numbers stay where they are while the same rows run on: a steady step copies nothing."""
        if rows != self._rows_written:
            self._write("rows", rows)
            self._rows_written = rows

    def _write(self, name: str, values: list[int]) -> None:
        self.table.buffers.write(name, self._stage(torch.tensor(values, dtype=torch.int32)))

    def _stage(self, value: Tensor) -> Tensor:
        return value.pin_memory() if self.device.type == "cuda" else value
