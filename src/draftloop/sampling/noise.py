"""Random numbers that are a pure function of (seed, position, stream): no generator state.

The same request therefore draws the same noise in any batch, on any device, inside a captured
graph, after preemption, and however many iterations it took to get there. Each use of a position
(drafting it, testing the draft, sampling it) has a stream of its own; sharing one would make the
test depend on the draft that it judges, which changes the distribution.

A key is a SplitMix64 output (Steele, Lea & Flood 2014; Stafford's mix 13). Noise per token is a
two-round 32-bit finaliser (Wellons' "lowbias32" constants) with half of the key entering in each
round. Kernels draw the same bits; logarithms may differ in the last place.

Shape suffixes: N samples, V vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from draftloop.kernels.triton_import import constant, jit, tl


class Stream(IntEnum):
    """What the noise of a position is used for. Streams are independent of each other."""

    DRAFT = 1
    """Choosing a draft token."""
    ACCEPT = 2
    """Testing a draft token."""
    SAMPLE = 3
    """Sampling a token of the target: residual, bonus, or no draft at all."""


def _signed(value: int, bits: int) -> int:
    """`value` as the two's complement integer that torch takes for `bits` bits."""
    return value - (1 << bits) if value >> (bits - 1) else value


# unsigned, as kernels take them
GOLDEN64 = 0x9E3779B97F4A7C15
MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STREAM64 = 0xD1342543DE82EF95
_GOLDEN64 = _signed(GOLDEN64, 64)
_MIX64 = tuple(_signed(factor, 64) for factor in MIX64)
_GOLDEN32 = _signed(0x9E3779B9, 32)
_MIX32 = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32))

# 31 random bits to the open unit interval: bits + 0.5 is at most 2**31 in float32, so the factor
# just below 2**-31 keeps the result at most 1 - 2**-24, and 0.5 keeps it above 0
UNIT = (1 - 2**-24) * 2**-31


# what kernels read by name: what a stream adds to a seed, and the factors above
DRAFT_NOISE, ACCEPT_NOISE, SAMPLE_NOISE = (constant(_STREAM64 * stream % 2**64) for stream in Stream)
_GOLDEN64_C, _MIX64_A, _MIX64_B = (constant(factor) for factor in (GOLDEN64, *MIX64))
_GOLDEN32_C, _MIX32_A, _MIX32_B = (constant(factor % 2**32) for factor in (_GOLDEN32, *_MIX32))
_UNIT_C = constant(UNIT)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (x.element_size() * 8 - bits)) - 1)


def _key(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """int64: 64 random bits for each (seed, position); shapes broadcast."""
    offset = _signed(_STREAM64 * stream & (2**64 - 1), 64)
    x = torch.add(seeds + offset, positions.to(torch.int64), alpha=_GOLDEN64)
    x = (x ^ _shift(x, 30)) * _MIX64[0]
    x = (x ^ _shift(x, 27)) * _MIX64[1]
    return x ^ _shift(x, 31)


MAX_BLOCK = 64
"""More than the drafts of any block."""


def in_block(starts: Tensor, index: Tensor) -> Tensor:
    """int64: positions for noise that belongs to the block beginning at `starts`, so that no later one sees it.

    What is drafted past the last accepted draft may have had a say in where the block ended; the next block
    goes over the same places, and must draw anew.
    """
    return starts.to(torch.int64) * MAX_BLOCK + index


def uniform(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """float32 in (0, 1), one for each (seed, position); int64 `seeds` and integer `positions` broadcast."""
    return (_shift(_key(seeds, positions, stream), 33).to(torch.float32) + 0.5) * UNIT


def _log_exponential(seeds_N: Tensor, positions_N: Tensor, stream: Stream, num_tokens: int) -> Tensor:
    """float32 [N, V]: logarithms of independent Exp(1) variables, always finite. Their negatives are Gumbel."""
    key_N1 = _key(seeds_N, positions_N, stream)[:, None]
    ids_V = torch.arange(num_tokens, dtype=torch.int32, device=seeds_N.device)
    x = torch.add(key_N1.to(torch.int32), ids_V, alpha=_GOLDEN32)
    x = x ^ _shift(x, 16)
    # the other half of the key: without it, keys a multiple of the golden ratio apart would shift the same noise
    x = torch.add((key_N1 >> 32).to(torch.int32), x, alpha=_MIX32[0])
    x = (x ^ _shift(x, 15)) * _MIX32[1]
    # an arithmetic shift clears the sign and leaves 31 uniform bits
    x = x ^ (x >> 16)
    # log1p resolves small values to 2**-32, and the smallest exponential wins the argmax
    return torch.log1p((x.to(torch.float32) + 0.5) * -UNIT).neg().log()


def gumbel_argmax(log_probs_NV: Tensor, seeds_N: Tensor, positions_N: Tensor, stream: Stream) -> Tensor:
    """int64 [N]: one token per row, drawn with probability proportional to `exp(log_probs_NV)`.

    Rows need not be normalised. A token of log probability -inf is never drawn while another is
    finite. The result is in range whatever the row holds. Source: Gumbel-max (Maddison et al. 2014).
    """
    return (log_probs_NV - _log_exponential(seeds_N, positions_N, stream, log_probs_NV.shape[1])).argmax(-1)


# ---- in kernels -----------------------------------------------------------------------------


@jit()
def noise_key(seed, position, stream):
    """uint64: `_key`; `stream` is one of the constants above."""
    bits = seed.to(tl.uint64) + stream + position.to(tl.uint64) * _GOLDEN64_C
    bits = (bits ^ (bits >> 30)) * _MIX64_A
    bits = (bits ^ (bits >> 27)) * _MIX64_B
    return bits ^ (bits >> 31)


@jit()
def unit_noise(key):
    """float32: `uniform`."""
    return ((key >> 33).to(tl.int64).to(tl.float32) + 0.5) * _UNIT_C


@jit()
def log_exponential(key, index):
    """float32: `_log_exponential` of one key, at tokens `index`."""
    x = key.to(tl.uint32) + index.to(tl.uint32) * _GOLDEN32_C
    x = x ^ (x >> 16)
    x = (key >> 32).to(tl.uint32) + x * _MIX32_A
    x = (x ^ (x >> 15)) * _MIX32_B
    bits = x.to(tl.int32, bitcast=True)
    unit = ((bits ^ (bits >> 16)).to(tl.float32) + 0.5) * _UNIT_C
    # log1p(-unit): the rounding of 1 - unit is taken out again (Kahan)
    rest = 1.0 - unit
    taken = rest - 1.0
    exponential = tl.where(taken == 0.0, unit, tl.log(rest) * (unit / tl.where(taken == 0.0, 1.0, taken)))
    return tl.log(exponential)
