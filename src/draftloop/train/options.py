"""What `draftloop train` can be told. No torch here: `--help` and refused settings must not wait for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from draftloop.config.fields import check, check_fields
from draftloop.errors import ConfigError

_PREFIX = "train option "


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """Of method eagle3."""

    ttt_steps: int = 7
    """Drafts that training goes on with the head's own states for (training-time test)."""
    ttt_decay: float = 0.8
    """What each further draft weighs less."""
    draft_vocab_size: int | None = None
    """Draft from this many most frequent ids of the recording; left out, from all."""
    train_lm_head: bool = False
    """Train an output head of the head's own, which starts as the target's."""
    store_lm_head: bool = True
    """Write the output head of a reduced vocabulary, which other engines need; without it, draftloop takes the
    target's rows."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Target layers whose inputs the head reads; left out, 2, half of the layers, and all but 3."""
    norm_before_fc: bool = True
    """Norm the target's states before they are joined; layers differ much in size."""
    norm_before_residual: bool = True
    """Start the residual stream after the norm of the hidden state, so that it does not grow from draft to draft."""
    attention: Literal["auto", "flex", "dense"] = "auto"
    """How training attends: flex_attention, or with all scores in memory; auto is flex on a GPU."""

    def __post_init__(self) -> None:
        check_fields(self, _PREFIX)
        check(1 <= self.ttt_steps <= 32, self, "ttt_steps", "in [1, 32]", _PREFIX)
        check(0 < self.ttt_decay <= 1, self, "ttt_decay", "in (0, 1]", _PREFIX)
        size, ids = self.draft_vocab_size, self.aux_layer_ids
        check(size is None or size >= 1, self, "draft_vocab_size", "an integer >= 1", _PREFIX)
        check(ids is None or len(ids) > 0, self, "aux_layer_ids", "a list of at least one layer", _PREFIX)


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """Of method draft_model."""

    hidden_size: int | None = None
    """Width of the draft model; left out, about a third of the target's."""
    intermediate_size: int | None = None
    """Width of its MLPs; left out, twice its hidden size."""
    num_layers: int = 6
    """Decoder layers."""
    num_heads: int | None = None
    """Query heads; left out, as many as fill the hidden size."""
    num_kv_heads: int = 1
    """Key and value heads."""
    head_dim: int = 64
    """Numbers per head; on a GPU 64, 80, 96, 128 or 256."""
    num_drafts: int = 4
    """Drafts of a round, for the acceptance that is shown while training."""
    teacher_temperature: float = 1.0
    """The target's logits are divided by it; below 1, the likeliest tokens count for more."""

    def __post_init__(self) -> None:
        check_fields(self, _PREFIX)
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            check(value is None or value >= 1, self, name, "an integer >= 1", _PREFIX)
        check(self.head_dim >= 2 and self.head_dim % 2 == 0, self, "head_dim", "an even number >= 2", _PREFIX)
        check(1 <= self.num_drafts <= 32, self, "num_drafts", "in [1, 32]", _PREFIX)
        check(0 < self.teacher_temperature <= 10, self, "teacher_temperature", "in (0, 10]", _PREFIX)


METHOD_OPTIONS: dict[str, type] = {"eagle3": Eagle3Options, "draft_model": DraftModelOptions}
"""Name of a training method -> the dataclass of its options. Options of one name mean the same in each."""


def method_options(name: str, given: dict[str, Any]) -> Any:
    """The options of a method from those that were given.

    Raises ConfigError for a value that does not fit, and for an option that the method does not have.
    """
    cls = METHOD_OPTIONS[name]
    known = {field.name for field in dataclasses.fields(cls)}
    for option in given:
        if option not in known:
            owners = ", ".join(sorted(m for m, c in METHOD_OPTIONS.items() if hasattr(c, option)))
            flag = option.replace("_", "-")
            raise ConfigError(
                f"training method {name!r} does not use --{flag}, which belongs to {owners}; leave it out"
            )
    return cls(**given)
