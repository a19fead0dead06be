"""Matrices that are bf16 where activations are float32: read as they are stored, half of the bytes.

A bf16 number is the upper half of a float32, so widening is exact, and results are those of float32 weights. Passes of
few tokens widen in registers (`native.linear`); here is what is left: torch's products, and rows of embedding tables.

Shape suffixes: T tokens, N output columns, K input columns, V entries of a table, C its width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.opaque import define

WIDENED_AT_ONCE = 1 << 18
"""Weights that are float32 at a time: 1 MiB, which the product finds in the cache."""
MIN_COLUMNS = 64


def is_narrow(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight must be widened for activations of `dtype`."""
    return weight.dtype is torch.bfloat16 and dtype is torch.float32


def embedding(ids: Tensor, table_VC: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table for activations of `dtype`, ids' shape and C."""
    return F.embedding(ids, table_VC).to(dtype)


def widened_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`F.linear` of float32 x [.., K] on the CPU with a bf16 weight; written to `out` [.., N] if given."""
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight_NK.shape[0])
    _widened_linear(x, weight_NK, bias_N, out)
    return out


def _body(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor) -> None:
    num_columns, size = weight_NK.shape
    x_TK, out_TN = x.reshape(-1, size), out.view(-1, num_columns)
    step = max(WIDENED_AT_ONCE // size // MIN_COLUMNS, 1) * MIN_COLUMNS
    for start in range(0, num_columns, step):
        columns = slice(start, start + step)
        weight_KM, out_TM = weight_NK[columns].float().t(), out_TN[:, columns]
        if bias_N is None:
            torch.mm(x_TK, weight_KM, out=out_TM)
        else:
            torch.addmm(bias_N[columns], x_TK, weight_KM, out=out_TM)


_widened_linear = define("widened_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()", _body, "CPU")
