"""What the shapes of all drafters have in common that read several of the target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class AuxConfig(ABC):
    """Decoder layers beside the target's states, and an output head."""

    layout: str
    """Whose export it is, for messages."""
    model: ModelConfig
    """Layers, heads, windows and rotation; `vocab_size` is that of the token ids that it is fed."""
    target_hidden_size: int
    draft_vocab_size: int
    """Rows of the output head."""
    num_aux: int = 1
    """Hidden states of the target that it reads per token."""
    layer_ids: tuple[int, ...] | None = None
    """Target layers as the checkpoint names them; None: `usual_layers`."""
    ids_are_outputs: bool = False
    """`layer_ids` name layers whose outputs are read, not their inputs."""
    own_embeddings: bool = False
    """False: the target's."""
    own_head: bool = False
    """False: the target's, or the rows of it that `d2t` leads to."""
    has_map: bool = False
    """A tensor `d2t` says how far each draft id is from the target's."""

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.model.vocab_size

    @property
    def aux_width(self) -> int:
        """X: numbers per token that the target hands over."""
        return self.num_aux * self.target_hidden_size

    @abstractmethod
    def usual_layers(self, num_target_layers: int) -> tuple[tuple[int, ...], bool]:
        """What stands for `layer_ids` and `ids_are_outputs` where a checkpoint names none."""

    def aux_layers(self, num_target_layers: int, offset: int | None = None) -> tuple[int, ...]:
        """Which target layers' inputs it was trained on. Raises ConfigError for layers that are not there.

        Engines disagree on what ids in a checkpoint mean, so `offset` replaces the rule: it is added to the ids as
        they stand.
        """
        ids, are_outputs = self.layer_ids, self.ids_are_outputs
        if ids is None:
            ids, are_outputs = self.usual_layers(num_target_layers)
        found = tuple(index + (int(are_outputs) if offset is None else offset) for index in ids)
        if bad := [index for index in found if not 0 <= index <= num_target_layers]:
            raise ConfigError(
                f"the drafter reads what enters target layer {bad[0]}, but the target has {num_target_layers} layers; "
                "it is probably made for another target"
                + ("" if offset is None else f", or aux_layer_offset {offset} is wrong")
            )
        return found

    def check_map(self, name: str) -> None:
        """Raises ConfigError where nothing says which ids the draft vocabulary has."""
        if self.reduced_vocabulary and not self.has_map:
            raise ConfigError(
                f"{name!r} has a draft vocabulary of {self.draft_vocab_size} of {self.model.vocab_size} ids, but no "
                "tensor d2t that says which; the export is incomplete"
            )
