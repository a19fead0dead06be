"""Linear layers of few tokens: kernels that stream the weights once, at the speed of memory.

With few rows the time is that of reading the weights. Each program owns some output columns and
walks along K; layers with too few columns to fill the GPU are split along K as well. Split sums are
not added up by atomics, which would make results differ between runs, but by the residual norm
that follows (`rms_norm.add_rms_norm`), in a fixed order.

Shape suffixes: T tokens, N output columns, K input columns, X splits of K.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.kernels import linear_wide
from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear_wide import Kind
from draftloop.kernels.native import ops as native
from draftloop.kernels.native.functions import takes
from draftloop.kernels.triton_import import gpu_name, jit, next_power_of_2, pdl_options, tl
from draftloop.kernels.widened import is_narrow, widened_linear

if TYPE_CHECKING:
    from draftloop.kernels.quantised import QuantisedWeight

Weight: TypeAlias = "Tensor | QuantisedWeight"
"""What a linear layer may have for a matrix."""

MAX_TOKENS = 64
"""Above this, where `linear_wide` is not faster, cuBLAS."""
FEW_TOKENS = 32
"""Up to this, tiles are wide in columns; above, the tokens take the shared memory."""
SHARED_BYTES = 220 << 10
"""Shared memory that the tiles below may take; devices with less are left to cuBLAS."""
DTYPES = (torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """Launch parameters."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


MEASURED = {
    (6144, 4096, False): (Tiles(32, 256, 1, 4, 4), Tiles(64, 128, 1, 4, 5)),
    (4096, 4096, True): (Tiles(64, 128, 4, 4, 3), Tiles(64, 128, 2, 4, 4)),
    (28672, 4096, False): (Tiles(128, 128, 1, 4, 3), Tiles(128, 128, 1, 4, 4)),
    (4096, 14336, True): (Tiles(128, 128, 4, 4, 4), Tiles(64, 128, 4, 4, 3)),
    (128256, 4096, False): (Tiles(64, 256, 1, 4, 3), Tiles(128, 128, 1, 4, 4)),
    (4096, 12288, False): (Tiles(32, 256, 1, 4, 4), Tiles(32, 256, 1, 4, 4)),
    (6144, 8192, False): (Tiles(32, 256, 1, 4, 4), Tiles(64, 128, 1, 4, 5)),
    (2048, 2048, True): (Tiles(32, 128, 2, 4, 5), Tiles(32, 128, 2, 4, 5)),
    (16384, 2048, False): (Tiles(128, 128, 1, 4, 4), Tiles(64, 128, 1, 4, 4)),
    (2048, 8192, True): (Tiles(32, 128, 4, 4, 4), Tiles(64, 128, 4, 4, 4)),
    (3072, 2048, True): (Tiles(64, 128, 2, 4, 4), Tiles(64, 128, 2, 4, 4)),
}
"""(N, K, may split) -> the fastest tiles on an H200 at 6 tokens, and at 48. The last four are a 1B model's, at one
token (qkv: 16) and at 64."""


