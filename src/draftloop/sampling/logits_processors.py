"""Custom rules for logits: what a plug-in implements, and how it is loaded.

A processor is part of the captured accept phase. It sees the logits of all positions of a verified block at
once, each with the tokens before it, drafts included, so that speculation changes nothing of what it does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from draftloop.errors import ConfigError, RequestError, nearest
from draftloop.kvcache.rows import RowState
from draftloop.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class BlockPositions:
    """Where the logits of a block stand. R rows, Q positions of each, M rows of the engine."""

    rows_R: Tensor
    """int64: engine rows; the last row of the engine, which pads, may come many times."""
    tokens_RL: Tensor
    """int32: each row's prompt and output; valid up to `lengths_R`."""
    lengths_R: Tensor
    """int64: tokens before the block's first position."""
    num_prompt_R: Tensor
    """int64"""
    drafts_RK: Tensor
    """int64: tokens that positions after the first stand behind; negative where nothing was drafted."""

    @classmethod
    def gather(cls, state: RowState, rows_R: Tensor, num_drafts: int, lengths_R: Tensor | None) -> BlockPositions:
        """`lengths_R` None: the rows' lengths now."""
        assert state.constraints is not None
        rows_R = rows_R.long()
        lengths_R = state.num_tokens_M.index_select(0, rows_R) if lengths_R is None else lengths_R
        return cls(
            rows_R=rows_R,
            tokens_RL=state.tokens_ML.index_select(0, rows_R),
            lengths_R=lengths_R.long(),
            num_prompt_R=state.constraints.num_prompt_M.index_select(0, rows_R).long(),
            drafts_RK=state.drafts_MK.index_select(0, rows_R)[:, :num_drafts].long(),
        )

    @property
    def num_outputs(self) -> Tensor:
        """int64 [R, Q]: tokens of the output before each position, drafts included."""
        index_Q = torch.arange(self.drafts_RK.shape[1] + 1, device=self.rows_R.device)
        return (self.lengths_R - self.num_prompt_R)[:, None] + index_Q

    def last_outputs(self, count: int) -> Tensor:
        """int64 [R, Q, count]: the tokens of the output right before each position; -2 where the prompt is."""
        num_positions, device = self.drafts_RK.shape[1] + 1, self.rows_R.device
        ahead_QC = torch.arange(num_positions, device=device)[:, None] + torch.arange(-count, 0, device=device)
        where_RQC = self.lengths_R[:, None, None] + ahead_QC
        index = where_RQC.clamp(0, self.tokens_RL.shape[1] - 1).flatten(1)
        tokens_RQC = self.tokens_RL.gather(1, index).view(where_RQC.shape).long()
        if num_positions > 1:
            index_QC = ahead_QC.clamp(0, num_positions - 2)
            tokens_RQC = torch.where(ahead_QC >= 0, self.drafts_RK[:, index_QC], tokens_RQC)
        return torch.where(where_RQC >= self.num_prompt_R[:, None, None], tokens_RQC, -2)


class LogitsProcessor(ABC):
    """One custom rule. Named by `EngineConfig.logits_processors`; made once, before graphs are captured."""

    arguments: ClassVar[frozenset[str]] = frozenset()
    """Keys of `SamplingParams.extra_args` that it reads."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate what is kept for each of `num_rows` engine rows. Nothing may be allocated later."""

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError for arguments that cannot work. Called before the request is queued."""

    @abstractmethod
    def admit(self, row: int, params: SamplingParams) -> None:
        """A row begins a request: write its arguments to the device, or what changes nothing if it has none."""

    @abstractmethod
    def apply(self, logits_RQV: Tensor, positions: BlockPositions) -> Tensor:
        """The new logits, float32 [R, Q, V].

        Captured: no branch on a value of a tensor, no host read, no memory that is not made in here or in
        `__init__`. Each row's result depends on that row alone.
        """


def load_logits_processors(
    names: Sequence[str], *, num_rows: int, vocab_size: int, device: torch.device
) -> tuple[LogitsProcessor, ...]:
    """Make the processors that are named as "package.module:Class". Raises ConfigError saying what is wrong."""
    made = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"logits_processors names {name!r}, which cannot be loaded ({error}); give 'package.module:Class'"
            ) from error
        if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
            raise ConfigError(
                f"logits_processors names {name!r}, which is no subclass of draftloop.sampling.logits_processors."
                f"LogitsProcessor"
            )
        made.append(found(num_rows=num_rows, vocab_size=vocab_size, device=device))
    return tuple(made)


def check_extra_args(params: SamplingParams, processors: Sequence[LogitsProcessor]) -> None:
    """Raises RequestError for an argument that no processor takes, or that one refuses."""
    known = sorted(set().union(*(processor.arguments for processor in processors)))
    for key in params.extra_args or {}:
        if key not in known:
            takes = f"they take: {', '.join(known)}" if known else "there is none that takes arguments"
            raise RequestError(
                f"extra_args has {key!r}, which no logits processor takes{nearest(key, known)} ({takes})"
            )
    for processor in processors:
        processor.check(params)
