"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from draftloop.errors import CapacityError, ConfigError


def make_folder(path: Path, option: str) -> Path:
    """Make a folder that an option names. Raises ConfigError where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r} cannot be made: {error}; name another folder") from error
    return path


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """What processes that were killed left half written."""
    for part in folder.glob(f".{names}.part"):
        part.unlink(missing_ok=True)


def write_file(path: Path, write: Callable[[Path], object], *, kept: str) -> None:
    """Write under another name, then rename. Raises CapacityError saying what is `kept` if it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save wraps what the system says
        part.unlink(missing_ok=True)
        raise CapacityError(f"{path} cannot be written: {error}; {kept}. Make room and run the same again") from error


def write_folder(path: Path, write: Callable[[Path], None], *, kept: str) -> None:
    """The same for a folder; one that is there already is replaced. Raises CapacityError."""
    part, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    try:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise CapacityError(f"{path} cannot be written: {error}; {kept}. Make room and run the same again") from error
