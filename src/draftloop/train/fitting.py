"""What fits the target, and what fits an earlier export: checks of methods that read hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.train.method import Subject


class ReadsLayers(Protocol):
    """The shape of a drafter that is there already."""

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The layers of a target of so many whose inputs it reads."""
        ...


def check_draft_vocab_size(size: int | None, subject: Subject) -> None:
    """Raises ConfigError for a draft vocabulary that leaves nothing out; None is all of the target's."""
    vocab_size = subject.config.vocab_size
    if size is not None and size >= vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}, but {subject.name!r} has {vocab_size} ids; name fewer, or leave "
            "it out for all of them"
        )


def choose_aux_layers(asked: tuple[int, ...] | None, subject: Subject) -> tuple[int, ...]:
    """The layers that are asked for, or an early, a middle and a late one. Raises ConfigError for one that is not."""
    num_layers = subject.config.num_layers
    layers = asked or (2, num_layers // 2, num_layers - 3)
    # a target of few layers has no three of them; its first and last states are always there
    if asked is None and (num_layers < 6 or len(set(layers)) < len(layers)):
        layers = tuple(sorted({0, num_layers // 2, num_layers}))
    if bad := [layer for layer in layers if not 0 <= layer <= num_layers]:
        raise ConfigError(
            f"aux_layer_ids names layer {bad[0]}, but {subject.name!r} has {num_layers} layers; name 0 to "
            f"{num_layers} (what enters a layer; {num_layers}: what leaves the last)"
        )
    return layers


def check_alike(
    given: ReadsLayers,
    wanted: object,
    keys: Sequence[str],
    aux_layers: tuple[int, ...],
    *,
    folder: Path,
    num_layers: int,
) -> None:
    """Raises ConfigError unless the drafter in a folder has these values and reads these layers."""
    for key in keys:
        if getattr(given, key) != getattr(wanted, key):
            raise ConfigError(
                f"the drafter in {str(folder)!r} has {key} {getattr(given, key)}, but {getattr(wanted, key)} is to "
                "be trained; give the options that it was trained with"
            )
    if (layers := given.aux_layers(num_layers)) != aux_layers:
        raise ConfigError(
            f"the drafter in {str(folder)!r} reads layers {layers}, but {aux_layers} are to be trained; name "
            "its layers in --aux-layer-ids"
        )


def copy_stored(weight: Tensor, stored: Tensor, name: str, folder: Path) -> None:
    """Fill a weight of the module. Raises ConfigError for another shape."""
    if stored.shape != weight.shape:
        raise ConfigError(
            f"{name} of the drafter in {str(folder)!r} has shape {list(stored.shape)}, but "
            f"{list(weight.shape)} is to be trained; it is made for another target, or smaller"
        )
    weight.copy_(stored)
