"""What weights of fewer bits than activations have in common, whatever their format.

`linear` and `residual_linear` take them in the place of a tensor. Layers of few tokens stream the small weights and
multiply in the activations' type; what is done with many tokens, the file of each format says.

Shape suffixes: T tokens, N output columns, K input columns, X splits of K.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.gated_linear import Activation, gated
from draftloop.kernels.linear import DTYPES, linear, sm_count
from draftloop.kernels.linear_planes import Planes, PlaneTiles, linear_planes_triton
from draftloop.kernels.linear_wide import Kind
from draftloop.kernels.packed_values import BLOCK
from draftloop.kernels.silu_mul import silu_mul
from draftloop.kernels.triton_import import gpu_name

MAX_TOKENS = 128
"""Of layers that were not measured: above this, reading the weights once more as floats pays."""
INVARIANT_TOKENS = 64
"""The tiles of this many serve any number where a token's sums must not depend on the others."""
TilesByTokens = Mapping[int, PlaneTiles]
"""The last number of tokens, ascending -> tiles up to it. A token's sums have the same bits for any number of others up
to the first last one, and beyond it where K is divided alike."""
Measured = Mapping[str, Mapping[tuple[int, int, bool], TilesByTokens]]
"""GPU -> (N, K, may split) -> the fastest tiles."""


