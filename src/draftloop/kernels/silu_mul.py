"""The gated activations of SwiGLU and GeGLU blocks.

Shape suffixes: T tokens, I intermediate size; 2I holds the gate's half, then the up projection's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from draftloop.kernels.native import ops as native
from draftloop.kernels.triton_import import jit, pdl_options, tl

BLOCK = 1024


def silu_mul_torch(gate_up_T2I: Tensor) -> Tensor:
    """Reference of `silu_mul`."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return silu(gate_TI).mul_(up_TI)


def gelu_mul_torch(gate_up_T2I: Tensor) -> Tensor:
    """Reference of `gelu_mul`."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return gelu(gate_TI, approximate="tanh").mul_(up_TI)


@jit()
def gate_times_up(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    """fp32 sums of both halves of a layer -> their gated product, rounded to `dtype` between the steps.

    So do models in training, and torch. GELU by its approximation with tanh is `x * sigmoid(2 * sqrt(2 / pi) * (x +
    0.044715 * x^3))` (Hendrycks and Gimpel, 2016).
    """
    gate = gate.to(dtype).to(tl.float32)
    slope = gate * (1.5957691216057308 + 0.07135481282052834 * gate * gate) if GELU else gate
    activated = (gate / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@jit()
def _gated_kernel(
    gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
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
    out = gate_times_up(gate, up, out_ptr.dtype.element_ty, GELU)
    tl.store(out_ptr + token * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=live)


def _launch(gate_up_T2I: Tensor, *, gelu: bool) -> Tensor:
    num_tokens, double = gate_up_T2I.shape
    assert gate_up_T2I.stride(1) == 1
    size = double // 2
    out_TI = torch.empty(num_tokens, size, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if num_tokens:
        grid = (num_tokens, -(-size // BLOCK))
        options = dict(SIZE=size, GELU=gelu, BLOCK=BLOCK, num_warps=4, **pdl_options(gate_up_T2I.device))
        _gated_kernel[grid](gate_up_T2I, out_TI, gate_up_T2I.stride(0), **options)
    return out_TI


def silu_mul_triton(gate_up_T2I: Tensor) -> Tensor:
    """Twin of `silu_mul_torch`."""
    return _launch(gate_up_T2I, gelu=False)


def gelu_mul_triton(gate_up_T2I: Tensor) -> Tensor:
    """Twin of `gelu_mul_torch`."""
    return _launch(gate_up_T2I, gelu=True)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """`silu(gate) * up`, in the dtype of the input."""
    if gate_up_T2I.is_cuda:
        return silu_mul_triton(gate_up_T2I)
    if native.takes_serial(gate_up_T2I):
        return native.silu_mul(gate_up_T2I)
    return silu_mul_torch(gate_up_T2I)


def gelu_mul(gate_up_T2I: Tensor) -> Tensor:
    """`gelu(gate) * up`, GELU by its approximation with tanh, in the dtype of the input."""
    return gelu_mul_triton(gate_up_T2I) if gate_up_T2I.is_cuda else gelu_mul_torch(gate_up_T2I)
