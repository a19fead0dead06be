"""Kernels of `deterministic`: each token's result is bit for bit the same in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, backend, make

from draftloop.kernels.attention_tiles import LEAST_FIXED_SPLIT, MAX_FIXED_SPLITS, choose_tiles
from draftloop.kernels.batch_invariance import batch_invariant, is_wanted
from draftloop.kernels.linear import MAX_TOKENS, linear_invariant_triton, residual_linear
from draftloop.kernels.rms_norm import add_rms_norm_torch

pytestmark = pytest.mark.usefixtures("sums_by_themselves")


def dtypes(device: torch.device) -> list[torch.dtype]:
    # numpy, and so the interpreter, multiplies no bf16
    return [torch.bfloat16, torch.float16, torch.float32] if device.type == "cuda" else [torch.float16]


@pytest.mark.parametrize(("columns", "size"), [(96, 128), (80, 76), (256, 1024)], ids=["even", "odd", "split"])
def test_a_tokens_sums_do_not_depend_on_how_many_there_are(device, columns, size):
    for dtype in dtypes(device):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2 * MAX_TOKENS + 9, size, generator=generator).to(dtype).to(device)
        weight = (torch.randn(columns, size, generator=generator) * size**-0.5).to(dtype).to(device)
        bias = torch.randn(columns, generator=generator).to(dtype).to(device)
        for may_split in (False, True):
            whole = linear_invariant_triton(x, weight, bias, may_split=may_split)
            assert (whole.dim() == 3) == (may_split and size == 1024 and dtype.itemsize == 2)
            summed = whole.sum(0).to(dtype) if whole.dim() == 3 else whole
            exact = x.double() @ weight.double().T + bias.double()
            torch.testing.assert_close(summed.double(), exact, rtol=2**-7, atol=1e-2)
            for start, count in ((0, 1), (5, 6), (63, 2), (7, MAX_TOKENS), (3, MAX_TOKENS + 20)):
                part = linear_invariant_triton(x[start : start + count], weight, bias, may_split=may_split)
                assert torch.equal(part, whole[..., start : start + count, :]), (dtype, start, count)
        out = torch.empty(5, columns, dtype=dtype, device=device)
        assert linear_invariant_triton(x[:5], weight, out_TN=out) is out


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "size"), [(4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096)])
def test_layers_of_8b_on_a_gpu(columns, size):
    x = torch.randn(300, size, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(columns, size, dtype=torch.bfloat16, device="cuda") * size**-0.5
    run = batch_invariant(residual_linear)
    whole = run(x, weight)
    for start, count in ((0, 1), (17, 6), (64, 33), (100, 200)):
        assert torch.equal(run(x[start : start + count].contiguous(), weight), whole[..., start : start + count, :])
    residual = torch.zeros(300, columns, dtype=torch.bfloat16, device="cuda")
    ones = torch.ones(columns, dtype=torch.bfloat16, device="cuda")
    _, total = add_rms_norm_torch(whole, residual, ones, 1e-6)
    torch.testing.assert_close(total.float(), (x.float() @ weight.float().T), rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("window", [None, pytest.param(50, marks=pytest.mark.gpu)])
def test_a_tokens_attention_does_not_depend_on_what_it_came_with(device, window):
    """The last 37 tokens of a row as a chunk of a prompt, as blocks and one by one; the row is longer than a split."""
    keys = LEAST_FIXED_SPLIT + 80
    for dtype in dtypes(device):
        case = Case(lens=((37, keys),), window=window)
        q, kv, batch, expected = make(case, device, dtype)
        batch = replace(batch, invariant=True)
        triton = backend("triton", case, device, dtype)
        whole = torch.full_like(q, float("nan"))
        triton.attend(q, kv, batch, whole, sliding_window=window)
        torch.testing.assert_close(whole.float().cpu(), expected, atol=2e-2, rtol=2e-2)
        for count, copies in ((1, 1), (4, 3), (37, 2)):
            for end in (37,) if count == 37 else (5, 37):
                # other rows beside it are copies of the padding row: they see nothing
                ones = torch.ones(copies, dtype=torch.int32, device=device)
                lens = torch.zeros_like(ones)
                lens[-1] = keys - 37 + end
                some = replace(
                    batch,
                    rows_R=batch.rows_R * ones,
                    query_starts_R1=torch.arange(copies + 1, dtype=torch.int32, device=device) * count,
                    kv_lens_R=lens,
                    max_query_len=count,
                    uniform=True,
                )
                asked = torch.randn(copies * count, *q.shape[1:], device=device).to(dtype)
                asked[-count:] = q[end - count : end]
                out = torch.full_like(asked, float("nan"))
                triton.attend(asked, kv, some, out, sliding_window=window)
                assert torch.equal(out[-count:], whole[end - count : end]), (dtype, count, copies, end)


@pytest.mark.parametrize("kv_itemsize", [1, 2])
@pytest.mark.parametrize("max_keys", [64, 700, 8192, 131072])
def test_tiles_follow_from_the_model_alone_and_cover_the_longest_row(max_keys, kv_itemsize):
    def tiles(num_tokens: int, num_rows: int, query_len: int):
        found = choose_tiles(
            num_tokens=num_tokens,
            num_rows=num_rows,
            query_len=query_len,
            group=4,
            num_kv_heads=8,
            head_dim=128,
            itemsize=2,
            kv_itemsize=kv_itemsize,
            max_keys=max_keys,
            num_sms=132,
            invariant=True,
        )
        return replace(found, num_blocks=0)

    one = tiles(1, 1, 1)
    assert {tiles(6, 1, 6), tiles(192, 32, 6), tiles(2048, 16, 0), one} == {one}
    assert one.num_splits <= MAX_FIXED_SPLITS
    assert one.num_splits * one.split_blocks * one.block_n >= max_keys


def test_it_is_wanted_inside_alone_and_after_an_error_no_more():
    def fail() -> None:
        assert is_wanted()
        raise ValueError("no kernel")

    assert not is_wanted()
    with pytest.raises(ValueError, match="no kernel"):
        batch_invariant(fail)()
    assert not is_wanted()
