"""Tensors in a model's safetensors files, by name. Those stored in 8 bits read as the weights they stand for.

8-bit storage is the format `int-quantized` of compressed-tensors, weights only and one scale per row:
`x.weight` int8 [out, in] is to be multiplied by `x.weight_scale` [out, 1]. It makes files small, not passes
fast: whoever reads such a tensor gets floats.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.errors import ConfigError

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]

FLOAT_TYPES = ("F32", "BF16", "F16")
"""Names that safetensors gives to the types that weights may have."""
LARGEST = 127
"""int8 holds -128 too; without it a row's scale serves both signs."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What some safetensors files hold; scales of 8-bit storage are left out."""

    shapes: Mapping[str, Shape]
    types: Mapping[str, str]
    """By safetensors' names; of a tensor stored in 8 bits that of its scale."""
    files: Mapping[str, Path]
    """Where each tensor is."""
    read: Read


@contextmanager
def open_tensors(files: Sequence[Path]) -> Generator[Tensors]:
    """Read headers now, tensors when asked. Raises ConfigError for damaged files and 8-bit weights without scales."""
    from safetensors import SafetensorError, safe_open

    try:
        with ExitStack() as stack:
            shards = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
            owners = {name: file for file, shard in shards.items() for name in shard.keys()}  # noqa: SIM118  not a dict
            slices = {name: shards[file].get_slice(name) for name, file in owners.items()}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            types = {name: part.get_dtype() for name, part in slices.items()}
            scales = _scales(shapes, types)

            def read(name: str) -> Tensor:
                tensor = shards[owners[name]].get_tensor(name)
                scale = scales.get(name)
                return tensor if scale is None else tensor.float() * shards[owners[scale]].get_tensor(scale).float()

            names = [name for name in owners if name not in scales.values()]
            yield Tensors(
                shapes={name: shapes[name] for name in names},
                types={name: types[scales.get(name, name)] for name in names},
                files={name: owners[name] for name in names},
                read=read,
            )
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the weights in {files[0].parent}: {error}; download them again") from error


def _scales(shapes: Mapping[str, Shape], types: Mapping[str, str]) -> dict[str, str]:
    """The name of the scale of each tensor that is stored in 8 bits."""
    found = {}
    for name, shape in shapes.items():
        if types[name] != "I8" or len(shape) != 2:
            continue
        scale, needed = f"{name}_scale", (shape[0], 1)
        if scale not in shapes:
            raise ConfigError(f"{name} is stored in 8 bits, but {scale} {list(needed)} is missing; export it again")
        if shapes[scale] != needed or types[scale] not in FLOAT_TYPES:
            raise ConfigError(
                f"{scale} is {types[scale]} {list(shapes[scale])}, but {name} {list(shape)} needs one of "
                f"{', '.join(FLOAT_TYPES)} {list(needed)}, a number per row; export it again"
            )
        found[name] = scale
    return found


def store_in_8_bits(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Matrices of floats as int8 with their scales, the rest as it is; and the `quantization_config` that says so."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            stored[name], stored[f"{name}_scale"] = quantise_rows(tensor)
        else:
            stored[name] = tensor
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear", "Embedding"], "weights": weights, "input_activations": None}
    return stored, {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [] if "lm_head.weight" in tensors else ["lm_head"],  # a shared head is none of ours
    }


def quantise_rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and bf16 scales [N, 1] whose product is nearest to the weight, [N, K]."""
    weight_NK = weight_NK.float()
    scale_N1 = (weight_NK.abs().amax(1, keepdim=True) / LARGEST).bfloat16()
    # by the scale as it is stored, so that its rounding is no error of the weights; a row of zeros has none
    ratio_NK = weight_NK / scale_N1.float().where(scale_N1 > 0, 1)
    return ratio_NK.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale_N1
