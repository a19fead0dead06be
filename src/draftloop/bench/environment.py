"""What a report of a fault should say of the machine: versions, device, variables, and what the engine would choose."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

import torch

import draftloop
from draftloop.bench.stamp import stamp
from draftloop.config import EngineConfig
from draftloop.config.env import PREFIX
from draftloop.config.resolve import Facts, resolve

_SECRET = PREFIX + "API_KEY"
_OF_OTHERS = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
# Any model: what follows from its own shape is left out below.
_FACTS = {"model_max_len": 2048, "model_dtype": "bfloat16"}


def collect() -> dict[str, dict[str, str]]:
    """Sections of names and values, all texts; a key that a server asks for is not shown."""
    where = stamp()
    settled = resolve(EngineConfig(), facts=Facts(cuda_available=torch.cuda.is_available(), **_FACTS))
    return {
        "draftloop": {"version": draftloop.__version__, "commit": _commit(where)},
        "machine": {
            "platform": platform.platform(),
            "cpu": str(where["cpu"]),
            "C compiler": shutil.which("cc") or shutil.which("gcc") or "none: CPU kernels are left to torch",
            "driver": where["versions"]["driver"] or "none",
            "CUDA of torch": torch.version.cuda or "none",
            **_gpus(),
        },
        "packages": {"python": where["versions"]["python"], **_packages()},
        "environment": variables(os.environ),
        "chosen here for a bfloat16 model, no drafter": {
            choice.name: f"{choice.value} ({choice.reason})"
            for choice in settled.choices
            if choice.name != "max_model_len"
        },
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Our variables that are set, and those of others that change how the engine runs."""
    names = sorted(name for name in environ if name.startswith(PREFIX) or name in _OF_OTHERS)
    return {name: "set, not shown" if name == _SECRET else environ[name] for name in names}


def as_text(sections: Mapping[str, Mapping[str, str]]) -> str:
    """For a terminal and for an issue alike."""
    lines = []
    for title, values in sections.items():
        lines += [f"{title}:", *(f"  {name}: {value}" for name, value in values.items())]
        if not values:
            lines.append("  nothing set")
    return "\n".join(lines)


def _commit(where: Mapping[str, object]) -> str:
    return f"{where['git']}{', changed' if where['dirty'] else ''}" if where["git"] else "none"


def _gpus() -> dict[str, str]:
    found = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return found or {"GPU": "none that torch can use"}


def _packages() -> dict[str, str]:
    """Everything that draftloop asks for itself, extras included."""
    try:
        wanted = requires("draftloop") or []
    except PackageNotFoundError:  # run from its sources
        wanted = ["torch", "triton", "transformers"]
    found = {}
    for name in sorted({re.split(r"[^A-Za-z0-9_.-]", want, maxsplit=1)[0].lower() for want in wanted} - {"draftloop"}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