@functools.cache
def choose(num_columns: int, size: int, num_sms: int, *, may_split: bool, few: bool = True) -> Tiles:
    """Tiles of a layer with weights [num_columns, size]; `few`: for up to `FEW_TOKENS`.

    Within `few` the number of tokens plays no part, so that a token's sums do not depend on how many others there
    are: verifying drafts gives the logits that decoding one by one would give, but where `linear_wide` has an entry.
    """
    if found := MEASURED.get((num_columns, size, may_split)):
        return found[0 if few else 1]
    splits = 1
    if may_split and num_columns < 64 * num_sms:
        splits = next(splits for splits in (4, 2, 1) if size % (128 * splits) == 0)
    # the widest blocks that still give every SM something to read
    wanted = num_sms * 3 // 2 if splits > 1 else num_sms
    large = num_columns >= 8 * 64 * num_sms
    widths = (64, 32, 16) if large and few else (128, 64, 32, 16)
    block_n = next((width for width in widths if -(-num_columns // width) * splits >= wanted), 16)
    # about as many bytes in flight whatever the width; wide blocks of huge layers go as lm_head was measured
    long_k = few and (block_n <= 32 or large)
    block_k = 256 if long_k and size % (256 * splits) == 0 else 128
    return Tiles(block_n, block_k, splits, 4, 3 if block_n * block_k >= 128 * 128 else 4)


def linear_torch(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Reference of `linear`."""
    return F.linear(x_TK, weight_NK, bias_N)


def linear_split_torch(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, splits: int) -> Tensor:
    """Reference of `linear_split_triton`."""
    x_XTK, weight_XKN = (part.float().unflatten(1, (splits, -1)).transpose(0, 1) for part in (x_TK, weight_NK))
    sums_XTN = x_XTK @ weight_XKN.transpose(1, 2)
    if bias_N is not None:
        sums_XTN[0] += bias_N
    return sums_XTN


@jit("num_tokens")
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # whether the blocks divide the columns
    EVEN_K: tl.constexpr,  # whether they divide each split of K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,  # of fp32
    PDL: tl.constexpr,
):
    """One block of tokens (mostly all), one block of columns, one split of K."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    m_live = m < num_tokens
    # columns past the end read the last one again, which costs nothing in the loop, and are not stored
    row = n if EVEN else tl.minimum(n, num_columns - 1)
    PART: tl.constexpr = SIZE // SPLITS
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, PART, BLOCK_K):
        k = split * PART + start + tl.arange(0, BLOCK_K)
        # read once: the cache is better used for what the next kernels read
        if EVEN_K:
            weight = tl.load(weight_ptr + row[None, :] * SIZE + k[:, None], eviction_policy="evict_first")
            x = tl.load(x_ptr + m[:, None] * SIZE + k[None, :], mask=m_live[:, None], other=0.0)
        else:
            k_live = k < SIZE
            weight = tl.load(weight_ptr + row[None, :] * SIZE + k[:, None], mask=k_live[:, None], other=0.0)
            x = tl.load(x_ptr + m[:, None] * SIZE + k[None, :], mask=m_live[:, None] & k_live[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_live = n < num_columns
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[None, :]
    out_offset = (split * num_tokens + m)[:, None] * num_columns + n[None, :]
    live = m_live[:, None] if EVEN else m_live[:, None] & n_live[None, :]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=live)


def _launch_arguments(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles, block_m: int | None = None
) -> tuple[list, tuple[int, int, int], dict]:
    """The kernel's arguments, grid and options. `block_m` None: one block holds all tokens."""
    num_tokens, size = x_TK.shape
    num_columns = weight_NK.shape[0]
    block_m = block_m or max(16, next_power_of_2(num_tokens))
    assert x_TK.is_contiguous()
    assert weight_NK.is_contiguous()
    assert block_m <= MAX_TOKENS
    assert tiles.splits == 1 or size % (tiles.block_k * tiles.splits) == 0
    bias = x_TK if bias_N is None else bias_N
    options = {
        "SIZE": size,
        "SPLITS": tiles.splits,
        "BIAS": bias_N is not None,
        "EVEN": num_columns % tiles.block_n == 0,
        "EVEN_K": size % (tiles.block_k * tiles.splits) == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "PRECISION": "ieee" if x_TK.dtype is torch.float32 else "tf32",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **pdl_options(x_TK.device),
    }
    # blocks of tokens are next to each other in time, so that they find their weights in the cache
    grid = (-(-num_tokens // block_m), -(-num_columns // tiles.block_n), tiles.splits)
    return [x_TK, weight_NK, bias, out, num_tokens, num_columns], grid, options


def _launch(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor, tiles: Tiles, block_m: int | None = None
) -> None:
    if x_TK.shape[0]:
        arguments, grid, options = _launch_arguments(x_TK, weight_NK, bias_N, out, tiles, block_m)
        _linear_kernel[grid](*arguments, **options)


def compile_ahead(x_TK: Tensor, weight_NK: Tensor, out: Tensor, tiles: Tiles) -> None:
    """Compile what `linear_triton`, or with an `out` of sums `linear_split_triton`, would launch; from any thread."""
    arguments, grid, options = _launch_arguments(x_TK, weight_NK, None, out, tiles)
    _linear_kernel.warmup(*arguments, grid=grid, **options)


def linear_triton(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    block_m: int | None = None,
    out_TN: Tensor | None = None,
) -> Tensor:
    """Twin of `linear_torch`, for few tokens unless `block_m` cuts them. `tiles` None: as `choose` says, no splits."""
    num_columns = weight_NK.shape[0]
    tiles = tiles or _tiles(x_TK, weight_NK, may_split=False)
    assert tiles.splits == 1
    if out_TN is None:
        out_TN = torch.empty(x_TK.shape[0], num_columns, dtype=x_TK.dtype, device=x_TK.device)
    assert out_TN.is_contiguous()
    _launch(x_TK, weight_NK, bias_N, out_TN, tiles, block_m)
    return out_TN


def linear_split_triton(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    block_m: int | None = None,
) -> Tensor:
    """fp32 [X, T, N], to be added up over X: the layer's sums over each part of K; the bias is in the first."""
    num_columns = weight_NK.shape[0]
    tiles = tiles or _tiles(x_TK, weight_NK, may_split=True)
    sums_XTN = torch.empty(tiles.splits, x_TK.shape[0], num_columns, dtype=torch.float32, device=x_TK.device)
    _launch(x_TK, weight_NK, bias_N, sums_XTN, tiles, block_m)
    return sums_XTN


def _tiles(x_TK: Tensor, weight_NK: Tensor, *, may_split: bool) -> Tiles:
    few = x_TK.shape[0] <= FEW_TOKENS
    return choose(*weight_NK.shape, sm_count(x_TK.device), may_split=may_split, few=few)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors that want work."""
    if device.type != "cuda":
        return 8  # in the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _holds_tiles(device: torch.device) -> bool:
    properties = torch.cuda.get_device_properties(device)
    return properties.major >= 9 and getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_BYTES


def _is_skinny(x: Tensor, weight_NK: Tensor) -> bool:
    """Whether the kernel takes this layer, on a CUDA device."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in DTYPES
        and x.shape[1] % 128 == 0
        and weight_NK.numel() < 2**31  # offsets are 32 bits wide
        and x.is_contiguous()
        and weight_NK.is_contiguous()
        and _holds_tiles(x.device)
    )


def invariant_tiles(x_TK: Tensor, weight_NK: Tensor, *, may_split: bool) -> Tiles:
    """The tiles of a layer for any number of tokens, in blocks of `MAX_TOKENS`."""
    (num_columns, size), device = weight_NK.shape, x_TK.device
    if x_TK.dtype.itemsize == 4:
        return Tiles(32, 32, 1, 4, 2)  # no tensor core multiplies fp32 exactly
    if device.type == "cuda" and not _holds_tiles(device):
        return Tiles(64, 64, 1, 4, 3)
    return choose(num_columns, size, sm_count(device), may_split=may_split and size % 128 == 0, few=False)


def linear_invariant_triton(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    may_split: bool = False,
    out_TN: Tensor | None = None,
) -> Tensor:
    """`linear_triton` for any number of tokens, always by the same tiles; with `may_split` as `residual_linear`.

    Raises ConfigError for weights that are too large for offsets of 32 bits.
    """
    if weight_NK.numel() >= 2**31:
        raise ConfigError(
            f"deterministic is set, but a layer of {tuple(weight_NK.shape)} weights is too large for the kernel whose "
            "sums do not depend on the batch; leave it out"
        )
    x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
    tiles = invariant_tiles(x_TK, weight_NK, may_split=may_split)
    if tiles.splits > 1:
        return linear_split_triton(x_TK, weight_NK, bias_N, tiles=tiles, block_m=MAX_TOKENS)
    return linear_triton(x_TK, weight_NK, bias_N, tiles=tiles, block_m=MAX_TOKENS, out_TN=out_TN)


def linear_invariant_cpu(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """As many tokens at a time as the C kernel takes, which adds up each by itself; without it, token by token."""
    if takes(x_TK, bias_N, weight=weight_NK):
        parts = [native.linear(part_TK, weight_NK, bias_N) for part_TK in x_TK.split(native.MAX_TOKENS)]
    else:
        project = widened_linear if is_narrow(weight_NK, x_TK.dtype) else F.linear
        parts = [project(x_1K, weight_NK, bias_N) for x_1K in x_TK.split(1)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def linear(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None = None, *, out_TN: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, [T, N], added up in fp32 and rounded once; written to `out_TN` if given.

    On a CPU a weight may be bf16 where x is float32 (kernels/widened.py).
    """
    if not isinstance(weight_NK, Tensor):
        return weight_NK.linear(x_TK, bias_N, out_TN)
    if is_wanted():
        if x_TK.is_cuda:
            return linear_invariant_triton(x_TK, weight_NK, bias_N, out_TN=out_TN)
        result_TN = linear_invariant_cpu(x_TK, weight_NK, bias_N)
        return result_TN if out_TN is None else out_TN.copy_(result_TN)
    if x_TK.is_cuda and (wide := linear_wide.choose(x_TK, weight_NK, Kind.PLAIN)):
        return linear_wide.linear_wide(x_TK, weight_NK, bias_N, kind=Kind.PLAIN, tiles=wide, out=out_TN)
    if x_TK.is_cuda and _is_skinny(x_TK, weight_NK):
        return linear_triton(x_TK, weight_NK, bias_N, out_TN=out_TN)
    if native.takes_linear(x_TK, weight_NK, bias_N):
        if out_TN is None:
            return native.linear(x_TK, weight_NK, bias_N)
        native.linear_into(x_TK, weight_NK, bias_N, out_TN)
        return out_TN
    if is_narrow(weight_NK, x_TK.dtype):
        return widened_linear(x_TK, weight_NK, bias_N, out_TN)
    if out_TN is None:
        return F.linear(x_TK, weight_NK, bias_N)
    torch.mm(x_TK, weight_NK.T, out=out_TN)
    return out_TN if bias_N is None else out_TN.add_(bias_N)


def qkv_linear(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """`linear` for layers whose output goes into `rope_write`, which takes either thing this returns.

    [T, N], or fp32 [X, T, N] to be added up over X, where splitting K was measured to be faster.
    """
    if x_TK.is_cuda and isinstance(weight_NK, Tensor) and linear_wide.choose(x_TK, weight_NK, Kind.SUMS):
        return residual_linear(x_TK, weight_NK, bias_N)
    if x_TK.is_cuda and (is_wanted() or x_TK.shape[0] <= MAX_TOKENS):
        measured = MEASURED if isinstance(weight_NK, Tensor) else weight_NK.measured_on(gpu_name(x_TK.device))
        if (*weight_NK.shape, True) in measured:
            return residual_linear(x_TK, weight_NK, bias_N)
    return linear(x_TK, weight_NK, bias_N)


def residual_linear(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """`linear` for layers whose output goes into `add_rms_norm`, which takes either thing this returns.

    [T, N], or fp32 [X, T, N] to be added up over X where the kernel splits K.
    """
    if not isinstance(weight_NK, Tensor):
        return weight_NK.residual_linear(x_TK, bias_N)
    if is_wanted() and x_TK.is_cuda:
        return linear_invariant_triton(x_TK, weight_NK, bias_N, may_split=True)
    if x_TK.is_cuda and (wide := linear_wide.choose(x_TK, weight_NK, Kind.SUMS)):
        return linear_wide.linear_wide(x_TK, weight_NK, bias_N, kind=Kind.SUMS, tiles=wide)
    if x_TK.is_cuda and _is_skinny(x_TK, weight_NK) and _tiles(x_TK, weight_NK, may_split=True).splits > 1:
        return linear_split_triton(x_TK, weight_NK, bias_N)
    return linear(x_TK, weight_NK, bias_N)
