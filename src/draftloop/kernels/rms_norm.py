"""Root-mean-square norm, alone or with the residual addition in front of it.

Shape suffixes: T tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_torch(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Reference of `rms_norm`."""
    return torch.rms_norm(x_TH, weight_H.shape, weight_H, eps)


def add_rms_norm_torch(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Reference of `add_rms_norm`."""
    residual_TH = residual_TH + x_TH
    return torch.rms_norm(residual_TH, weight_H.shape, weight_H, eps), residual_TH


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight`, computed in fp32, in the dtype of x."""
    return rms_norm_torch(x_TH, weight_H, eps)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(residual + x), residual + x)`. The inputs are left as they are.

    The sum is rounded to the model's dtype before it is normed, as the model was trained.
    """
    return add_rms_norm_torch(x_TH, residual_TH, weight_H, eps)
