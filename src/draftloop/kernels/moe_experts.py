"""A mixture of experts for few tokens: each expert that is hit is read once, and no other.

Two kernels, both of one program per expert and block of columns: gate, up and activation; then down, times the
router's weight. Tokens are gathered by the lists of `moe_route`. The k outputs of a token are left side by side in
fp32, for the residual norm that follows to add up by rank (`rms_norm.add_rms_norm`): no atomics, always the same order.

Shape suffixes: T tokens, C hidden size, E experts here, I inner size, K experts per token, A = T * K assignments,
X splits of a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.linear import Tiles, linear, linear_invariant_cpu
from draftloop.kernels.moe_combine import combine_torch, combine_triton
from draftloop.kernels.moe_route import Router, Routes, route_torch, route_triton
from draftloop.kernels.opaque import define
from draftloop.kernels.silu_mul import gate_times_up, silu_mul_torch
from draftloop.kernels.triton_import import jit, pdl_options, tl

MANY_TOKENS = 16
"""Tokens that an expert gets on average from which on blocks of them are tall."""

MEASURED: dict[tuple[int, int, bool, bool], tuple[int, Tiles]] = {}
"""(columns, K columns, whether gated, whether tall) -> the fastest on an H200, from `draftloop.bench.sweep_experts`."""


@functools.cache
def choose(num_columns: int, size: int, *, gated: bool, itemsize: int = 2, tall: bool = False) -> tuple[int, Tiles]:
    """Tokens per block, and tiles of a layer with [num_columns, size] weights per expert, twice that if `gated`.

    `tall`: for at least `MANY_TOKENS` tokens per expert.

    Widths give a single token's eight experts enough programs to keep the memory busy.
    """
    if itemsize == 4:
        return 32, Tiles(32, 32, 1, 4, 2)  # no tensor core multiplies fp32 exactly
    if found := MEASURED.get((num_columns, size, gated, tall)):
        return found
    return (64, Tiles(64 if gated else 128, 64, 1, 4, 3)) if tall else (16, Tiles(32 if gated else 64, 128, 1, 4, 4))


def experts_torch(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    routes: Routes,
    project: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Reference of `experts_triton`; zero where an expert is not here."""
    num_tokens, num_per_token = routes.weights_TK.shape
    out_KTC = torch.zeros(num_per_token, num_tokens, x_TC.shape[1], dtype=torch.float32, device=x_TC.device)
    for expert, start, count in routes.groups_G3.tolist():
        if count:
            assignments = routes.order_A[start : start + count].long()
            tokens, ranks = assignments // num_per_token, assignments % num_per_token
            inner = silu_mul_torch(project(x_TC[tokens], gate_up_E2IC[expert]))
            out = project(inner, down_ECI[expert]).float()
            out_KTC[ranks, tokens] = out * routes.weights_TK[tokens, ranks, None]
    return out_KTC


@jit()
def _group(groups_ptr):
    """This program's: read together, since each read is a wait. Without a count the others say nothing."""
    group = groups_ptr + 3 * tl.program_id(1)
    return tl.load(group).to(tl.int64), tl.load(group + 1), tl.load(group + 2)


