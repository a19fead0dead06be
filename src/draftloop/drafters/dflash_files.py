"""What block drafters keep beside config.json and the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftloop.errors import ConfigError

MASK_EMBEDDING = "mask_embedding.pt"
"""What a mask is embedded as, where it is not a row of the embedding: {mask_token_id, embedding}."""


def read_mask_embedding(folder: Path) -> Tensor | None:
    """[width], if the checkpoint has one. Raises ConfigError for a damaged file."""
    path = folder / MASK_EMBEDDING
    if not path.is_file():
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return (stored["embedding"] if isinstance(stored, dict) else stored).flatten()
    except Exception as error:  # unpickling raises whatever it likes
        raise ConfigError(f"cannot read {path} as a plain tensor: {error}") from error
