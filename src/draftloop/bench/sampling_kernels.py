"""Times of what samples and constrains at the Llama-3.1-8B vocabulary, by kernels and by the torch rules.

Every second row asks for everything of `SamplingMix.ALL_PARAMETERS_HALF`, the others for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftloop.bench.sampling_mix import SamplingMix
from draftloop.drafters.write import write_next
from draftloop.kernels.softmax_statistics import Truncation, softmax_statistics_triton
from draftloop.kvcache.rows import RowState
from draftloop.sampling.accept_drawn import accept_drawn_triton
from draftloop.sampling.commit import _token_rows, accept_rows_greedy, accept_rows_sampled
from draftloop.sampling.constrain_block import constrain_triton
from draftloop.sampling.constraints import constrain
from draftloop.sampling.sampler import SamplingKind, SamplingRows, probabilities

VOCAB, DRAFT_VOCAB, K, PROMPT, LENGTH = 128256, 32000, 5, 512, 1024
MakeRow = Callable[..., dict[str, Any]]
"""`kernels.make_row`."""


def make_state(num_rows: int, device: torch.device) -> RowState:
    """Rows in the middle of their answers. Their limits are reached: acceptance computes everything, and they stay."""
    state = RowState.create(
        num_rows=num_rows, max_model_len=2 * LENGTH, num_drafts=K, page_size=16, draft_vocab=VOCAB, device=device,
        vocab_size=VOCAB,
    )  # fmt: skip
    assert state.constraints is not None
    assert state.draft_probs_MKV is not None
    state.tokens_ML.random_(0, VOCAB)
    state.num_tokens_M[:-1] = state.max_tokens_M[:-1] = LENGTH
    state.drafts_MK[:-1].random_(0, DRAFT_VOCAB)
    state.draft_probs_MKV.fill_(1 / VOCAB)
    for row in range(num_rows):
        params = SamplingMix.ALL_PARAMETERS_HALF.params(row, max_tokens=LENGTH, vocab_size=VOCAB)
        for column, value in (
            (state.temperature_M, params.temperature),
            (state.top_k_M, params.top_k),
            (state.top_p_M, params.top_p),
            (state.min_p_M, params.min_p),
            (state.seed_M, params.seed or 0),
        ):
            column[row] = value
        if params.constrained:
            state.constraints.write(
                row, params, num_prompt=PROMPT, bad_words=[], ending_ids=[2], stage=lambda host: host.to(device)
            )
    return state


def sampling_rows(make_row: MakeRow, num_rows: int, device: torch.device) -> list[dict[str, Any]]:
    """The parts and the whole of an accept phase, and the draw of a draft."""
    state, num_places = make_state(num_rows, device), num_rows * (1 + K)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    logits = (torch.randn(num_places, VOCAB, device=device) * 2).bfloat16()
    draft_logits = (torch.randn(num_rows, DRAFT_VOCAB, device=device) * 2).bfloat16()
    target_ids = torch.randperm(VOCAB, device=device)[:DRAFT_VOCAB]
    truncation = Truncation(state.temperature_M, state.top_k_M, state.top_p_M, state.min_p_M)
    sampling = SamplingRows.gather(state, rows).repeat(1 + K)
    changed, best = constrain_triton(state, rows, logits)
    known = softmax_statistics_triton(logits, rows, truncation, best_XC=best, changed=changed)
    shape, num_bytes = f"B={num_rows} K={K} V={VOCAB}, half ask", logits.numel() * logits.element_size()

    def draft(sampled: bool) -> Callable[[], None]:
        return lambda: write_next(
            state, rows, draft_logits, vocab_size=DRAFT_VOCAB, sampled=sampled, first=True, target_ids_W=target_ids
        )

    calls: dict[str, Callable[[], Any]] = {
        "softmax_statistics": lambda: softmax_statistics_triton(logits, rows, truncation),
        "softmax_statistics.torch": lambda: probabilities(logits, sampling),
        "constrain": lambda: constrain_triton(state, rows, logits),
        "constrain.torch": lambda: constrain(state, rows, logits.view(num_rows, 1 + K, VOCAB)),
        "accept_drawn": lambda: accept_drawn_triton(
            rows, logits, known, _token_rows(state), state.temperature_M, state.draft_probs_MKV,
            changed=changed, num_drafts=K, width=1 + K,
        ),
        "accept.greedy": lambda: accept_rows_greedy(state, rows, logits, K),
        **{
            f"accept.{kind.value}": lambda kind=kind: accept_rows_sampled(state, rows, logits, K, kind=kind)
            for kind in (SamplingKind.SAMPLED, SamplingKind.TRUNCATED, SamplingKind.CONSTRAINED)
        },
    }  # fmt: skip
    made = [make_row(name, shape, num_bytes, [call]) for name, call in calls.items()]
    draft_shape, draft_bytes = f"B={num_rows} W={DRAFT_VOCAB}", draft_logits.numel() * draft_logits.element_size()
    made.append(make_row("write_next.greedy", draft_shape, draft_bytes, [draft(False)]))
    made.append(make_row("write_next.sampled", draft_shape, draft_bytes + num_rows * VOCAB * 4, [draft(True)]))
    return made
