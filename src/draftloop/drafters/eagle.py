"""EAGLE: a small head drafts from the target's own hidden states.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024 (method
`eagle`; EAGLE-2 changed how its trees grow, not the head), and "EAGLE-3: Scaling up Inference Acceleration
of Large Language Models via Training-Time Test", 2025 (method `eagle3`). Drafts are a chain, or a tree of a shape
that the configuration gives. What a round runs is in drafters/pairs.py.
"""

from __future__ import annotations

from typing import ClassVar

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Target
from draftloop.drafters.eagle_config import HEAD_PRESETS, EagleConfig, Method, check_target, parse
from draftloop.drafters.eagle_model import EagleHead
from draftloop.drafters.files import read_shapes
from draftloop.drafters.locate import locate
from draftloop.drafters.pairs import PairDrafter
from draftloop.drafters.tree import check_width
from draftloop.models.config_file import read_config


class EagleBase(PairDrafter[EagleConfig, EagleHead]):
    """What all methods share."""

    method: ClassVar[Method]
    options = frozenset(
        {
            "model",
            "revision",
            "draft_sample_method",
            "attention_backend",
            "load_format",
            "max_model_len",
            "speculative_token_tree",
        }
    )

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self._aux_layers = self.config.aux_layers(target.config.num_layers, spec.aux_layer_offset)
        check_width(self.tree, self.config.draft_vocab_size)

    def find(self) -> EagleConfig:
        name, target = str(self.spec.model), self.target
        found, self.folder = locate(self.spec, target, HEAD_PRESETS, method=self.method)
        if self.folder is not None:
            config = read_config(self.folder)
            found, self.names = parse(config, read_shapes(self.folder), method=self.method, name=name)
        assert found is not None
        check_target(found, name, target.config, target.name)
        return found

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def aux_layer_offset(self) -> int | None:
        if self.config.fuses_embedding:
            return None
        asked = self.spec.aux_layer_offset
        return int(self.config.ids_are_outputs) if asked is None else asked

    def details(self) -> list[str]:
        parts = [f"{self.spec.model} ({self.config.layout} layout)"]
        if not self.tree.is_chain:
            parts.append(self.tree.describe())
        if not self.config.fuses_embedding:
            parts.append(f"reads what enters layers {', '.join(map(str, self._aux_layers))}")
        return parts

    def load(self, *, progress: bool) -> None:
        self.head = self.make(EagleHead)
        self.head.settle_head()


class EagleDrafter(EagleBase):
    """EAGLE-1 and EAGLE-2 heads: they read what the target's output head reads."""

    name = "eagle"
    method = "eagle"


class Eagle3Drafter(EagleBase):
    """EAGLE-3 heads: they read the residual stream at three (or more) places of the target."""

    name = "eagle3"
    method = "eagle3"
    options = EagleBase.options | {"aux_layer_offset"}
    in_parallel = "peagle"
