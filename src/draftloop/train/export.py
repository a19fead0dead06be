"""A trained drafter as a folder: config.json, model.safetensors and a model card, there at once or not at all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from draftloop.bench.stamp import stamp
from draftloop.drafters.made_for import TARGET_KEY
from draftloop.models.tensors import store_in_8_bits
from draftloop.train.files import write_folder
from draftloop.train.method import Method


def export(
    folder: Path,
    method: Method[Any],
    weights: Mapping[str, Tensor],
    *,
    revision: str,
    data: Mapping[str, Any],
    log: Sequence[Mapping[str, Any]],
    store_bits: int | None = None,
) -> None:
    """Write a drafter that the engine loads. Raises CapacityError where it cannot be written; nothing is left then.

    `weights`: the module's state; `revision`: fingerprint of the target; `data`: what it was trained on, for
    the model card; `log`: as in `loop.Trainer`; `store_bits` 8: matrices in 8 bits (see models/tensors.py).
    """
    config = {**method.config(), TARGET_KEY: {"name": method.subject.name, "fingerprint": revision}}
    tensors = {name: weight.contiguous() for name, weight in method.tensors(weights).items()}
    if store_bits == 8:
        tensors, config["quantization_config"] = store_in_8_bits(tensors)
    card = model_card(method, revision=revision, data=data, log=log)

    def write(part: Path) -> None:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner alone
        (part / "README.md").write_text(card, encoding="utf-8")
        method.files(part)

    write_folder(folder, write, kept="the checkpoints are complete")


def model_card(method: Method[Any], *, revision: str, data: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    """What it drafts for, what it was trained on, how well it does, and the command that made it."""
    subject, made = method.subject, stamp()
    measured = [row for row in log if "held_out" in row]
    steps, minutes = (log[-1]["step"], log[-1]["minutes"]) if log else (0, 0.0)
    facts = {
        "target": subject.name,
        "target fingerprint": revision or "none (random weights)",
        **data,
        "steps": steps,
        "minutes": minutes,
        "command": f"`{made['command']}`",
        "commit": f"{made['git']}{' with local changes' if made['dirty'] else ''}",
        "machine": made["gpu"] or made["cpu"],
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version),
        "date": made["date"],
    }
    lines = [
        "---",
        f"base_model: {json.dumps(subject.name)}",
        "library_name: draftloop",
        "tags: [speculative-decoding]",
        "---",
        f"# {method.name} drafter for {Path(subject.name).name}",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "## Acceptance on held-out text",
        "",
        "Share of places in the text from which the drafts up to the k-th are what the target said; mean length",
        "is the number of tokens of a step if every place began one.",
        "",
        f"| step | mean length | {' | '.join(str(k + 1) for k in range(method.num_drafts))} |",
        f"|{'---|' * (2 + method.num_drafts)}",
        *(_row(row) for row in (measured[:1] + measured[-1:] if len(measured) > 1 else measured)),
        "",
        "## Use",
        "",
        "```sh",
        f"draftloop run --model {shlex.quote(subject.name)} --spec-method {method.name} --spec-model FOLDER "
        f"--spec-tokens {min(method.num_drafts, 5)}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    rates = " | ".join(f"{rate:.3f}" for rate in row["held_out"]["acceptance"])
    return f"| {row['step']} | {row['held_out']['acceptance_length']:.3f} | {rates} |"
