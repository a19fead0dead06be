"""What a number needs to mean anything: the command, machine, versions and commit it came from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftloop.engine.llm import LLM

_PACKAGES = ("torch", "triton", "transformers")


def stamp(command: str | None = None) -> dict[str, Any]:
    """Where a result comes from. `gpu` is None on a machine without one.

    Where the program runs from a copy without its repository, perhaps inside of another one, `GIT_SHA`
    (and `GIT_DIRTY=1`) say which commit it is.
    """
    if sha := os.environ.get("GIT_SHA"):
        dirty = os.environ.get("GIT_DIRTY", "0") != "0"
    else:
        sha, dirty = _git("rev-parse", "HEAD"), _dirty()
    return {
        "command": command or current_command(),
        "gpu": _gpu_name(),
        "cpu": cpu_name(),
        "git": sha,
        "dirty": dirty,
        "date": datetime.date.today().isoformat(),
        "versions": {
            **{name: _version(name) for name in _PACKAGES},
            "driver": _driver_version(),
            "python": platform.python_version(),
        },
    }


def engine_facts(llm: LLM) -> dict[str, Any]:
    """What every row says of the engine that was measured."""
    config, resolved = llm.config, llm.engine.resolved
    spec = config.speculation
    path = "loop" if llm.engine.core.worker.loop else "iteration" if resolved.iteration_graph else "phases"
    others = ["fp8 cache"] if config.kv_cache_dtype != "auto" else []
    others += ["deterministic"] if config.deterministic else []
    quantisation = llm.engine.model_config.quantisation
    return {
        # another measurement than that of the plain model
        "model": f"{config.model}, {quantisation.method}" if quantisation else config.model,
        "dtype": resolved.dtype,
        "method": (spec.method or "draft_model") if spec else "none",
        "drafter": spec.model if spec else None,
        "k": spec.num_speculative_tokens if spec else 0,
        # what makes it another measurement
        "path": ", ".join([path, *others]),
        "tensor_parallel": config.tensor_parallel_size,
        "backend": config.attention_backend,
        "mode": resolved.graph_mode,
    }


def write_numbers(
    path_or_dir: Path | str, rows: Sequence[dict[str, Any]], command: str | None = None, *, name: str | None = None
) -> Path:
    """Write one run's rows with their stamp and return the file.

    A folder gets a new file named after the first row, or `name` and its model, and the time; no earlier run is
    overwritten there.
    """
    path = Path(path_or_dir)
    if path.suffix != ".json":
        path = _new_file(path, rows, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: json.dumps(value) for key, value in stamp(command).items()}
    # One row per line, so that a diff of two runs shows which rows changed.
    body = ",\n  ".join(json.dumps(row) for row in rows)
    lines = [f'"{key}": {value}' for key, value in head.items()] + [f'"rows": [\n  {body}\n ]']
    part = path.with_suffix(".json.part")
    part.write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")
    part.replace(path)
    return path


def current_command() -> str:
    """How this program was called, with its folder left out."""
    name = Path(sys.argv[0]).name
    return shlex.join(["draftloop" if name == "__main__.py" else name, *sys.argv[1:]])


def cpu_name() -> str:
    """The processor's name and how many of its cores we may use."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    match = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    name = match[1].strip() if match else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _new_file(folder: Path, rows: Sequence[dict[str, Any]], name: str | None) -> Path:
    first = rows[0] if rows else {}
    parts = [str(part) for part in (name or first.get("metric"), first.get("model"), first.get("method")) if part]
    stem = re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()).strip("-") or "run"
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path, number = folder / f"{stem}-{time}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{time}-{number}.json"
    return path


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _driver_version() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _dirty() -> bool | None:
    """Whether tracked files differ from the commit; results themselves are no change of the program."""
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/numbers")
    return None if changes is None else bool(changes)


def _git(*args: str) -> str | None:
    """Asked of the repository that this source file is in, whatever folder the user is in."""
    return _output("git", "-C", str(Path(__file__).parent), *args)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
