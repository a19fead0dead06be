"""Which experts each token goes through, and which tokens each expert gets: in fixed shapes, never read by the host.

The k experts of T tokens are T * k assignments, numbered token by token: token t's expert of rank j is t * k + j. They
are listed expert by expert, within one by token, so that whoever computes an expert finds its tokens side by side.

Shape suffixes: T tokens, C hidden size, E experts, X splits of a sum, K experts per token, A = T * K assignments,
G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.linear import linear, linear_invariant_triton
from draftloop.kernels.ordered import order_of
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl

MAX_SORTED = 32
"""Tokens up to which one program routes them all and sorts as well."""
BLOCK_T = 4
"""Tokens per program above that."""
BLOCK_A = 1024
"""Assignments that a sorting program looks at together."""


class Router(NamedTuple):
    """How experts are chosen, and which of them are here."""

    num_per_token: int
    normalise: bool
    """The weights of a token's experts add up to 1."""
    first: int
    """Of the experts here."""
    num_here: int


class Routes(NamedTuple):
    """Where the tokens of a pass go."""

    weights_TK: Tensor
    """fp32: what the output of each expert is multiplied by; by rank, the likeliest first."""
    experts_TK: Tensor
    """int32"""
    order_A: Tensor
    """int32: assignments by expert, then by token."""
    groups_G3: Tensor
    """int32: an expert, counted from the first here; its first place in `order_A`; how many follow, 0 for no group.

    Every expert here that a token goes through has one group; there are as many as there can at most be.
    """


def num_groups(num_tokens: int, router: Router) -> int:
    """Rows of `groups_G3`: the experts here, or as many as so few tokens can go through."""
    return router.num_here if num_tokens > MAX_SORTED else min(router.num_here, num_tokens * router.num_per_token)


def router_logits(x_TC: Tensor, weight_EC: Tensor) -> Tensor:
    """[T, E], or fp32 [X, T, E] to be added up over X. On a GPU a token's do not depend on how many there are."""
    return linear_invariant_triton(x_TC, weight_EC, may_split=True) if x_TC.is_cuda else linear(x_TC, weight_EC)


def route_torch(logits: Tensor, router: Router) -> Routes:
    """Reference of `route_triton`, which may list groups in another order."""
    logits_TE = logits.float().sum(0) if logits.dim() == 3 else logits.float()
    probabilities_TE = logits_TE.softmax(-1)
    # what is no number has no order: it must still lead to experts that exist
    ranked_TE = logits_TE.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    experts_TK = ranked_TE.topk(router.num_per_token, -1).indices
    weights_TK = probabilities_TE.gather(-1, experts_TK)
    if router.normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    flat_A = experts_TK.flatten()
    here_E = torch.arange(router.first, router.first + router.num_here, device=logits.device)
    counts_E = (flat_A[:, None] == here_E).sum(0)
    starts_E = (flat_A[:, None] < here_E).sum(0)
    by_count_G = counts_E.argsort(descending=True, stable=True)[: num_groups(len(logits_TE), router)]
    groups_G3 = torch.stack((by_count_G, starts_E[by_count_G], counts_E[by_count_G]), 1)
    order_A = flat_A.argsort(stable=True)
    return Routes(weights_TK, experts_TK.int(), order_A.int(), groups_G3.int())


