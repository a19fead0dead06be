"""One request's answers on their way to the client: what all routes count, measure and say of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from draftloop.request import Logprob, Logprobs, SamplingParams, SpeculationStats
from draftloop.server.client import Answers, EngineUnavailableError
from draftloop.server.errors import ApiError, parameter_of
from draftloop.server.messages import Ending, TracedToken, Update
from draftloop.server.metrics import Metrics
from draftloop.server.smooth import Smoother

json_bytes = msgspec.json.Encoder().encode


class Answer:
    """One answer so far."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """That the engine has given."""
        self.num_shown = 0
        """That the client is told of."""
        self.ending: Ending | None = None
        self.first_token = 0.0
        self.last_token = 0.0


class Reply:
    """All answers to one request. Closing it, in whatever way, aborts what has not ended."""

    def __init__(
        self,
        id: str,
        answers: Answers,
        params: SamplingParams,
        metrics: Metrics,
        observe: Callable[[Reply], None] | None = None,
    ) -> None:
        """`observe` is called once, when the request has ended."""
        self.id, self.params, self.n = id, params, params.n
        self._answers, self._observe = answers, observe
        self._metrics = [metrics.engines[rank] for rank in answers.ranks]
        self.answers = [Answer() for _ in answers.request_ids]
        self.created = int(time.time())
        self._metrics[0].request(n=params.n, max_tokens=params.max_tokens)

    async def updates(self, *, smooth: bool = False) -> AsyncIterator[list[tuple[int, Update]]]:
        """What comes, until all answers have ended; of each answer at most one update at a time.

        `smooth`: the tokens of a step one by one; see `Smoother`. Raises EngineUnavailableError if the engine dies,
        ApiError for an answer that ends in an error.
        """
        smoother = Smoother() if smooth else None
        try:
            num_running = len(self.answers)
            while num_running:
                batch = await (self._arrived() if smoother is None else self._due(smoother))
                for index, update in batch:
                    self.answers[index].num_shown += len(update.token_ids)
                    if update.ending is not None:
                        num_running -= 1
                        if update.ending.error is not None:
                            raise _failed(update.ending.error)
                yield batch
        finally:
            self.close()

    async def _arrived(self) -> list[tuple[int, Update]]:
        """What the engine gave since the last time."""
        batch = await self._answers.next()
        now = time.monotonic()
        for index, update in batch:
            self._measure(index, update, now)
        return batch

    async def _due(self, smoother: Smoother) -> list[tuple[int, Update]]:
        """What is to be shown next."""
        while not (batch := smoother.due(time.monotonic())):
            wait_s = None if smoother.next_due is None else max(smoother.next_due - time.monotonic(), 0.0)
            try:
                async with asyncio.timeout(wait_s):
                    arrived = await self._arrived()
            except TimeoutError:
                continue
            except EngineUnavailableError:
                if smoother.next_due is None:
                    raise
                return smoother.due(math.inf)  # what was given before is shown
            smoother.take(arrived, time.monotonic())
        return batch

    def close(self) -> None:
        self._answers.close()
        for answer, metrics in zip(self.answers, self._metrics, strict=True):
            if answer.ending is None:
                answer.ending = Ending(finish_reason="abort")
                metrics.aborted()
        observe, self._observe = self._observe, None
        if observe is not None:
            observe(self)

    def _measure(self, index: int, update: Update, now: float) -> None:
        answer, metrics, count = self.answers[index], self._metrics[index], len(update.token_ids)
        if count and not answer.num_tokens:
            answer.first_token = now
            metrics.first_token(now - self._answers.arrived)
        elif count:
            metrics.tokens(now - answer.last_token, count)
        if count:
            answer.num_tokens += count
            answer.last_token = now
        if update.ending is not None:
            answer.ending = update.ending
            metrics.ended(
                update.ending,
                seconds=now - self._answers.arrived,
                num_prompt_tokens=self._answers.num_prompt_tokens[index],
                num_tokens=answer.num_tokens,
            )

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many answers it gets; at the end, what of it was cached."""
        counts = self._answers.num_prompt_tokens
        prompt = sum(counts[index] for index in range(0, len(self.answers), self.n))
        completion = sum(answer.num_shown for answer in self.answers)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        firsts = [answer.ending for answer in self.answers[:: self.n]]
        if all(firsts):
            cached = sum(ending.num_cached_tokens for ending in firsts if ending)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def facts(self) -> dict[str, Any]:
        """What there is to say of a request that has ended. Times are seconds; those of its slowest answer."""
        endings = [answer.ending for answer in self.answers if answer.ending is not None]
        firsts = [answer.first_token for answer in self.answers if answer.num_tokens]
        prompts = self._answers.num_prompt_tokens
        return {
            "request_id": self.id,
            "prompt_tokens": sum(prompts[index] for index in range(0, len(self.answers), self.n)),
            "completion_tokens": sum(answer.num_tokens for answer in self.answers),
            "finish_reasons": [ending.finish_reason for ending in endings],
            "seconds": time.monotonic() - self._answers.arrived,
            "time_to_first_token": min(firsts) - self._answers.arrived if firsts else None,
            "queue_s": max((ending.queue_s for ending in endings), default=0.0),
            "prefill_s": max((ending.prefill_s for ending in endings), default=0.0),
            "decode_s": max((ending.decode_s for ending in endings), default=0.0),
        }

    def metrics(self) -> dict[str, Any] | None:
        """What is known of a request with one answer, once it has ended."""
        if len(self.answers) != 1 or self.answers[0].ending is None:
            return None
        answer, ending = self.answers[0], self.answers[0].ending
        seconds = answer.last_token - answer.first_token
        found: dict[str, Any] = {
            "time_to_first_token_ms": (answer.first_token - self._answers.arrived) * 1e3,
            "generation_time_ms": (answer.last_token - self._answers.arrived) * 1e3,
            "queue_time_ms": ending.queue_s * 1e3,
        }
        if answer.num_tokens > 1 and seconds > 0:
            found["mean_itl_ms"] = seconds * 1e3 / (answer.num_tokens - 1)
            found["tokens_per_second"] = (answer.num_tokens - 1) / seconds
        if ending.speculation is not None:
            found["speculative_decoding"] = speculation_dict(ending.speculation)
        return found


