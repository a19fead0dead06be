"""The gated activation of a SwiGLU block.

Shape suffixes: T tokens, I intermediate size; 2I holds the gate's half, then the up projection's.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_mul_torch(gate_up_T2I: Tensor) -> Tensor:
    """Reference of `silu_mul`."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return silu(gate_TI).mul_(up_TI)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """`silu(gate) * up`, in the dtype of the input."""
    return silu_mul_torch(gate_up_T2I)
