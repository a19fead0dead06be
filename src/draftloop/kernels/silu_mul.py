"""The gated activation of a SwiGLU block.

Shape suffixes: T tokens, I intermediate size; 2I holds the gate's half, then the up projection's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from draftloop.kernels.native import ops as native
from draftloop.kernels.triton_import import jit, pdl_options, tl

BLOCK = 1024


def silu_mul_torch(gate_up_T2I: Tensor) -> Tensor:
    """Reference of `silu_mul`."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return silu(gate_TI).mul_(up_TI)


@jit()
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One token, one block of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + token * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride + SIZE + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # rounded between the two steps, as models are trained and as the reference does
    activated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, (activated * up).to(out_ptr.dtype.element_ty), mask=live)


def silu_mul_triton(gate_up_T2I: Tensor) -> Tensor:
    """Twin of `silu_mul_torch`."""
    num_tokens, double = gate_up_T2I.shape
    assert gate_up_T2I.stride(1) == 1
    size = double // 2
    out_TI = torch.empty(num_tokens, size, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if num_tokens:
        grid = (num_tokens, -(-size // BLOCK))
        options = pdl_options(gate_up_T2I.device)
        stride = gate_up_T2I.stride(0)
        _silu_mul_kernel[grid](gate_up_T2I, out_TI, stride, SIZE=size, BLOCK=BLOCK, num_warps=4, **options)
    return out_TI


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """`silu(gate) * up`, in the dtype of the input."""
    if gate_up_T2I.is_cuda:
        return silu_mul_triton(gate_up_T2I)
    if native.takes_serial(gate_up_T2I):
        return native.silu_mul(gate_up_T2I)
    return silu_mul_torch(gate_up_T2I)
