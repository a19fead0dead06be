"""Tensors in a model's safetensors files, by name. Quantised ones read as the weights that they stand for.

8-bit storage is the format `int-quantized` of compressed-tensors, weights only and one scale per row:
`x.weight` int8 [out, in] is to be multiplied by `x.weight_scale` [out, 1]. It makes files small, not passes
fast: whoever reads such a tensor gets floats. Formats that make passes fast are in models/stored.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kernels.linear_fp8 import FP8
from draftloop.models.quantisation import Quantisation
from draftloop.models.stored import Shape, StoredWeight, find_stored

Read = Callable[[str], Tensor]

FLOAT_TYPES = ("F32", "BF16", "F16")
"""Names that safetensors gives to the types that weights may have."""
LARGEST = 127
"""int8 holds -128 too; without it a row's scale serves both signs."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What some files hold, as plain weights: what stands for quantised ones is left out."""

    shapes: Mapping[str, Shape]
    types: Mapping[str, str]
    """By safetensors' names; of a quantised tensor that of its scale."""
    files: Mapping[str, Path]
    """Where each tensor is."""
    read: Read
    """A quantised weight as fp32."""
    read_raw: Read
    """A tensor by its name in the files."""
    stored: Mapping[str, StoredWeight]
    """The quantised ones, but for 8-bit storage."""
    scaled: Set[str]
    """Those of 8-bit storage."""

    @property
    def narrow(self) -> set[str]:
        """Those that are bf16 numbers in the files."""
        return {name for name, kind in self.types.items() if kind == "BF16"} - self.stored.keys() - self.scaled


@contextmanager
def open_tensors(files: Sequence[Path], quantisation: Quantisation | None = None) -> Generator[Tensors]:
    """Read headers now, tensors when asked; from several threads if need be. Names are in the files' order.

    Raises ConfigError for damaged files and quantised weights that are not complete.
    """
    from safetensors import SafetensorError, safe_open

    if (suffix := files[0].suffix) != ".safetensors":
        yield plain_view(*(_gguf(files[0]) if suffix == ".gguf" else _pickled(files)), quantisation)
        return
    try:
        with ExitStack() as stack:
            shards = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
            owners = {name: file for file, shard in shards.items() for name in shard.offset_keys()}
            slices = {name: shards[file].get_slice(name) for name, file in owners.items()}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            types = {name: part.get_dtype() for name, part in slices.items()}
            yield plain_view(shapes, types, owners, lambda name: shards[owners[name]].get_tensor(name), quantisation)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the weights in {files[0].parent}: {error}; download them again") from error


def _gguf(file: Path) -> tuple[dict[str, Shape], dict[str, str], dict[str, Path], Read]:
    from draftloop.models.gguf_import import read_tensors

    shapes, read = read_tensors(file)
    return shapes, dict.fromkeys(shapes, "F32"), dict.fromkeys(shapes, file), read


_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", FP8: "F8_E4M3"}


def _pickled(files: Sequence[Path]) -> tuple[dict[str, Shape], dict[str, str], dict[str, Path], Read]:
    """Tensors and nothing else are taken from pickles, which could run code otherwise. Raises ConfigError."""
    found: dict[str, Tensor] = {}
    owners = {}
    for file in files:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # unpickling raises whatever it likes
            raise ConfigError(f"cannot read {file} as plain tensors: {error}") from error
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ConfigError(f"{file} holds more than tensors by name; convert it to safetensors")
        found |= tensors
        owners |= dict.fromkeys(tensors, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    types = {name: _TYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) for name, tensor in found.items()}
    return shapes, types, owners, found.__getitem__


def plain_view(
    shapes: Mapping[str, Shape],
    types: Mapping[str, str],
    files: Mapping[str, Path],
    read_raw: Read,
    quantisation: Quantisation | None,
) -> Tensors:
    """Weights in the place of what stands for them. Raises ConfigError where that is not complete."""
    scales, stored = _scales(shapes, types), find_stored(shapes, types, quantisation)
    parts = {part for weight in stored.values() for part in weight.tensors.values()} | set(scales.values())
    whole = {name: next(iter(weight.tensors.values())) for name, weight in stored.items()}
    names = {name: name for name in shapes if name not in parts} | whole

    def read(name: str) -> Tensor:
        if name in stored:
            return stored[name].read(read_raw).dequantise()
        scale = scales.get(name)
        return read_raw(name) if scale is None else read_raw(name).float() * read_raw(scale).float()

    return Tensors(
        shapes={name: stored[name].shape if name in stored else shapes[name] for name in names},
        types={name: stored[name].type if name in stored else types[scales.get(name, name)] for name in names},
        files={name: files[raw] for name, raw in names.items()},
        read=read,
        read_raw=read_raw,
        stored=stored,
        scaled=scales.keys(),
    )


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


def mtp_tensors(names: Iterable[str], num_layers: int) -> set[str]:
    """Those of multi-token-prediction heads, which checkpoints keep beside the model's `num_layers` layers.

    They are `mtp.*` (Qwen), `model.mtp_layers.*` (MiMo), or decoder layers past the last that have an
    `eh_proj` (DeepSeek). The model does not need them; see drafters/mtp.py.
    """
    names = list(names)
    beyond = {name.removesuffix("eh_proj.weight") for name in names if re.fullmatch(_EH_PROJ, name)}
    layers = tuple(prefix for prefix in beyond if int(prefix.split(".")[2]) >= num_layers)
    return {name for name in names if name.startswith(("mtp.", "model.mtp_layers.", *layers))}


_EH_PROJ = r"model\.layers\.\d+\.eh_proj\.weight"


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
