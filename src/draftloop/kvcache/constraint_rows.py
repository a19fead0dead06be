"""What changes a row's logits before a token is chosen, on the device: penalties, biases, masks, bad words.

Shape suffixes: M rows of the engine, plus one; B biased ids; S bad words; N tokens of a bad word; Q verified
positions; W 32-bit words of a mask over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.request import SamplingParams

MAX_BIASED_IDS = 1024
"""Token ids of one request's logit_bias."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
NO_ID = -1
"""Fills up lists of ids; it is no token."""
ALL = -1
"""A word of a mask that allows its 32 tokens."""

Stage = Callable[[Tensor], Tensor]
"""Puts a host tensor where it can be copied from without waiting."""


@dataclass(frozen=True, kw_only=True)
class ConstraintRows:
    """A part of the row state that only batches with a constrained request read. Rows without are neutral."""

    is_active_M: Tensor
    """int32: 1 for rows whose logits are changed, 0 for those that are neutral in everything below."""
    presence_M: Tensor
    frequency_M: Tensor
    repetition_M: Tensor
    """float32: 0, 0 and 1 change nothing."""
    num_prompt_M: Tensor
    """int32: tokens from here on are output."""
    min_length_M: Tensor
    """int32: a row that is shorter is held to `early_MW`."""
    bias_ids_MB: Tensor
    """int32, NO_ID where there is none."""
    bias_MB: Tensor
    """float32."""
    bad_words_MSN: Tensor
    """int32: ids of each bad word, the last one last; NO_ID before its first."""
    allowed_MW: Tensor
    """int32 masks, lowest id in the lowest bit: tokens that the row may ever produce."""
    early_MW: Tensor
    """The same, without those that end the request."""
    grammar_MQW: Tensor
    """The same, by what the grammar allows at each position to be verified next; written by the host."""

    @classmethod
    def create(cls, *, num_rows: int, num_positions: int, vocab_size: int, device: torch.device) -> ConstraintRows:
        """`num_rows` counts the padding row."""
        words = num_words(vocab_size)

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            is_active_M=full(num_rows),
            presence_M=full(num_rows, dtype=torch.float32),
            frequency_M=full(num_rows, dtype=torch.float32),
            repetition_M=full(num_rows, value=1, dtype=torch.float32),
            num_prompt_M=full(num_rows),
            min_length_M=full(num_rows),
            bias_ids_MB=full(num_rows, MAX_BIASED_IDS, value=NO_ID),
            bias_MB=full(num_rows, MAX_BIASED_IDS, dtype=torch.float32),
            bad_words_MSN=full(num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, value=NO_ID),
            allowed_MW=full(num_rows, words, value=ALL),
            early_MW=full(num_rows, words, value=ALL),
            grammar_MQW=full(num_rows, num_positions, words, value=ALL),
        )

    def write(
        self,
        row: int,
        params: SamplingParams,
        *,
        num_prompt: int,
        bad_words: Sequence[Sequence[int]],
        ending_ids: Iterable[int],
        stage: Stage,
    ) -> None:
        """Give a row what its request asks for; `ending_ids` are the tokens that end it."""
        for column, value in (
            (self.is_active_M, 1),
            (self.presence_M, params.presence_penalty),
            (self.frequency_M, params.frequency_penalty),
            (self.repetition_M, params.repetition_penalty),
            (self.num_prompt_M, num_prompt),
            (self.min_length_M, num_prompt + params.min_tokens),
        ):
            column[row].fill_(value)
        bias = params.logit_bias or {}
        self.bias_ids_MB[row].fill_(NO_ID)
        if bias:
            ids, values = torch.tensor(list(bias), dtype=torch.int32), torch.tensor(list(bias.values())).float()
            self.bias_ids_MB[row, : len(bias)].copy_(stage(ids), non_blocking=True)
            self.bias_MB[row, : len(bias)].copy_(stage(values), non_blocking=True)
        self.bad_words_MSN[row].fill_(NO_ID)
        if bad_words:
            words = torch.full((len(bad_words), MAX_BAD_WORD_TOKENS), NO_ID, dtype=torch.int32)
            for word, ids in zip(words, bad_words, strict=True):
                word[-len(ids) :] = torch.tensor(ids, dtype=torch.int32)
            self.bad_words_MSN[row, : len(bad_words)].copy_(stage(words), non_blocking=True)
        allowed = self._mask(params.allowed_token_ids)
        self.allowed_MW[row].copy_(stage(pack(allowed)), non_blocking=True)
        if params.min_tokens:
            allowed[[i for i in ending_ids if i < allowed.shape[0]]] = False
            self.early_MW[row].copy_(stage(pack(allowed)), non_blocking=True)
        self.grammar_MQW[row].fill_(ALL)

    def clear(self, row: int) -> None:
        """Make a row neutral."""
        for column, value in (
            (self.is_active_M, 0),
            (self.presence_M, 0),
            (self.frequency_M, 0),
            (self.repetition_M, 1),
            (self.min_length_M, 0),
            (self.bias_ids_MB, NO_ID),
            (self.bad_words_MSN, NO_ID),
            (self.allowed_MW, ALL),
            (self.grammar_MQW, ALL),
        ):
            column[row].fill_(value)

    def _mask(self, allowed_ids: Sequence[int] | None) -> Tensor:
        """bool [W * 32]"""
        mask = torch.full((self.allowed_MW.shape[1] * 32,), allowed_ids is None)
        if allowed_ids is not None:
            mask[list(allowed_ids)] = True
        return mask


def num_words(vocab_size: int) -> int:
    """Words of a mask over this many tokens."""
    return -(-vocab_size // 32)


def pack(mask: Tensor) -> Tensor:
    """int32 [.., W] from bool [.., W * 32], the lowest index in the lowest bit."""
    bits = mask.unflatten(-1, (-1, 32)).long() << torch.arange(32, device=mask.device)
    return bits.sum(-1).to(torch.int32)


def forbidden(words: Tensor, size: int) -> Tensor:
    """bool [.., size] from int32 [.., W]: True where the bit is not set."""
    bits = torch.ones(32, dtype=torch.int32, device=words.device) << torch.arange(32, device=words.device)
    return ((words[..., None] & bits.to(torch.int32)) == 0).flatten(-2)[..., :size]
