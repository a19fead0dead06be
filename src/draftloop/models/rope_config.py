"""Rotary settings of a Hugging Face `config.json`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftloop.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "none"]

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "longrope")
"""What a `config.json` may ask for in every architecture."""
OTHER_NAMES = {"su": "longrope"}
"""What older files call them."""
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched for long contexts."""

    kind: RopeKind = "default"
    """"default", "linear", "llama3", "yarn", "longrope", "proportional", or "none": nothing turns."""
    theta: float = 10_000.0
    """Base wavelength."""
    factor: float = 1.0
    """How many times longer than in pretraining the context may get."""
    original_max_position_embeddings: int = 0
    """Context length of pretraining, in tokens (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original / low_freq_factor` are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original / high_freq_factor` are left alone."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is stretched in full."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cos and sin; None: inferred from the other settings."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()
    """longrope: what each wavelength is multiplied by where no sequence gets longer than in pretraining."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same where sequences may."""
    share: float = 1.0
    """Share of a head's dimensions that turn: the first ones."""


def read_rope(
    hf: Mapping[str, Any], *, layer_type: str | None = None, theta: float = 10_000.0, share: float | None = None
) -> RopeConfig:
    """Settings in either spelling, `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5).

    `layer_type`: of these layers, where settings are given by type of layer. `theta` and `share` are the
    architecture's defaults; `share` None: every dimension must turn. Raises ConfigError for what cannot be run.
    """
    settings: dict[str, Any] = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    if nested := [key for key, value in settings.items() if isinstance(value, Mapping)]:
        if layer_type is None:
            raise ConfigError(
                f"the model's config has rotary settings per layer type ({', '.join(nested)}); supported: one"
            )
        settings = dict(settings.get(layer_type) or {})
    kind = settings.get("rope_type") or settings.get("type") or "default"
    kind = OTHER_NAMES.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope_type is {kind!r} in the model's config; supported: {', '.join(ROPE_KINDS)}")
    partial = settings.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or share or 1.0
    if share is None and partial != 1.0:
        raise ConfigError(f"partial_rotary_factor is {partial} in the model's config; supported: 1.0")
    # a length saved beside the rotary settings goes before the one within, as in transformers
    original = hf.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = original or hf.get("max_position_embeddings") or 0
    for key in REQUIRED.get(kind, ()):
        if settings.get(key) is None:
            raise ConfigError(f"the model's config has rope_type {kind!r} without {key!r}, which it needs")
    factor = settings.get("factor")
    if factor is None:
        factor = hf["max_position_embeddings"] / original if kind in ("yarn", "longrope") else 1.0
    return RopeConfig(
        kind=kind,
        theta=settings.get("rope_theta") or hf.get("rope_theta") or theta,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=settings.get("low_freq_factor") or 1.0,
        high_freq_factor=settings.get("high_freq_factor") or 4.0,
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        truncate=settings.get("truncate", True),
        attention_factor=settings.get("attention_factor"),
        mscale=settings.get("mscale"),
        mscale_all_dim=settings.get("mscale_all_dim"),
        short_factors=tuple(settings.get("short_factor") or ()) if kind == "longrope" else (),
        long_factors=tuple(settings.get("long_factor") or ()) if kind == "longrope" else (),
        share=partial,
    )
