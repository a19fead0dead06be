"""The model's tokenizer in the API process, made of what the engine's process has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from draftloop.errors import RequestError
from draftloop.server.chat_template import ChatTemplate
from draftloop.server.messages import Ready


class ServerTokenizer:
    """Text to ids and back, conversations to text. Raises RequestError where the model has no tokenizer."""

    def __init__(self, ready: Ready, *, chat_template: str | None = None) -> None:
        """`chat_template` replaces the model's."""
        self._backend = Tokenizer.from_str(ready.tokenizer) if ready.tokenizer is not None else None
        self._special_tokens = ready.special_tokens
        template = chat_template if chat_template is not None else ready.chat_template
        self._template = ChatTemplate(template, ready.special_tokens) if template is not None else None
        self._max_model_len = ready.max_model_len
        self._longest_token = 1
        if self._backend is not None:
            self._longest_token = max(map(len, self._backend.get_vocab()), default=1)

    @property
    def backend(self) -> Tokenizer:
        if self._backend is None:
            raise RequestError("the prompt must be token ids: this model has no tokenizer; name one with --tokenizer")
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A text that cannot fit, however it is cut, is refused before any work is done on it."""
        most = self._longest_token * self._max_model_len
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters; more than {most} never fit into max_model_len "
                f"{self._max_model_len}"
            )
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:  # only with unpaired surrogates, which JSON can hold
            raise RequestError("the prompt is no valid Unicode text: it holds half a character") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens. Raises RequestError for ids that the tokenizer does not know."""
        bad = next((i for i in ids if not 0 <= i < 2**32), None)
        if bad is not None:
            raise RequestError(f"tokens holds {bad}; token ids are >= 0")
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """The text of one token, alone."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any) -> str:
        """A conversation as text, by `chat_template` or the model's."""
        template = self._template if chat_template is None else ChatTemplate(chat_template, self._special_tokens)
        if template is None:
            raise RequestError("messages cannot be used: this model has no chat template; give --chat-template")
        return template.render(messages, **options)