@jit()
def _weights(pointers, k, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Columns of K by rows; `EVEN`: no block goes past the end of K."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=(k < SIZE)[:, None], other=0.0)


@jit()
def _inputs(ptr, row, live, k, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Rows that are live, by columns of K."""
    live = live[:, None] if EVEN else live[:, None] & (k < SIZE)[None, :]
    return tl.load(ptr + row[:, None] * SIZE + k[None, :], mask=live, other=0.0)


@jit("num_tokens")
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    order_ptr,
    groups_ptr,
    out_ptr,
    num_tokens,
    SIZE: tl.constexpr,  # C
    COLUMNS: tl.constexpr,  # I
    PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of columns of one expert's `silu(gate) * up`, for all of its tokens."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, COLUMNS - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert, start, count = _group(groups_ptr)
    if count > 0:
        gate_ptr = weight_ptr + expert * (2 * COLUMNS * SIZE)
        for begin in range(0, count, BLOCK_M):
            m = begin + tl.arange(0, BLOCK_M)
            m_live = m < count
            token = (tl.load(order_ptr + start + m, mask=m_live, other=0) // PER_TOKEN).to(tl.int64)
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k_begin in range(0, SIZE, BLOCK_K):
                k = k_begin + tl.arange(0, BLOCK_K)
                offset = row[None, :] * SIZE + k[:, None]
                gate_weight = _weights(gate_ptr + offset, k, SIZE, SIZE % BLOCK_K == 0)
                up_weight = _weights(gate_ptr + COLUMNS * SIZE + offset, k, SIZE, SIZE % BLOCK_K == 0)
                x = _inputs(x_ptr, token, m_live, k, SIZE, SIZE % BLOCK_K == 0)
                gate = tl.dot(x, gate_weight, gate, input_precision=PRECISION)
                up = tl.dot(x, up_weight, up, input_precision=PRECISION)
            inner = gate_times_up(gate, up, out_ptr.dtype.element_ty, False)
            out = out_ptr + (start + m).to(tl.int64)[:, None] * COLUMNS + n[None, :]
            live = m_live[:, None] & (n < COLUMNS)[None, :]
            tl.store(out, inner.to(out_ptr.dtype.element_ty), mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit("num_tokens")
def _down_kernel(
    x_ptr,
    weight_ptr,
    order_ptr,
    groups_ptr,
    router_ptr,
    out_ptr,
    num_tokens,
    SIZE: tl.constexpr,  # I
    COLUMNS: tl.constexpr,  # C
    PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of columns of one expert's output, times the router's weight, for all of its tokens."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, COLUMNS - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert, start, count = _group(groups_ptr)
    if count > 0:
        expert_ptr = weight_ptr + expert * (COLUMNS * SIZE)
        for begin in range(0, count, BLOCK_M):
            m = begin + tl.arange(0, BLOCK_M)
            m_live = m < count
            place = (start + m).to(tl.int64)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k_begin in range(0, SIZE, BLOCK_K):
                k = k_begin + tl.arange(0, BLOCK_K)
                weight = _weights(expert_ptr + row[None, :] * SIZE + k[:, None], k, SIZE, SIZE % BLOCK_K == 0)
                x = _inputs(x_ptr, place, m_live, k, SIZE, SIZE % BLOCK_K == 0)
                acc = tl.dot(x, weight, acc, input_precision=PRECISION)
            assignment = tl.load(order_ptr + place, mask=m_live, other=0)
            share = tl.load(router_ptr + assignment, mask=m_live, other=0.0)
            out_row = (assignment % PER_TOKEN).to(tl.int64) * num_tokens + assignment // PER_TOKEN
            live = m_live[:, None] & (n < COLUMNS)[None, :]
            tl.store(out_ptr + out_row[:, None] * COLUMNS + n[None, :], acc * share[:, None], mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    num_tokens: int,
    routes: Routes,
    size: int,
    columns: int,
    block_m: int,
    tiles: Tiles,
) -> None:
    (x, *_), num_per_token = tensors, routes.weights_TK.shape[1]
    assert all(tensor.is_contiguous() for tensor in tensors)
    kernel[(-(-columns // tiles.block_n), routes.groups_G3.shape[0])](
        *tensors,
        num_tokens,
        SIZE=size,
        COLUMNS=columns,
        PER_TOKEN=num_per_token,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        PRECISION="ieee" if x.dtype.itemsize == 4 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x.device),
    )


def gate_up_triton(x_TC: Tensor, gate_up_E2IC: Tensor, routes: Routes, block_m: int, tiles: Tiles) -> Tensor:
    """[A, I]: `silu(gate(x)) * up(x)` in the order of `routes.order_A`."""
    (num_tokens, size), columns = x_TC.shape, gate_up_E2IC.shape[1] // 2
    out_AI = torch.empty(routes.order_A.numel(), columns, dtype=x_TC.dtype, device=x_TC.device)
    tensors = x_TC, gate_up_E2IC, routes.order_A, routes.groups_G3, out_AI
    _launch(_gate_up_kernel, tensors, num_tokens, routes, size, columns, block_m, tiles)
    return out_AI


def down_triton(inner_AI: Tensor, down_ECI: Tensor, routes: Routes, block_m: int, tiles: Tiles) -> Tensor:
    """fp32 [K, T, C], by rank: each expert's output times its weight, of what `gate_up_triton` returns."""
    (num_tokens, num_per_token), columns = routes.weights_TK.shape, down_ECI.shape[1]
    out_KTC = torch.empty(num_per_token, num_tokens, columns, dtype=torch.float32, device=inner_AI.device)
    tensors = inner_AI, down_ECI, routes.order_A, routes.groups_G3, routes.weights_TK, out_KTC
    _launch(_down_kernel, tensors, num_tokens, routes, inner_AI.shape[1], columns, block_m, tiles)
    return out_KTC


def experts_triton(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    routes: Routes,
    *,
    gate_up_tiles: tuple[int, Tiles] | None = None,
    down_tiles: tuple[int, Tiles] | None = None,
) -> Tensor:
    """fp32 [K, T, C]: each expert's output times its weight, by rank. Unwritten where an expert is not here.

    Tiles are those of `choose`, by how many tokens an expert gets on average, unless given.
    """
    num_here, size, inner = down_ECI.shape
    tall = is_wanted() or routes.order_A.numel() >= MANY_TOKENS * num_here
    options = {"itemsize": x_TC.dtype.itemsize, "tall": tall}
    gate_up_tiles = gate_up_tiles or choose(inner, size, gated=True, **options)
    down_tiles = down_tiles or choose(size, inner, gated=False, **options)
    return down_triton(gate_up_triton(x_TC, gate_up_E2IC, routes, *gate_up_tiles), down_ECI, routes, *down_tiles)


def _experts_cpu(
    x_TC: Tensor,
    logits_TE: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    num_per_token: int,
    normalise: bool,
    first: int,
    invariant: bool,
) -> Tensor:
    router = Router(num_per_token, normalise, first, down_ECI.shape[0])
    routes = route_torch(logits_TE, router)
    project = linear_invariant_cpu if invariant else linear
    return combine_torch(experts_torch(x_TC, gate_up_E2IC, down_ECI, routes, project), x_TC.dtype)


experts_cpu = define(
    "moe_experts(Tensor x, Tensor logits, Tensor gate_up, Tensor down, int num_per_token, bool normalise, int first, "
    "bool invariant) -> Tensor",
    _experts_cpu,
    "CPU",
)
"""One op on a tape: which experts are hit is known to its body alone."""


def experts(
    x_TC: Tensor,
    logits: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    router: Router,
    *,
    before_norm: bool = True,
) -> Tensor:
    """The sum over a token's experts of weight times `down(silu(gate(x)) * up(x))`, [T, C] in the dtype of x.

    `logits` as `router_logits` returns them, of all experts. Those that are not here add nothing. `before_norm`: an
    `add_rms_norm` follows, so that where all are here it is what `residual_linear` returns.
    """
    if not x_TC.is_cuda:
        return experts_cpu(x_TC, logits, gate_up_E2IC, down_ECI, *router[:3], is_wanted())
    routes = route_triton(logits, router)
    out_KTC = experts_triton(x_TC, gate_up_E2IC, down_ECI, routes)
    if before_norm and router.num_here == logits.shape[-1]:
        return out_KTC
    return combine_triton(out_KTC, routes.experts_TK, router, x_TC.dtype)
