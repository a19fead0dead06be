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
from draftloop.kernels.linear import DTYPES, Tiles, linear, sm_count
from draftloop.kernels.triton_import import next_power_of_2

MAX_TOKENS = 128
"""Above this, reading the weights once more as floats pays."""
BLOCK_TOKENS = 32
"""Tokens of one program; more are several programs, of which all but the first find the weights in the cache."""
Measured = Mapping[tuple[int, int, bool], Tiles]
"""(N, K, may split) -> the fastest tiles on an H200."""


class KernelCall(NamedTuple):
    """A Triton kernel, its arguments, and its constants and launch options by name."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


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
    def kernel_call(self, x_TK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles) -> KernelCall:
        """The kernel and what it is called with, to write [T, N], or fp32 [X, T, N]."""

    def launch(self, x_TK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles) -> None:
        """Run the kernel."""
        assert x_TK.is_contiguous()
        assert out.is_contiguous()
        if x_TK.shape[0]:
            call = self.kernel_call(x_TK, bias_N, out, tiles)
            call.kernel[self._grid(x_TK, tiles)](*call.arguments, **call.options)

    def compile_ahead(self, x_TK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles) -> None:
        """Compile what `launch` would run; from any thread."""
        call = self.kernel_call(x_TK, bias_N, out, tiles)
        call.kernel.warmup(*call.arguments, grid=self._grid(x_TK, tiles), **call.options)

    def _grid(self, x_TK: Tensor, tiles: Tiles) -> tuple[int, int, int]:
        # blocks of tokens are next to each other in time, so that they find their weights in the cache
        return -(-x_TK.shape[0] // token_block(x_TK.shape[0])), -(-self.shape[0] // tiles.block_n), tiles.splits

    def linear_torch(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Reference of `linear_triton`; by floats, which take more memory for the time of a call."""
        return F.linear(x_TK, self.dequantise_torch(x_TK.dtype), bias_N)

    def linear_many(self, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
        """For more tokens than the kernel takes."""
        return linear(x_TK, self.dequantise(x_TK.dtype), bias_N)

    def linear_triton(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        *,
        tiles: Tiles | None = None,
        out_TN: Tensor | None = None,
    ) -> Tensor:
        """Twin of `linear_torch` for few tokens. `tiles` None: as measured, or chosen."""
        tiles = tiles or self.tiles(may_split=False)
        assert tiles.splits == 1
        if out_TN is None:
            out_TN = torch.empty(x_TK.shape[0], self.shape[0], dtype=x_TK.dtype, device=x_TK.device)
        self.launch(x_TK, bias_N, out_TN, tiles)
        return out_TN

    def linear_split_triton(self, x_TK: Tensor, bias_N: Tensor | None = None, *, tiles: Tiles | None = None) -> Tensor:
        """fp32 [X, T, N], to be added up over X: the sums over each part of K; the bias is in the first."""
        tiles = tiles or self.tiles(may_split=True)
        sums_XTN = torch.empty(tiles.splits, x_TK.shape[0], self.shape[0], dtype=torch.float32, device=x_TK.device)
        self.launch(x_TK, bias_N, sums_XTN, tiles)
        return sums_XTN

    def linear(self, x_TK: Tensor, bias_N: Tensor | None, out_TN: Tensor | None) -> Tensor:
        """What `linear.linear` promises."""
        if x_TK.is_cuda and self._is_skinny(x_TK):
            return self.linear_triton(x_TK, bias_N, out_TN=out_TN)
        found = self.linear_many(x_TK, bias_N)
        return found if out_TN is None else out_TN.copy_(found)

    def residual_linear(self, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
        """What `linear.residual_linear` promises."""
        if x_TK.is_cuda and self._is_skinny(x_TK) and self.tiles(may_split=True).splits > 1:
            return self.linear_split_triton(x_TK, bias_N)
        return self.linear(x_TK, bias_N, None)

    def max_tokens(self, x_TK: Tensor) -> int:
        """Of passes that the kernel takes."""
        return MAX_TOKENS

    def _is_skinny(self, x_TK: Tensor) -> bool:
        return (
            x_TK.dim() == 2
            and x_TK.shape[0] > 0
            and (
                x_TK.shape[0] <= self.max_tokens(x_TK) or is_wanted()
            )  # the kernel's sums never depend on other tokens
            and x_TK.dtype in DTYPES
            and x_TK.is_contiguous()
            and self.takes()
        )

    def tiles(self, *, may_split: bool) -> Tiles:
        """The same for any number of tokens, so that a token's sums do not depend on how many others there are."""
        device = next(self.parameters()).device
        return self.measured.get((*self.shape, may_split)) or choose(*self.shape, sm_count(device), may_split=may_split)


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
def choose(num_columns: int, size: int, num_sms: int, *, may_split: bool) -> Tiles:
    """Tiles of a layer that was not measured: as wide as leaves every SM something to read.

    K is split where there are few columns and a norm follows.
    """
    splits = 1
    if may_split and num_columns < 64 * num_sms:
        splits = next((splits for splits in (4, 2) if size % (128 * splits) == 0), 1)
    block_n = next((width for width in (128, 64, 32) if -(-num_columns // width) * splits >= num_sms), 16)
    return Tiles(block_n, 128, splits, 4, 4)


def token_block(num_tokens: int) -> int:
    """Tokens of one program."""
    return min(BLOCK_TOKENS, max(16, next_power_of_2(num_tokens)))


def stored(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Memory to be filled; a pass reads all of it."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
