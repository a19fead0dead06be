"""The engine: plan, stage and run, commit. Steps overlap: the next is planned while one runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

from draftloop.engine.adapters import Adapters
from draftloop.engine.check_request import RequestChecker
from draftloop.engine.detokenizer import Detokenizer
from draftloop.engine.flight import Emitted, InFlight
from draftloop.engine.lockstep import Lockstep
from draftloop.engine.logprobs import LogprobReader
from draftloop.engine.observe import observed_block, observed_chunks
from draftloop.engine.sources import block_sources
from draftloop.engine.stats import EngineStats
from draftloop.engine.worker import Worker
from draftloop.errors import RequestError
from draftloop.request import LoRARequest, SamplingParams
from draftloop.sampling.grammar import GrammarCompiler
from draftloop.sampling.sampler import request_seed
from draftloop.scheduler.batch import Adapter, Sequence, Stage, StepPlan
from draftloop.scheduler.scheduler import NOTHING, Scheduler
from draftloop.scheduler.step_shape import NO_STEP, StepShape


class EngineCore:
    """Runs requests to their end, many at a time. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        seed: str,
        pipeline_depth: int,
        tokenizer=None,
        max_logprobs: int = 0,
        adapters: Adapters | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """`seed` is that of requests without one.

        `lockstep`: with the ranks that take every step together with this one. All of them call `step` then, with
        something to do or without.
        """
        self.scheduler, self.worker, self.tokenizer, self.adapters = scheduler, worker, tokenizer, adapters
        self.lockstep = lockstep
        self.vocab_size, self.eos_ids, self.seed, self.pipeline_depth = vocab_size, eos_ids, seed, pipeline_depth
        self.checker = RequestChecker(
            vocab_size=vocab_size,
            max_model_len=scheduler.max_model_len,
            max_logprobs=max_logprobs,
            tokenizer=tokenizer,
            processors=worker.processors,
            num_drafts=worker.num_drafts,
            drafters=worker.drafter.drafters if worker.drafter else (),
        )
        self.grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        self._reader = LogprobReader(tokenizer)
        self.stats = EngineStats(
            num_drafts=worker.num_drafts, drafters=worker.drafter.drafters if worker.drafter else ()
        )
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, Detokenizer] = {}
        self._compiling: list[Sequence] = []
        """Requests whose grammar was not ready when last looked at."""
        self._in_flight: deque[InFlight] = deque()
        self._last_decode: float | None = None
        """When the last decoding step came back, if no prompt ran in it."""
        self._count = 0

    # ---- requests ---------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        speculation: bool = True,
        traced: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> Sequence:
        """Queue a request. `traced`: its `Sequence.sources` say where each token came from.

        Lower `priority` is served first. Cached prefixes are shared within one `cache_salt`. `lora_request` is the
        adapter that it is answered with, or the name of one that is loaded.

        Raises RequestError for an id in use, an empty or too long prompt, ids outside of the
        vocabulary, parameters that this engine cannot serve, a request that the cache could never hold, or an adapter
        that cannot be had.
        """
        if request_id in self._sequences:
            raise RequestError(f"request id {request_id!r} is running already; choose another")
        prompt_ids = self.checker.prompt(prompt_ids, params)
        self.checker.check(params)
        max_drafts = self.checker.max_drafts(params) if speculation else 0
        self.checker.check_place(priority, cache_salt)
        sequence = Sequence(
            request_id=request_id,
            number=self._count,
            prompt_ids=prompt_ids,
            params=params,
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            seed=request_seed(params, self.seed, self._count),
            speculation=max_drafts > 0,
            max_drafts=max_drafts,
            traced=traced,
            priority=priority,
            cache_salt=cache_salt,
            adapter=self._adapter(lora_request),
            bad_words=self.checker.bad_words(params),
            grammar=self.grammars.follow(params.structured_outputs) if params.structured_outputs else None,
        )
        if params.prompt_logprobs is not None:
            sequence.prompt_logprobs.append(None)
        self.scheduler.add(sequence)
        self._count += 1
        self._sequences[request_id] = sequence
        if sequence.grammar is not None:
            sequence.is_compiling = True
            self._compiling.append(sequence)
        self._texts[request_id] = Detokenizer(self.tokenizer, params)
        return sequence

    def _adapter(self, asked: LoRARequest | str | None) -> Adapter | None:
        if asked is None:
            return None
        if self.adapters is None:
            raise RequestError("lora_request names an adapter, but this engine has none; start it with enable_lora")
        return self.adapters.find(asked, lambda: {sequence.adapter for sequence in self._sequences.values()})

    def abort(self, request_id: str) -> None:
        """End a request now, in whatever state it is. An unknown or ended one is left alone."""
        if sequence := self._sequences.pop(request_id, None):
            self._texts.pop(request_id)
            sequence.finish_reason = "abort"
            self.scheduler.abort(sequence)
            self._interrupt()

    def preempt(self, request_id: str) -> None:
        """Take its row from a running request; it goes on, as if nothing had been, once there is room."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.stage in (Stage.PREFILL, Stage.DECODE):
            self.scheduler.preempt(sequence)
            self._interrupt()

    def reset_prefix_cache(self) -> bool:
        """Find nothing again that was computed before now. What runs is not disturbed. Returns True: it always can."""
        self.scheduler.reset_prefix_cache()
        return True

    def text(self, request_id: str) -> str:
        """What a running request has said so far; it never ends in half a character."""
        return self._texts[request_id].text

    @property
    def request_ids(self) -> Collection[str]:
        """Of all requests that have not ended."""
        return self._sequences.keys()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._in_flight

    # ---- steps ------------------------------------------------------------------------------

    def step(self) -> list[tuple[Sequence, str]]:
        """Launch the next step and commit the oldest one.

        Returns the requests that got tokens, with their text so far. Raises what went wrong on the device.
        """
        try:
            return self._step()
        except RuntimeError:
            self.worker.explain()
            raise

    def _step(self) -> list[tuple[Sequence, str]]:
        failed = self._fail_uncompiled()
        plan = self._next_plan()
        now = time.perf_counter()
        for chunk in plan.chunks:
            if not chunk.sequence.started:
                chunk.sequence.started = now
                self.stats.count_prompt(chunk.sequence)
        shape = self._agree_on_shape(plan)
        if shape:
            most = self.worker.steps_at_once(plan, shape)
            num_steps = self.scheduler.reserve(plan, most) if most > 1 else 1
            flight = self.worker.launch(plan, shape, num_steps)
            self._in_flight.append(flight)
            self.scheduler.launched(plan, num_steps=num_steps, fed=flight.feeds_drafter)
        if self._in_flight and (
            not shape or self._in_flight[-1].repeats or len(self._in_flight) >= self.pipeline_depth
        ):
            return [*failed, *self._commit_oldest()]
        if not shape and not failed:
            self._last_decode = None
            self._wait_for_grammars()
        return failed

    def _agree_on_shape(self, plan: StepPlan) -> StepShape:
        """What to run for this plan, and for those of the ranks that step together with this one."""
        shape = self.worker.shape(plan) if plan or self.lockstep else NO_STEP
        return self.lockstep.agree(shape, is_idle=self.idle) if self.lockstep else shape

    def _fail_uncompiled(self) -> list[tuple[Sequence, str]]:
        """End requests whose grammar, which looked well, could not be compiled."""
        failed: list[tuple[Sequence, str]] = []
        if not self._compiling:
            return failed
        compiling, self._compiling = self._compiling, []
        for sequence in compiling:
            assert sequence.grammar is not None
            if sequence.stage is Stage.FINISHED:
                continue  # aborted
            if not sequence.grammar.ready:
                self._compiling.append(sequence)
            elif sequence.grammar.error is not None:
                sequence.finish_reason, sequence.error = "error", sequence.grammar.error
                self.scheduler.abort(sequence)
                failed.append((sequence, ""))
                self._forget(sequence)
            else:
                sequence.is_compiling = False
        return failed

    def _wait_for_grammars(self) -> None:
        """There is nothing to run, nor in flight: do not spin while grammars are being compiled."""
        if self._compiling:
            assert self._compiling[0].grammar is not None
            self._compiling[0].grammar.wait(timeout_s=0.01)

    def _next_plan(self) -> StepPlan:
        """What to launch now. Nothing while the device repeats decoding by itself; prompts end that."""
        is_looping = bool(self._in_flight) and self._in_flight[-1].repeats
        if is_looping:
            if not self.scheduler.has_prompt_to_run():
                if self.scheduler.drafting.wants_change():
                    self._in_flight[-1].interrupt()
                return NOTHING
            self._in_flight[-1].interrupt()
        if len(self._in_flight) >= self.pipeline_depth:
            return NOTHING
        if self._in_flight and any(s.grammar is not None and s.stage is Stage.DECODE for s in self.scheduler.running):
            return NOTHING  # the masks of a step follow from the tokens of the last one
        plan = self.scheduler.plan(settled=not self._in_flight)
        return plan if plan.chunks or not is_looping else NOTHING  # the loop has decoded for this plan already

    def _commit_oldest(self) -> list[tuple[Sequence, str]]:
        flight = self._in_flight[0]
        try:
            emitted = flight.wait()
        finally:
            self.scheduler.landed(*flight.land())
            if flight.ended:
                self._in_flight.popleft()
        return self._commit(flight, emitted)

    def _interrupt(self) -> None:
        """A request has ended that a loop in flight, if there is one, goes on with."""
        for flight in self._in_flight:
            flight.interrupt()

    def close(self) -> None:
        """End what is in flight and wait for it. Its tokens are dropped."""
        try:
            while self._in_flight:
                self._in_flight.popleft().drop()
        finally:
            self.grammars.close()

    def _commit(self, flight: InFlight, emitted: Emitted) -> list[tuple[Sequence, str]]:
        """Apply what a step emitted. Requests that ended or were preempted while it was in flight are passed over."""
        plan = flight.plan
        if emitted.has_drafts is not None:
            for sequence in self.scheduler.running:
                sequence.has_drafts = emitted.has_drafts[sequence.row]
        changed = []
        observed = observed_chunks(flight, emitted)  # before first tokens end some of these requests
        self._reader.add_prompts(flight, emitted)
        ending = [(at, chunk.sequence) for at, chunk in enumerate(plan.chunks) if chunk.emits]
        for (at, sequence), token in zip(ending, emitted.first_tokens, strict=True):
            if flight.still_runs(sequence):
                sequence.first_token = time.perf_counter()
                report = emitted.first_logprobs
                tokens = [token] if token >= 0 else []
                self._reader.add(sequence, tokens, report and (report[0][at : at + 1], report[1][at : at + 1]))
                changed.append(self._append(sequence, tokens))
                if sequence.traced:
                    self._trace(sequence, 0, [])
        rows = zip(
            plan.decodes, emitted.tokens, emitted.num_accepted, emitted.num_drafted, emitted.drafted_by, strict=True
        )
        drafting = self.scheduler.drafting
        for index, (sequence, tokens, num_accepted, num_drafted, drafted_by) in enumerate(rows):
            if flight.still_runs(sequence):
                drafting.accepted(sequence, num_drafted, num_accepted)
                known = len(sequence.output_ids)
                report = emitted.logprobs
                self._reader.add(sequence, tokens, report and (report[0][index], report[1][index]))
                changed.append(self._append(sequence, tokens))
                if sequence.traced:
                    self._trace(sequence, num_accepted, emitted.drafts[index] if emitted.drafts else [])
                if self.worker.observes:
                    assert emitted.hidden is not None, "a step ran past the drafter that observes it"
                    observed.append(observed_block(sequence, known, emitted.hidden[index]))
                if sequence.speculation:
                    delivered = min(num_accepted, len(sequence.output_ids) - known)
                    self.stats.count_step(
                        sequence, num_drafted=num_drafted, num_accepted=delivered, drafted_by=drafted_by
                    )
        step_ms = self._step_ms(plan)
        if plan.decodes:
            drafting.stepped(len(plan.decodes), plan.num_drafts, step_ms if flight.is_as_planned else None)
        if observed and self.worker.drafter:
            self.worker.drafter.observe(observed)
        return changed

    def _step_ms(self, plan: StepPlan) -> float | None:
        """What a decoding step took, where it and the one before it ran no prompts."""
        now, before = time.perf_counter(), self._last_decode
        self._last_decode = None if plan.chunks else now
        return None if before is None or plan.chunks else (now - before) * 1e3

    def _append(self, sequence: Sequence, tokens: list[int]) -> tuple[Sequence, str]:
        """Take tokens up to the first one that ends the request. None at all: its logits were bad."""
        text = self._texts[sequence.request_id]
        for token in tokens:
            sequence.output_ids.append(token)
            self.stats.generated_tokens += 1
            is_last = self._ends(sequence, token, text)
            if sequence.traced:
                sequence.text_ends.append(len(text.text))
            if is_last:
                break
        if not tokens:
            sequence.finish_reason, sequence.error = "error", _bad_logits(sequence)
        del sequence.logprobs[len(sequence.output_ids) :]
        if sequence.finish_reason is None and sequence.num_tokens >= sequence.max_total:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            text.flush()
            sequence.finished = time.perf_counter()
            self.scheduler.finish(sequence)
            self._forget(sequence)
            self._interrupt()
        return sequence, text.text

    def _trace(self, sequence: Sequence, num_accepted: int, drafts: list[int]) -> None:
        """Record where the tokens came from that a step has just added."""
        count = len(sequence.output_ids) - len(sequence.sources)
        drafts = self.worker.tree.branch(drafts, sequence.output_ids[-count:][:num_accepted]) if drafts else []
        sequence.sources += block_sources(count, num_accepted, drafts)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id], self._texts[sequence.request_id]

    def _ends(self, sequence: Sequence, token: int, text: Detokenizer) -> bool:
        """Does this token end the request? Its text is added unless it is a mere end marker."""
        params = sequence.params
        if sequence.grammar is not None and not sequence.grammar.accept(token):
            sequence.finish_reason = "error"
            sequence.error = sequence.grammar.error or f"token {token} does not fit the grammar"
            return True
        if token in sequence.eos_ids or token in params.stop_token_ids:
            sequence.finish_reason = "stop"
            sequence.stop_reason = token if token in params.stop_token_ids else None
            return True
        stop = text.add(token, may_stop=len(sequence.output_ids) > params.min_tokens)
        if stop is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop
            return True
        return False


def _bad_logits(sequence: Sequence) -> str:
    place = sequence.num_tokens
    if sequence.params.constrained:
        return (
            f"no token can follow the first {place}: the request's parameters leave none, or the model's logits are "
            f"NaN or infinite"
        )
    return f"the model's logits after {place} tokens are NaN or infinite"
