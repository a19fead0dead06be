"""Text from tokens, as they come: never half a character, cut exactly at a stop text."""

from __future__ import annotations

from typing import Any

from draftloop.request import SamplingParams


class Detokenizer:
    """The text of one request. Without a tokenizer, or where none is wanted, it stays empty."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.text = ""
        self._stop, self._include_stop = params.stop, params.include_stop_str_in_output
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None) if params.detokenize else None
        self._skip_special = params.skip_special_tokens
        self._stream: Any = self._new_stream() if self._backend is not None else None
        self._pending: list[int] = []

    def add(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token. Returns the stop text that it completed, if any; the text then ends before it, or with it."""
        if self._stream is None:
            return None
        piece = self._step(token)
        if piece is None:  # the token ends inside a character
            self._pending.append(token)
            return None
        self._pending.clear()
        # a stop text may begin in what is there already, but must end in the new piece
        known = len(self.text)
        self.text += piece
        if not may_stop:
            return None
        found = [(at, s) for s in self._stop if (at := self.text.find(s, max(known - len(s) + 1, 0))) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop

    def flush(self) -> None:
        """The request has ended: show what is left of an unfinished character."""
        if self._pending:
            self.text += self._decode(self._pending)
            self._pending.clear()

    def _step(self, token: int) -> str | None:
        """What a token adds to the text; None while it ends inside a character."""
        try:
            return self._stream.step(self._backend, token)
        except Exception as error:
            if "Invalid prefix" not in str(error):  # no type of its own says so
                raise
            # a run of single bytes was shown so far as it was text, and as a whole is none: it would all read otherwise
            self._stream = self._new_stream([token])
            return self._decode([*self._pending, token])

    def _new_stream(self, before: list[int] | None = None) -> Any:
        """Decodes what comes behind these tokens."""
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=before, skip_special_tokens=self._skip_special)

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=self._skip_special)
