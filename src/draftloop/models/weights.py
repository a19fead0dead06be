"""Memory for weights, plain or quantised, and what of it a checkpoint's tensors fill."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from draftloop.kernels.linear_fp8 import Fp8Weight
from draftloop.kernels.linear_int4 import Int4Weight
from draftloop.kernels.native.functions import available
from draftloop.kernels.quantised import Part, QuantisedWeight
from draftloop.models.quantisation import Quantisation, Scheme
from draftloop.models.shards import Plain, QuantisedShard, Shard, Slices, shard

logger = logging.getLogger(__name__)

Memory: TypeAlias = torch.nn.Parameter | QuantisedWeight
Destination: TypeAlias = Tensor | Part | Shard | QuantisedShard
"""What one tensor of a checkpoint fills."""


def parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Parameter:
    """Uninitialised weights: the loader fills every element, or fails."""
    return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def linear_weight(
    parts: Mapping[str, int],
    size: int,
    quantisation: Quantisation | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Memory:
    """Uninitialised weights of a linear layer from `size` numbers to those of its parts, by full module name.

    Plain unless all parts are quantised alike.
    """
    schemes = {quantisation.scheme(module) if quantisation else None for module in parts}
    scheme = schemes.pop()
    if schemes or scheme is None:
        return parameter(sum(parts.values()), size, device=device, dtype=dtype)
    return _quantised(scheme, tuple(parts.values()), size, device)


def _quantised(scheme: Scheme, rows: tuple[int, ...], size: int, device: torch.device) -> QuantisedWeight:
    if scheme.kind == "fp8":
        return Fp8Weight(sum(rows), size, block=scheme.block, parts=rows, activations=scheme.activations, device=device)
    # a checkpoint's groups fit, as was checked; ours are made to
    group_size = math.gcd(scheme.group_size, size) if scheme.layout == "online" else scheme.group_size
    return Int4Weight(
        sum(rows),
        size,
        group_size=group_size,
        has_zeros=scheme.has_zeros,
        is_ordered=scheme.is_ordered,
        device=device,
    )


def split_rows(weight: Memory, sizes: tuple[int, ...]) -> list[Tensor] | list[Part]:
    """The parts of a fused weight, to be filled."""
    return weight.split(sizes) if isinstance(weight, QuantisedWeight) else list(weight.data.split(sizes))


def sharded(parts: list[Tensor] | list[Part], slices: Sequence[Slices | None] | None) -> list[Destination]:
    """What the tensors of a checkpoint fill whose parts these are."""
    if slices is None:
        return list(parts)
    return [_sharded(part, one) for part, one in zip(parts, slices, strict=True)]


def _sharded(part: Tensor | Part, slices: Slices | None) -> Destination:
    if isinstance(part, Tensor):
        return shard(part, slices)
    return part if slices is None else QuantisedShard(part, slices)


def plain(destinations: Mapping[str, Destination]) -> dict[str, Plain]:
    """Of a drafter's head, whose weights are never quantised."""
    found = {name: weight for name, weight in destinations.items() if isinstance(weight, Tensor | Shard)}
    assert len(found) == len(destinations)
    return found


def keep_narrow(
    weights: Iterable[torch.nn.Parameter], destinations: Mapping[str, Destination], narrow: Container[str]
) -> bool:
    """Let float32 matrices on a CPU be bf16 where all tensors are that fill them, the `narrow` ones; whether any is.

    Nothing must be filled yet, and destinations must be asked for anew: this memory is given back. It saves half of it,
    and of the time that passes take to read it (kernels/widened.py), but only where the C kernels can be had.
    """
    wide = {_storage(to) for name, to in destinations.items() if name not in narrow}
    filled = {_storage(to) for to in destinations.values()} - wide
    found = [
        weight
        for weight in weights
        if (weight.dim(), weight.device.type, weight.dtype) == (2, "cpu", torch.float32) and _storage(weight) in filled
    ]
    if not found or not available():
        return False
    for weight in found:
        weight.data = torch.empty_like(weight, dtype=torch.bfloat16)
    return True


def _storage(memory: Destination) -> int:
    """Tells memory from other memory."""
    if isinstance(memory, Shard):
        memory = memory.memory
    return memory.untyped_storage().data_ptr() if isinstance(memory, Tensor) else 0


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, Memory]]:
    """Every weight once, with its name; a quantised one as a whole."""
    seen = set()
    for prefix, part in module.named_modules():
        if isinstance(part, QuantisedWeight):
            yield prefix, part
            continue
        for name, weight in part.named_parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield f"{prefix}.{name}" if prefix else name, weight


def warn_of_plain_layers(module: torch.nn.Module, architecture: str) -> None:
    """Say where a decoder has no quantised layers, though its checkpoint is quantised."""
    if not any(isinstance(part, QuantisedWeight) for part in module.modules()):
        logger.warning(
            "layers of %s run as plain ones, though the checkpoint is quantised: it saves no time", architecture
        )


def dequantise(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Turn quantised weights into the plain ones that they stand for."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, QuantisedWeight):
                delattr(part, name)
                setattr(part, name, torch.nn.Parameter(child.dequantise(dtype), requires_grad=False))