class QuantisedWeight(torch.nn.Module, ABC):
    """A weight [N, K] in a format of its own. Parts of a fused weight are rows of it, filled one by one."""

    measured: ClassVar[Measured] = {}

    def __init__(self, num_columns: int, size: int) -> None:
        super().__init__()
        self.shape = (num_columns, size)

    def numel(self) -> int:
        """Weights that it stands for."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """What a pass reads."""
        return sum(stored.nbytes for stored in self.parameters())

    def split(self, sizes: tuple[int, ...]) -> list[Part]:
        """Consecutive rows, to be filled."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [Part(self, start, (size, self.shape[1])) for start, size in zip(starts, sizes, strict=True)]

    @abstractmethod
    def fill(self, start: int, values: Any) -> None:
        """Put a part's values, in the form that this format has in files, at row `start` and after."""

    @abstractmethod
    def quantise(self, weight_NK: Tensor) -> Any:
        """The values nearest to a weight of floats, for `fill`."""

    @abstractmethod
    def dequantise_torch(self, dtype: torch.dtype) -> Tensor:
        """Reference of `dequantise_triton`."""

    @abstractmethod
    def dequantise_triton(self, dtype: torch.dtype) -> Tensor:
        """Twin of `dequantise_torch`, to bf16 or fp16, of layers that the kernel takes."""

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[N, K], as floats."""
        if next(self.parameters()).is_cuda and dtype in DTYPES and self.takes():
            return self.dequantise_triton(dtype)
        return self.dequantise_torch(dtype)

    @abstractmethod
    def takes(self) -> bool:
        """Whether the kernels can take this layer."""

    @abstractmethod
    def planes(self) -> Planes:
        """The stored tensors, as the kernel wants them."""

    @property
    def is_arranged(self) -> bool:
        """Whether stored columns are in the order of the input's."""
        return True

    def arranged(self, x_TK: Tensor) -> Tensor:
        """Activations in the order of the stored columns."""
        return x_TK

    def linear_torch(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Reference of `linear_triton`; by floats, which take more memory for the time of a call."""
        return F.linear(x_TK, self.dequantise_torch(x_TK.dtype), bias_N)

    def linear_many(self, x_TK: Tensor, bias_N: Tensor | None, kind: Kind) -> Tensor:
        """For more tokens than the kernel takes. Where sums are asked for, [T, N] will do."""
        out_TN = linear(x_TK, self.dequantise(x_TK.dtype), bias_N)
        return silu_mul(out_TN) if kind is Kind.GATED else out_TN

    def linear_triton(
        self, x_TK: Tensor, bias_N: Tensor | None = None, *, tiles: PlaneTiles, out_TN: Tensor | None = None
    ) -> Tensor:
        """Twin of `linear_torch` for few tokens."""
        return linear_planes_triton(self.arranged(x_TK), self.planes(), bias_N, tiles=tiles, out=out_TN)

    def gated_linear_triton(
        self, x_TK: Tensor, bias_N: Tensor | None = None, activation: Activation = "silu", *, tiles: PlaneTiles
    ) -> Tensor:
        """`gated` of `linear_triton`, in its kernel."""
        return linear_planes_triton(self.arranged(x_TK), self.planes(), bias_N, tiles=tiles, activation=activation)

    def linear_split_triton(self, x_TK: Tensor, bias_N: Tensor | None = None, *, tiles: PlaneTiles) -> Tensor:
        """fp32 [X, T, N], to be added up over X: the sums over each part of K; the bias is in the first."""
        sums_XTN = torch.empty(tiles.splits, x_TK.shape[0], self.shape[0], dtype=torch.float32, device=x_TK.device)
        return linear_planes_triton(self.arranged(x_TK), self.planes(), bias_N, tiles=tiles, out=sums_XTN)

    def linear(self, x_TK: Tensor, bias_N: Tensor | None, out_TN: Tensor | None) -> Tensor:
        """What `linear.linear` promises."""
        if tiles := self.tiles_for(x_TK, may_split=False):
            return self.linear_triton(x_TK, bias_N, tiles=tiles, out_TN=out_TN)
        found = self.linear_many(x_TK, bias_N, Kind.PLAIN)
        return found if out_TN is None else out_TN.copy_(found)

    def residual_linear(self, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
        """What `linear.residual_linear` promises."""
        tiles = self.tiles_for(x_TK, may_split=True)
        if tiles is None:
            return self.linear_many(x_TK, bias_N, Kind.SUMS)
        run = self.linear_split_triton if tiles.splits > 1 else self.linear_triton
        return run(x_TK, bias_N, tiles=tiles)

    def gated_linear(self, x_TK: Tensor, bias_N: Tensor | None, activation: Activation = "silu") -> Tensor:
        """What `gated_linear.gated_linear` promises, on a GPU."""
        if tiles := self.tiles_for(x_TK, may_split=False):
            return self.gated_linear_triton(x_TK, bias_N, activation, tiles=tiles)
        if activation == "silu":
            return self.linear_many(x_TK, bias_N, Kind.GATED)
        return gated(self.linear_many(x_TK, bias_N, Kind.PLAIN), activation=activation)

    def tiles_for(self, x_TK: Tensor, *, may_split: bool) -> PlaneTiles | None:
        """None: not on a GPU, or too many tokens for the kernel."""
        if not (x_TK.is_cuda and x_TK.dim() == 2 and x_TK.dtype in DTYPES and x_TK.is_contiguous() and self.takes()):
            return None
        num_tokens = x_TK.shape[0]
        tiles = self.tiles(gpu_name(x_TK.device), sm_count(x_TK.device), may_split=may_split)
        if is_wanted():
            num_tokens = INVARIANT_TOKENS
        elif not 0 < num_tokens <= self.max_tokens(x_TK):
            return None
        return next((tiles[last] for last in tiles if num_tokens <= last), None)

    def max_tokens(self, x_TK: Tensor) -> float:
        """Above which `linear_many` is always faster."""
        return float("inf")

    def tiles(self, gpu: str, num_sms: int, *, may_split: bool) -> TilesByTokens:
        """As measured, or chosen."""
        found = self.measured_on(gpu).get((*self.shape, may_split))
        return found or choose(*self.shape, num_sms, may_split=may_split)

    def measured_on(self, gpu: str) -> Mapping[tuple[int, int, bool], TilesByTokens]:
        """Of all layers."""
        return self.measured.get(gpu, {})


class Part(NamedTuple):
    """Rows of a quantised weight."""

    weight: QuantisedWeight
    start: int
    shape: tuple[int, int]

    def fill(self, values: Any) -> None:
        """From the form that files hold, see the weight's own `fill`."""
        self.weight.fill(self.start, values)

    def quantise(self, weight_NK: Tensor) -> None:
        """From floats, rounded."""
        self.fill(self.weight.quantise(weight_NK))


@functools.cache
def choose(num_columns: int, size: int, num_sms: int, *, may_split: bool) -> TilesByTokens:
    """Tiles of a layer that was not measured: as wide as leaves every SM something to read.

    K is split where there are few columns and a norm follows.
    """
    splits = 1
    if may_split and num_columns < 64 * num_sms:
        splits = next((splits for splits in (4, 2) if -(-size // BLOCK) % splits == 0), 1)
    block_n = next((width for width in (128, 64) if -(-num_columns // width) * splits >= num_sms), 32)
    few = PlaneTiles(block_n, BLOCK, splits, max_tokens=8, num_warps=4 if block_n > 32 else 2, num_stages=4)
    return {8: few, MAX_TOKENS: few._replace(max_tokens=32)}


def stored(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Memory to be filled; a pass reads all of it."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
