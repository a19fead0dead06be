"""Which weights a model folder holds, in a few characters: so that a drafter knows the target it was trained for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from draftloop.models.resolve import weight_files

SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def fingerprint(folder: Path) -> str:
    """16 hex digits of config.json's and the weights' contents; large files are sampled at even distances.

    Training moves nearly every weight, so another revision differs in any sample. Raises ConfigError where
    there are no weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder, pickled=True):  # nothing is unpickled
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for index in range(SAMPLES):
                file.seek(size * index // SAMPLES)
                digest.update(file.read(min(SAMPLE_BYTES, -(-size // SAMPLES))))
    return digest.hexdigest()[:16]
