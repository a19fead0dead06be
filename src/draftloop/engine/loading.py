"""What is loaded: how a rank's part of the model is laid out, the drafter, and the target's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from draftloop.attention.base import AttentionBackend, AttentionShape
from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.engine import EngineConfig
from draftloop.config.resolve import Resolved
from draftloop.distributed.launcher import Ranks
from draftloop.drafters.base import Drafter, Target, drafter_class
from draftloop.drafters.made_for import warn_of_other_target
from draftloop.engine.check_settings import check_deterministic
from draftloop.errors import ConfigError
from draftloop.kernels.fp8_cache import FP8
from draftloop.kvcache.pages import pages_in_sight
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import Decoder, attention_shapes
from draftloop.models.loader import ModelSource, load_model
from draftloop.models.shards import share
from draftloop.scheduler.row_pages import tokens_per_step

if TYPE_CHECKING:
    from draftloop.models.fill import Loaded


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Types and sizes of a rank's part of the target, and who computes its attention."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    layers: ModelConfig
    """With the sizes that one rank has of the layers."""
    overhang: int
    """Positions past a row's last token that a pass may reach."""
    max_positions: int
    attention: type[AttentionBackend]
    shapes: list[AttentionShape]
    windows: frozenset[int]
    """Sliding windows of layers that have pages of their own, and let go of those behind the window."""

    @classmethod
    def of(cls, config: EngineConfig, model_config: ModelConfig, resolved: Resolved, ranks: Ranks) -> Layout:
        """Raises ConfigError where the attention backend cannot serve the model or the drafts."""
        spec, device_type = config.speculation, ranks.device.type
        dtype = getattr(torch, resolved.dtype)
        kv_dtype = dtype if config.kv_cache_dtype == "auto" else FP8
        layers = share(model_config, ranks.group.size)
        overhang = drafter_class(spec).overhang(spec) if spec else 1
        max_positions = resolved.max_model_len + overhang
        attention = attention_backend(resolve_attention_name(config.attention_backend, device_type), device_type)
        shapes = attention_shapes(layers, page_size=resolved.block_size, dtype=dtype, kv_dtype=kv_dtype)
        if config.deterministic:
            check_deterministic(config, model_config, device_type)
        if spec and spec.tree:
            for layer in range(model_config.num_layers):
                attention.check_tree(spec.tree, model_config.window(layer))
        for shape in shapes:
            attention.check(shape, device_type)
        return cls(
            dtype=dtype,
            kv_dtype=kv_dtype,
            layers=layers,
            overhang=overhang,
            max_positions=max_positions,
            attention=attention,
            shapes=shapes,
            windows=_own_windows(config, model_config, resolved, attention, max_positions),
        )


def _own_windows(
    config: EngineConfig,
    model_config: ModelConfig,
    resolved: Resolved,
    attention: type[AttentionBackend],
    max_positions: int,
) -> frozenset[int]:
    """Those that are shorter than what a row can get, where nobody needs one table for all layers."""
    spec = config.speculation
    drafter = drafter_class(spec) if spec else None
    if not attention.keeps_to_windows or (drafter and spec and drafter.reads_target(spec)):
        return frozenset()
    num_new = tokens_per_step(drafter.count_drafts(spec) if drafter and spec else 0)
    found = {model_config.window(layer) for layer in range(model_config.num_layers)} - {None}
    pages_per_row = -(-max_positions // resolved.block_size)
    return frozenset(
        w for w in found if w is not None and pages_in_sight(w, num_new, resolved.block_size) < pages_per_row
    )


def make_drafter(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    resolved: Resolved,
    layout: Layout,
    ranks: Ranks,
) -> Drafter | None:
    """The drafter, without its weights. Raises ConfigError for one that does not go with the target."""
    spec = config.speculation
    if not spec:
        return None
    drafter = drafter_class(spec)(
        spec,
        Target(
            name=config.model,
            folder=source.folder,
            config=replace(model_config, quantisation=None),  # never inherited
            vocab_size=model_config.vocab_size,
            max_model_len=resolved.max_model_len,
            max_positions=layout.max_positions,
            page_size=resolved.block_size,
            device=ranks.device,
            dtype=layout.dtype,
            kv_dtype=layout.kv_dtype,
            load_format=config.load_format,
            seed=config.seed,
            group=ranks.group,
        ),
    )
    warn_of_other_target(drafter.folder, source.folder, name=str(spec.model), target_name=config.model)
    if ranks.steps and len(drafter.counts) > 1:
        raise ConfigError(
            "engines that share experts take every step together, and do not agree on a number of drafts that follows "
            "the load; leave adaptive and num_speculative_tokens_per_batch_size out"
        )
    return drafter


def load_target(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    layout: Layout,
    ranks: Ranks,
    *,
    show: bool,
    report: Callable[[Loaded], None],
) -> Decoder:
    """The target with its weights. `show`: with a bar, on terminals; `report` is told where they came from."""
    return load_model(
        source,
        model_config,
        layout.attention(layout.shapes[0], ranks.device),
        device=ranks.device,
        dtype=layout.dtype,
        max_positions=layout.max_positions,
        load_format=config.load_format,
        seed=config.seed,
        group=ranks.group,
        engines=ranks.engines,
        show_progress=None if show else False,
        report=report,
    )
