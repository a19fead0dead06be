"""Tensor parallelism: which part of each weight a rank has, and how what the ranks compute is put together.

Query and key/value heads, the MLP's inner columns and the vocabulary of the output head are divided; norms, embeddings
and the residual stream are whole on every rank. Attention and MLP each end in a sum over the ranks. Where there are
fewer key/value heads than ranks, neighbours have the same one.

Shape suffixes: T tokens, K input columns, N output columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from draftloop.config.engine import EngineConfig
from draftloop.config.speculative import SpeculativeConfig
from draftloop.distributed.group import Group
from draftloop.errors import ConfigError
from draftloop.kernels.linear import Weight, linear, residual_linear
from draftloop.kernels.linear_fp8 import Fp8Values, spread
from draftloop.kernels.quantised import Part
from draftloop.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Part of a tensor: along `dim`, which is `size` long, these runs of entries (start, count), joined."""

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """The part, a view where it is one run. Of a tensor that is mapped from a file, no more is read."""
        parts = [whole.narrow(self.dim, start, count) for start, count in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def take_fp8(self, whole: Fp8Values) -> Fp8Values:
        """The same of a quantised weight and its scales, whose blocks get as small as the part's edges ask for."""
        weight_NK, scale_PQ, dim = self.take(whole.weight_NK), whole.scale_PQ, self.dim
        if whole.block is None:
            if dim == 0 and scale_PQ.shape[0] > 1:
                scale_PQ = self.take(scale_PQ)
            return whole._replace(weight_NK=weight_NK, scale_PQ=scale_PQ)
        finer = list(whole.block)
        finer[dim] = math.gcd(finer[dim], *(edge for run in self.runs for edge in run))
        rows, columns = whole.weight_NK.shape
        scale_PQ = spread(scale_PQ, whole.block, (finer[0], finer[1]), (rows, columns))
        runs = tuple((start // finer[dim], count // finer[dim]) for start, count in self.runs)
        scale_PQ = replace(self, runs=runs).take(scale_PQ)
        return Fp8Values(weight_NK, scale_PQ, (finer[0], finer[1]), whole.input_scale)


class Shard:
    """Memory for a part of a checkpoint's tensor, filled like that tensor."""

    def __init__(self, memory: Tensor, slices: Slices) -> None:
        """`memory` may be longer than the part; the rest of it is padding."""
        length = sum(count for _, count in slices.runs)
        self.memory, self.slices = memory.detach().narrow(slices.dim, 0, length), slices
        memory.detach().narrow(slices.dim, length, memory.shape[slices.dim] - length).zero_()

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        shape = list(self.memory.shape)
        shape[self.slices.dim] = self.slices.size
        return torch.Size(shape)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def dim(self) -> int:
        return self.memory.dim()

    def copy_(self, whole: Tensor) -> None:
        self.memory.copy_(self.slices.take(whole))


class QuantisedShard(NamedTuple):
    """A quantised weight for a part of a checkpoint's."""

    part: Part
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""
        shape = list(self.part.shape)
        shape[self.slices.dim] = self.slices.size
        return tuple(shape)


Plain: TypeAlias = Tensor | Shard
"""What a tensor of plain numbers fills."""


def shard(memory: Tensor, slices: Slices | None) -> Plain:
    """What the whole tensor fills; None: memory is for all of it."""
    return memory if slices is None else Shard(memory, slices)


def fill_random(memory: Tensor, slices: Slices | None, std: float, generator: torch.Generator) -> None:
    """The same numbers on every number of ranks: drawn for the whole tensor, of which the part is kept."""
    if slices is None:
        memory.normal_(0, std, generator=generator)
        return
    part = Shard(memory, slices)
    part.copy_(torch.empty(part.shape, dtype=part.dtype, device=part.device).normal_(0, std, generator=generator))


def named_slices(module: torch.nn.Module) -> Iterator[tuple[str, Slices]]:
    """Of every divided weight, by the name of its parameter."""
    for prefix, part in module.named_modules():
        found: Mapping[str, Slices] = vars(part).get("slices", {})
        for name, slices in found.items():
            yield f"{prefix}.{name}" if prefix else name, slices


# ---- how sizes are divided ------------------------------------------------------------------


def why_not_divided(config: ModelConfig, size: int) -> str:
    """What keeps a model's layers from being divided among so many ranks; empty if nothing does."""
    if type(config) is not ModelConfig:
        return f"layers of {config.architecture} cannot be divided"
    if config.whole_qk_norm:
        return f"queries of {config.architecture} are normed over all heads"
    if config.num_heads % size:
        return f"it does not divide the {config.num_heads} attention heads"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"it neither divides the {config.num_kv_heads} key/value heads nor is a multiple of them"
    if config.experts is not None and config.experts.inner_size % size:
        return f"it does not divide the {config.experts.inner_size} columns of an expert"
    if config.intermediate_size % size:
        return f"it does not divide the MLP's {config.intermediate_size} columns"
    if config.quantisation and any(scheme.kind != "fp8" for _, scheme in config.quantisation.groups):
        return "weights of 4 bits are not divided"
    return ""


def check(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what several ranks cannot run, before anything is started. Raises ConfigError."""
    size = config.tensor_parallel_size
    _check_drafters(config.speculation, size)
    if size == 1:
        return
    said = f"tensor_parallel_size is {size}, but"
    if why := why_not_divided(model, size):
        raise ConfigError(f"{said} {why}; choose another number, or 1")
    if config.enable_lora:
        raise ConfigError(f"{said} enable_lora is set, and adapters are not divided; leave one out")


def _check_drafters(spec: SpeculativeConfig | None, size: int) -> None:
    for part in (spec, *(spec.drafters or ())) if spec else ():
        if (asked := part.draft_tensor_parallel_size) not in (None, 1, size):
            limit = f"1, or tensor_parallel_size, {size}" if size > 1 else "1 without tensor_parallel_size"
            raise ConfigError(f"draft_tensor_parallel_size is {asked}; it must be {limit}")


def share(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes of what each of `size` ranks has of the layers."""
    if size == 1:
        return config
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


class Division:
    """Which parts of a model's weights a rank has. Of a group of one rank nothing is divided."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        self.config, self.group = config, group

    def _runs(self, sizes: Sequence[int], mine: Sequence[tuple[int, int]], dim: int) -> list[Slices] | None:
        if self.group.size == 1:
            return None
        return [Slices(dim=dim, size=size, runs=(run,)) for size, run in zip(sizes, mine, strict=True)]

    def qkv(self) -> list[Slices] | None:
        """Rows of q, k and v."""
        config, rank, size = self.config, self.group.rank, self.group.size
        mine = share(config, size) if size > 1 else config
        first_kv = rank * config.num_kv_heads // size
        runs = [(rank * mine.num_heads, mine.num_heads), *[(first_kv, mine.num_kv_heads)] * 2]
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        width = config.head_dim
        return self._runs([h * width for h in heads], [(s * width, c * width) for s, c in runs], 0)

    def heads(self) -> Slices | None:
        """Entries of what there is one of per query head."""
        return self._even(self.config.num_heads, 0)

    def queries(self) -> Slices | None:
        """Columns of the projection behind attention."""
        return self._even(self.config.num_heads * self.config.head_dim, 1)

    def gate_up(self) -> list[Slices] | None:
        """Rows of gate and up."""
        one = self._even(self.config.intermediate_size, 0)
        return None if one is None else [one, one]

    def inner(self) -> Slices | None:
        """Columns of the projection behind the MLP."""
        return self._even(self.config.intermediate_size, 1)

    def _even(self, size: int, dim: int) -> Slices | None:
        if self.group.size == 1:
            return None
        count = size // self.group.size
        return Slices(dim=dim, size=size, runs=((self.group.rank * count, count),))


def joined(parts: Sequence[Slices]) -> Slices:
    """Of a tensor that has these parts one after another."""
    runs, start = [], 0
    for part in parts:
        runs += [(start + first, count) for first, count in part.runs]
        start += part.size
    return Slices(dim=parts[0].dim, size=start, runs=tuple(runs))


# ---- layers ---------------------------------------------------------------------------------


def summed_linear(
    x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None, group: Group, *, before_norm: bool = False
) -> Tensor:
    """A linear layer of which each rank has some columns, added up: [T, N].

    `before_norm`: an `add_rms_norm` follows, so that alone it is what `residual_linear` returns.
    """
    if group.size == 1:
        return (residual_linear if before_norm else linear)(x_TK, weight_NK, bias_N)
    return group.all_reduce(linear(x_TK, weight_NK, bias_N if group.is_first else None))
