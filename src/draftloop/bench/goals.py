"""What is aimed at on one H200, and what others reach there: the rows of docs/numbers/h200.md."""

from __future__ import annotations

from dataclasses import dataclass

GPU = "NVIDIA H200"
PROMPT_TOKENS = 512

SOURCE = f"""\
vLLM 0.26.0 and SGLang 0.5.17 were measured on the same kind of GPU in November 2026: shapes without weights, bf16,
{PROMPT_TOKENS} random prompt tokens, forced acceptance; (time for 16 + n tokens - time for 16) / n over the whole
batch, n = 64 to 128, median of 3, times the acceptance length. SGLang ran with its overlap scheduler; of its attention
backends the faster one counts in each row. Their command lines were not kept.

draftloop's iterations are read off the host's clock while every row decodes. Whole generations end with rows that were
unlucky: with vLLM, which draws acceptance for each request, that is 2 to 4 % of a batch's time; with SGLang, which
draws it for the batch, nothing. draftloop draws for each draft, so that its own whole generations (`tpot_ms` in the
files) hold up to 18 % of it and say little about a step."""

GROWTH = 1.5
"""From 1 row to 32 an iteration may grow by at most this many times what its floor grows by."""

SAMPLING_LIMIT = 1.08
"""Every parameter for half the rows may take at most this many times what greedy takes, at 32 rows."""

FLOOR_CONTEXT = 1024
"""Tokens per row that `Goal.floor` is for."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line of the table. Times in ms, start-up in s; text where a peer was measured more than once."""

    what: str
    method: str
    k: int
    batch: int | None
    model: str = "llama-3.1-8b"
    metric: str = "iteration_ms"
    vllm: float | str | None = None
    sglang: float | str | None = None
    floor: float | None = None
    target: float | None = None
    stretch: float | None = None


GOALS = (
    Goal(
        what="plain decode, per token", method="none", k=0, batch=1,
        vllm=4.92, sglang=4.81, floor=3.52, target=4.1, stretch=3.8,
    ),
    Goal(
        what="EAGLE-3 K=5, iteration", method="eagle3", k=5, batch=1,
        vllm=7.78, sglang=6.51, floor=4.42, target=5.1, stretch=4.8,
    ),
    Goal(
        what="EAGLE-3 K=5, iteration", method="eagle3", k=5, batch=8,
        vllm=8.27, sglang=7.21, floor=4.67, target=5.7, stretch=5.2,
    ),
    Goal(
        what="EAGLE-3 K=5, iteration", method="eagle3", k=5, batch=32,
        vllm=10.75, sglang=9.37, floor=5.54, target=7.2, stretch=6.5,
    ),
    Goal(
        what="EAGLE-3 K=5, iteration", method="eagle3", k=5, batch=128,
        vllm=27.25, sglang=26.26, floor=16.4, target=21, stretch=18.5,
    ),
    Goal(
        what="1B draft model K=4, iteration", method="draft_model", k=4, batch=1,
        vllm=14.80, sglang=10.80, floor=5.8, target=6.8, stretch=6.4,
    ),
    Goal(
        what="1B draft model K=4, iteration", method="draft_model", k=4, batch=32,
        vllm=16.81, sglang=13.85, floor=7.8, target=10, stretch=9,
    ),
    Goal(
        what="SmolLM2-135M, EAGLE-3 K=5, iteration", model="smollm2-135m-shape", method="eagle3", k=5, batch=1,
        target=0.9, stretch=0.6,
    ),
    Goal(
        what="plain decode, FP8 weights, per token", model="llama-3.1-8b, fp8", method="none", k=0, batch=1,
        floor=1.9, target=2.6,
    ),
    Goal(
        what="EAGLE-3 K=5, FP8 weights, iteration", model="llama-3.1-8b, fp8", method="eagle3", k=5, batch=1,
        floor=2.8, target=3.8,
    ),
    Goal(
        what="plain decode, INT4 weights, per token", model="llama-3.1-8b, int4", method="none", k=0, batch=1,
        floor=1.1, target=1.9,
    ),
    Goal(
        what="start-up, every graph captured, s", method="eagle3", k=5, batch=None, metric="startup_s",
        vllm="69-181", sglang="53-60", target=20, stretch=10,
    ),
    Goal(what="plain decode, per token", method="none", k=0, batch=8, sglang=5.08, floor=3.74),
    Goal(what="plain decode, per token", method="none", k=0, batch=32, vllm=5.86, sglang=5.81, floor=4.49),
    Goal(
        what="1B draft model K=4, iteration", method="draft_model", k=4, batch=8,
        vllm=13.99, sglang=11.69, floor=6.3,
    ),
    Goal(what="time to first token, plain", method="none", k=0, batch=1, metric="ttft_ms"),
    Goal(what="time to first token, EAGLE-3 K=5", method="eagle3", k=5, batch=1, metric="ttft_ms"),
    Goal(what="time to first token, 1B draft model K=4", method="draft_model", k=4, batch=1, metric="ttft_ms"),
)  # fmt: skip
