"""How a checkpoint's linear layers are quantised, as its `config.json` says. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftloop.errors import ConfigError, nearest

Layout = Literal["fp8", "compressed-tensors", "gptq", "gptq_v2", "awq", "online"]
"""What tensors are called and how numbers are packed; online: plain weights, quantised while they are read."""
ONLINE = ("fp8", "int4")
ONLINE_GROUP = 128
METHODS = ("fp8", "gptq", "awq", "compressed-tensors")
"""`quant_method`s that are read."""

SUPPORTED = (
    "plain weights (float32, bfloat16, float16); fp8 (a scale per tensor, output channel or block; static or dynamic "
    "activations); gptq and awq (gemm) of 4 bits; compressed-tensors float-quantized (8 bits), pack-quantized (4 bits, "
    "groups of a multiple of 32 or whole channels, zero points or none), and int-quantized int8 weights with a scale "
    "per row"
)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What stands for the weights of one linear layer."""

    kind: Literal["fp8", "int4"]
    layout: Layout
    block: tuple[int, int] | None = None
    """fp8: rows and columns that share a scale; None: a whole output channel, or the whole tensor."""
    activations: Literal["none", "dynamic", "static"] = "none"
    """fp8: whether activations were meant to be rounded to 8 bits, by a scale per token or by one that is stored."""
    group_size: int = -1
    """int4: columns of K that share a scale; -1: all."""
    has_zeros: bool = False
    """int4: groups have zero points of their own."""
    is_ordered: bool = False
    """int4: columns may be grouped in another order than the input's."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """Which linear layers are quantised, and how."""

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Names of modules, "Linear" for all, or "re:" and a regular expression; the first that fits counts."""
    ignored: tuple[str, ...] = ()
    """In the same words: modules whose weights are plain."""

    def scheme(self, module: str) -> Scheme | None:
        """Of one module, by its full name, such as "model.layers.0.mlp.up_proj"; None where it is plain."""
        if any(_fits(pattern, module) for pattern in self.ignored):
            return None
        return next(
            (scheme for patterns, scheme in self.groups if any(p == "Linear" or _fits(p, module) for p in patterns)),
            None,
        )

    @property
    def is_online(self) -> bool:
        """Whether the checkpoint's own weights are plain."""
        return all(scheme.layout == "online" for _, scheme in self.groups)


