"""Output that obeys a grammar: which tokens it allows at each position of a block, by xgrammar.

The host knows the grammar, so a row that follows one makes its step wait for the host: drafts are read back,
masks are written, and acceptance comes after. Grammars are compiled in other processes, for a limited time
(`grammar_compiler`); the request waits for its own one, and nobody else does.

Shape suffixes: Q positions of a block, W 32-bit words of a mask.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from draftloop.errors import RequestError
from draftloop.kvcache.constraint_rows import ALL
from draftloop.request import StructuredOutputsParams
from draftloop.sampling.grammar_compiler import (
    MAX_CHARACTERS,
    Compilers,
    GrammarError,
    ProcessLostError,
    grammar_text,
    reason,
)

KEPT_GRAMMARS = 128
"""Compiled grammars that are kept for requests to come."""
THREADS = 2
"""Grammars that are compiled at the same time."""
COMPILE_S = 10.0
"""What a grammar may take to compile."""
FOLLOW_S, FOLLOW_S_PER_TOKEN = 1.0, 0.01
"""Processor time that following a grammar may take, in all and for each token: the engine waits for it. Grammars
that can be read in many ways take seconds for a token; others less than a millisecond."""

_COMPILERS = Compilers()
"""Of all engines of this process: a compiler takes seconds to start."""


class GrammarCompiler:
    """Makes grammars for one tokenizer, and keeps those used last."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = sorted(i for i in eos_ids if i < vocab_size)
        self._kept: OrderedDict[tuple, Future] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._info: Any = None
        self._info_json = ""

    def follow(self, params: StructuredOutputsParams) -> FollowedGrammar:
        """Start compiling, unless it is known already. Returns at once.

        Raises RequestError for a grammar that is too long or no JSON where it must be, without a tokenizer, where
        the model has no token that ends an answer, or without xgrammar (the extra `grammar`).
        """
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and this model came without one; name one with --tokenizer"
            )
        if not self._eos_ids:
            raise RequestError(
                "structured_outputs needs a model with an end-of-sequence token, to end what is complete"
            )
        if params.after_token_id is not None and params.after_token_id >= self._vocab_size:
            last = self._vocab_size - 1
            raise RequestError(
                f"structured_outputs.after_token_id is {params.after_token_id}; this model's ids are 0 to {last}"
            )
        text = _text(params)
        key = (params.kind, text, params.disable_any_whitespace)
        if key not in self._kept or _may_do_better(self._kept[key]):
            import_xgrammar()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
            self._kept[key] = self._pool.submit(self._compile, params)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return FollowedGrammar(self._kept[key], params.after_token_id, self._vocab_size)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        xgrammar = import_xgrammar()
        if self._info is None:  # a second thread that comes by makes another: harmless
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
            )
            self._info_json, self._info = info.serialize_json(), info
        compiled = _COMPILERS.compile(params, self._info_json, timeout_s=COMPILE_S)
        return xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(compiled, self._info))

    def close(self) -> None:
        """Let the threads end."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class FollowedGrammar:
    """Where one request stands in its grammar."""

    def __init__(self, compiled: Future, after_token_id: int | None, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size
        self._after = after_token_id
        """Until this token has come, everything is allowed."""
        self._own: Any = None
        self._num_tokens = 0
        self._spent_s = 0.0

    @property
    def ready(self) -> bool:
        return self._compiled.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is ready, or the time is over."""
        wait([self._compiled], timeout_s)

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed (any more), once `ready`."""
        failed = self._compiled.exception()
        if isinstance(failed, GrammarError):
            return str(failed)
        if failed is not None:
            return f"structured_outputs could not be compiled: {reason(failed)}"
        if self._is_too_slow:
            return (
                f"structured_outputs took {self._spent_s:.1f} s to follow for {self._num_tokens} tokens, too much: the "
                "grammar can be read in too many ways"
            )
        return None

    @property
    def _is_too_slow(self) -> bool:
        return self._spent_s > FOLLOW_S + FOLLOW_S_PER_TOKEN * self._num_tokens

    @property
    def _matcher(self) -> Any:
        if self._own is None:
            self._own = self._compiled.result().fork()
        return self._own

    def fill_masks(self, drafts: Sequence[int], masks_QW: Tensor) -> None:
        """Write what is allowed at the next position, and behind each of these drafts; at most Q of them.

        Where a draft is not allowed, whatever comes after it will be dropped, and everything is allowed.
        """
        begin = time.thread_time()
        self._fill(drafts, masks_QW)
        self._spent_s += time.thread_time() - begin

    def _fill(self, drafts: Sequence[int], masks_QW: Tensor) -> None:
        masks_QW.fill_(ALL)
        matcher, after, num_taken = self._matcher, self._after, 0
        for position in range(masks_QW.shape[0]):
            if after is None:
                if matcher.is_terminated():
                    break
                matcher.fill_next_token_bitmask(masks_QW, position)
            if position >= len(drafts) or not 0 <= drafts[position] < self._vocab_size:
                break
            draft = drafts[position]
            if after is not None:
                after = None if draft == after else after
                continue
            # asked first: the matcher itself would complain about a token that it cannot take
            if not int(masks_QW[position, draft // 32]) >> (draft % 32) & 1 or not matcher.accept_token(draft):
                break
            num_taken += 1
        if num_taken:
            matcher.rollback(num_taken)

    def accept(self, token: int) -> bool:
        """Go one produced token further. False if the grammar does not allow it, or is too slow to follow."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return True
        begin = time.thread_time()
        is_allowed = self._matcher.accept_token(token)
        self._spent_s += time.thread_time() - begin
        self._num_tokens += 1
        return is_allowed and not self._is_too_slow


def _may_do_better(compiled: Future) -> bool:
    """It was not refused: what went wrong, such as a machine that was busy, may be over."""
    failed = compiled.exception() if compiled.done() else None
    return failed is not None and (isinstance(failed, ProcessLostError) or not isinstance(failed, GrammarError))


def import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs xgrammar, which is not installed: pip install 'draftloop[grammar]'"
        ) from error
    return xgrammar


def _text(params: StructuredOutputsParams) -> str:
    try:
        text = grammar_text(params)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{params.kind} cannot be used: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs.{params.kind} has {len(text)} characters; at most {MAX_CHARACTERS} are taken"
        )
    return text
