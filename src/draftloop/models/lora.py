"""Adapters (LoRA) in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

`make_room` gives the linear layers of a decoder memory for several adapters (see kernels/lora.py), `load_adapter` fills
one. What adapters may hold beside pairs of matrices for these layers is refused by name.

Shape suffixes: J rank, K input columns, N output columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kernels.lora import LoraStack
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import Decoder
from draftloop.models.dense import DenseDecoder
from draftloop.models.fallback_config import FallbackConfig
from draftloop.models.fill import warn_of_rounding
from draftloop.models.gemma4_config import Gemma4Config
from draftloop.models.layers import GatedMLP
from draftloop.models.resolve import read_json
from draftloop.models.tensors import FLOAT_TYPES, Tensors, open_tensors
from draftloop.models.weights import Memory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
# fmt: off
REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layer_replication",
    "trainable_token_indices", "target_parameters", "use_qalora", "alora_invocation_tokens", "arrow_config",
    "megatron_config", "use_bdlora", "kasa_config", "monteclora_config", "velora_config",
)
# fmt: on
"""Settings that change what an adapter computes; each must say nothing."""
ROOTS = ("model.", "model.language_model.", "language_model.model.")
"""What the names of a decoder's layers begin with in adapters, after PEFT's own prefix."""
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?P<root>.*)(?P<layer>layers\.\d+\.(?:self_attn|mlp)\.\w+))"
    r"\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What of `adapter_config.json` counts here."""

    rank: int
    scale: float
    """What `B @ A` is multiplied by."""


class Place(NamedTuple):
    """Where a module's adapters are kept."""

    stack: LoraStack
    slice_: int


def make_room(model: Decoder, *, num_adapters: int, rank: int) -> dict[str, Place]:
    """Let every linear layer of a decoder have adapters, and say where, by the module's name from "layers." on."""
    assert isinstance(model, DenseDecoder), "`check_lora` comes first"
    device, dtype = model.embed_tokens.device, model.dtype
    places: dict[str, Place] = {}

    def room(prefix: str, parts: Mapping[str, int], weight: Memory) -> LoraStack:
        stack = LoraStack.create(
            tuple(parts.values()), weight.shape[1], num_adapters=num_adapters, rank=rank, device=device, dtype=dtype
        )
        places.update({f"{prefix}.{name}_proj": Place(stack, index) for index, name in enumerate(parts)})
        return stack

    for index, layer in enumerate(model.decoder_layers):
        attention, mlp = layer.attention, layer.mlp
        here = f"layers.{index}.self_attn"
        attention.qkv_lora = room(here, attention.qkv_parts, attention.qkv_weight)
        attention.o_lora = room(here, {"o": attention.o_weight.shape[0]}, attention.o_weight)
        if isinstance(mlp, GatedMLP):
            here = f"layers.{index}.mlp"
            mlp.gate_up_lora = room(here, mlp.gate_up_parts, mlp.gate_up_weight)
            mlp.down_lora = room(here, {"down": mlp.down_weight.shape[0]}, mlp.down_weight)
    return places


def check_lora(config: ModelConfig, folders: Iterable[Path], *, max_rank: int) -> None:
    """What can be told before any weights are read. Raises ConfigError for a model or adapter that cannot be served."""
    if isinstance(config, FallbackConfig | Gemma4Config) or config.interleaved_rope:
        raise ConfigError(
            f"enable_lora is set, but layers of {config.architecture} cannot have adapters; leave it out, or merge the "
            "adapter into the model's weights"
        )
    for folder in folders:
        read_lora_config(folder, max_rank=max_rank)


def load_adapter(folder: Path, places: Mapping[str, Place], number: int, *, max_rank: int) -> None:
    """Fill what there is room for with the adapter in `folder`, as the one of this number; numbers count from 1.

    Raises ConfigError for files that are missing or damaged, and what is not supported or does not fit, before anything
    is changed.
    """
    config = read_lora_config(folder, max_rank=max_rank)
    with open_tensors([folder / WEIGHTS]) as tensors:
        pairs = _pairs(tensors, places, config, folder)
        dtypes = {name: places[module].stack.a_LSJK.dtype for module, pair in pairs.items() for name in pair}
        warn_of_rounding({name: (tensors.types[name], dtype) for name, dtype in dtypes.items()}, folder)
        read = {name: (_read(tensors, a, folder), _read(tensors, b, folder)) for name, (a, b) in pairs.items()}
    for stack in {id(place.stack): place.stack for place in places.values()}.values():
        stack.clear(number)
    for name, (a_JK, b_NJ) in read.items():
        # the scale is rounded once, with what it multiplies
        places[name].stack.fill(number, places[name].slice_, a_JK, b_NJ * config.scale)


