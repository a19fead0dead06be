"""Drafters' checkpoints on disk: which files, and what is in them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from draftloop.errors import ConfigError
from draftloop.models.quantisation import read_quantisation
from draftloop.models.resolve import check_folder, read_json, resolve_model, weight_files
from draftloop.models.tensors import Read, Shape, open_tensors

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""The older heads come in this form only. It is read as tensors and nothing else, so it cannot run code."""


def only_pickle(folder: Path) -> Path | None:
    """The pickled weights, where there are no others."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((folder / name for name in PICKLES if (folder / name).is_file()), None)


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all tensors. Raises ConfigError for files that are missing or damaged."""
    with open_weights(folder) as (shapes, _):
        return dict(shapes)


@contextmanager
def open_weights(folder: Path) -> Generator[tuple[Mapping[str, Shape], Read]]:
    """The tensors' shapes, and a function that reads one by its name in the files. Raises ConfigError."""
    if pickle := only_pickle(folder):
        try:
            weights = torch.load(pickle, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # unpickling raises whatever it likes
            raise ConfigError(f"cannot read {pickle} as plain tensors: {error}") from error
        yield {name: tuple(weight.shape) for name, weight in weights.items()}, weights.__getitem__
        return
    settings = read_json(folder / "config.json").get("quantization_config")
    with open_tensors(weight_files(folder), read_quantisation(settings)) as tensors:
        yield tensors.shapes, tensors.read


def find_checkpoint(name: str, revision: str | None = None) -> Path:
    """The folder of a drafter with its weights, from a folder or hub id. Raises ConfigError."""
    # the first look leaves weights aside, which are refused elsewhere where they are pickled
    folder = resolve_model(name, revision=revision, load_format="dummy").folder
    if folder is not None and only_pickle(folder) is None:
        folder = resolve_model(name, revision=revision).folder
    if folder is None:
        raise ConfigError(f"{name!r} is the shape of a whole model; name the folder or hub id of a drafter")
    check_folder(folder, weights=False)
    return folder
