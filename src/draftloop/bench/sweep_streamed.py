"""Up to how many tokens passes should be streamed: what `kernels.streamed_plan.MEASURED` is made of.

    python -m draftloop.bench.sweep_streamed --out sweep.json               # on the GPU, about half a minute
    python -m draftloop.bench.sweep_streamed --streamed 8 -- latency ...    # `draftloop bench`, up to 8 tokens streamed

What is measured is a captured pass through layers of a model with their attention, since the time that streaming saves
lies between kernels. A pass must give the same bits each time.

Shape suffixes: R rows, T tokens, Q tokens per row, N pages per row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.attention.registry import attention_backend
from draftloop.bench.kernels import BYTES_PER_SECOND, DTYPE, time_us
from draftloop.bench.sweep_report import SweepReport, gpu, run_bench
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.kernels.streamed_plan import MAX_TOKENS, trying
from draftloop.models.dense import DenseDecoder, attention_shape, cache_spec
from draftloop.models.presets import PRESETS
from draftloop.models.quantisation import online

NUM_KEYS, PAGE_SIZE, REPLAYS = 640, 16, 40


class Case(NamedTuple):
    """Passes of one shape."""

    model: str
    num_layers: int
    rows: int
    query_len: int
    quantization: str | None = None


CASES = [
    Case("llama-3.1-8b", 6, 1, 6),
    Case("llama-3.2-1b", 16, 1, 1),
    Case("smollm2-135m-shape", 30, 1, 6),
    Case("llama-3.1-8b", 6, 1, 1),
    Case("llama-3.2-1b", 16, 8, 1),
    Case("llama-3.1-8b", 6, 8, 1),
    Case("smollm2-135m-shape", 30, 8, 1),
    Case("llama-3.1-8b", 12, 1, 1, "int4"),
    Case("llama-3.1-8b", 8, 1, 1, "fp8"),
    Case("llama-3.1-8b", 12, 1, 6, "int4"),
    Case("llama-3.1-8b", 8, 1, 6, "fp8"),
    Case("llama-3.1-8b", 12, 8, 1, "int4"),
    Case("llama-3.1-8b", 8, 8, 1, "fp8"),
    Case("llama-3.2-1b", 16, 1, 1, "int4"),
    Case("llama-3.2-1b", 16, 1, 1, "fp8"),
]


def make_pass(case: Case, device: torch.device) -> tuple[Callable[[], Tensor], float]:
    """A pass without its logits, and the us that memory needs for its weights."""
    quantisation = online(case.quantization) if case.quantization else None
    config = replace(PRESETS[case.model], num_layers=case.num_layers, quantisation=quantisation)
    shape = attention_shape(config, page_size=PAGE_SIZE, dtype=DTYPE)
    backend = attention_backend("triton" if device.type == "cuda" else "sdpa", device.type)(shape, device)
    model = DenseDecoder(config, backend, device=device, dtype=DTYPE, max_positions=4 * NUM_KEYS)
    for name, weight in model.named_parameters():
        if weight.dtype is DTYPE:
            weight.data.normal_(mean=float(name.endswith("norm")), std=0.02)
    for weight in (module for module in model.modules() if isinstance(module, QuantisedWeight)):
        weight.fill(0, weight.quantise(torch.randn(weight.shape, device=device) * 0.02))
    spec, num_tokens = cache_spec(config, DTYPE), case.rows * case.query_len
    pages = -(-NUM_KEYS // PAGE_SIZE)
    cache = torch.randn(
        spec.num_layers, 2, 1 + case.rows * pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim,
        dtype=DTYPE, device=device,
    )  # fmt: skip
    # as wide as serving's tables: the width bounds how often a row may be split
    table_RN = torch.zeros(case.rows, 8192 // PAGE_SIZE, dtype=torch.int32, device=device)
    table_RN[:, :pages] = (torch.randperm(case.rows * pages, device=device) + 1).view(case.rows, pages)
    position_Q = torch.arange(NUM_KEYS - case.query_len, NUM_KEYS, device=device)
    slots_RQ = table_RN[:, position_Q // PAGE_SIZE].long() * PAGE_SIZE + position_Q % PAGE_SIZE
    batch = AttentionBatch(
        rows_R=torch.arange(case.rows, dtype=torch.int32, device=device),
        query_starts_R1=torch.arange(0, num_tokens + 1, case.query_len, dtype=torch.int32, device=device),
        kv_lens_R=torch.full((case.rows,), NUM_KEYS, dtype=torch.int32, device=device),
        positions_T=position_Q.repeat(case.rows),
        slots_T=slots_RQ.flatten(),
        page_table_MN=table_RN,
        max_query_len=case.query_len,
        uniform=True,
    )
    token_ids_T = torch.randint(0, config.vocab_size, (num_tokens,), device=device)
    caches = model.layer_caches((cache,))
    layer_bytes = sum(weight.nbytes for weight in model.layers.parameters())
    return lambda: model.forward(token_ids_T, caches, batch)[0], layer_bytes / BYTES_PER_SECOND * 1e6


def replayed(run: Callable[[], Tensor]) -> list[Tensor]:
    """What comes out of a captured pass, each time."""
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(REPLAYS):
        graph.replay()
        found.append(out.clone())
    return found


@torch.inference_mode()
def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """us per layer, streamed and not, and whether and how what comes out differs."""
    run, floor = make_pass(case, device)
    us, outs = {}, {}
    for limit in (0, MAX_TOKENS):
        with trying(limit):
            us[limit] = time_us([run], min_calls=2, repeats=15)[0] / case.num_layers
            outs[limit] = replayed(run)
    plain, streamed = outs[0][0].float(), outs[MAX_TOKENS]
    return {
        "case": case._asdict(),
        "floor_us": floor / case.num_layers,
        "us": us[0],
        "streamed_us": us[MAX_TOKENS],
        "same": all(torch.equal(out, streamed[0]) for out in streamed),
        "difference": ((streamed[0].float() - plain).norm() / plain.norm()).item(),
    }


def line(row: dict[str, Any]) -> str:
    case = Case(**row["case"])
    wrong = "" if row["same"] else "  NOT THE SAME EACH TIME"
    model = f"{case.model} {case.quantization or ''}".rstrip()
    return (
        f"{model} {case.rows} x {case.query_len}: {row['us']:.1f} us a layer, streamed {row['streamed_us']:.1f} "
        f"({row['streamed_us'] / row['us'] - 1:+.1%}), floor {row['floor_us']:.1f}, "
        f"difference {row['difference']:.1e}{wrong}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every case")
    parser.add_argument("--seconds", type=float, default=60, help="start no new case after this long")
    parser.add_argument("--streamed", type=int, metavar="TOKENS", help="stream so many while the arguments are run")
    parser.add_argument("arguments", nargs="*", help="of `draftloop bench`")
    args = parser.parse_args()
    if args.streamed is not None:
        with trying(args.streamed):
            run_bench(args.arguments)
        return
    report, device = SweepReport(args.out, args.seconds), gpu()
    for case in CASES:
        if report.is_late():
            break
        row = measure(case, device)
        report.add(row, [line(row)])


if __name__ == "__main__":
    main()
