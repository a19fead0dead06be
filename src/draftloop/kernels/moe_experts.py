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

MEASURED: dict[tuple[int, int, bool], Tiles] = {}
"""(columns, K columns, whether gated) -> the fastest tiles on an H200 at 6 tokens."""


@functools.cache
def choose(num_columns: int, size: int, *, gated: bool, itemsize: int = 2, tall: bool = False) -> tuple[int, Tiles]:
    """Tokens per block, and tiles of a layer with [num_columns, size] weights per expert, twice that if `gated`.

    Widths give a single token's eight experts enough programs to keep the memory busy.
    """
    if itemsize == 4:
        return 32, Tiles(32, 32, 1, 4, 2)  # no tensor core multiplies fp32 exactly
    if tall:
        return 64, Tiles(64 if gated else 128, 64, 1, 4, 3)
    return 16, MEASURED.get((num_columns, size, gated)) or Tiles(32 if gated else 64, 128, 1, 4, 4)


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
    group = groups_ptr + 3 * tl.program_id(1)
    count = tl.load(group + 2)
    if count > 0:
        expert, start = tl.load(group).to(tl.int64), tl.load(group + 1)
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
                if SIZE % BLOCK_K == 0:
                    gate_weight = tl.load(gate_ptr + offset)
                    up_weight = tl.load(gate_ptr + COLUMNS * SIZE + offset)
                    x = tl.load(x_ptr + token[:, None] * SIZE + k[None, :], mask=m_live[:, None], other=0.0)
                else:
                    k_live = k < SIZE
                    gate_weight = tl.load(gate_ptr + offset, mask=k_live[:, None], other=0.0)
                    up_weight = tl.load(gate_ptr + COLUMNS * SIZE + offset, mask=k_live[:, None], other=0.0)
                    live = m_live[:, None] & k_live[None, :]
                    x = tl.load(x_ptr + token[:, None] * SIZE + k[None, :], mask=live, other=0.0)
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
    group = groups_ptr + 3 * tl.program_id(1)
    count = tl.load(group + 2)
    if count > 0:
        expert, start = tl.load(group).to(tl.int64), tl.load(group + 1)
        expert_ptr = weight_ptr + expert * (COLUMNS * SIZE)
        for begin in range(0, count, BLOCK_M):
            m = begin + tl.arange(0, BLOCK_M)
            m_live = m < count
            place = (start + m).to(tl.int64)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k_begin in range(0, SIZE, BLOCK_K):
                k = k_begin + tl.arange(0, BLOCK_K)
                if SIZE % BLOCK_K == 0:
                    weight = tl.load(expert_ptr + row[None, :] * SIZE + k[:, None])
                    x = tl.load(x_ptr + place[:, None] * SIZE + k[None, :], mask=m_live[:, None], other=0.0)
                else:
                    k_live = k < SIZE
                    weight = tl.load(expert_ptr + row[None, :] * SIZE + k[:, None], mask=k_live[:, None], other=0.0)
                    live = m_live[:, None] & k_live[None, :]
                    x = tl.load(x_ptr + place[:, None] * SIZE + k[None, :], mask=live, other=0.0)
                acc = tl.dot(x, weight, acc, input_precision=PRECISION)
            assignment = tl.load(order_ptr + place, mask=m_live, other=0)
            share = tl.load(router_ptr + assignment, mask=m_live, other=0.0)
            out_row = (assignment % PER_TOKEN).to(tl.int64) * num_tokens + assignment // PER_TOKEN
            live = m_live[:, None] & (n < COLUMNS)[None, :]
            tl.store(out_ptr + out_row[:, None] * COLUMNS + n[None, :], acc * share[:, None], mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


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
    (num_tokens, size), (num_here, _, inner) = x_TC.shape, down_ECI.shape
    num_per_token, num_assignments = routes.weights_TK.shape[1], routes.order_A.numel()
    assert x_TC.is_contiguous()
    assert gate_up_E2IC.is_contiguous()
    assert down_ECI.is_contiguous()
    tall = is_wanted() or num_assignments >= MANY_TOKENS * num_here
    itemsize = x_TC.dtype.itemsize
    out_KTC = torch.empty(num_per_token, num_tokens, size, dtype=torch.float32, device=x_TC.device)
    inner_AI = torch.empty(num_assignments, inner, dtype=x_TC.dtype, device=x_TC.device)
    options = {"PRECISION": "ieee" if itemsize == 4 else "tf32", **pdl_options(x_TC.device)}
    groups = routes.groups_G3.shape[0]
    block_m, tiles = gate_up_tiles or choose(inner, size, gated=True, itemsize=itemsize, tall=tall)
    _gate_up_kernel[(-(-inner // tiles.block_n), groups)](
        x_TC,
        gate_up_E2IC,
        routes.order_A,
        routes.groups_G3,
        inner_AI,
        num_tokens,
        SIZE=size,
        COLUMNS=inner,
        PER_TOKEN=num_per_token,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    block_m, tiles = down_tiles or choose(size, inner, gated=False, itemsize=itemsize, tall=tall)
    _down_kernel[(-(-size // tiles.block_n), groups)](
        inner_AI,
        down_ECI,
        routes.order_A,
        routes.groups_G3,
        routes.weights_TK,
        out_KTC,
        num_tokens,
        SIZE=inner,
        COLUMNS=size,
        PER_TOKEN=num_per_token,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    return out_KTC


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


def experts(x_TC: Tensor, logits: Tensor, gate_up_E2IC: Tensor, down_ECI: Tensor, router: Router) -> Tensor:
    """The sum over a token's experts of weight times `down(silu(gate(x)) * up(x))`, as `residual_linear` returns it.

    `logits` as `router_logits` returns them, of all experts. Those that are not here add nothing, and the sum is then
    [T, C] in the dtype of x.
    """
    if not x_TC.is_cuda:
        return experts_cpu(x_TC, logits, gate_up_E2IC, down_ECI, *router[:3], is_wanted())
    routes = route_triton(logits, router)
    out_KTC = experts_triton(x_TC, gate_up_E2IC, down_ECI, routes)
    if router.num_here == logits.shape[-1]:
        return out_KTC
    return combine_triton(out_KTC, routes.experts_TK, router, x_TC.dtype)
