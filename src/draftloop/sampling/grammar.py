"""Output that obeys a grammar: which tokens it allows at each position of a block, by xgrammar.

The host knows the grammar, so a row that follows one makes its step wait for the host: drafts are read back,
masks are written, and acceptance comes after. Grammars are checked when a request comes in and compiled on
threads of their own; the request waits for its own one, and nobody else does.

Shape suffixes: Q positions of a block, W 32-bit words of a mask.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from draftloop.errors import RequestError
from draftloop.kvcache.constraint_rows import ALL
from draftloop.request import StructuredOutputsParams

KEPT_GRAMMARS = 128
"""Compiled grammars that are kept for requests to come."""
THREADS = 2


class GrammarCompiler:
    """Makes grammars for one tokenizer, and keeps those used last."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = sorted(i for i in eos_ids if i < vocab_size)
        self._kept: OrderedDict[tuple, Future] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._compiler: Any = None

    def follow(self, params: StructuredOutputsParams) -> FollowedGrammar:
        """Start compiling, unless it is known already. Returns at once.

        Raises RequestError with the reason for a grammar that says nothing, without a tokenizer, where the model
        has no token that ends an answer, or without xgrammar (the extra `grammar`).
        """
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and this model came without one")
        if not self._eos_ids:
            raise RequestError(
                "structured_outputs needs a model with an end-of-sequence token, to end what is complete"
            )
        if params.after_token_id is not None and params.after_token_id >= self._vocab_size:
            last = self._vocab_size - 1
            raise RequestError(
                f"structured_outputs.after_token_id is {params.after_token_id}; this model's ids are 0 to {last}"
            )
        key = (params.kind, _text(getattr(params, params.kind)), params.disable_any_whitespace)
        if key not in self._kept:
            grammar = parse(params)
            self._start()
            assert self._pool is not None
            self._kept[key] = self._pool.submit(self._compile, grammar)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return FollowedGrammar(self._kept[key], params.after_token_id, self._vocab_size)

    def _start(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def _compile(self, grammar: Any) -> Any:
        xgrammar = import_xgrammar()
        if self._compiler is None:  # a second thread that comes by makes another: harmless
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
        return xgrammar.GrammarMatcher(self._compiler.compile_grammar(grammar))

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

    @property
    def ready(self) -> bool:
        return self._compiled.done()

    def wait(self, timeout_s: float) -> None:
        """Block until it is ready, or the time is over."""
        wait([self._compiled], timeout_s)

    @property
    def error(self) -> str | None:
        """Why there is no grammar, once `ready`."""
        failed = self._compiled.exception()
        return None if failed is None else f"structured_outputs could not be compiled: {_reason(failed)}"

    @property
    def _matcher(self) -> Any:
        if self._own is None:
            self._own = self._compiled.result().fork()
        return self._own

    def fill_masks(self, drafts: Sequence[int], masks_QW: Tensor) -> None:
        """Write what is allowed at the next position, and behind each of these drafts; at most Q of them.

        Where a draft is not allowed, whatever comes after it will be dropped, and everything is allowed.
        """
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
        """Go one produced token further. False if the grammar does not allow it."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return True
        return self._matcher.accept_token(token)


def parse(params: StructuredOutputsParams) -> Any:
    """An `xgrammar.Grammar`. Raises RequestError naming the parameter and what is wrong with it."""
    xgrammar = import_xgrammar()
    value, kind = getattr(params, params.kind), params.kind
    whitespace = not params.disable_any_whitespace
    make: dict[str, Callable[[], Any]] = {
        "json": lambda: xgrammar.Grammar.from_json_schema(_json(value), any_whitespace=whitespace),
        "json_object": lambda: xgrammar.Grammar.from_json_schema('{"type": "object"}', any_whitespace=whitespace),
        "regex": lambda: xgrammar.Grammar.from_regex(value),
        "grammar": lambda: xgrammar.Grammar.from_ebnf(value),
        "choice": lambda: xgrammar.Grammar.from_ebnf("root ::= " + " | ".join(map(json.dumps, value))),
        "structural_tag": lambda: xgrammar.Grammar.from_structural_tag(_json(value)),
    }
    try:
        return make[kind]()
    except Exception as error:
        raise RequestError(f"structured_outputs.{kind} cannot be used: {_reason(error)}") from error


def import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs xgrammar, which is not installed: pip install 'draftloop[grammar]'"
        ) from error
    return xgrammar


def _json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    json.loads(text)  # says where it is wrong
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=False)


def _reason(error: BaseException) -> str:
    """The message without the place in somebody else's source."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
