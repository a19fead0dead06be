"""What adapters (LoRA) add to a linear layer: `x @ A.T @ B.T` of each token's own adapter, or nothing.

A fused layer (q, k and v; gate and up) has a pair of its own for each of its slices. Of few tokens each finds the
weights of its adapter by itself, and those without one end at once; with many tokens all adapters' weights are one
matrix, and what is not a token's own is masked.

Shape suffixes: T tokens, K input columns, N output columns, L adapters, S slices of a fused layer, J rank,
X splits of K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear import linear
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

MAX_TOKENS = 256
"""Of passes in which each token reads its own adapter's weights."""
MAX_SLICES = 3
BLOCK_K = 128
SPLIT_K = 512
"""Columns of K that one program adds up; more where there would be too many programs."""
MAX_SPLITS = 16
TILE = 4096
"""Weights that one program of the second kernel holds at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraStack:
    """The adapters of one linear layer, in memory that stays where it is. Zeros change nothing."""

    a_LSJK: Tensor
    b_NLJ: Tensor
    """Of every slice, one after the other, with the adapter's scale."""
    sizes: tuple[int, ...]
    """Output columns of each slice."""
    numbers_L: Tensor
    """int32: 1, 2, .., as tokens name their adapters."""

    @classmethod
    def create(
        cls,
        sizes: tuple[int, ...],
        size: int,
        *,
        num_adapters: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> LoraStack:
        """For a layer from `size` numbers to slices of `sizes`, at most `MAX_SLICES`; `rank` is a power of 2."""
        assert len(sizes) <= MAX_SLICES
        assert rank == next_power_of_2(rank)
        return cls(
            a_LSJK=torch.zeros(num_adapters, len(sizes), rank, size, device=device, dtype=dtype),
            b_NLJ=torch.zeros(sum(sizes), num_adapters, rank, device=device, dtype=dtype),
            sizes=sizes,
            numbers_L=torch.arange(1, num_adapters + 1, device=device, dtype=torch.int32),
        )

    @property
    def nbytes(self) -> int:
        return self.a_LSJK.nbytes + self.b_NLJ.nbytes

    def clear(self, number: int) -> None:
        """Make one adapter add nothing; they count from 1."""
        self.a_LSJK[number - 1].zero_()
        self.b_NLJ[:, number - 1].zero_()

    def fill(self, number: int, slice_: int, a_JK: Tensor, b_NJ: Tensor) -> None:
        """One slice of one adapter; the rank may be lower than what there is room for."""
        start, rank = sum(self.sizes[:slice_]), a_JK.shape[0]
        self.a_LSJK[number - 1, slice_, :rank].copy_(a_JK)
        self.b_NLJ[start : start + self.sizes[slice_], number - 1, :rank].copy_(b_NJ)


def lora_torch(out_TN: Tensor, x_TK: Tensor, adapters_T: Tensor, stack: LoraStack) -> None:
    """Reference of `lora_triton`, and what runs with many tokens: all adapters at once, but for each its own."""
    num_adapters, num_slices, rank, size = stack.a_LSJK.shape
    inner_TLSJ = linear(x_TK, stack.a_LSJK.view(-1, size)).view(-1, num_adapters, num_slices, rank)
    is_own_TL = adapters_T[:, None] == stack.numbers_L
    inner_TLSJ = inner_TLSJ.where(is_own_TL[:, :, None, None], 0)
    parts = zip(out_TN.split(stack.sizes, 1), stack.b_NLJ.split(stack.sizes), inner_TLSJ.unbind(2), strict=True)
    for part_TN, b_NLJ, inner_TLJ in parts:
        part_TN.add_(linear(inner_TLJ.flatten(1), b_NLJ.flatten(1)))


@jit("num_tokens")
def _shrink_kernel(
    x_ptr,
    adapters_ptr,
    a_ptr,
    inner_ptr,
    num_tokens,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,  # of all slices
    PART: tl.constexpr,  # columns of each split
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one block of ranks, one split of K."""
    token = tl.program_id(0)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    adapter = tl.load(adapters_ptr + token)
    if adapter > 0:
        row = (adapter - 1).to(tl.int64) * RANKS + j
        acc = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
        for start in range(0, PART, BLOCK_K):
            k = split * PART + start + tl.arange(0, BLOCK_K)
            live = k < SIZE
            x = tl.load(x_ptr + token * SIZE + k, mask=live, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + row[:, None] * SIZE + k[None, :], mask=live[None, :], other=0.0).to(tl.float32)
            acc += a * x[None, :]
        tl.store(inner_ptr + (split * num_tokens + token) * RANKS + j, tl.sum(acc, 1))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit("num_tokens")
def _expand_kernel(
    inner_ptr,
    adapters_ptr,
    b_ptr,
    out_ptr,
    num_tokens,
    SIZE_0: tl.constexpr,  # columns of each slice; 0: there is none
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    SLICES: tl.constexpr,
    ADAPTERS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one block of columns, of one slice."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    BLOCKS_0: tl.constexpr = (SIZE_0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = (SIZE_1 + BLOCK_N - 1) // BLOCK_N
    COLUMNS: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    slice_ = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_0 + BLOCKS_1).to(tl.int32)
    before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, BLOCKS_0, BLOCKS_0 + BLOCKS_1))
    start = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, SIZE_0, SIZE_0 + SIZE_1))
    end = tl.where(slice_ == 0, SIZE_0, tl.where(slice_ == 1, SIZE_0 + SIZE_1, COLUMNS))
    n = start + (block - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, RANK)
    x = tl.arange(0, BLOCK_X)
    if PDL:
        tl.extra.cuda.gdc_wait()
    adapter = tl.load(adapters_ptr + token)
    if adapter > 0:
        live = n < end
        place = (x[:, None] * num_tokens + token) * SLICES * RANK + slice_ * RANK + j[None, :]
        inner = tl.sum(tl.load(inner_ptr + place, mask=x[:, None] < SPLITS, other=0.0), 0)
        row = n.to(tl.int64) * ADAPTERS + adapter - 1
        b = tl.load(b_ptr + row[:, None] * RANK + j[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        added = tl.sum(b * inner[None, :], 1)
        at = out_ptr + token.to(tl.int64) * COLUMNS + n
        out = tl.load(at, mask=live, other=0.0).to(tl.float32) + added
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def lora_triton(out_TN: Tensor, x_TK: Tensor, adapters_T: Tensor, stack: LoraStack) -> None:
    """Twin of `lora_torch`. A token's sums do not depend on the others; `out_TN` may be fp32 where `x_TK` is not."""
    num_tokens, size = x_TK.shape
    num_adapters, num_slices, rank, _ = stack.a_LSJK.shape
    assert x_TK.is_contiguous()
    assert out_TN.is_contiguous()
    if not num_tokens:
        return
    part = max(SPLIT_K, -(-size // (MAX_SPLITS * BLOCK_K)) * BLOCK_K)
    splits, options = -(-size // part), pdl_options(x_TK.device)
    inner_XTSJ = torch.empty(splits, num_tokens, num_slices, rank, dtype=torch.float32, device=x_TK.device)
    block_j = min(rank, 32)
    _shrink_kernel[(num_tokens, num_slices * rank // block_j, splits)](
        x_TK,
        adapters_T,
        stack.a_LSJK,
        inner_XTSJ,
        num_tokens,
        SIZE=size,
        RANKS=num_slices * rank,
        PART=part,
        BLOCK_J=block_j,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        **options,
    )
    block_n = max(16, min(128, TILE // rank))
    sizes = [*stack.sizes, *[0] * (MAX_SLICES - num_slices)]
    _expand_kernel[(num_tokens, sum(-(-columns // block_n) for columns in stack.sizes))](
        inner_XTSJ,
        adapters_T,
        stack.b_NLJ,
        out_TN,
        num_tokens,
        SIZE_0=sizes[0],
        SIZE_1=sizes[1],
        SIZE_2=sizes[2],
        SLICES=num_slices,
        ADAPTERS=num_adapters,
        RANK=rank,
        SPLITS=splits,
        BLOCK_X=next_power_of_2(splits),
        BLOCK_N=block_n,
        num_warps=4,
        **options,
    )


def adapted(out: Tensor, x_TK: Tensor, adapters_T: Tensor | None, stack: LoraStack | None) -> Tensor:
    """`out` of a linear layer, as `linear` or `residual_linear` gave it, with what the tokens' adapters add, in place.

    `adapters_T` is int32, 0 for none. As it is where the layer or the pass has no adapters.
    """
    if stack is None or adapters_T is None:
        return out
    # kernels take the pointer alone: a view of one number for all tokens would send them past its end
    assert adapters_T.is_contiguous()
    assert adapters_T.shape == x_TK.shape[:1]
    out_TN = out if out.dim() == 2 else out[0]  # of split sums any may take it
    if x_TK.is_cuda and (x_TK.shape[0] <= MAX_TOKENS or is_wanted()):
        lora_triton(out_TN, x_TK, adapters_T, stack)
    else:
        lora_torch(out_TN, x_TK, adapters_T, stack)
    return out
