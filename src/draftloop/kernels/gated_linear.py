"""A linear layer and the gated activation behind it, in one kernel where that has been measured to be faster.

Shape suffixes: T tokens, N = 2 * I output columns, K input columns.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from draftloop.kernels import linear_wide
from draftloop.kernels.linear import Weight, linear
from draftloop.kernels.linear_wide import Kind
from draftloop.kernels.silu_mul import gelu_mul, silu_mul

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
""""gelu_tanh" is GELU by its approximation with tanh."""


def gated_linear(
    x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None = None, *, activation: Activation = "silu"
) -> Tensor:
    """`gated` of a layer whose first I columns are the gate's; rounded like `linear` between."""
    if x_TK.is_cuda and not isinstance(weight_NK, Tensor):
        return weight_NK.gated_linear(x_TK, bias_N, activation)
    may_fuse = x_TK.is_cuda and activation == "silu"
    if may_fuse and isinstance(weight_NK, Tensor) and (tiles := linear_wide.choose(x_TK, weight_NK, Kind.GATED)):
        return linear_wide.linear_wide(x_TK, weight_NK, bias_N, kind=Kind.GATED, tiles=tiles)
    return gated(linear(x_TK, weight_NK, bias_N), activation=activation)


def gated(gate_up_T2I: Tensor, *, activation: Activation = "silu") -> Tensor:
    """`activation(gate) * up`, [T, I]."""
    return silu_mul(gate_up_T2I) if activation == "silu" else gelu_mul(gate_up_T2I)
