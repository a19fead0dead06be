"""Weights as quantised checkpoints hold them: which tensors belong together, and the values that they stand for.

Sources of the layouts: compressed-tensors (`float-quantized`, `pack-quantized`), the checkpoint formats of AutoGPTQ
and GPTQModel (`gptq` keeps zero points less one, `gptq_v2` as they are), AutoAWQ's `gemm`, and `fp8` as Hugging Face
transformers and DeepSeek write it. All 4-bit ones keep eight values in an int32, lowest bits first.

Shape suffixes: N output columns, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kernels.linear_fp8 import FP8, Fp8Values
from draftloop.kernels.linear_int4 import MIDDLE, Int4Values
from draftloop.models.quantisation import Quantisation, Scheme

Shape = tuple[int, ...]
Get = Callable[[str], Tensor]
Values = Fp8Values | Int4Values

PER_WORD = 8
"""4-bit values in an int32."""
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in its word AWQ keeps each of eight neighbouring output columns."""
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True)
class Need:
    """A tensor of a quantised weight."""

    suffix: str
    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A weight and the tensors that stand for it."""

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, str]
    """Suffix -> the tensor's full name."""
    type: str
    """Of the scales, by safetensors' name."""

    def read(self, get: Get) -> Values:
        """On the device where `get` puts tensors. Raises ConfigError for values that cannot be."""
        found = {suffix: get(name) for suffix, name in self.tensors.items()}
        if self.scheme.kind == "fp8":
            return self._fp8(found)
        return {"compressed-tensors": self._packed, "awq": self._awq}.get(self.scheme.layout, self._gptq)(found)

    def _fp8(self, found: Mapping[str, Tensor]) -> Fp8Values:
        weight_NK = found["weight"]
        if bool((weight_NK.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ConfigError(f"{self.module}.weight holds NaN; the checkpoint is damaged: download it again")
        scale = next(tensor for suffix, tensor in found.items() if suffix.startswith("weight_scale")).float()
        input_scale = found.get("input_scale")
        if self.scheme.block is None:
            scale = scale.reshape(-1, 1)
        return Fp8Values(
            weight_NK.view(FP8),
            scale,
            self.scheme.block,
            None if input_scale is None else input_scale.float().reshape(()),
        )

    def _packed(self, found: Mapping[str, Tensor]) -> Int4Values:
        values_NK = nibbles(found["weight_packed"])[:, : self.shape[1]]
        zero = found.get("weight_zero_point")
        zero_NG = None if zero is None else nibbles(zero.t()).t()[: self.shape[0]]
        return self._ordered(values_NK, found["weight_scale"], zero_NG, found.get("weight_g_idx"))

    def _gptq(self, found: Mapping[str, Tensor]) -> Int4Values:
        zero_GN = nibbles(found["qzeros"]) + (self.scheme.layout == "gptq")
        values_NK = nibbles(found["qweight"].t())
        return self._ordered(values_NK, found["scales"].t(), zero_GN.t(), found.get("g_idx"))

    def _awq(self, found: Mapping[str, Tensor]) -> Int4Values:
        def columns(packed: Tensor) -> Tensor:
            return nibbles(packed).unflatten(1, (-1, PER_WORD))[:, :, AWQ_PLACES].flatten(1)

        zero_NG = columns(found["qzeros"]).t() if self.scheme.has_zeros else None
        return Int4Values(columns(found["qweight"]).t(), found["scales"].t(), zero_NG)

    def _ordered(
        self, values_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, g_idx_K: Tensor | None
    ) -> Int4Values:
        if zero_NG is not None and not self.scheme.has_zeros:
            if bool((zero_NG != MIDDLE).any()):
                raise ConfigError(
                    f"{self.module} has zero points other than {MIDDLE}, but config.json says that it is symmetric; "
                    "set 'sym' to false"
                )
            zero_NG = None
        order_K = None if g_idx_K is None else self._order(g_idx_K, scale_NG.shape[1])
        if order_K is not None:
            values_NK = values_NK[:, order_K]
        return Int4Values(values_NK, scale_NG, zero_NG, order_K)

    def _order(self, g_idx_K: Tensor, num_groups: int) -> Tensor | None:
        """The columns, group by group; None where that is how they are."""
        size = g_idx_K.shape[0]
        order_K = torch.argsort(g_idx_K.long(), stable=True)
        expected_K = torch.arange(size, device=g_idx_K.device) // (size // num_groups)
        if not torch.equal(g_idx_K.long()[order_K], expected_K):
            raise ConfigError(f"{self.module} has groups of unequal size (g_idx); supported: all of one size")
        if torch.equal(g_idx_K.long(), expected_K):
            return None
        if not self.scheme.is_ordered:
            raise ConfigError(
                f"{self.module} has its columns in another order (g_idx), but config.json says that it has not; set "
                "'desc_act' to true"
            )
        return order_K


def nibbles(packed: Tensor) -> Tensor:
    """int32 [.., n] -> uint8 [.., 8n]"""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)


MARKS = {"weight_packed": "I32", "qweight": "I32", "weight": "F8_E4M3"}
"""What shows that a weight is quantised: a tensor's last name and type."""


def find_stored(
    shapes: Mapping[str, Shape], types: Mapping[str, str], quantisation: Quantisation | None
) -> dict[str, StoredWeight]:
    """Of each quantised weight, by its plain name. Raises ConfigError for what is missing or does not fit."""
    found = {}
    for name in shapes:
        module, _, last = name.rpartition(".")
        if MARKS.get(last) != types[name]:
            continue
        scheme = quantisation.scheme(module) if quantisation else None
        if scheme is None or scheme.layout == "online":
            raise ConfigError(
                f"{name} is of type {types[name]}, but config.json does not say how {module} is quantised; take the "
                "config.json that belongs to the weights"
            )
        found[f"{module}.weight"] = _stored(module, scheme, shapes, types)
    return found


def _stored(module: str, scheme: Scheme, shapes: Mapping[str, Shape], types: Mapping[str, str]) -> StoredWeight:
    shape, needs = _needs(module, scheme, shapes)
    tensors, scale_type = {}, "F32"
    for need in needs:
        name = f"{module}.{need.suffix}"
        if name not in shapes:
            if need.optional:
                continue
            raise ConfigError(f"{name} {list(need.shapes[0])} is missing, which {_said(scheme)} needs; export it again")
        if shapes[name] not in need.shapes or types[name] not in need.types:
            raise ConfigError(
                f"{name} is {types[name]} {list(shapes[name])}, but {_said(scheme)} of {list(shape)} needs "
                f"{' or '.join(str(list(s)) for s in need.shapes)} of {', '.join(need.types)}; check that config.json "
                "and weights are of the same model"
            )
        tensors[need.suffix] = name
        if "scale" in need.suffix and need.suffix != "input_scale":
            scale_type = types[name]
    return StoredWeight(module=module, scheme=scheme, shape=shape, tensors=tensors, type=scale_type)


def _said(scheme: Scheme) -> str:
    return f"a {scheme.kind} weight ({scheme.layout})"


def _needs(module: str, scheme: Scheme, shapes: Mapping[str, Shape]) -> tuple[tuple[int, int], list[Need]]:
    """The weight's own shape, and the tensors of such a shape."""

    def shape_of(suffix: str) -> Shape:
        name = f"{module}.{suffix}"
        if len(shapes.get(name, ())) != 2:
            raise ConfigError(
                f"{name} is missing or not a matrix, but config.json says that {module} is {_said(scheme)}; take the "
                "config.json that belongs to the weights"
            )
        return shapes[name]

    if scheme.kind == "fp8":
        columns, size = shape_of("weight")
        scales: tuple[Shape, ...] = ((columns, 1), (columns,), (1, 1), (1,), ())
        if scheme.block is not None:
            scales = ((-(-columns // scheme.block[0]), -(-size // scheme.block[1])),)
        inverse = f"{module}.weight_scale_inv" in shapes
        needs = [
            Need(suffix="weight", shapes=((columns, size),), types=("F8_E4M3",)),
            Need(suffix="weight_scale_inv" if inverse else "weight_scale", shapes=scales, types=FLOATS),
        ]
        static = scheme.activations == "static"
        needs.append(Need(suffix="input_scale", shapes=((1,), ()), types=FLOATS, optional=not static))
        return (columns, size), needs
    if scheme.layout == "compressed-tensors":
        columns, words = shape_of("weight_packed")
        size = words * PER_WORD
        groups = _groups(module, scheme, size)
        needs = [
            Need(suffix="weight_packed", shapes=((columns, words),), types=("I32",)),
            Need(suffix="weight_scale", shapes=((columns, groups),), types=FLOATS),
            Need(suffix="weight_shape", shapes=((2,),), types=("I64", "I32"), optional=True),
            Need(suffix="weight_g_idx", shapes=((size,),), types=("I32",), optional=not scheme.is_ordered),
        ]
        if scheme.has_zeros:
            zeros = ((-(-columns // PER_WORD), groups),)
            needs.append(Need(suffix="weight_zero_point", shapes=zeros, types=("I32",)))
        return (columns, size), needs
    rows, words = shape_of("qweight")
    size, columns = (rows, words * PER_WORD) if scheme.layout == "awq" else (rows * PER_WORD, words)
    groups = _groups(module, scheme, size)
    needs = [
        Need(suffix="qweight", shapes=((rows, words),), types=("I32",)),
        Need(suffix="scales", shapes=((groups, columns),), types=FLOATS),
        Need(suffix="qzeros", shapes=((groups, -(-columns // PER_WORD)),), types=("I32",)),
    ]
    if scheme.layout != "awq":
        needs.append(Need(suffix="g_idx", shapes=((size,),), types=("I32",), optional=not scheme.is_ordered))
    return (columns, size), needs


def _groups(module: str, scheme: Scheme, size: int) -> int:
    if scheme.group_size == -1:
        return 1
    if size % scheme.group_size:
        raise ConfigError(
            f"{module} has {size} input columns, which groups of {scheme.group_size} do not divide; "
            "check the group size in config.json"
        )
    return size // scheme.group_size
