"""What adapters add to a linear layer: both implementations against plain sums in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.linear import residual_linear
from draftloop.kernels.lora import LoraStack, adapted, lora_torch, lora_triton

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
Run = Callable[[Tensor, Tensor, Tensor, LoraStack], None]


def make_stack(
    sizes: tuple[int, ...], size: int, *, ranks: tuple[int, ...], room: int, device: torch.device, dtype: torch.dtype
) -> LoraStack:
    """With an adapter of each rank."""
    stack = LoraStack.create(sizes, size, num_adapters=len(ranks), rank=room, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for number, rank in enumerate(ranks, 1):
        for slice_, columns in enumerate(sizes):
            a_JK = torch.randn(rank, size, generator=generator) * size**-0.5
            stack.fill(number, slice_, a_JK, torch.randn(columns, rank, generator=generator) * rank**-0.5)
    return stack


def plain_sums(out_TN: Tensor, x_TK: Tensor, adapters_T: Tensor, stack: LoraStack) -> Tensor:
    """fp32: token by token, slice by slice."""
    expected_TN = out_TN.float().clone()
    for token, number in enumerate(adapters_T.tolist()):
        start = 0
        for slice_, columns in enumerate(stack.sizes if number else ()):
            inner_J = stack.a_LSJK[number - 1, slice_].float() @ x_TK[token].float()
            rows = slice(start, start + columns)
            expected_TN[token, rows] += stack.b_NLJ[rows, number - 1].float() @ inner_J
            start += columns
    return expected_TN


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
@pytest.mark.parametrize("run", [lora_torch, lora_triton])
@pytest.mark.parametrize(
    ("sizes", "size", "room", "ranks"),
    [
        ((64, 32, 32), 64, 8, (8, 4, 1)),
        ((100, 140), 600, 64, (64, 3)),  # neither blocks of columns nor splits come out even
        ((20,), 9000, 8, (5,)),
    ],
    ids=["qkv", "gate_up", "down"],
)
def test_each_token_gets_what_its_adapter_adds(
    run: Run,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    size: int,
    room: int,
    ranks: tuple[int, ...],
) -> None:
    stack = make_stack(sizes, size, ranks=ranks, room=room, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    x_TK = torch.randn(5, size, generator=generator).to(device, dtype)
    adapters_T = torch.tensor([1, 0, len(ranks), 0, 1], dtype=torch.int32, device=device)
    for out_dtype in dict.fromkeys((dtype, torch.float32)):  # split sums are fp32
        out_TN = torch.randn(5, sum(sizes), generator=generator).to(device, out_dtype)
        before, expected = out_TN.clone(), plain_sums(out_TN, x_TK, adapters_T, stack)
        run(out_TN, x_TK, adapters_T, stack)
        torch.testing.assert_close(out_TN.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(out_TN[[1, 3]], before[[1, 3]])
        assert not torch.equal(out_TN, before)


@pytest.mark.parametrize("run", [lora_torch, lora_triton])
def test_a_slot_that_is_cleared_adds_nothing_and_another_is_left_alone(run: Run, device: torch.device) -> None:
    stack = make_stack((32,), 64, ranks=(8, 8), room=8, device=device, dtype=torch.float32)
    x_TK, adapters_T = torch.randn(2, 64, device=device), torch.tensor([1, 2], dtype=torch.int32, device=device)
    expected = plain_sums(torch.zeros(2, 32, device=device), x_TK, adapters_T, stack)
    stack.clear(1)
    out_TN = torch.zeros(2, 32, device=device)
    run(out_TN, x_TK, adapters_T, stack)
    assert not out_TN[0].any()
    torch.testing.assert_close(out_TN[1], expected[1])


def test_bad_numbers_of_one_token_stay_with_it(device: torch.device) -> None:
    stack = make_stack((32,), 64, ranks=(8, 8), room=8, device=device, dtype=torch.float32)
    x_TK = torch.randn(3, 64, device=device)
    x_TK[1] = float("inf")
    adapters_T = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    # in the interpreter numpy warns of such numbers
    for run in (lora_torch, lora_triton) if device.type == "cuda" else (lora_torch,):
        out_TN = torch.zeros(3, 32, device=device)
        run(out_TN, x_TK, adapters_T, stack)
        assert out_TN[[0, 2]].isfinite().all()
        assert not out_TN[1].isfinite().all()


def test_split_sums_get_it_once(device: torch.device) -> None:
    """The output of a layer that is still to be added up."""
    stack = make_stack((32,), 64, ranks=(8,), room=8, device=device, dtype=torch.float32)
    x_TK, adapters_T = torch.randn(2, 64, device=device), torch.ones(2, dtype=torch.int32, device=device)
    sums_XTN = torch.randn(4, 2, 32, device=device)
    expected = plain_sums(sums_XTN.sum(0), x_TK, adapters_T, stack)
    torch.testing.assert_close(adapted(sums_XTN.clone(), x_TK, adapters_T, stack).sum(0), expected)
    assert adapted(sums_XTN, x_TK, None, stack) is sums_XTN
    assert adapted(sums_XTN, x_TK, adapters_T, None) is sums_XTN


def test_a_layer_with_an_adapter_is_the_layer_with_it_merged(device: torch.device) -> None:
    """Whatever form its output has; on a GPU sums of parts of K."""
    stack = make_stack((256,), 1024, ranks=(8, 16), room=16, device=device, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    weight_NK = (torch.randn(256, 1024, generator=generator) / 32).to(device, torch.bfloat16)
    x_TK = torch.randn(4, 1024, generator=generator).to(device, torch.bfloat16)
    adapters_T = torch.tensor([0, 1, 2, 2], dtype=torch.int32, device=device)
    out = residual_linear(x_TK, weight_NK)
    assert out.dim() == (3 if device.type == "cuda" else 2)
    out = adapted(out, x_TK, adapters_T, stack).float()
    expected_TN = plain_sums(x_TK.float() @ weight_NK.float().T, x_TK, adapters_T, stack)
    torch.testing.assert_close(out.sum(0) if out.dim() == 3 else out, expected_TN, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
def test_batch_invariant_sums_do_not_depend_on_the_other_tokens(device: torch.device, dtype: torch.dtype) -> None:
    stack = make_stack((64, 32), 128, ranks=(8, 8), room=8, device=device, dtype=dtype)
    count = 400 if device.type == "cuda" else 20
    x_TK = torch.randn(count, 128, device=device).to(dtype)
    adapters_T = torch.arange(count, dtype=torch.int32, device=device) % 3
    run = batch_invariant(adapted)
    whole_TN = run(torch.zeros(count, 96, device=device, dtype=dtype), x_TK, adapters_T, stack)
    for start, end in ((0, 1), (1, 4), (4, 17)):
        part = slice(start, end)
        out_TN = torch.zeros(end - start, 96, device=device, dtype=dtype)
        assert torch.equal(run(out_TN, x_TK[part], adapters_T[part], stack), whole_TN[part])
