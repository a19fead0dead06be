"""Which target a drafter was trained for, as its config.json says."""

from __future__ import annotations

import logging
from pathlib import Path

from draftloop.models.config_file import read_config
from draftloop.models.fingerprint import fingerprint

logger = logging.getLogger(__name__)

TARGET_KEY = "draftloop_target"
"""In config.json of a drafter: {name, fingerprint}."""


def warn_of_other_target(folder: Path | None, target: Path | None, *, name: str, target_name: str) -> None:
    """Say so where a drafter names the target that it was trained for, and it is not this one.

    Training writes the fingerprint of the target's weights to the drafter's config.json. Drafts are verified,
    so another revision costs acceptance and nothing else.
    """
    if folder is None or target is None:
        return
    made_for = read_config(folder, TARGET_KEY).get(TARGET_KEY)
    if not made_for or not made_for.get("fingerprint"):
        return
    if (found := fingerprint(target)) != made_for["fingerprint"]:
        logger.warning(
            "%s was trained for %s with weights %s, but %s has weights %s: it may draft badly",
            name,
            made_for.get("name"),
            made_for["fingerprint"],
            target_name,
            found,
        )
