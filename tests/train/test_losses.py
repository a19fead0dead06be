"""The fused loss is the plain formula, and acceptance counts are what drafting would do."""

from __future__ import annotations

import pytest
import torch

from draftloop.train import losses
from draftloop.train.losses import soft_cross_entropy


@pytest.mark.parametrize("chunk", [100, 1 << 20])
@pytest.mark.parametrize("from_states", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(monkeypatch, chunk, from_states):
    monkeypatch.setattr(losses, "CHUNK_LOGITS_CPU", chunk)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, head = random(5, 3, 8).requires_grad_(), random(20, 8).requires_grad_()
    states, teacher_head, weight = random(5, 3, 6), random(20, 6), random(5, 3).abs()
    teacher = states @ teacher_head.T
    if from_states:
        loss, ids = soft_cross_entropy(hidden, head, states, weight, teacher_head=teacher_head)
    else:
        loss, ids = soft_cross_entropy(hidden, head, teacher, weight)
    (3 * loss).backward()
    found = [hidden.grad, head.grad]
    hidden.grad = head.grad = None
    logits = hidden @ head.T
    plain = -(weight * (teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)).sum()
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain)
    assert ids.equal(logits.argmax(-1))
    for mine, theirs in zip(found, [hidden.grad, head.grad], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_acceptance_loss_is_the_chance_that_a_sampled_draft_is_accepted():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, 8, generator=generator).requires_grad_()
    head, teacher = torch.randn(20, 8, generator=generator), torch.randn(5, 3, 20, generator=generator)
    weight = torch.rand(5, 3, generator=generator)
    alone, _ = soft_cross_entropy(hidden, head, teacher, weight)
    loss, _ = soft_cross_entropy(hidden, head, teacher, weight, acceptance=0.7)
    (3 * loss).backward()
    found, hidden.grad = hidden.grad, None
    p, q = teacher.softmax(-1), (hidden @ head.T).softmax(-1)
    plain = -0.7 * (weight * torch.minimum(p, q).sum(-1).log()).sum()
    (3 * (plain - (weight * (p * q.log()).sum(-1)).sum())).backward()
    torch.testing.assert_close(loss - alone, plain)
    torch.testing.assert_close(found, hidden.grad, rtol=1e-4, atol=1e-5)


def test_nothing_is_computed_for_what_is_frozen():
    hidden, head = torch.randn(2, 3, 4), torch.randn(7, 4)
    loss, _ = soft_cross_entropy(hidden, head, torch.randn(2, 3, 7), torch.ones(2, 3))
    assert not loss.requires_grad
