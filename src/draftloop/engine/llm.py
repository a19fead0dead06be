"""The offline interface: prompts in, answers out. Names are vLLM's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from draftloop.config.engine import EngineConfig
from draftloop.distributed.launcher import Ranks
from draftloop.distributed.replica import ALONE, Replica
from draftloop.engine.build import Engine
from draftloop.engine.startup import start
from draftloop.engine.stats import PartStats, speculation_stats
from draftloop.errors import RequestError
from draftloop.graphs.report import GraphReport
from draftloop.observability.progress import progress_bar
from draftloop.request import CompletionOutput, LoRARequest, RequestOutput, SamplingParams
from draftloop.scheduler.batch import Sequence as Running

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": .. or "prompt_token_ids": .., "cache_salt": ..}`."""
Message = Mapping[str, Any]
Lora: TypeAlias = LoRARequest | str | None
"""An adapter, or the name of one of `lora_modules`."""


class _Open(NamedTuple):
    """Somebody waits for this output."""

    output: RequestOutput
    running: list[Running]
    """What runs for each of its answers."""
    streams: bool
    """It is looked at after every step; others are complete when they end, which spares most of the work."""


class LLM:
    """Owns an engine and steps it.

    `LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 4})`;
    the other keywords are the fields of `EngineConfig`. Raises ConfigError, CapacityError or
    GraphError if the engine cannot start as asked.
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        self._start(EngineConfig.from_mapping(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig, *, ranks: Ranks | None = None, replica: Replica = ALONE) -> LLM:
        """The same from a ready configuration; `ranks` and `replica`: see `startup.start`."""
        llm = cls.__new__(cls)
        llm._start(config, ranks=ranks, replica=replica)
        return llm

    def _start(self, config: EngineConfig, *, ranks: Ranks | None = None, replica: Replica = ALONE) -> None:
        self.config = config
        self._engine: Engine | None = start(config, ranks=ranks, replica=replica)
        self._ids = itertools.count()
        self._open: dict[str, _Open] = {}
        """By the engine's request id."""

    # ---- answers ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = False,
        speculation: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
    ) -> list[RequestOutput]:
        """Answer each prompt and return the answers in order.

        `lora_request` is the adapter for all of them, or one each; None is the model itself. `speculation=False` drafts
        nothing for these prompts. Of several prompts those of lower `priority` go first. A prompt with a `cache_salt`
        shares cached beginnings with those of the same salt only. A prompt that cannot be served gets an output with
        `finish_reason` "error" if it is one of several; alone it raises RequestError. `use_tqdm` None: a bar on a
        terminal, elsewhere a line of the log every minute.
        """
        many = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(many)
        else:
            params = list(sampling_params)
            if not all(isinstance(one, SamplingParams) for one in params):
                raise RequestError(f"sampling_params is {sampling_params!r}; it must be SamplingParams, one or a list")
            if len(params) != len(many):
                raise RequestError(f"{len(many)} prompts came with {len(params)} sampling_params; give one or one each")
        if priority is not None and len(priority) != len(many):
            raise RequestError(f"{len(many)} prompts came with {len(priority)} priorities; give one for each")
        loras = [lora_request] * len(many) if isinstance(lora_request, Lora) else list(lora_request)
        if len(loras) != len(many):
            raise RequestError(f"{len(many)} prompts came with {len(loras)} of lora_request; give one or one each")
        outputs: list[RequestOutput] = []
        try:
            for prompt, one, rank, lora in zip(many, params, priority or [0] * len(many), loras, strict=True):
                try:
                    outputs.append(self._add(prompt, one, speculation, rank, lora))
                except RequestError as error:
                    if len(many) == 1:
                        raise
                    outputs.append(_refused(self._next_id(), prompt, error))
            total = sum(len(output.outputs) for output in outputs if not output.finished)
            with progress_bar(total=total, description="Answering", show=use_tqdm) as bar:
                while not self.engine.core.idle:
                    bar.update(sum(sequence.finish_reason is not None for sequence, _ in self._step()))
        finally:  # an interrupt must not leave requests behind
            for output in outputs:
                self._close(output)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; messages are `{"role": .., "content": ..}`. `options` are those of
        `generate`. Raises RequestError for messages that the model's chat template cannot take."""
        is_one = isinstance(messages, str | Mapping) or (messages and isinstance(messages[0], Mapping))
        many = [messages] if is_one else messages
        return self.generate([self._render(one) for one in many], sampling_params, **options)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        speculation: bool = True,
        lora_request: Lora = None,
    ) -> Iterator[RequestOutput]:
        """Yield the growing answer to one prompt or conversation; abandoning the iterator ends the request."""
        if prompt and not isinstance(prompt, str | Mapping) and isinstance(prompt[0], Mapping):
            prompt = self._render(prompt)  # type: ignore[arg-type]
        params = sampling_params or SamplingParams()
        output = self._add(prompt, params, speculation, lora=lora_request, streams=True)  # type: ignore[arg-type]
        num_seen, is_last = 0, False
        try:
            while not is_last:
                if _num_tokens(output) > num_seen or output.finished:  # whoever made the step
                    num_seen, is_last = _num_tokens(output), output.finished
                    yield output
                elif self.engine.core.idle:
                    return  # aborted from outside
                else:
                    self._step()
        finally:
            self._close(output)
            if self._engine is not None:
                while self._engine.core.scheduler.idle and not self._engine.core.idle:
                    self._engine.core.step()  # what is in flight lands, where nobody else is served

    def _step(self) -> list[tuple[Running, str]]:
        """Step the engine, and bring outputs up to date, whoever it is that steps."""
        changed = self.engine.core.step()
        for sequence, text in changed:
            if place := self._open.get(sequence.request_id):
                index = place.running.index(sequence)
                if place.streams or sequence.finish_reason is not None:
                    _fill(place.output, place.running, index, text)
                else:
                    answer = place.output.outputs[index]
                    answer.text = text
                    answer.token_ids += sequence.output_ids[len(answer.token_ids) :]
        return changed

    def _close(self, output: RequestOutput) -> None:
        """Nobody waits for this output any more."""
        for answer in output.outputs:
            request_id = _answer_id(output, answer.index)
            self._open.pop(request_id, None)
            if self._engine is not None:
                self._engine.core.abort(request_id)

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        speculation: bool,
        priority: int = 0,
        lora: Lora = None,
        *,
        streams: bool = False,
    ) -> RequestOutput:
        """Queue one request for each answer. All or none: the first one is refused if any would be."""
        text, ids, salt = self._tokenize(prompt)
        answers = [CompletionOutput(index=index, text="", token_ids=[]) for index in range(params.n)]
        output = RequestOutput(
            request_id=self._next_id(), prompt=text, prompt_token_ids=ids, outputs=answers, finished=False
        )
        running: list[Running] = []
        try:
            for answer in answers:
                request_id = _answer_id(output, answer.index)
                running.append(
                    self.engine.core.add(
                        request_id,
                        ids,
                        params.answer(answer.index),
                        speculation=speculation,
                        priority=priority,
                        cache_salt=salt,
                        lora_request=lora,
                    )
                )
                self._open[request_id] = _Open(output, running, streams)
            if (grammar := running[0].grammar) is not None:
                grammar.wait()  # a wrong one is refused, as wrong parameters are
                if grammar.error is not None:
                    raise RequestError(grammar.error)
        except BaseException:
            self._close(output)
            raise
        output.prompt_token_ids = running[0].prompt_ids
        return output

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text if there is one, token ids, and the cache salt."""
        salt = None
        if isinstance(prompt, Mapping):
            keys, salt = prompt.keys() - {"cache_salt"}, prompt.get("cache_salt")
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    f"the prompt has the keys {sorted(prompt)}; give 'prompt' or 'prompt_token_ids', and 'cache_salt'"
                )
            prompt = prompt[keys.pop()]
        if not isinstance(prompt, str):
            return None, _as_ids(prompt), salt
        if self.engine.tokenizer is None:
            raise RequestError(
                f"{self.config.model!r} has no tokenizer; give the prompt as token ids, or name one with --tokenizer"
            )
        return prompt, self.engine.tokenizer.encode(prompt), salt

    def check_chat(self) -> None:
        """Raises RequestError if the model has no chat template, so that it takes plain prompts alone."""
        if not getattr(self.engine.tokenizer, "chat_template", None):
            raise RequestError(
                f"{self.config.model!r} has no chat template; give a plain prompt to generate, or to `draftloop run`"
            )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        self.check_chat()
        tokenizer = self.engine.tokenizer
        if isinstance(messages, str | Mapping) or not messages or not all(isinstance(one, Mapping) for one in messages):
            raise RequestError(f"messages are {messages!r}; they must be a list of {{'role': .., 'content': ..}}")
        try:
            text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is the model's own program
            raise RequestError(f"messages do not fit the chat template: {error}") from error
        return tokenizer.encode(text, add_special_tokens=False)

    # ---- facts ------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine inside. Raises RequestError once the LLM is closed."""
        if self._engine is None:
            raise RequestError("this LLM is closed; make another")
        return self._engine

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, None where it has none."""
        return self.engine.tokenizer

    def get_graph_report(self) -> GraphReport:
        """What is captured, at which sizes, how often it ran, and what ran eager and why."""
        return self.engine.table.report()

    def reset_prefix_cache(self) -> bool:
        """Forget the beginnings of earlier prompts. Requests that run are not disturbed. Returns True."""
        return self.engine.core.reset_prefix_cache()

    def reset_graph_counts(self) -> None:
        """Count graph replays and eager runs anew."""
        self.engine.table.reset_counts()

    def get_metrics(self) -> dict[str, Any]:
        """Counters since the start, under vLLM's names without their prefix; of several drafters each its own too.

        `steps_by_num_drafts`: decoding steps by the drafts that they were to verify of each row.
        """
        stats, drafting = self.engine.core.stats, self.engine.core.scheduler.drafting
        whole = PartStats(num_spec_steps=stats.num_spec_steps, num_accepted_tokens=stats.num_accepted_tokens)
        metrics: dict[str, Any] = {
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generated_tokens,
            "prefix_cache_queries": stats.prompt_tokens,
            "prefix_cache_hits": stats.num_cached_prompt_tokens,
            "num_preemptions": self.engine.core.scheduler.num_preemptions,
            "spec_decode_num_drafts": stats.num_spec_steps,
            "spec_decode_num_steps_without_drafts": stats.num_steps_without_drafts,
            "spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": [
                sum(stats.histogram[i:]) for i in range(1, stats.num_drafts + 1)
            ],
            "mean_acceptance_length": whole.mean_acceptance_length,
            "steps_by_num_drafts": dict(drafting.steps_by_count),
        }
        if stats.by_drafter:
            parts = zip(stats.drafters, stats.by_drafter, strict=True)
            metrics["spec_decode_by_drafter"] = {name: _part(part) for name, part in parts}
        if stats.by_adapter:
            metrics["spec_decode_by_adapter"] = {name: _part(part) for name, part in stats.by_adapter.items()}
        return metrics

    def close(self) -> None:
        """Give back memory, and finish what a drafter writes. A second time does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _part(part: PartStats) -> dict[str, Any]:
    return {
        "num_drafts": part.num_spec_steps,
        "num_draft_tokens": part.num_draft_tokens,
        "num_accepted_tokens": part.num_accepted_tokens,
        "mean_acceptance_length": part.mean_acceptance_length,
    }


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; it must be a prompt, or a list of them")
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many  # type: ignore[list-item]


