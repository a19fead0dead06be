"""Cross-entropy to a teacher's probabilities over a whole vocabulary, a few rows at a time.

Beside it, if asked for, the loss of what a sampled draft is for: -log of sum(min(p, q)), the chance that one
drawn from q is accepted by p (Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative
Decoding", 2026).

The logits of a step, [tokens, vocabulary], would be gigabytes, and several steps are alive at once. So the
gradient of the draft's hidden states is computed together with the loss and nothing else is kept: two
matrix products and what torch.compile makes of the rest.

Shape suffixes: N rows (of tokens), `...` whatever a row consists of, C width of the draft, W draft vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 29
"""Logits of one chunk: 1 GiB in bf16, enough to fill the largest GPUs."""
CHUNK_LOGITS_CPU = 1 << 24
"""Enough for a few cores; some ten copies in fp32 are alive at once."""


def _compare(
    logits: Tensor, teacher_logits: Tensor, weight: Tensor, acceptance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (a sum), gradient of the logits, and the draft's most likely ids; [..., W] and weight [...]."""
    wide = logits.float()
    log_q = wide - wide.logsumexp(-1, keepdim=True)
    p, q = teacher_logits.float().softmax(-1), log_q.exp()
    loss = -(p * log_q).sum(-1)
    grad = q - p
    if acceptance:
        accepted = torch.minimum(p, q).sum(-1, keepdim=True)
        limiting = torch.where(q < p, q, 0.0)  # where more of q would mean more accepted
        loss -= acceptance * accepted.squeeze(-1).log()
        grad -= acceptance * (limiting - q * limiting.sum(-1, keepdim=True)) / accepted
    return (loss * weight).sum(), (grad * weight.unsqueeze(-1)).to(logits.dtype), logits.argmax(-1)


@functools.cache
def _comparison(compiled: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_compare, dynamic=False) if compiled else _compare


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_WC: Tensor,
        teacher: Tensor,
        teacher_head: Tensor | None,
        weight: Tensor,
        acceptance: float,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = teacher.dtype
        table_WC = head_WC.to(dtype)
        compare = _comparison(compiled)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head_WC, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float32)
        ids = torch.empty(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        per_row = hidden[0].numel() // hidden.shape[-1] * head_WC.shape[0]
        num_rows = hidden.shape[0]
        most = CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS_CPU
        rows = -(-num_rows // -(-num_rows * per_row // most))  # chunks of one size, which is compiled once
        for start in range(0, num_rows, rows):
            part = slice(start, start + rows)
            x = hidden[part].to(dtype)
            teacher_logits = teacher[part] if teacher_head is None else teacher[part] @ teacher_head.T
            loss, grad, ids[part] = compare(x @ table_WC.T, teacher_logits, weight[part], acceptance)
            total += loss
            if grad_hidden is not None:
                grad_hidden[part] = grad @ table_WC
            if grad_head is not None:
                grad_head += grad.flatten(0, -2).T @ x.flatten(0, -2)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_loss,
            None if grad_head is None else grad_head * grad_loss,
            *[None] * 5,
        )


def soft_cross_entropy(
    hidden: Tensor,
    head_WC: Tensor,
    teacher: Tensor,
    weight: Tensor,
    *,
    teacher_head: Tensor | None = None,
    acceptance: float = 0.0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`-sum(weight * sum(softmax(teacher) * log_softmax(hidden @ head_WC.T)))`, and the most likely ids.

    `hidden` [N, ..., C]; `teacher` [N, ..., W], logits over the same vocabulary in the compute dtype, or with
    `teacher_head` [W, T] the hidden states [N, ..., T] that it makes them from; `weight` fp32 [N, ...], 0 where
    nothing is to be learnt; `acceptance` is the weight of the second loss. Returns an fp32 scalar with gradients
    for `hidden` and `head_WC` (where they require one; never for the teacher), and int64 [N, ...]. Rows N are
    taken a few at a time.
    """
    return _SoftCrossEntropy.apply(hidden, head_WC, teacher, teacher_head, weight, acceptance, compiled)  # pyrefly: ignore
