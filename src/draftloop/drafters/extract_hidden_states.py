"""Drafts nothing, and writes what the target computes: chosen layers' hidden states, for training drafters.

Each shard is a safetensors file of `shard_tokens` tokens or more, sorted by request and position.
A request's last token has no states, since the target never reads it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Observed, Rounds, Target
from draftloop.errors import CapacityError, ConfigError
from draftloop.graphs.phase import Phase
from draftloop.kvcache.rows import RowState
from draftloop.models.dense import FINAL_HIDDEN

FORMAT = "draftloop hidden states 1"
DEFAULT_SHARD_TOKENS = 8192


class ExtractHiddenStatesDrafter(Drafter):
    """Observes the target. The engine decodes as without speculation."""

    name = "extract_hidden_states"
    options = frozenset({"layer_ids", "output_dir", "shard_tokens"})
    drafts = False
    observes = True

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if not spec.layer_ids or spec.output_dir is None:
            raise ConfigError("speculative method 'extract_hidden_states' needs 'layer_ids' and 'output_dir'")
        num_layers = target.config.num_layers
        bad = next((i for i in spec.layer_ids if i != FINAL_HIDDEN and not 0 <= i <= num_layers), None)
        if bad is not None:
            raise ConfigError(
                f"layer_ids names layer {bad}, but {target.name!r} has {num_layers} layers; name 0 to {num_layers} "
                f"(what enters a layer; {num_layers}: what leaves the last), or {FINAL_HIDDEN} after the final norm"
            )
        if len(set(spec.layer_ids)) < len(spec.layer_ids):
            raise ConfigError(f"layer_ids is {list(spec.layer_ids)}; name each layer once")
        self._layer_ids = spec.layer_ids
        self._writer = ShardWriter(
            Path(spec.output_dir),
            spec.shard_tokens or DEFAULT_SHARD_TOKENS,
            {
                "format": FORMAT,
                "model": target.name,
                "layer_ids": json.dumps(list(spec.layer_ids)),
                "hidden_size": str(target.config.hidden_size),
                "dtype": str(target.dtype).removeprefix("torch."),
            },
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._layer_ids

    def describe(self) -> str:
        return f"{self.name}, layers {', '.join(map(str, self._layer_ids))} to {self.spec.output_dir}"

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        return []

    def rounds(self, *, sampled: bool) -> Rounds:
        return Rounds()

    def observe(self, rows: Sequence[Observed]) -> None:
        for row in rows:
            self._writer.add(row)

    def close(self) -> None:
        self._writer.flush()


class ShardWriter:
    """Collects tokens and writes a shard when there are enough. A shard that has its name is complete."""

    def __init__(self, folder: Path, shard_tokens: int, metadata: dict[str, str]) -> None:
        self.folder, self.shard_tokens, self.metadata = folder, shard_tokens, metadata
        # several engines may write to one folder, and number their requests alike
        self.run = uuid.uuid4().hex[:12]
        self.num_shards = 0
        self._rows: list[Observed] = []
        self._num_tokens = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir {str(folder)!r} cannot be made: {error}; name another folder") from error

    def add(self, row: Observed) -> None:
        self._rows.append(row)
        self._num_tokens += len(row.token_ids)
        if self._num_tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what there is. Raises CapacityError if it cannot be written; earlier shards stay as they are."""
        if not self._num_tokens:
            return
        rows = sorted(self._rows, key=lambda row: (row.number, row.first_position))
        counts = torch.tensor([len(row.token_ids) for row in rows])
        numbers = torch.tensor([row.number for row in rows])
        tensors = {
            "token_ids": torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.int32),
            "positions": torch.cat([torch.arange(len(row.token_ids)) + row.first_position for row in rows]).int(),
            "requests": torch.repeat_interleave(numbers, counts),
            "hidden_states": torch.cat([row.hidden for row in rows]),
        }
        names = {str(row.number): row.request_id for row in rows}
        self._save(tensors, {**self.metadata, "run": self.run, "request_ids": json.dumps(names)})
        self._rows, self._num_tokens = [], 0

    def _save(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        path = self.folder / f"hidden-{self.run}-{self.num_shards:05d}.safetensors"
        unfinished = path.with_name(f".{path.name}.part")
        try:
            save_file(tensors, unfinished, metadata=metadata)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise CapacityError(
                f"{self._num_tokens} tokens' hidden states cannot be written to {str(self.folder)!r}: {error}; the "
                f"{self.num_shards} shards before are complete. Make room, or write fewer layers or requests"
            ) from error
        self.num_shards += 1


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """One request's tokens, from its first on, and their states."""

    request_id: str
    token_ids: Tensor
    """int32 [T]"""
    hidden: Tensor
    """[T, layers * hidden size]: the layers side by side, in the order of `layer_ids`."""
    layer_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Consecutive tokens of one request in one shard."""

    path: Path
    start: int
    end: int
    first_position: int


def read_hidden_states(folder: str | os.PathLike[str]) -> Iterator[HiddenStates]:
    """Requests of a folder, one by one; only the pieces of one are in memory at a time.

    Raises ConfigError for a folder without shards, a foreign file among them, or a shard that is missing.
    """
    paths = sorted(Path(folder).glob("hidden-*.safetensors"))
    if not paths:
        raise ConfigError(f"{os.fspath(folder)!r} holds no hidden states; name the output_dir they were written to")
    pieces: dict[tuple[str, int], list[_Piece]] = defaultdict(list)
    names: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    for path in paths:
        with safe_open(path, "pt") as shard:
            metadata: dict[str, Any] = shard.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ConfigError(f"{str(path)!r} is not a shard of hidden states; move it elsewhere")
            run, ids = metadata["run"], json.loads(metadata["request_ids"])
            layer_ids = tuple(json.loads(metadata["layer_ids"]))
            numbers, positions = shard.get_tensor("requests"), shard.get_tensor("positions")
        found, counts = torch.unique_consecutive(numbers, return_counts=True)
        end = 0
        for number, count in zip(found.tolist(), counts.tolist(), strict=True):
            start, end = end, end + count
            first = int(positions[start])
            pieces[run, number].append(_Piece(path=path, start=start, end=end, first_position=first))
            names[run, number] = ids[str(number)], layer_ids
    for key, parts in pieces.items():
        yield _join(*names[key], parts)


def _join(request_id: str, layer_ids: tuple[int, ...], parts: list[_Piece]) -> HiddenStates:
    token_ids, hidden, known = [], [], 0
    for part in parts:
        if part.first_position != known:
            raise ConfigError(
                f"request {request_id!r} has tokens up to position {known}, then from {part.first_position} in "
                f"{part.path.name}; a shard before it is missing"
            )
        known += part.end - part.start
        with safe_open(part.path, "pt") as shard:
            token_ids.append(shard.get_slice("token_ids")[part.start : part.end])
            hidden.append(shard.get_slice("hidden_states")[part.start : part.end])
    return HiddenStates(
        request_id=request_id, token_ids=torch.cat(token_ids), hidden=torch.cat(hidden), layer_ids=layer_ids
    )
