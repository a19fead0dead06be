"""From files to the weights of a model: many tensors at a time, straight to where they belong.

Files are mapped into memory. Threads copy tensors, in the order of the file, to the device; for a GPU through pinned
memory of their own, so that reading and copying overlap.

Shape suffixes: N output columns, K input columns.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kernels.linear_fp8 import Fp8Values
from draftloop.kernels.quantised import Part
from draftloop.models.quantisation import Quantisation
from draftloop.models.shards import QuantisedShard, Shard
from draftloop.models.tensors import FLOAT_TYPES, Tensors, mtp_tensors, open_tensors
from draftloop.models.weights import Destination, keep_narrow
from draftloop.observability.progress import progress_bar

if TYPE_CHECKING:
    from draftloop.models.decoder import Decoder

logger = logging.getLogger(__name__)

MAX_NAMED = 5
"""Tensors named in one message."""
STAGE_BYTES = 64 << 20
"""Pinned memory of each thread."""
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
UNLIKE_HALVES = {("BF16", torch.float16), ("F16", torch.bfloat16)}
"""Either has numbers that the other has not."""
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")
"""Of 8-bit caches, last part of the name; not applied, since the scale of a cache is 1 here."""
APPLIED_SCALES = ("k_scale", "v_scale", "kv_scale")
"""Those that an 8-bit cache would need: the cache holds keys and values only."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """How reading went."""

    num_bytes: int
    seconds: float
    kept_narrow: bool = False
    """Whether there are matrices that stay bf16 where passes compute in float32."""

    def __str__(self) -> str:
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        kept = "; bfloat16 matrices stay so" if self.kept_narrow else ""
        return f"{self.num_bytes / 2**30:.2f} GiB in {self.seconds:.1f} s, {rate:.1f} GB/s{kept}"


def fill_from_files(
    model: Decoder,
    files: Sequence[Path],
    *,
    quantisation: Quantisation | None = None,
    may_narrow: bool = True,
    show_progress: bool | None = None,
) -> Loaded:
    """Fill every weight; `may_narrow`: having given matrices the type that they have in the files (`keep_narrow`).

    Raises ConfigError for tensors that are missing, unexpected or of another shape or type.
    """
    begin = time.perf_counter()
    device = model.embed_tokens.device
    with open_tensors(files, quantisation) as tensors:
        destinations = model.destinations(tensors.shapes)
        skipped = model.needless(tensors.shapes) | mtp_tensors(tensors.shapes, model.config.num_layers)
        zero_biases = _needless_of_quantised(tensors, destinations)
        scales = {name for name in tensors.shapes if name.endswith(CACHE_SCALES)}
        if scales:
            _check_cache_scales(tensors, scales, model.backend.shape.kv_dtype)
        skipped |= zero_biases | scales
        _check_kinds(tensors, destinations, quantisation)
        check_tensors(tensors, destinations, skipped, files[0].parent)
        kept_narrow = may_narrow and keep_narrow(model.parameters(), destinations, tensors.narrow)
        if kept_narrow:
            destinations = model.destinations(tensors.shapes)
        plain = {name: to for name, to in destinations.items() if not isinstance(to, Part | QuantisedShard)}
        warn_of_rounding(
            {name: (tensors.types[name], to.dtype) for name, to in plain.items() if name not in tensors.stored},
            files[0].parent,
        )
        for name in sorted(zero_biases):
            if bool(tensors.read(name).any()):
                raise ConfigError(f"{name} is not zero, but {model.config.architecture} has no such bias")
        names = [name for name in tensors.shapes if name in destinations]
        staging = _Staging(device)

        def put(name: str) -> None:
            with torch.inference_mode():  # the destinations may have been made in it; threads begin without
                _put(name, tensors, destinations[name], staging)

        with ThreadPoolExecutor(_num_threads(device)) as pool:
            done = pool.map(put, names)
            for _ in progress_bar(
                done, description="Loading weights", unit="tensor", show=show_progress, total=len(names)
            ):
                pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Loaded(num_bytes=bytes_of(files), seconds=time.perf_counter() - begin, kept_narrow=kept_narrow)


def _num_threads(device: torch.device) -> int:
    """On a CPU the copies themselves are parallel."""
    return min(8, os.cpu_count() or 1) if device.type == "cuda" else 1


def bytes_of(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _put(name: str, tensors: Tensors, destination: Destination, staging: _Staging) -> None:
    if isinstance(destination, Shard):
        staging.copy(destination.slices.take(tensors.read(name)), destination.memory)
        return
    slices = None
    if isinstance(destination, QuantisedShard):
        destination, slices = destination
    if isinstance(destination, Tensor):
        stored = tensors.stored.get(name)
        if stored is None:
            staging.copy(tensors.read(name), destination)
        else:
            destination.copy_(stored.read(lambda raw: staging.move(tensors.read_raw(raw))).dequantise())
        return
    if (stored := tensors.stored.get(name)) is None:
        plain = tensors.read(name)
        plain = staging.move(plain if slices is None else slices.take(plain))
        with staging.lock:
            destination.quantise(plain)
        return
    values = stored.read(lambda raw: staging.move(tensors.read_raw(raw)))
    if slices is not None:
        assert isinstance(values, Fp8Values)
        values = slices.take_fp8(values)
    try:
        with staging.lock:  # parts of a fused weight share scales
            destination.fill(values)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be joined with its neighbours: {error}") from error


class _Staging:
    """Copies from mapped files to the device, through pinned memory of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self._local = threading.local()

    def move(self, tensor: Tensor) -> Tensor:
        """On the device; the file's own memory where that is the CPU."""
        if self.device.type == "cpu":
            return tensor
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        self.copy(tensor, found)
        return found

    def copy(self, tensor: Tensor, destination: Tensor) -> None:
        """Rounded to the destination's type, on the device."""
        if self.device.type == "cpu":
            destination.copy_(tensor)
            return
        if tensor.dtype != destination.dtype or not destination.is_contiguous():
            destination.copy_(self.move(tensor))
            return
        source, target = (part.contiguous().view(-1).view(torch.uint8) for part in (tensor, destination))
        buffer = self._buffer()
        for start in range(0, source.numel(), STAGE_BYTES):
            piece = source[start : start + STAGE_BYTES]
            part = buffer[: piece.numel()]
            part.copy_(piece)
            target[start : start + STAGE_BYTES].copy_(part, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()

    def _buffer(self) -> Tensor:
        if not hasattr(self._local, "buffer"):
            torch.cuda.set_device(self.device)
            self._local.buffer = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._local.buffer


def _needless_of_quantised(tensors: Tensors, destinations: Mapping[str, Destination]) -> set[str]:
    """Biases that GPTQ writes for layers that have none."""
    return {
        bias
        for name in tensors.stored
        if (bias := f"{name.removesuffix('weight')}bias") in tensors.shapes and bias not in destinations
    }


def check_tensors(tensors: Tensors, destinations: Mapping[str, Destination], skipped: set[str], folder: Path) -> None:
    """Compare the files' headers with what the model needs; reads no weights. Raises ConfigError."""
    needless = {name for name in tensors.shapes if name in skipped or name.endswith("rotary_emb.inv_freq")}
    found = {name: list(shape) for name, shape in tensors.shapes.items() if name not in needless}
    wrong = [
        f"{name} is of type {tensors.types[name]}, supported: {', '.join(FLOAT_TYPES)}"
        for name in found
        if tensors.types[name] not in FLOAT_TYPES
    ]
    for name, destination in destinations.items():
        expected = list(destination.shape)
        if name not in found:
            wrong.append(f"{name} {expected} is missing")
        elif found[name] != expected:
            wrong.append(f"{name} has shape {found[name]}, but config.json asks for {expected}")
    wrong += [f"{name} {shape} is unexpected" for name, shape in found.items() if name not in destinations]
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ConfigError(
            f"the weights in {folder} do not fit config.json: {'; '.join(wrong[:MAX_NAMED])}{more}. "
            "Check that both are of the same model"
        )


def _check_cache_scales(tensors: Tensors, names: set[str], kv_dtype: torch.dtype) -> None:
    """An 8-bit cache has scale 1: others, which the weights were calibrated for, are refused rather than ignored."""
    if kv_dtype.itemsize > 1:
        logger.info("%d scales of an 8-bit cache are not needed: the cache is %s", len(names), kv_dtype)
        return
    for name in sorted(names):
        if name.endswith(APPLIED_SCALES) and bool(((scale := tensors.read(name)) != 1).any()):
            raise ConfigError(
                f"{name} is {scale.flatten()[0].item():g}, but an fp8 cache supports only scales of 1; "
                "leave kv_cache_dtype at auto"
            )


def _check_kinds(tensors: Tensors, destinations: Mapping[str, Destination], quantisation: Quantisation | None) -> None:
    """Plain weights where quantised ones were promised are never rounded on the quiet."""
    if quantisation is None or quantisation.is_online:
        return
    quantised = Part | QuantisedShard
    plain = [name for name, to in destinations.items() if isinstance(to, quantised) and name in tensors.shapes]
    plain = [name for name in plain if name not in tensors.stored]
    if plain:
        raise ConfigError(
            f"{plain[0]} is of type {tensors.types[plain[0]]}, but config.json says that it is quantised "
            f"({quantisation.method!r}; {len(plain)} such); name its module among those that are not"
        )


def warn_of_rounding(kinds: Mapping[str, tuple[str, torch.dtype]], folder: Path) -> None:
    """Say which tensors lose precision: those of a wider type than the memory that they fill, both by name."""
    rounded: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, (kind, dtype) in kinds.items():
        if SIZES.get(kind, 0) > dtype.itemsize or (kind, dtype) in UNLIKE_HALVES:
            rounded.setdefault((kind, dtype), []).append(name)
    for (kind, dtype), names in rounded.items():
        logger.warning(
            "%d of %d tensors in %s are %s and rounded to %s, the first being %s; dtype float32 keeps them",
            len(names),
            len(kinds),
            folder,
            kind,
            str(dtype).removeprefix("torch."),
            names[0],
        )
