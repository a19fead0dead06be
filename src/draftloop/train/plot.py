"""A picture of a training: loss, and acceptance on held-out text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftloop.train.files import write_file

logger = logging.getLogger(__name__)


def plot(path: Path, log: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Write a PNG. Without matplotlib (extra `train`) there is none, and the log says so."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("no picture is drawn: that needs matplotlib; pip install 'draftloop[train]'")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trained = [row for row in log if "loss" in row]
    measured = [row for row in log if "held_out" in row]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot([row["step"] for row in trained], [row["loss"] for row in trained], label="training", linewidth=0.8)
    held_out = [row["held_out"] for row in measured]
    steps = [row["step"] for row in measured]
    left.plot(steps, [row["loss"] for row in held_out], "o-", label="held out", markersize=3)
    left.set(xlabel="step", ylabel="loss", title=title)
    left.legend()
    num_drafts = len(held_out[0]["acceptance"]) if held_out else 0
    for draft in range(num_drafts):
        right.plot(steps, [row["acceptance"][draft] for row in held_out], label=f"draft {draft + 1}", linewidth=1)
    right.set(xlabel="step", ylabel="accepted together with all before", ylim=(0, 1), title="held out")
    lengths = right.twinx()
    lengths.plot(steps, [row["acceptance_length"] for row in held_out], "k--", label="mean length")
    lengths.set(ylabel="mean tokens of a step (dashed)", ylim=(1, num_drafts + 1))
    if num_drafts:
        right.legend(fontsize="small")
    write_file(path, lambda part: figure.savefig(part, dpi=110, format="png"), kept="the log is complete")
    plt.close(figure)