def _failed(message: str) -> ApiError:
    param = parameter_of(message)
    return ApiError(400 if param else 500, message, param=param)


def speculation_dict(stats: SpeculationStats) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding`."""
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": stats.acceptance_histogram,
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": stats.num_spec_tokens,
    }


def token_sources(updates: Sequence[Update], text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """`token_sources` of a choice. `text_of` gives the texts of drafts that were rejected."""

    def one(token: TracedToken) -> dict[str, Any]:
        found: dict[str, Any] = {"token_id": token.token_id, "text": token.text}
        if token.source.position:
            return {**found, "source": "draft", "position": token.source.position}
        if token.source.rejected:
            rejected = [{"token_id": draft, "text": text_of(draft)} for draft in token.source.rejected]
            return {**found, "source": "replacement", "rejected": rejected}
        return {**found, "source": "bonus" if token.source.num_drafted else "plain"}

    return [one(token) for update in updates for token in update.traced or []]


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"

# ---- logprobs -------------------------------------------------------------------------------


class TokenNames:
    """What a token is called in an answer: its text, or "token_id:5"."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids

    def name(self, token: int, logprob: Logprob) -> str:
        if self._as_ids or logprob.decoded_token is None:
            return f"token_id:{token}"
        return logprob.decoded_token


def completion_logprobs(
    ids: Sequence[int], found: Sequence[Logprobs | None], num_top: int, names: TokenNames, *, offset: int
) -> dict[str, Any]:
    """The shape of completions: four lists. `offset` is where the first token's text begins."""
    tokens, values, tops, offsets = [], [], [], []
    for token, logprobs in zip(ids, found, strict=True):
        if logprobs is None:  # the prompt's first token
            name = names.name(token, Logprob(logprob=0.0, rank=0))
            values.append(None)
            tops.append(None)
        else:
            name = names.name(token, logprobs[token])
            values.append(logprobs[token].logprob)
            kept = {i: one for i, one in logprobs.items() if i == token or one.rank <= num_top}
            tops.append({names.name(i, one): one.logprob for i, one in kept.items()} if num_top else None)
        tokens.append(name)
        offsets.append(offset)
        offset += len(name)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(ids: Sequence[int], found: Sequence[Logprobs], num_top: int, names: TokenNames) -> dict[str, Any]:
    """The shape of chats."""

    def one(token: int, logprob: Logprob) -> dict[str, Any]:
        name = names.name(token, logprob)
        return {"token": name, "logprob": logprob.logprob, "bytes": list(name.encode())}

    content = []
    for token, logprobs in zip(ids, found, strict=True):
        likely = sorted((lp.rank, i) for i, lp in logprobs.items() if lp.rank <= num_top)
        tops = [one(i, logprobs[i]) for _, i in likely]
        content.append({**one(token, logprobs[token]), "top_logprobs": tops})
    return {"content": content}


def prompt_logprobs_dict(found: Sequence[Logprobs | None] | None, num_top: int) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: of each token, which comes first, and of the `num_top` likeliest ones in its place."""
    if found is None:
        return None
    return [
        None
        if logprobs is None
        else {
            str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for place, (token, one) in enumerate(logprobs.items())
            if not place or one.rank <= num_top
        }
        for logprobs in found
    ]
