"""From the files of a drafter to its weights, or random ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from draftloop.drafters.files import open_weights
from draftloop.errors import ConfigError
from draftloop.models.fill import warn_of_rounding
from draftloop.models.loader import DUMMY_STD
from draftloop.models.shards import Plain, Shard, fill_random
from draftloop.models.weights import keep_narrow

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Head(Protocol):
    """A module whose weights come from files."""

    target_ids_W: Tensor | None
    """int64: the target's id of each draft id, where the head has a vocabulary of its own."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """As a module has them."""
        ...

    def destinations(self) -> Mapping[str, Plain]:
        """Plain tensor name -> the weight, or part of one, that it fills."""
        ...


def fill(head: Head, folder: Path, names: Mapping[str, str], *, vocab_size: int, name: str) -> None:
    """Read the weights into a head whose shape has been checked; `names`: plain name -> name in the files.

    Raises ConfigError for quantised weights, and where `d2t` leads outside of the target's `vocab_size`
    ids, or twice to one of them.
    """
    with open_weights(folder) as tensors:
        destinations = head.destinations()
        narrow = {plain for plain in destinations if names[plain] in tensors.narrow}
        if keep_narrow(head.parameters(), destinations, narrow):
            destinations = head.destinations()
        warn_of_rounding({plain: (tensors.types[names[plain]], to.dtype) for plain, to in destinations.items()}, folder)
        for plain, destination in destinations.items():
            weight = tensors.read(names[plain])
            if weight.dtype not in FLOATS:
                raise ConfigError(f"{plain} of {name!r} is of type {weight.dtype}; a head must have plain weights")
            destination.copy_(weight)
        if head.target_ids_W is not None:
            head.target_ids_W.copy_(target_ids(tensors.read(names["d2t"]), vocab_size=vocab_size, name=name))


def target_ids(offsets_W: Tensor, *, vocab_size: int, name: str, tensor: str = "d2t") -> Tensor:
    """int64 [W]: the target's id of each draft id, of which `d2t` keeps the distance. Raises ConfigError."""
    ids_W = torch.arange(offsets_W.shape[0]) + offsets_W.long()
    if outside := ids_W[(ids_W < 0) | (ids_W >= vocab_size)].tolist():
        index = ids_W.tolist().index(outside[0])
        raise ConfigError(
            f"{tensor} of {name!r} leads outside of the vocabulary: draft id {index} to {outside[0]}, but the target's "
            f"ids are 0 to {vocab_size - 1} ({len(outside)} such); the head is probably made for another target"
        )
    if (num := ids_W.unique().numel()) != ids_W.numel():
        raise ConfigError(
            f"{tensor} of {name!r} leads to {num} ids for {ids_W.numel()} draft ids; the export is damaged"
        )
    return ids_W


def fill_dummy(head: Head, *, vocab_size: int, seed: int) -> None:
    """Random weights, made on the head's device, and draft ids spread over the vocabulary."""
    destinations = head.destinations()
    generator = torch.Generator(device=next(iter(destinations.values())).device).manual_seed(seed)
    for name, weight in destinations.items():
        memory, slices = (weight.memory, weight.slices) if isinstance(weight, Shard) else (weight, None)
        if memory.dim() == 1 and not name.endswith("bias"):
            memory.fill_(1)
        else:
            fill_random(memory, slices, DUMMY_STD, generator)
    if head.target_ids_W is not None:
        size = head.target_ids_W.shape[0]
        ids_W = torch.arange(size) * vocab_size // size
        head.target_ids_W.copy_(target_ids(ids_W - torch.arange(size), vocab_size=vocab_size, name="dummy"))