def _as_ids(prompt: Any) -> list[int]:
    """Token ids of a list, an array or a tensor of them."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence):
        raise RequestError(f"the prompt is {prompt!r}; it must be a text or a list of token ids")
    return list(ids)


def _answer_id(output: RequestOutput, index: int) -> str:
    """What the engine calls one answer of a request."""
    return output.request_id if len(output.outputs) == 1 else f"{output.request_id}-{index}"


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def _fill(output: RequestOutput, running: Sequence[Running], index: int, text: str) -> None:
    """Bring an answer up to date with what the engine runs for it."""
    answer, sequence = output.outputs[index], running[index]
    answer.text, answer.token_ids = text, list(sequence.output_ids)
    answer.finish_reason, answer.stop_reason = sequence.finish_reason, sequence.stop_reason
    if sequence.params.logprobs is not None:
        answer.logprobs = list(sequence.logprobs)
        ids = zip(sequence.output_ids, sequence.logprobs, strict=True)
        answer.cumulative_logprob = sum(found[token].logprob for token, found in ids)
    if sequence.params.prompt_logprobs is not None:
        output.prompt_logprobs = list(sequence.prompt_logprobs)
    output.finished = all(one.finish_reason is not None for one in output.outputs)
    output.error = sequence.error or output.error
    output.num_cached_tokens = running[0].num_cached
    output.spec = speculation_stats(running)
    now = sequence.finished or time.perf_counter()
    started, first_token = sequence.started or now, sequence.first_token or now  # it may end before either
    decoding = now - first_token
    output.metrics = {
        "time_to_first_token_ms": (first_token - sequence.arrived) * 1e3,
        "generation_time_ms": (now - sequence.arrived) * 1e3,
        "queue_time_ms": (started - sequence.arrived) * 1e3,
        "tokens_per_second": (len(sequence.output_ids) - 1) / decoding if decoding > 0 else 0.0,
    }


def _refused(request_id: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    answer = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids") or []
    text, ids = None, []
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Sequence):
        ids = list(prompt)
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=ids, outputs=[answer], finished=True, error=str(error)
    )
