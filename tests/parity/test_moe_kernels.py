"""Routing and grouped kernels of mixtures of experts: in Triton's interpreter without a GPU, for real with `-m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.graphs.tape import TapeRecorder
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.linear import Tiles
from draftloop.kernels.moe_combine import combine_torch, combine_triton
from draftloop.kernels.moe_experts import experts, experts_torch, experts_triton
from draftloop.kernels.moe_route import MAX_SORTED, Router, Routes, num_groups, route_torch, route_triton, router_logits

NAN = float("nan")
SMALL = 16, Tiles(block_n=32, block_k=64, splits=1, num_warps=4, num_stages=2)


def half(device: torch.device) -> torch.dtype:
    # numpy, and so the interpreter, multiplies no bf16
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def grouped(routes: Routes) -> dict[int, list[int]]:
    """Expert, counted from the first here -> its assignments, in the order of the list."""
    groups = [group for group in routes.groups_G3.tolist() if group[2]]
    found = {expert: routes.order_A[start : start + count].tolist() for expert, start, count in groups}
    assert len(found) == len(groups), "an expert has two groups"
    return found


@pytest.mark.parametrize(
    ("tokens", "num_experts", "router"),
    [
        (1, 128, Router(8, True, 0, 128)),
        (6, 128, Router(8, True, 64, 64)),
        (5, 12, Router(3, False, 0, 12)),
        (MAX_SORTED, 5, Router(2, True, 1, 3)),
        (MAX_SORTED + 1, 40, Router(1, False, 0, 40)),
        (150, 128, Router(8, True, 32, 64)),
    ],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_routes(device: torch.device, tokens: int, num_experts: int, router: Router, splits: int) -> None:
    torch.manual_seed(tokens)
    logits = torch.randn(splits, tokens, num_experts, device=device) * 2
    if splits == 1:  # no two alike, rounded
        logits = logits[0].argsort(-1).to(half(device)) / 16
    routes = route_triton(logits, router)
    expected = route_torch(logits, router)
    # as transformers': softmax in fp32, then the likeliest
    shares, chosen = (logits.sum(0) if splits > 1 else logits).float().softmax(-1).topk(router.num_per_token)
    shares = shares / shares.sum(-1, keepdim=True) if router.normalise else shares
    for found in (routes, expected):
        assert found.experts_TK.tolist() == chosen.tolist()
        torch.testing.assert_close(found.weights_TK, shares, atol=1e-6, rtol=1e-5)
        assert found.groups_G3.shape == (num_groups(tokens, router), 3)
    hit: dict[int, list[int]] = {}
    for assignment, expert in enumerate(chosen.flatten().tolist()):
        if router.first <= expert < router.first + router.num_here:
            hit.setdefault(expert - router.first, []).append(assignment)
    assert grouped(routes) == hit
    assert grouped(expected) == hit


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, for inf - inf
@pytest.mark.parametrize("tokens", [3, MAX_SORTED + 3])
def test_what_is_no_number_leads_to_experts_that_exist(device: torch.device, tokens: int) -> None:
    """And stays with its token."""
    router = Router(3, True, 0, 5)
    logits = torch.randn(tokens, 5, device=device)
    clean = route_triton(logits, router)
    logits[0], logits[1, 2:] = NAN, torch.tensor([NAN, float("inf"), float("-inf")], device=device)
    for routes in (route_triton(logits, router), route_torch(logits, router)):
        assert routes.weights_TK[:2].isnan().all()
        assert torch.equal(routes.experts_TK[2:], clean.experts_TK[2:])
        torch.testing.assert_close(routes.weights_TK[2:], clean.weights_TK[2:])
        assert all(len(set(chosen)) == 3 and set(chosen) <= set(range(5)) for chosen in routes.experts_TK.tolist())
        assert sorted(a for group in grouped(routes).values() for a in group) == list(range(3 * tokens))


def test_of_equal_experts_the_first_ones_are_chosen(device: torch.device) -> None:
    routes = route_triton(torch.zeros(2, 12, device=device), Router(4, False, 0, 12))
    assert routes.experts_TK.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(routes.weights_TK, torch.full((2, 4), 1 / 12, device=device))


def make(
    tokens: int, num_experts: int, size: int, inner: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, logits, weights of gate and up, weights of down."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    return (
        random(tokens, size),
        random(tokens, num_experts, scale=2.0),
        random(num_experts, 2 * inner, size, scale=size**-0.5),
        random(num_experts, size, inner, scale=inner**-0.5),
    )


def exact(
    x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, first: int = 0, between: torch.dtype = torch.float64
) -> Tensor:
    """[K, T, C] in fp64, token by token; zero where an expert is not here.

    What lies between the two layers is rounded to `between`: gate, up, the activated gate, and its product with up.
    """

    def rounded(number: Tensor) -> Tensor:
        return number.to(between).double()

    out = torch.zeros(routes.weights_TK.shape[1], *x.shape, dtype=torch.float64, device=x.device)
    for token, chosen in enumerate(routes.experts_TK.tolist()):
        for rank, expert in enumerate(chosen):
            if 0 <= expert - first < len(down):
                gate, up = (x[token].double() @ gate_up[expert - first].double().T).chunk(2)
                inner = rounded(rounded(F.silu(rounded(gate))) * rounded(up))
                out[rank, token] = inner @ down[expert - first].double().T * routes.weights_TK[token, rank]
    return out


@pytest.mark.parametrize(
    ("tokens", "num_experts", "size", "inner", "router"),
    [
        (1, 8, 64, 32, Router(2, True, 0, 8)),
        (19, 3, 80, 48, Router(3, False, 0, 3)),
        (37, 2, 64, 40, Router(1, True, 0, 2)),
        (6, 9, 128, 96, Router(4, True, 3, 3)),
    ],
)
def test_experts(device: torch.device, tokens: int, num_experts: int, size: int, inner: int, router: Router) -> None:
    x, logits, gate_up, down = make(tokens, num_experts, size, inner, device, half(device))
    here = slice(router.first, router.first + router.num_here)
    gate_up, down = gate_up[here].contiguous(), down[here].contiguous()
    routes = route_triton(logits, router)
    unhit = sorted(set(range(router.num_here)) - set(grouped(routes)))
    gate_up[unhit], down[unhit] = NAN, NAN  # what no token goes through is not read
    out = experts_triton(x, gate_up, down, routes, gate_up_tiles=SMALL, down_tiles=SMALL)
    expected = exact(x, gate_up, down, routes, router.first)
    is_here = (routes.experts_TK >= here.start) & (routes.experts_TK < here.stop)
    torch.testing.assert_close(out[is_here.T].double(), expected[is_here.T], atol=2e-2, rtol=2e-2)
    reference = experts_torch(x, gate_up, down, routes)
    torch.testing.assert_close(reference.double(), expected, atol=2e-2, rtol=2e-2)
    # others' parts were never written
    out[~is_here.T] = NAN
    total = combine_triton(out, routes.experts_TK, router, torch.float32)
    torch.testing.assert_close(total.double(), expected.sum(0), atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(combine_torch(reference, torch.float32), total, atol=4e-2, rtol=2e-2)


@pytest.mark.usefixtures("sums_by_themselves")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tokens_experts_do_not_depend_on_other_tokens(device: torch.device, dtype: torch.dtype) -> None:
    """Bit for bit, in whatever place of however many; nothing of a token that is no number reaches another."""
    router = Router(2, True, 0, 4)
    x, logits, gate_up, down = make(40, 4, 64, 32, device, dtype)
    x[7], logits[7] = NAN, NAN
    run = batch_invariant(
        lambda x, logits: experts_triton(x, gate_up, down, route_triton(logits.contiguous(), router)).clone()
    )
    whole = run(x, logits)
    assert whole[:, 7].isnan().all()
    assert whole[:, :7].isfinite().all()
    assert whole[:, 8:].isfinite().all()
    for start, count in ((0, 1), (5, 2), (8, 32)):
        part = run(x[start : start + count], logits[start : start + count])
        assert torch.equal(part.nan_to_num(), whole[:, start : start + count].nan_to_num())


def test_on_a_cpu_it_is_one_op_that_reads_what_is_hit() -> None:
    router = Router(2, True, 1, 5)
    x, logits, gate_up, down = make(6, 8, 64, 32, torch.device("cpu"), torch.float32)
    gate_up, down = gate_up[1:6], down[1:6]
    routes = route_torch(logits, router)
    unhit = sorted(set(range(5)) - set(grouped(routes)))
    gate_up[unhit], down[unhit] = NAN, NAN
    out = torch.empty(6, 64)
    tape = TapeRecorder().record(lambda call: out.copy_(experts(x, logits, gate_up, down, router)), piecewise=False)
    for seed in range(3):  # other tokens, other experts
        if seed:
            x.normal_()
            logits.copy_(logits[torch.randperm(6)])
        tape.replay()
        expected = exact(x, gate_up, down, route_torch(logits, router), 1).sum(0)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_rounding_between_the_layers_costs() -> None:
    """0.36 % of the output, whatever the sizes: so six standard deviations are 0.013 of an output of size 0.6.

    A bf16 number is off by 2^-7.5 / sqrt(12) of itself, 0.16 %, as a standard deviation. The activated gate, up and
    their product give one such error each, the gate itself about 1.2, and all of them are independent from term to
    term of the sum.
    """
    for size, inner in ((64, 1024), (256, 4096)):
        x, logits, gate_up, down = make(64, 1, size, inner, torch.device("cpu"), torch.bfloat16)
        routes = route_torch(logits, Router(1, True, 0, 1))
        right = exact(x, gate_up, down, routes)
        error = exact(x, gate_up, down, routes, between=torch.bfloat16) - right
        assert 0.0032 < error.std() / right.std() < 0.0040
        assert error.abs().max() < 6 * error.std()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6, 48, 192, 700])
@pytest.mark.parametrize(
    ("num_experts", "size", "inner", "num_per_token"),
    [(128, 2048, 768, 8), (8, 4096, 14336, 2)],
    ids=["qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_layers_on_a_gpu(tokens: int, num_experts: int, size: int, inner: int, num_per_token: int) -> None:
    """By the tiles that serve, captured and replayed with other tokens.

    Against sums in fp64 with the same roundings between the layers. What is left are fp32 sums that round to the other
    side: 0.5 % of 14336 numbers, by 2^-7.5 of themselves, are 1.7e-4 of noise on an output of size 0.6 (emulated with
    sums that are cut off at 24 bits after every 16 products, as tensor cores may). The tolerance is twelve times that.
    """
    device, dtype, router = torch.device("cuda"), torch.bfloat16, Router(num_per_token, True, 0, num_experts)
    torch.manual_seed(0)
    gate_up = torch.randn(num_experts, 2 * inner, size, device=device, dtype=dtype) * size**-0.5
    down = torch.randn(num_experts, size, inner, device=device, dtype=dtype) * inner**-0.5
    router_weight = torch.randn(num_experts, size, device=device, dtype=dtype) * size**-0.5
    x = torch.randn(tokens, size, device=device, dtype=dtype)

    def run() -> Tensor:
        return experts(x, router_logits(x, router_weight), gate_up, down, router)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, first)
    x.normal_()
    graph.replay()
    assert torch.equal(out, run())
    routes = route_triton(router_logits(x, router_weight), router)
    torch.testing.assert_close(routes.weights_TK.sum(-1), torch.ones(tokens, device=device))
    some = torch.arange(0, tokens, max(1, tokens // 16), device=device)
    few = Routes(routes.weights_TK[some], routes.experts_TK[some], routes.order_A, routes.groups_G3)
    expected = exact(x[some], gate_up, down, few, between=dtype)
    torch.testing.assert_close(out[:, some].double(), expected, atol=2e-3, rtol=1e-5)
