"""EAGLE: a small head drafts from the target's own hidden states.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024 (method
`eagle`; EAGLE-2 changed how its trees grow, not the head), and "EAGLE-3: Scaling up Inference Acceleration
of Large Language Models via Training-Time Test", 2025 (method `eagle3`). Drafts are a chain, or a tree of a shape
that the configuration gives. What a round runs is in drafters/pairs.py.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Target
from draftloop.drafters.eagle_config import HEAD_PRESETS, EagleConfig, Method, check_target, parse
from draftloop.drafters.eagle_model import EagleHead
from draftloop.drafters.files import read_shapes
from draftloop.drafters.fill import fill, fill_dummy
from draftloop.drafters.locate import locate
from draftloop.drafters.pairs import PairDrafter
from draftloop.drafters.tree import check_width
from draftloop.models.decoder import Decoder
from draftloop.models.dense import attention_shape
from draftloop.models.resolve import read_json

logger = logging.getLogger(__name__)


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
        self.config, self.names = self._find()
        check_target(self.config, str(spec.model), target.config, target.name)
        self._aux_layers = self.config.aux_layers(target.config.num_layers, spec.aux_layer_offset)
        # beyond what it was trained for a head drafts badly; its rows stop drafting, and are verified on
        self.longest = min(spec.max_model_len or self.config.model.max_position_embeddings, target.max_model_len)
        name = resolve_attention_name(spec.attention_backend or "auto", target.device.type)
        self.backend_class = attention_backend(name, target.device.type)
        self.backend_class.check_tree(self.tree, self.config.model.sliding_window)
        check_width(self.tree, self.config.draft_vocab_size)

    def _find(self) -> tuple[EagleConfig, dict[str, str]]:
        """The head's shape and the names of its tensors. Reads no weights; raises ConfigError."""
        preset, self.folder = locate(self.spec, self.target, HEAD_PRESETS, method=self.method)
        if self.folder is None:
            assert preset is not None
            return preset, {}
        config = read_json(self.folder / "config.json")
        return parse(config, read_shapes(self.folder), method=self.method, name=str(self.spec.model))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def aux_layer_offset(self) -> int | None:
        if self.config.fuses_embedding:
            return None
        asked = self.spec.aux_layer_offset
        return int(self.config.ids_are_outputs) if asked is None else asked

    def describe(self) -> str:
        parts = [super().describe(), f"{self.spec.model} ({self.config.layout} layout)"]
        if not self.tree.is_chain:
            parts.append(self.tree.describe())
        if not self.config.fuses_embedding:
            parts.append(f"reads what enters layers {', '.join(map(str, self._aux_layers))}")
        if self.longest < self.target.max_model_len:
            parts.append(f"rows stop drafting at {self.longest} tokens")
        return ", ".join(parts)

    # ---- weights ----------------------------------------------------------------------------

    def borrow(self, target: Decoder) -> None:
        self._embed_tokens, self._lm_head = target.embed_tokens, target.lm_head
        for table, own in (("embed_tokens", self.config.own_embeddings), ("lm_head", self.config.own_head)):
            if not own:
                logger.info("%s has no %s: it uses the target's", self.spec.model, table)

    def load(self, *, progress: bool) -> None:
        target, config = self.target, self.config
        # the head's own weights and cache: nothing of how the target is quantised or cached applies to them
        shape = attention_shape(config.model, page_size=target.page_size, dtype=target.dtype)
        self.backend_class.check(shape, target.device.type)
        self.head = EagleHead(
            config,
            self.backend_class(shape, target.device),
            device=target.device,
            dtype=target.dtype,
            max_positions=target.max_positions,
            embed_tokens=self._embed_tokens,
            lm_head=self._lm_head,
        )
        del self._embed_tokens, self._lm_head
        if self.folder is None:
            fill_dummy(self.head, vocab_size=target.vocab_size, seed=target.seed)
        else:
            fill(self.head, self.folder, self.names, vocab_size=target.vocab_size, name=str(self.spec.model))
        self.head.settle()


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
