"""Attention over packed documents: what may be seen, and that both ways of computing it agree."""

from __future__ import annotations

import pytest
import torch

from draftloop.train.attention import (
    attend_dense,
    chain_attention_dense,
    chain_attention_flex,
    document_blocks,
    document_mask,
)

DOCUMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 3, 3, 3, 3, 3]])
SCALE = 0.25


def inputs(
    device: str = "cpu", steps: int = 3, length: int = 8
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(2, length, heads, 16, generator=generator).to(device).requires_grad_()

    return make(4), [make(2) for _ in range(steps)], [make(2) for _ in range(steps)]


def test_a_token_sees_its_own_document_up_to_itself():
    seen = document_mask(DOCUMENTS)
    assert seen[0, 5].nonzero().flatten().tolist() == [4, 5]
    assert seen[0, 3].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert document_mask(DOCUMENTS, window=2)[1, 7].nonzero().flatten().tolist() == [6, 7]


def test_a_chain_of_one_step_is_plain_attention():
    q, keys, values = inputs(steps=1)
    mask = document_mask(DOCUMENTS)
    plain = attend_dense(q, keys[0], values[0], mask, SCALE)
    torch.testing.assert_close(chain_attention_dense(q, keys, values, mask, SCALE), plain)


def test_later_steps_see_the_keys_of_their_own_place_only():
    q, keys, values = inputs()
    before = chain_attention_dense(q, keys, values, document_mask(DOCUMENTS), SCALE)
    with torch.no_grad():
        keys[1][0, 5] += 1.0
    changed = chain_attention_dense(q, keys, values, document_mask(DOCUMENTS), SCALE) != before
    assert changed.any(-1).any(-1).nonzero().tolist() == [[0, 5]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same_values():
    q, keys, values = inputs()
    with torch.no_grad():
        dense = chain_attention_dense(q, keys, values, document_mask(DOCUMENTS), SCALE)
        q, keys, values = q.detach(), [key.detach() for key in keys], [value.detach() for value in values]
        flexible = chain_attention_flex(q, keys, values, document_blocks(DOCUMENTS), SCALE, compiled=False)
    torch.testing.assert_close(flexible, dense)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks
def test_flex_attention_gives_the_same_values_and_gradients_on_a_gpu():
    # rows as long as in training: short ones run other kernels
    documents, results = DOCUMENTS.repeat_interleave(32, 1).cuda(), []
    for flex in (False, True):
        q, keys, values = inputs("cuda", length=256)
        if flex:
            out = chain_attention_flex(q, keys, values, document_blocks(documents), SCALE, compiled=True)
        else:
            out = chain_attention_dense(q, keys, values, document_mask(documents), SCALE)
        leaves = [q, *keys, *values]
        weight = torch.arange(out.numel(), device="cuda").view_as(out).sin()
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for dense, flexible in zip(*results, strict=True):
        torch.testing.assert_close(flexible, dense, rtol=1e-2, atol=2e-3)
