"""Quantised copies of a model folder in every format, written from the formats' descriptions, not by the code under
test; each comes with a folder of the plain weights that it stands for.

Shape suffixes: N output columns, K input columns, G groups along K.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN = "model.layers.1.mlp.down_proj"
"""A linear layer that every copy leaves alone."""
Q = "model.layers.0.self_attn.q_proj"
"""One that none does."""

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors by their last names, and the plain weight [N, K]."""


@dataclass(frozen=True)
class Format:
    """How weights are written, and what config.json says."""

    write: Callable[[Tensor], Written]
    config: dict[str, Any] = field(default_factory=dict)


def _words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit values of the last dimension in an int32, the first in the lowest bits."""
    groups = values.long().unflatten(-1, (-1, 8))
    words = sum(groups[..., place] << (4 * index) for index, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def _fp8(regions: tuple[int, int] | None, scale_name: str, **more: float) -> Callable[[Tensor], Written]:
    """`regions`: rows and columns that share a scale; None: all."""

    def write(weight_NK: Tensor) -> Written:
        rows, columns = regions or weight_NK.shape
        columns = columns or weight_NK.shape[1]
        scale = torch.stack(
            [torch.stack([part.abs().max() / 448 for part in band.split(columns, 1)]) for band in weight_NK.split(rows)]
        )
        spread = scale.repeat_interleave(rows, 0)[: weight_NK.shape[0]]
        spread = spread.repeat_interleave(columns, 1)[:, : weight_NK.shape[1]]
        rounded = (weight_NK / spread).to(FP8)
        stored = scale.reshape(()) if regions is None else scale
        tensors = {"weight": rounded, scale_name: stored.contiguous()}
        tensors |= {name: torch.tensor(value) for name, value in more.items()}
        return tensors, rounded.float() * spread

    return write


def _int4(weight_NK: Tensor, group: int, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values and zero points as uint, scales in fp16, and the plain weight."""
    parts_NGS = weight_NK.unflatten(1, (-1, group))
    if zeros:
        low, high = parts_NGS.amin(2), parts_NGS.amax(2)
        scale_NG = ((high - low) / 15).half()
        zero_NG = (-low / scale_NG.float()).round().clamp(1, 15)
    else:
        scale_NG = (parts_NGS.abs().amax(2) / 7).half()
        zero_NG = torch.full_like(scale_NG, 8).float()
    values_NGS = (parts_NGS / scale_NG.float()[..., None] + zero_NG[..., None]).round().clamp(0, 15)
    plain = (values_NGS - zero_NG[..., None]) * scale_NG.float()[..., None]
    return values_NGS.flatten(1), scale_NG, zero_NG, plain.flatten(1)


