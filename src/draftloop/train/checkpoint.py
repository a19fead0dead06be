"""Where a training stands: weights, optimiser, step and clock, in files that are complete or not there."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from draftloop.errors import ConfigError
from draftloop.train.files import write_file

KEPT = 2
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""One file for any number of processes, so that training can go on with more or fewer of them."""


@dataclass(kw_only=True)
class Standing:
    """How far a training has come."""

    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)
    """What was measured up to here, see `loop.Trainer`."""


def newest(folder: Path) -> Path | None:
    """The last checkpoint of a folder, None where there is none."""
    found = sorted(folder.glob("step-*.pt"))
    return found[-1] if found else None


def save(
    folder: Path,
    standing: Standing,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    identity: dict[str, Any],
    writes: bool,
) -> None:
    """Write a checkpoint and drop all but the last two. All processes call it, and one writes.

    Raises CapacityError where it cannot be written; those before stay.
    """
    weights, moments = get_state_dict(module, optimizer, options=WHOLE)
    if not writes:
        return
    content = {"identity": identity, "standing": asdict(standing), "weights": weights, "optimizer": moments}
    write_file(
        folder / f"step-{standing.step:07d}.pt",
        lambda path: torch.save(content, path),
        kept="the checkpoint before is complete",
    )
    for path in sorted(folder.glob("step-*.pt"))[:-KEPT]:
        path.unlink()


def load(
    path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, identity: dict[str, Any]
) -> Standing:
    """Fill module and optimiser. Raises ConfigError for a damaged file, or one of another training."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; delete it, the checkpoint before will do") from error
    for key, value in identity.items():
        if (found := content["identity"].get(key)) != value:
            raise ConfigError(
                f"{path} is of a training with {key} {found!r}, not {value!r}; name another --out, or start over with "
                "--no-resume"
            )
    set_state_dict(
        module,
        optimizer,
        model_state_dict=content["weights"],
        optim_state_dict=content["optimizer"],
        options=WHOLE,
    )
    return Standing(**content["standing"])


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's whole state on the CPU. All processes call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return dict(get_model_state_dict(module, options=WHOLE))  # pyrefly: ignore[bad-return]