def read_lora_config(folder: Path, *, max_rank: int) -> LoraConfig:
    """Raises ConfigError for a folder that is no adapter's, and naming the first setting that is not supported."""
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        pickled = ", but has pickled weights" if (folder / "adapter_model.bin").is_file() else ""
        raise ConfigError(f"{folder} is no adapter: it must be a folder with {CONFIG} and {WEIGHTS}{pickled}")
    settings = read_json(path)

    def need(ok: bool, name: str, limit: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {settings.get(name)!r} in {path}; supported: {limit}")

    need(settings.get("peft_type", "LORA") == "LORA", "peft_type", "'LORA'")
    need(settings.get("task_type") in (None, "CAUSAL_LM"), "task_type", "'CAUSAL_LM'")
    need(settings.get("bias", "none") == "none", "bias", "'none'")
    for name in REFUSED:
        need(not settings.get(name), name, "none; merge the adapter into the model's weights instead")
    targets = settings.get("target_modules")
    for module in targets if isinstance(targets, list) else ():
        if not isinstance(module, str) or module.rpartition(".")[2] not in MODULES:
            raise ConfigError(f"target_modules has {module!r} in {path}; supported: {', '.join(MODULES)}")
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha", 8)
    need(isinstance(rank, int) and rank >= 1, "r", "an integer >= 1")
    need(rank <= max_rank, "r", f"up to max_lora_rank, {max_rank}; raise that (--max-lora-rank)")
    need(isinstance(alpha, int | float), "lora_alpha", "a number")
    return LoraConfig(rank=rank, scale=alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def _pairs(
    tensors: Tensors, places: Mapping[str, Place], config: LoraConfig, folder: Path
) -> dict[str, tuple[str, str]]:
    """By module: the names of A and B. Raises ConfigError for tensors of other modules, kinds or shapes."""
    found: dict[str, dict[str, str]] = {}
    for name, shape in tensors.shapes.items():
        match = _NAME.fullmatch(name)
        place = places.get(match["layer"]) if match and match["root"] in ROOTS else None
        if match is None or place is None:
            raise ConfigError(
                f"{folder / WEIGHTS} has {name}, which is none of the layers that adapters can change: "
                f"{', '.join(dict.fromkeys(module.rpartition('.')[2] for module in places))} of "
                f"{len({module.split('.')[1] for module in places})} layers"
            )
        size, columns = place.stack.a_LSJK.shape[3], place.stack.sizes[place.slice_]
        needed = (config.rank, size) if match["side"] == "A" else (columns, config.rank)
        if tuple(shape) != needed:
            raise ConfigError(f"{name} has shape {list(shape)} in {folder}; it must be {list(needed)}")
        found.setdefault(match["layer"], {})[match["side"]] = name
    for module, sides in found.items():
        if len(sides) < 2:
            raise ConfigError(f"{folder / WEIGHTS} has lora_{min(sides)} of {module} alone; it needs A and B")
    if not found:
        raise ConfigError(f"{folder / WEIGHTS} is empty; train the adapter again, or leave it out")
    return {module: (sides["A"], sides["B"]) for module, sides in found.items()}


def _read(tensors: Tensors, name: str, folder: Path) -> Tensor:
    """fp32."""
    if tensors.types[name] not in FLOAT_TYPES:
        raise ConfigError(f"{name} is of type {tensors.types[name]} in {folder}; supported: {', '.join(FLOAT_TYPES)}")
    found = tensors.read(name).float()
    if not bool(torch.isfinite(found).all()):
        raise ConfigError(f"{name} in {folder} holds NaN or infinite numbers; train the adapter again")
    return found