def _fits(pattern: str, module: str) -> bool:
    """A regular expression from the start, or whole parts of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def online(kind: str) -> Quantisation:
    """Quantise plain weights while they are read: fp8 by output channel, int4 in groups of 128, rounded to nearest."""
    scheme = Scheme(kind="int4" if kind == "int4" else "fp8", layout="online", group_size=ONLINE_GROUP)
    if kind == "fp8":
        scheme = Scheme(kind="fp8", layout="online", activations="dynamic")
    return Quantisation(method=kind, groups=((("Linear",), scheme),))


def chosen(own: Quantisation | None, asked: str | None) -> Quantisation | None:
    """The checkpoint's quantisation, or the one that the user asked for plain weights.

    Raises ConfigError where the checkpoint's is another one than asked.
    """
    if asked is None or (own is not None and asked == own.method):
        return own
    if own is not None:
        raise ConfigError(
            f"quantization is {asked!r}, but the checkpoint is quantised already ({own.method!r}); leave it out"
        )
    if asked not in ONLINE:
        raise ConfigError(
            f"quantization is {asked!r}, but the checkpoint's weights are plain; leave it out, or quantise them while "
            f"they are read: {', '.join(ONLINE)}"
        )
    return online(asked)


def read_quantisation(settings: Mapping[str, Any] | None) -> Quantisation | None:
    """From `quantization_config`; None where weights are plain, or read as if they were (int8).

    Raises ConfigError naming what is not supported, and all that is.
    """
    if not settings or _is_8_bit_storage(settings):
        return None
    name = settings.get("quant_method")
    readers = {"fp8": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
    if name not in readers:
        raise unsupported(settings, f"this method is not among them{nearest(str(name), METHODS)}")
    return readers[name](settings)


def unsupported(settings: Mapping[str, Any], why: str) -> ConfigError:
    """The error about a checkpoint that cannot be read."""
    return ConfigError(
        f"the checkpoint is quantised ({settings.get('quant_method')!r}); supported are {SUPPORTED}: {why}"
    )


def _names(settings: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in settings.get(key) or ())


def _fp8(settings: Mapping[str, Any]) -> Quantisation:
    activations = settings.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise unsupported(settings, f"activation_scheme is {activations!r}, not 'dynamic' or 'static'")
    if (fmt := settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(settings, f"fmt is {fmt!r}, not 'e4m3'")
    block = settings.get("weight_block_size")
    scheme = Scheme(kind="fp8", layout="fp8", block=_block(settings, block) if block else None, activations=activations)
    ignored = _names(settings, "modules_to_not_convert", "ignored_layers")
    return Quantisation(method="fp8", groups=((("Linear",), scheme),), ignored=ignored)


def _block(settings: Mapping[str, Any], block: Any) -> tuple[int, int]:
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise unsupported(settings, f"blocks are {block!r}, not rows and columns")
    return int(block[0]), int(block[1])


def _gptq(settings: Mapping[str, Any]) -> Quantisation:
    if (bits := settings.get("bits")) != 4:
        raise unsupported(settings, f"bits is {bits!r}, not 4")
    skipped = []
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise unsupported(settings, f"'dynamic' is {dynamic!r}, not an object")
    for pattern, change in dynamic.items():
        if not pattern.startswith("-:"):
            raise unsupported(settings, f"'dynamic' changes {pattern!r} to {change!r}; it may leave modules out alone")
        skipped.append(f"re:{pattern[2:]}")
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported(settings, f"checkpoint_format is {layout!r}, not 'gptq' or 'gptq_v2'")
    scheme = Scheme(
        kind="int4",
        layout=layout,
        group_size=_group_size(settings, settings.get("group_size")),
        has_zeros=not settings.get("sym", True),
        is_ordered=bool(settings.get("desc_act", False)),
    )
    ignored = (*skipped, *_names(settings, "modules_to_not_convert"))
    return Quantisation(method="gptq", groups=((("Linear",), scheme),), ignored=ignored)


def _awq(settings: Mapping[str, Any]) -> Quantisation:
    if (bits := settings.get("bits", settings.get("w_bit"))) != 4:
        raise unsupported(settings, f"bits is {bits!r}, not 4")
    if (version := str(settings.get("version", "gemm")).lower()) != "gemm":
        raise unsupported(settings, f"version is {version!r}, not 'gemm'")
    scheme = Scheme(
        kind="int4",
        layout="awq",
        group_size=_group_size(settings, settings.get("group_size", settings.get("q_group_size"))),
        has_zeros=bool(settings.get("zero_point", True)),
    )
    ignored = _names(settings, "modules_to_not_convert")
    return Quantisation(method="awq", groups=((("Linear",), scheme),), ignored=ignored)


def _group_size(settings: Mapping[str, Any], size: Any) -> int:
    if not isinstance(size, int) or (size != -1 and (size < 32 or size % 32)):
        raise unsupported(settings, f"the group size is {size!r}, neither a multiple of 32 nor -1")
    return size


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantisation:
    groups = []
    for group in (settings.get("config_groups") or {}).values():
        form = group.get("format") or settings.get("format")
        groups.append((tuple(group.get("targets") or ("Linear",)), _compressed_group(settings, group, form)))
    if not groups:
        raise unsupported(settings, "config_groups is empty")
    if (sparsity := (settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise unsupported(settings, f"sparsity_config has format {sparsity!r}, not 'dense'")
    return Quantisation(method="compressed-tensors", groups=tuple(groups), ignored=_names(settings, "ignore"))


def _compressed_group(settings: Mapping[str, Any], group: Mapping[str, Any], form: Any) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if form in ("float-quantized", "naive-quantized") and (bits, kind) == (8, "float"):
        if strategy not in ("tensor", "channel", "block"):
            raise unsupported(
                settings, f"the strategy of 8-bit floats is {strategy!r}, not 'tensor', 'channel' or 'block'"
            )
        block = _block(settings, weights.get("block_structure") or ()) if strategy == "block" else None
        if inputs is not None and (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
            raise unsupported(settings, f"activations are {inputs.get('num_bits')} bits of {inputs.get('type')!r}")
        activations = "none" if inputs is None else "dynamic" if inputs.get("dynamic") else "static"
        return Scheme(kind="fp8", layout="compressed-tensors", block=block, activations=activations)
    if form == "pack-quantized" and (bits, kind) == (4, "int"):
        if inputs is not None:
            raise unsupported(settings, "activations are quantised beside weights of 4 bits")
        if strategy not in ("group", "channel"):
            raise unsupported(settings, f"the strategy of 4-bit integers is {strategy!r}, not 'group' or 'channel'")
        return Scheme(
            kind="int4",
            layout="compressed-tensors",
            group_size=_group_size(settings, weights.get("group_size") if strategy == "group" else -1),
            has_zeros=not weights.get("symmetric", True),
            is_ordered=weights.get("actorder") in ("group", "dynamic", True),
        )
    raise unsupported(settings, f"a group has format {form!r} with {bits} bits of {kind!r}")


def _is_8_bit_storage(quantization: Mapping[str, Any]) -> bool:
    """Weights alone in the one form that models/tensors.py reads as floats."""
    groups = (quantization.get("config_groups") or {}).values()
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return (
        bool(groups)
        and quantization.get("format") == "int-quantized"
        and all(
            not group.get("input_activations") and wanted.items() <= (group.get("weights") or {}).items()
            for group in groups
        )
    )
