"""The shape of a set of Medusa heads, and how their published forms are read. Nothing here reads weights.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774.

Plain names are those of vLLM's layout: `blocks.{head}.layers.{layer}.{weight,bias}`, `lm_heads.{head}.weight`.

Shape letters in comments: C hidden size of the target, W draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftloop.drafters.files import Shape
from draftloop.drafters.kinds import KINDS, check_kind
from draftloop.drafters.shapes import check_shapes
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.presets import PRESETS

TOKEN_MAP = "token_map"
"""int64 [W]: the target's id of each draft id."""

_FIRST_HEAD = "lm_heads.0.weight"
_WRAPPERS = re.compile(r"^medusa_heads?\.")
_ORIGINAL = re.compile(r"^(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
_INDEX = re.compile(r"^(?:blocks\.(\d+)\.layers\.(\d+)|lm_heads\.(\d+))\.")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Heads side by side over the target's last hidden state; head i says what comes i + 1 tokens after the next."""

    layout: str
    """Whose export it is, for messages."""
    hidden_size: int
    num_heads: int
    num_layers: int
    """Residual blocks of each head."""
    output_heads: Literal["each", "one", "target"]
    """Whose output heads: one for each head, one for all of them, or the target's."""
    output_size: int
    """Rows of an output head in the checkpoint; 0 where it is the target's."""
    map_size: int = 0
    """W, where a tensor `token_map` says which ids of the target they are; 0: there is none."""
    bias: bool = True
    method: str = "medusa"

    def shapes(self) -> dict[str, Shape]:
        """Every tensor that is read, by its plain name."""
        width = self.hidden_size
        found: dict[str, Shape] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                found[f"blocks.{head}.layers.{layer}.weight"] = (width, width)
                if self.bias:
                    found[f"blocks.{head}.layers.{layer}.bias"] = (width,)
            if self.output_heads == "each" or (self.output_heads == "one" and head == 0):
                found[f"lm_heads.{head}.weight"] = (self.output_size, width)
        if self.map_size:
            found[TOKEN_MAP] = (self.map_size,)
        return found


def parse(config: Mapping[str, Any], tensors: Mapping[str, Shape], *, name: str) -> tuple[MedusaConfig, dict[str, str]]:
    """Read config.json and the names and shapes of the tensors, which say nearly everything.

    Returns the shape of the heads and, for each tensor's plain name, its name in the files. Raises ConfigError for
    a checkpoint of another method, and for tensors that are missing, unexpected or of another shape than the
    others say. `name` is for messages.
    """
    bare = {_WRAPPERS.sub("", full): full for full in tensors}
    original = any(_ORIGINAL.match(plain) for plain in bare)
    check_kind("medusa", config, bare, name=name)
    names = {_renamed(plain, bare): full for plain, full in bare.items()} if original else bare
    shapes = {plain: tuple(tensors[full]) for plain, full in names.items()}
    heads = _read(config, shapes, "FasterDecoding" if original else "vLLM")
    if heads.output_heads == "one":  # exports may repeat it
        shapes = {plain: shape for plain, shape in shapes.items() if plain in heads.shapes() or "lm_heads" not in plain}
    check_shapes(heads.shapes(), shapes, name=name, kind=KINDS["medusa"])
    truncated = config.get("truncated_vocab_size")
    if truncated and config.get("vocab_size") and truncated < config["vocab_size"] and not heads.map_size:
        raise ConfigError(
            f"{name!r} has a draft vocabulary of {truncated} of {config['vocab_size']} ids, but no tensor {TOKEN_MAP} "
            "that says which; the export is incomplete"
        )
    return heads, names


def _renamed(plain: str, bare: Mapping[str, str]) -> str:
    """`{head}.{layer}.linear.weight` and, as the last of each head, `{head}.{N}.weight`."""
    found = _ORIGINAL.match(plain)
    if found is None:
        return plain
    head, layer, linear, kind = found.groups()
    return f"blocks.{head}.layers.{layer}.{kind}" if linear else f"lm_heads.{head}.{kind}"


def _read(config: Mapping[str, Any], shapes: Mapping[str, Shape], layout: str) -> MedusaConfig:
    found = [match.groups() for match in map(_INDEX.match, shapes) if match]
    # a config.json may say more than there is, which is refused with the names of what is missing
    said = int(config.get("num_heads") or 0) if layout == "vLLM" else 0
    num_heads = max([said, *(1 + int(block or head) for block, _, head in found)], default=0)
    block, head = shapes.get("blocks.0.layers.0.weight"), shapes.get(_FIRST_HEAD)
    whose = ("one" if head else "target") if config.get("original_lm_head") else "each"
    hidden_size = block[-1] if block else head[-1] if head else int(config.get("hidden_size") or 0)
    return MedusaConfig(
        layout=layout,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_layers=max((1 + int(layer) for _, layer, _ in found if layer), default=0),
        output_heads=whose,
        output_size=0 if whose == "target" else head[0] if head else int(config.get("vocab_size") or 0),
        map_size=shapes[TOKEN_MAP][0] if TOKEN_MAP in shapes else 0,
        bias="blocks.0.layers.0.bias" in shapes,
    )


def check_target(heads: MedusaConfig, name: str, target: ModelConfig, target_name: str) -> None:
    """Refuse heads that were made for another target. Raises ConfigError naming tensor, shapes and likely cause."""
    if heads.hidden_size != target.hidden_size:
        tensor = "blocks.0.layers.0.weight" if heads.num_layers else _FIRST_HEAD
        raise ConfigError(
            f"{tensor} of {name!r} has shape {list(heads.shapes()[tensor])}, but {target_name!r} has hidden size "
            f"{target.hidden_size}; the heads are made for another target"
        )
    # tables of one tokenizer may be padded differently, but not by much
    vocab, size = target.vocab_size, heads.output_size
    if size and size != heads.map_size and abs(size - vocab) > min(1024, vocab // 16):
        raise ConfigError(
            f"{_FIRST_HEAD} of {name!r} has shape {[size, heads.hidden_size]}, but {target_name!r} has {vocab} ids; "
            "the heads are made for another target"
        )


def _preset(target: str, num_heads: int) -> MedusaConfig:
    """One residual block and an output head of its own for each head: what is published."""
    model = PRESETS[target]
    return MedusaConfig(
        layout="preset",
        hidden_size=model.hidden_size,
        num_heads=num_heads,
        num_layers=1,
        output_heads="each",
        output_size=model.vocab_size,
    )


MEDUSA_PRESETS: dict[str, MedusaConfig] = {
    "medusa-llama-3.1-8b": _preset("llama-3.1-8b", 5),
    "medusa-tiny": _preset("tiny", 4),
}
"""Shapes without weights, for benchmarks and tests with `load_format="dummy"`."""
