"""Drafters' checkpoints on disk: which files, and what is in them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from draftloop.errors import ConfigError
from draftloop.models.config_file import read_config
from draftloop.models.quantisation import read_quantisation
from draftloop.models.resolve import LoadFormat, check_folder, resolve_model, weight_files
from draftloop.models.tensors import Shape, Tensors, open_tensors

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""The older heads come in this form only. It is read when asked for, as tensors and nothing else."""


def only_pickle(folder: Path) -> Path | None:
    """The pickled weights, where there are no others."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((folder / name for name in PICKLES if (folder / name).is_file()), None)


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all tensors. Raises ConfigError for files that are missing or damaged."""
    with open_weights(folder) as tensors:
        return dict(tensors.shapes)


@contextmanager
def open_weights(folder: Path) -> Generator[Tensors]:
    """The tensors by their names in the files. Raises ConfigError."""
    pickle = only_pickle(folder)
    settings = read_config(folder, "quantization_config").get("quantization_config")
    with open_tensors([pickle] if pickle else weight_files(folder), read_quantisation(settings)) as tensors:
        yield tensors


def find_checkpoint(name: str, revision: str | None = None, *, load_format: LoadFormat = "auto") -> Path:
    """The folder of a drafter with its weights, from a folder or hub id. Raises ConfigError."""
    # the first look leaves weights aside: pickles of drafters have names that models' do not have
    folder = resolve_model(name, revision=revision, load_format="dummy").folder
    pickle = None if folder is None else only_pickle(folder)
    if pickle is None and folder is not None:
        folder = resolve_model(name, revision=revision, load_format=load_format).folder
    elif pickle is not None and load_format != "pt":
        raise ConfigError(
            f"{folder} has only pickled weights ({pickle.name}); convert them to safetensors, or use load_format 'pt' "
            "(in the speculative configuration, or for all models), which reads tensors from them and runs nothing else"
        )
    if folder is None:
        raise ConfigError(f"{name!r} is the shape of a whole model; name the folder or hub id of a drafter")
    check_folder(folder, weights=False)
    return folder