@jit("num_tokens")
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    order_ptr,
    groups_ptr,
    num_tokens,
    first,
    num_here,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SORT: tl.constexpr,  # all tokens are in this program, which also sorts
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of tokens: softmax, the likeliest experts, their weights."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    t_live, e_live = t < num_tokens, e < EXPERTS
    live = t_live[:, None] & e_live[None, :]
    offset = t[:, None] * EXPERTS + e[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits_ptr + offset, mask=live, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(logits_ptr + split * num_tokens * EXPERTS + offset, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # rows past the last are even, so that nothing in them is infinite
    x = tl.where(t_live[:, None] | ~e_live[None, :], x, 0.0)
    # what is no number comes last, but before experts that do not exist; of equals the first
    number = tl.where(x == x, x, float("-inf"))
    p = tl.exp(x - tl.max(number, 1)[:, None])
    order = order_of(number)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)[None, :]
    key = tl.where(e_live[None, :], key, -0x7FFFFFFFFFFFFFFF)
    rank = tl.full([BLOCK_T, BLOCK_E], -1, tl.int32)
    for j in tl.static_range(PER_TOKEN):
        hit = key == tl.max(key, 1)[:, None]
        rank = tl.where(hit, j, rank)
        key = tl.where(hit, -0x7FFFFFFFFFFFFFFF, key)
    chosen = (rank >= 0) & t_live[:, None]
    total = tl.sum(tl.where(rank >= 0, p, 0.0) if NORMALISE else p, 1)
    assignment = t[:, None] * PER_TOKEN + rank
    tl.store(weights_ptr + assignment, p / total[:, None], mask=chosen)
    tl.store(experts_ptr + assignment, tl.zeros_like(rank) + e[None, :], mask=chosen)
    if SORT:
        one = chosen.to(tl.int32)
        count = tl.sum(one, 0)
        start = tl.cumsum(count, 0) - count
        place = start[None, :] + tl.cumsum(one, 0) - one
        tl.store(order_ptr + place, assignment, mask=chosen)
        here = (count > 0) & (e >= first) & (e < first + num_here)
        group = groups_ptr + 3 * (tl.cumsum(here.to(tl.int32), 0) - 1)
        tl.store(group, e - first, mask=here)
        tl.store(group + 1, start, mask=here)
        tl.store(group + 2, count, mask=here)
        g = tl.arange(0, BLOCK_G)
        tl.store(groups_ptr + 3 * g + 2, tl.zeros_like(g), mask=(g >= tl.sum(here.to(tl.int32), 0)) & (g < GROUPS))


@jit("num_assignments")
def _sort_kernel(experts_ptr, order_ptr, groups_ptr, num_assignments, first, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One expert: the places of its assignments."""
    g = tl.program_id(0)
    expert = first + g
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = 0
    for begin in range(0, num_assignments, BLOCK):
        a = begin + tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + a, mask=a < num_assignments, other=0x7FFFFFFF)
        start += tl.sum((found < expert).to(tl.int32), 0)
    count = 0
    for begin in range(0, num_assignments, BLOCK):
        a = begin + tl.arange(0, BLOCK)
        mine = tl.load(experts_ptr + a, mask=a < num_assignments, other=-1) == expert
        one = mine.to(tl.int32)
        tl.store(order_ptr + start + count + tl.cumsum(one, 0) - one, a, mask=mine)
        count += tl.sum(one, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(groups_ptr + 3 * g, g)
    tl.store(groups_ptr + 3 * g + 1, start)
    tl.store(groups_ptr + 3 * g + 2, count)


def route_triton(logits: Tensor, router: Router) -> Routes:
    """Softmax over [T, E] logits, or fp32 [X, T, E] to be added up over X; the K likeliest experts of each token.

    Of `order_A`, only what `groups_G3` points to is written. Logits that are no number lead to experts that exist.
    """
    splits = logits.shape[0] if logits.dim() == 3 else 1
    num_tokens, num_experts = logits.shape[-2:]
    num_assignments, groups = num_tokens * router.num_per_token, num_groups(num_tokens, router)
    assert logits.is_contiguous()
    assert num_tokens

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    routes = Routes(
        make(num_tokens, router.num_per_token, dtype=torch.float32),
        make(num_tokens, router.num_per_token),
        make(num_assignments),
        make(groups, 3),
    )
    sort = num_tokens <= MAX_SORTED
    block_t = next_power_of_2(num_tokens) if sort else BLOCK_T
    options = pdl_options(logits.device)
    _route_kernel[(-(-num_tokens // block_t),)](
        logits,
        *routes,
        num_tokens,
        router.first,
        router.num_here,
        EXPERTS=num_experts,
        BLOCK_E=next_power_of_2(num_experts),
        SPLITS=splits,
        PER_TOKEN=router.num_per_token,
        NORMALISE=router.normalise,
        BLOCK_T=block_t,
        SORT=sort,
        GROUPS=groups,
        BLOCK_G=next_power_of_2(groups),
        num_warps=8 if block_t >= 16 else 4,
        **options,
    )
    if not sort:
        _sort_kernel[(groups,)](
            routes.experts_TK, routes.order_A, routes.groups_G3, num_assignments, router.first, BLOCK=BLOCK_A, **options
        )
    return routes