def _gptq(
    group: int, *, zeros: bool = False, ordered: bool = False, stored_less: int = 1
) -> Callable[[Tensor], Written]:
    def write(weight_NK: Tensor) -> Written:
        size = weight_NK.shape[1]
        order_K = torch.randperm(size, generator=torch.Generator().manual_seed(size)) if ordered else torch.arange(size)
        values_NK, scale_NG, zero_NG, sorted_NK = _int4(weight_NK[:, order_K], group, zeros=zeros)
        back_K = torch.argsort(order_K)
        tensors = {
            "qweight": _words(values_NK[:, back_K]).t().contiguous(),
            "qzeros": _words(zero_NG.t() - stored_less),
            "scales": scale_NG.t().contiguous(),
            "g_idx": (back_K // group).to(torch.int32),
            "bias": torch.zeros(weight_NK.shape[0]),
        }
        return tensors, sorted_NK[:, back_K]

    return write


def _awq(weight_NK: Tensor) -> Written:
    values_NK, scale_NG, zero_NG, plain = _int4(weight_NK, 32, zeros=True)
    tensors = {
        "qweight": _words(values_NK.t(), AWQ_ORDER),
        "qzeros": _words(zero_NG.t(), AWQ_ORDER),
        "scales": scale_NG.t().contiguous(),
    }
    return tensors, plain


def _packed(group: int, *, zeros: bool = False, ordered: bool = False) -> Callable[[Tensor], Written]:
    def write(weight_NK: Tensor) -> Written:
        columns, size = weight_NK.shape
        order_K = torch.arange(size).flip(0) if ordered else torch.arange(size)
        values_NK, scale_NG, zero_NG, sorted_NK = _int4(weight_NK[:, order_K], group or size, zeros=zeros)
        back_K = torch.argsort(order_K)
        tensors = {
            "weight_packed": _words(values_NK[:, back_K]),
            "weight_scale": scale_NG.bfloat16() if group == 0 else scale_NG,
            "weight_shape": torch.tensor([columns, size]),
        }
        plain = sorted_NK[:, back_K]
        if group == 0:  # the scale as it is stored
            plain = (values_NK - 8) * tensors["weight_scale"].float()
        if zeros:
            tensors["weight_zero_point"] = _words(zero_NG.t()).t().contiguous()
        if ordered:
            tensors["weight_g_idx"] = (back_K // group).to(torch.int32)
        return tensors, plain

    return write


def _compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", f"re:.*{PLAIN.removeprefix('model.')}"],
    }


_FLOAT8 = {"num_bits": 8, "type": "float"}
_DYNAMIC = {**_FLOAT8, "dynamic": True, "strategy": "token"}
_STATIC = {**_FLOAT8, "dynamic": False, "strategy": "tensor"}
_INT4 = {"num_bits": 4, "type": "int"}
_LEFT = {"modules_to_not_convert": ["lm_head", PLAIN]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "dynamic": {f"-:.*{PLAIN[6:]}": {}}}

FORMATS = {
    "fp8 per tensor, dynamic": Format(_fp8(None, "weight_scale"), {"quant_method": "fp8", **_LEFT}),
    "fp8 per tensor, static": Format(
        _fp8(None, "weight_scale", input_scale=0.03), {"quant_method": "fp8", "activation_scheme": "static", **_LEFT}
    ),
    "fp8 per block": Format(
        _fp8((48, 32), "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [48, 32], **_LEFT}
    ),
    "compressed fp8 per channel": Format(
        _fp8((1, 0), "weight_scale"), _compressed("float-quantized", _DYNAMIC, **_FLOAT8, strategy="channel")
    ),
    "compressed fp8 per tensor, static": Format(
        _fp8(None, "weight_scale", input_scale=0.03),
        _compressed("float-quantized", _STATIC, **_FLOAT8, strategy="tensor"),
    ),
    "compressed fp8 per block": Format(
        _fp8((32, 64), "weight_scale"),
        _compressed("float-quantized", _DYNAMIC, **_FLOAT8, strategy="block", block_structure=[32, 64]),
    ),
    "compressed int4 per group": Format(
        _packed(32), _compressed("pack-quantized", **_INT4, strategy="group", group_size=32)
    ),
    "compressed int4 per channel": Format(_packed(0), _compressed("pack-quantized", **_INT4, strategy="channel")),
    "compressed int4, zeros": Format(
        _packed(32, zeros=True),
        _compressed("pack-quantized", **(_INT4 | {"symmetric": False}), strategy="group", group_size=32),
    ),
    "compressed int4, ordered": Format(
        _packed(32, ordered=True),
        _compressed("pack-quantized", **_INT4, strategy="group", group_size=32, actorder="group"),
    ),
    "gptq": Format(_gptq(32), {**_GPTQ, "group_size": 32}),
    "gptq, zeros": Format(_gptq(64, zeros=True), {**_GPTQ, "group_size": 64, "sym": False}),
    "gptq, act-order": Format(_gptq(32, ordered=True), {**_GPTQ, "group_size": 32, "desc_act": True}),
    "gptq_v2": Format(
        _gptq(32, zeros=True, stored_less=0),
        {**_GPTQ, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "awq": Format(_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, **_LEFT}),
}  # fmt: skip


def quantised_copy(folder: str, into: Path, name: str) -> tuple[Path, Path]:
    """Two folders: the model in this format, and the plain weights that it stands for."""
    quantised, plain = into / "quantised", into / "plain"
    form = FORMATS[name]
    tensors: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for key, weight in load_file(Path(folder) / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if module.endswith("_proj") and module != PLAIN:
            written, floats[key] = form.write(weight)
            tensors |= {f"{module}.{last}": tensor for last, tensor in written.items()}
        else:
            tensors[key] = floats[key] = weight
    config = json.loads((Path(folder) / "config.json").read_text())
    for path, content, more in ((quantised, tensors, {"quantization_config": form.config}), (plain, floats, {})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | more))
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, path / "model.safetensors")
    return quantised, plain


def change_config(folder: Path, **settings: Any) -> None:
    """Replace settings of `quantization_config`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
