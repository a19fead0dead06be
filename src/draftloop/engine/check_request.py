"""What depends on the engine before a request can be served: vocabulary, lengths, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from draftloop.errors import RequestError
from draftloop.kvcache.constraint_rows import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_IDS
from draftloop.request import LARGEST, SamplingParams
from draftloop.sampling.logits_processors import LogitsProcessor, check_extra_args


class RequestChecker:
    """Refuses with RequestError: parameter, its value, the limit."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        tokenizer: Any,
        processors: Sequence[LogitsProcessor],
        num_drafts: int = 0,
        drafters: Sequence[str] = (),
    ) -> None:
        self.vocab_size, self.max_model_len, self.max_logprobs = vocab_size, max_model_len, max_logprobs
        self.tokenizer, self.processors = tokenizer, processors
        self.num_drafts, self.drafters = num_drafts, drafters

    def prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt, cut if the request asks for that."""
        self._check_ids("prompt", prompt_ids)
        keep = params.truncate_prompt_tokens
        if keep == -1:
            keep = self.max_model_len - (params.max_tokens or 1)
            if keep < 1:
                raise RequestError(
                    f"max_tokens is {params.max_tokens}; with truncate_prompt_tokens -1 it must be below "
                    f"max_model_len, {self.max_model_len}, to leave room for the prompt"
                )
        return list(prompt_ids if keep is None else prompt_ids[-keep:])

    def check(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop is {list(params.stop)!r}, but without a tokenizer there is no text to stop at")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.max_logprobs:
                raise RequestError(
                    f"{name} is {value}; this engine reports at most {self.max_logprobs} (--max-logprobs)"
                )
        if params.logit_bias and len(params.logit_bias) > MAX_BIASED_IDS:
            raise RequestError(f"logit_bias has {len(params.logit_bias)} token ids; at most {MAX_BIASED_IDS} are taken")
        check_extra_args(params, self.processors)
        for name in (params.speculative and params.speculative.drafters) or ():
            if name not in self.drafters:
                has = ", ".join(self.drafters) or "none"
                raise RequestError(f"speculative.drafters names {name!r}; this engine's drafters: {has}")

    def max_drafts(self, params: SamplingParams) -> int:
        """Drafts per step that a request allows."""
        asked = params.speculative.num_tokens if params.speculative else None
        if asked is not None and asked > self.num_drafts:
            raise RequestError(
                f"speculative.num_tokens is {asked}; this engine drafts at most {self.num_drafts} tokens per step"
            )
        return self.num_drafts if asked is None else asked

    def check_place(self, priority: int, cache_salt: str | None) -> None:
        """Where it stands in the queue, and with whom it shares cached prefixes."""
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > LARGEST:
            raise RequestError(f"priority is {priority!r}; it must be an integer from -{LARGEST} to {LARGEST}")
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt and _is_unicode(cache_salt)):
            raise RequestError(f"cache_salt is {cache_salt!r}; it must be a text that is not empty")

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of each bad word, as it stands at the beginning of a text and after a space."""
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise RequestError(f"bad_words is {list(params.bad_words)!r}, but without a tokenizer they have no tokens")
        found: dict[tuple[int, ...], str] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                found.setdefault(tuple(self.tokenizer.encode(text, add_special_tokens=False)), word)
        found.pop((), None)
        for ids, word in found.items():
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words has {word!r} of {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are taken"
                )
        if len(found) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(params.bad_words)} texts of {len(found)} spellings, with and without a space "
                f"before; at most {MAX_BAD_WORDS} are taken"
            )
        return [list(ids) for ids in found]

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.vocab_size:
                raise RequestError(f"{name} holds token id {i!r}; this model's ids are 0 to {self.vocab_size - 1}")


def _is_unicode(text: str) -> bool:
    """False for a text with half a character, which nothing can be made of."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
