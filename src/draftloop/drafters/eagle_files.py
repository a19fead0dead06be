"""EAGLE heads on disk: which files, what is in them, and how it gets into a head."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from draftloop.drafters.eagle_config import EagleConfig, Shape
from draftloop.drafters.eagle_model import EagleHead
from draftloop.errors import ConfigError
from draftloop.models.loader import DUMMY_STD, WEIGHT_DTYPES
from draftloop.models.resolve import weight_files

PICKLE = "pytorch_model.bin"
"""The older heads come in this form only. It is read as tensors and nothing else, so it cannot run code."""

Read = Callable[[str], Tensor]


def has_only_pickle(folder: Path) -> bool:
    return (folder / PICKLE).is_file() and not any(folder.glob("*.safetensors"))


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all tensors. Raises ConfigError for weights of a type that is not supported."""
    with open_weights(folder) as (shapes, _):
        return dict(shapes)


@contextmanager
def open_weights(folder: Path) -> Generator[tuple[Mapping[str, Shape], Read]]:
    """The tensors' shapes, and a function that reads one by its name in the files. Raises ConfigError."""
    if has_only_pickle(folder):
        try:
            weights = torch.load(folder / PICKLE, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # unpickling raises whatever it likes
            raise ConfigError(f"cannot read {folder / PICKLE} as plain tensors: {error}") from error
        yield {name: tuple(weight.shape) for name, weight in weights.items()}, weights.__getitem__
        return
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, Shape] = {}
    owners: dict[str, Path] = {}
    try:
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118  not a dict
                    part = shard.get_slice(name)
                    owners[name], shapes[name] = file, tuple(part.get_shape())
                    if part.get_dtype() not in (*WEIGHT_DTYPES, "I64", "I32", "BOOL"):
                        raise ConfigError(
                            f"{name} in {file} is of type {part.get_dtype()}; supported: {', '.join(WEIGHT_DTYPES)}"
                        )

        def read(name: str) -> Tensor:
            with safe_open(owners[name], framework="pt") as shard:
                return shard.get_tensor(name)

        yield shapes, read
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the weights in {folder}: {error}; download them again") from error


def fill(head: EagleHead, folder: Path, names: Mapping[str, str], *, vocab_size: int, name: str) -> None:
    """Read the weights into a head whose shape has been checked; `names`: plain name -> name in the files.

    Raises ConfigError where `d2t` leads outside of the target's `vocab_size` ids, or twice to one of them.
    """
    with open_weights(folder) as (_, read):
        for plain, destination in head.destinations().items():
            destination.copy_(read(names[plain]))
        if head.target_ids_W is not None:
            head.target_ids_W.copy_(target_ids(read(names["d2t"]), vocab_size=vocab_size, name=name))


def target_ids(offsets_W: Tensor, *, vocab_size: int, name: str) -> Tensor:
    """int64 [W]: the target's id of each draft id, of which `d2t` keeps the distance. Raises ConfigError."""
    ids_W = torch.arange(offsets_W.shape[0]) + offsets_W.long()
    if outside := ids_W[(ids_W < 0) | (ids_W >= vocab_size)].tolist():
        index = ids_W.tolist().index(outside[0])
        raise ConfigError(
            f"d2t of {name!r} leads outside of the vocabulary: draft id {index} to {outside[0]}, but the target's ids "
            f"are 0 to {vocab_size - 1} ({len(outside)} such); the head is probably made for another target"
        )
    if (num := ids_W.unique().numel()) != ids_W.numel():
        raise ConfigError(f"d2t of {name!r} leads to {num} ids for {ids_W.numel()} draft ids; the export is damaged")
    return ids_W


def fill_dummy(head: EagleHead, config: EagleConfig, *, vocab_size: int, seed: int) -> None:
    """Random weights, made on the head's device, and draft ids spread over the vocabulary."""
    generator = torch.Generator(device=head.fc.device).manual_seed(seed)
    for name, weight in head.destinations().items():
        if weight.dim() == 1 and not name.endswith("bias"):
            weight.fill_(1)
        else:
            weight.normal_(0, DUMMY_STD, generator=generator)
    if head.target_ids_W is not None:
        ids_W = torch.arange(config.draft_vocab_size) * vocab_size // config.draft_vocab_size
        head.target_ids_W.copy_(target_ids(ids_W - torch.arange(len(ids_W)), vocab_size=vocab_size, name="dummy"))
