"""Rotary tables. Shape suffixes: L positions, D head size, F = D / 2 frequencies, T tokens, H heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.models.rope_config import RopeConfig

DRAFTS_PAST_END = 128
"""Positions that no sequence reaches, but drafts may."""


def cos_sin_table(rope: RopeConfig, *, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Fp32 [L, D]: cos of every position and frequency in the first half, sin in the second.

    Where a share of a head turns, D is the size of that share.
    """
    inverse_F, attention_factor = inverse_frequencies(rope, head_dim, max_positions)
    # made on the CPU, so that every device rotates by the same angles
    angles_LF = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_F)
    return (torch.cat((angles_LF.cos(), angles_LF.sin()), dim=1) * attention_factor).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Fp32 [F] angle per position of each frequency, and the factor for cos and sin.

    The order of fp32 operations is that of transformers, so that the angles are equal to the last bit.
    """
    if rope.kind == "proportional":
        return _proportional(rope, head_dim), 1.0
    if rope.kind == "none":
        return torch.zeros(head_dim // 2), 1.0
    head_dim = int(head_dim * rope.share)
    powers_F = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    inverse_F = 1.0 / powers_F
    if rope.kind == "linear":
        return inverse_F / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse_F), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, powers_F), yarn_attention_factor(rope)
    if rope.kind == "longrope":
        return _longrope(rope, powers_F, max_positions)
    return inverse_F, 1.0


def rotate(x_THD: Tensor, positions_T: Tensor, cos_sin_LD: Tensor) -> Tensor:
    """Turn each head's halves by the angles of its token's position, computed in fp32."""
    cos_T1F, sin_T1F = cos_sin_LD[positions_T].unsqueeze(1).chunk(2, -1)
    first, second = x_THD.float().chunk(2, -1)
    return torch.cat((first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), -1).to(x_THD.dtype)


def _proportional(rope: RopeConfig, head_dim: int) -> Tensor:
    """Frequencies of the whole head, of which only the first turn."""
    turning = int(rope.share * head_dim // 2)
    powers_F = rope.theta ** (torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / head_dim)
    return torch.cat((1.0 / powers_F, torch.zeros(head_dim // 2 - turning))) / rope.factor


def _longrope(rope: RopeConfig, powers_F: Tensor, max_positions: int) -> tuple[Tensor, float]:
    """One set of factors for all sequences, so that keys in the cache stay valid while a sequence grows.

    It is the long one where sequences may get longer than in pretraining; drafts that reach past the end do not count.
    """
    original = rope.original_max_position_embeddings
    factors = rope.long_factors if max_positions > original + DRAFTS_PAST_END else rope.short_factors
    if len(factors) != powers_F.shape[0]:
        raise ConfigError(
            f"longrope has {len(factors)} factors in the model's config; heads have {powers_F.shape[0]} frequencies; "
            "take the config.json that belongs to the weights"
        )
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers_F), attention_factor


def _llama3(rope: RopeConfig, inverse_F: Tensor) -> Tensor:
    """Stretch long wavelengths by the factor, leave short ones alone, blend in between."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelength_F = 2 * math.pi / inverse_F
    stretched_F = torch.where(wavelength_F > original / low, inverse_F / rope.factor, inverse_F)
    share_F = (original / wavelength_F - low) / (high - low)
    blend_F = (1 - share_F) * stretched_F / rope.factor + share_F * stretched_F
    between_F = ~(wavelength_F < original / high) * ~(wavelength_F > original / low)
    return torch.where(between_F, blend_F, stretched_F)


def _yarn(rope: RopeConfig, powers_F: Tensor) -> Tensor:
    """Ramp from plain to stretched frequencies between two numbers of rotations."""
    num_frequencies = powers_F.shape[0]
    head_dim = 2 * num_frequencies

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp_F = ((torch.arange(num_frequencies, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain_F = 1 - ramp_F
    return (1.0 / (rope.factor * powers_F)) * (1 - plain_F) + (1.0 / powers_F) * plain_F


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by, so that attention stays as sharp at long contexts."""

    def scale(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale()
