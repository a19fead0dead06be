"""Tiny block drafters (DFlash, DSpark) on disk, in every layout that is published."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.drafters.dflash_config import DFlashConfig
from draftloop.drafters.dflash_files import MASK_EMBEDDING
from draftloop.drafters.dspark_config import DSparkConfig
from draftloop.models.config import LayerType, ModelConfig, RopeConfig
from heads import head_weights, write_head
from helpers import HEADS, HIDDEN, KV_HEADS, MAX_LEN, VOCAB

MASK = VOCAB - 1
WINDOW = 16


def block_config(
    method: str = "dflash",
    *,
    layers: int = 1,
    width: int = HIDDEN,
    head_dim: int = 16,
    vocab: int = VOCAB,
    max_len: int = MAX_LEN,
    sliding: tuple[int, ...] = (),
    causal: tuple[int, ...] = (),
    sinks: tuple[bool, ...] = (),
    **changes: Any,
) -> DFlashConfig:
    """A drafter for the tiny target with blocks of 8, head norms and two aux states; layers by number slide."""
    kinds: tuple[LayerType, ...] = tuple(
        "sliding_attention" if i in sliding else "full_attention" for i in range(layers)
    )
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        rope=RopeConfig(original_max_position_embeddings=max_len),
        qk_norm=True,
        sliding_window=WINDOW if sliding else None,
        layer_types=kinds if sliding else (),
        sinks=sinks,
        dtype="float32",
    )
    base = {
        "layout": "test",
        "model": model,
        "causal_layers": tuple(i in causal for i in range(layers)),
        "block_size": 8,
        "samples_from_anchor": method == "dspark",
        "mask_token_id": MASK,
        "target_hidden_size": width,
        "draft_vocab_size": vocab,
        "num_aux": 2,
        "layer_ids": (0, 1),
        "num_target_layers": 2,
    }
    if method == "dspark":
        base["heads"] = dspark_heads(vocab=vocab)
    return DFlashConfig(method=method, **{**base, **changes})  # type: ignore[arg-type]


def dspark_heads(kind: str | None = "vanilla", *, vocab: int = VOCAB, **changes: Any) -> DSparkConfig:
    """A Markov head of rank 12 and a confidence head that reads it."""
    base = {"markov_kind": kind, "markov_rank": 12 if kind else 0, "vocab_size": vocab, "confidence": True}
    return DSparkConfig(**{**base, "confidence_reads_markov": kind is not None, **changes})  # type: ignore[arg-type]


def block_json(config: DFlashConfig, layout: str) -> dict[str, Any]:
    """config.json of a drafter: "z-lab", "speculators", "deepspec" or "specforge"."""
    model, heads = config.model, config.heads
    plain: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "hidden_act": "silu",
        "layer_types": list(model.layer_types) or ["full_attention"] * model.num_layers,
        "sliding_window": model.sliding_window,
        "torch_dtype": "float32",
    }
    ids = list(config.layer_ids or ())
    extra: dict[str, Any] = {}
    if heads:
        extra = {
            "markov_rank": heads.markov_rank,
            "markov_head_type": heads.markov_kind or "vanilla",
            "enable_confidence_head": heads.confidence,
            "confidence_head_with_markov": heads.confidence_reads_markov,
        }
    if layout == "speculators":
        return {
            "architectures": ["DFlashSpeculator" if config.method == "dflash" else "DSparkSpeculator"],
            "speculators_model_type": config.method,
            "speculators_version": "0.5.0",
            "speculators_config": {"algorithm": config.method},
            "transformer_layer_config": plain,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.samples_from_anchor,
            "sliding_window_non_causal": not any(config.causal_layers),
            **({"aux_hidden_state_layer_ids": ids} if ids else {}),
            **extra,
        }
    layers = {"num_target_layers": config.num_target_layers}
    nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, **({"target_layer_ids": ids} if ids else {})}
    if layout == "deepspec":
        top = {**nested, "block_size": config.block_size, **extra}
        return {"architectures": ["Qwen3DSparkModel"], **plain, **layers, **top, "num_anchors": 512}
    if model.sliding_window is not None:
        nested["causal"] = any(config.causal_layers)
    if any(model.sinks):
        nested["attention_sink_bias"] = True
    if layout == "specforge":
        nested |= {"projector_type": "dspark", **extra}
    top = {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
    return {**top, **plain, **layers, "dflash_config": nested}


def block_weights(config: DFlashConfig, *, seed: int = 5) -> dict[str, Tensor]:
    """Random weights by plain name, large enough that every part changes what is drafted."""
    weights = head_weights(config, seed=seed, vocab=config.model.vocab_size)
    # of a low rank, and yet they have to change what is drafted
    return {name: weight * 5 if "markov_w2" in name else weight for name, weight in weights.items()}


@functools.cache
def tiny_block(
    name: str,
    config: DFlashConfig | None = None,
    *,
    method: str = "dflash",
    layout: str = "",
    seed: int = 5,
    mask_embedding: bool = False,
) -> str:
    """Folder of a drafter with random weights; `mask_embedding` writes one beside them."""
    config = config or block_config(method)
    layout = layout or ("z-lab" if config.method == "dflash" else "deepspec")
    folder = write_head(f"block-{name}", block_json(config, layout), block_weights(config, seed=seed))
    if mask_embedding:
        stored = {"mask_token_id": MASK, "embedding": mask_row(config)}
        torch.save(stored, Path(folder) / MASK_EMBEDDING)
    return folder


def mask_row(config: DFlashConfig) -> Tensor:
    return torch.randn(config.model.hidden_size, generator=torch.Generator().manual_seed(17))


def wide_block_config(method: str = "dflash", *, sinks: tuple[bool, ...] = ()) -> DFlashConfig:
    """A drafter for the tiny target made 256 wide, which every kernel takes."""
    return block_config(method, layers=2, width=256, head_dim=64, sinks=sinks)


def wide_block(method: str = "dflash", *, sinks: tuple[bool, ...] = ()) -> str:
    name = f"wide-{method}-sinks" if sinks else f"wide-{method}"
    return tiny_block(name, wide_block_config(method, sinks=sinks), layout="speculators")
