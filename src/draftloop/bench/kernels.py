"""Times of single kernels at the Llama-3.1-8B shapes, inside CUDA graphs, against bytes and operations needed.

Shape suffixes: B batch rows, Q tokens per row, S keys per row (here not the page size), T tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from draftloop.attention.registry import attention_backend
from draftloop.bench.sampling_kernels import sampling_rows
from draftloop.bench.sweep_report import gpu
from draftloop.kernels.argmax import argmax, argmax_torch
from draftloop.kernels.linear import linear, linear_torch, residual_linear
from draftloop.kernels.rms_norm import add_rms_norm, rms_norm
from draftloop.kernels.rope_write import rope_write
from draftloop.kernels.silu_mul import silu_mul

BYTES_PER_SECOND = 4.3e12
"""Measured memory bandwidth of an H200; floors are bytes over this."""
OPERATIONS_PER_SECOND = 790e12
"""Measured bf16 matmul rate of an H200; the floor of long prefill."""
COLD_BYTES = 256 << 20
"""Cache data is rotated over at least this much, so that L2 does not serve it (in a model, weights evict it)."""

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
DTYPE = torch.bfloat16

ATTENTION_CASES = [
    # rows, tokens per row, keys per row, page size
    (1, 6, 1024, 16),
    (1, 6, 1024, 32),
    (1, 6, 1024, 64),
    (1, 1, 1024, 16),
    (1, 6, 8192, 16),
    (8, 6, 1024, 16),
    (16, 6, 1024, 16),
    (32, 1, 1024, 16),
    (32, 6, 1024, 16),
    (128, 6, 1024, 16),
]
LINEAR_CASES = [
    # name, columns, size, whether the residual norm follows
    ("qkv", 6144, 4096, False),
    ("o", 4096, 4096, True),
    ("gate_up", 28672, 4096, False),
    ("down", 4096, 14336, True),
    ("lm_head", 128256, 4096, False),
    # a draft model of 1B parameters
    ("1b.qkv", 3072, 2048, False),
    ("1b.o", 2048, 2048, True),
    ("1b.gate_up", 16384, 2048, False),
    ("1b.down", 2048, 8192, True),
    ("1b.lm_head", 128256, 2048, False),
    # a draft head over the hidden states of three layers
    ("head.fc", 4096, 12288, False),
    ("head.qkv", 6144, 8192, False),
    ("head.lm_head", 32000, 4096, False),
]
PREFILL_CASES = [
    # tokens of one prompt, keys before it
    (512, 0),
    (2048, 0),
    (2048, 6144),
]


def time_us(
    calls: Sequence[Callable[[], Any]], *, min_calls: int = 64, repeats: int = 30
) -> tuple[float, float, float]:
    """(median, min, max) microseconds per call. The calls run one after another in one captured graph."""
    rounds = -(-min_calls // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compile outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads may be compiling
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times), min(times), max(times)


def make_row(
    kernel: str, shape: str, num_bytes: int, calls: Sequence[Callable[[], Any]], *, num_operations: int = 0
) -> dict[str, Any]:
    value, low, high = time_us(calls)
    return {
        "metric": "kernel_us",
        "kernel": kernel,
        "shape": shape,
        "dtype": "bf16",
        "value": value,
        "min": low,
        "max": high,
        "floor": max(num_bytes / BYTES_PER_SECOND, num_operations / OPERATIONS_PER_SECOND) * 1e6,
    }


def attention_calls(
    backend: AttentionBackend, rows: int, query_len: int, kv_len: int, *, uniform: bool
) -> list[Callable[[], None]]:
    q, kv, batches = attention_batches(backend, rows, query_len, kv_len, uniform=uniform)
    out = torch.empty_like(q)
    return [lambda batch=batch: backend.attend(q, kv, batch, out, sliding_window=None) for batch in batches]


def attention_batches(
    backend: AttentionBackend, rows: int, query_len: int, kv_len: int, *, uniform: bool
) -> tuple[torch.Tensor, torch.Tensor, list[AttentionBatch]]:
    """Queries, the cache, and rows of equal length, each time over pages that no recent batch has."""
    page_size, device = backend.shape.page_size, backend.device
    num_tokens = rows * query_len
    pages_per_row = -(-kv_len // page_size)
    sets = max(1, -(-COLD_BYTES // kv_bytes(rows, kv_len)))
    num_pages = sets * rows * pages_per_row
    kv = torch.randn(2, num_pages + 1, page_size, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    tables = (torch.randperm(num_pages, device=device) + 1).int().view(sets, rows, pages_per_row)
    # as wide as serving's tables: the width bounds how often a row may be split
    width = max(pages_per_row, 8192 // page_size)
    q = torch.randn(num_tokens, HEADS, HEAD_DIM, dtype=DTYPE, device=device)

    def make_batch(table: torch.Tensor) -> AttentionBatch:
        wide = torch.zeros(rows, width, dtype=torch.int32, device=device)
        wide[:, :pages_per_row] = table
        return AttentionBatch(
            rows_R=torch.arange(rows, dtype=torch.int32, device=device),
            query_starts_R1=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=device),
            kv_lens_R=torch.full((rows,), kv_len, dtype=torch.int32, device=device),
            positions_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            slots_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            page_table_MN=wide,
            max_query_len=query_len,
            uniform=uniform,
        )

    return q, kv, [make_batch(table) for table in tables]


def kv_bytes(rows: int, kv_len: int) -> int:
    return 2 * rows * kv_len * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def make_backend(name: str, page_size: int, device: torch.device) -> AttentionBackend:
    shape = AttentionShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        page_size=page_size,
        dtype=DTYPE,
        kv_dtype=DTYPE,
    )
    cls = attention_backend(name, device.type)
    cls.check(shape, device.type)
    return cls(shape, device)


def attention_row(
    name: str, rows: int, query_len: int, kv_len: int, page_size: int, *, uniform: bool, device: torch.device
) -> dict[str, Any]:
    kind = "uniform" if uniform else "ragged"
    return make_row(
        f"attention.{name}",
        f"B={rows} q={query_len} S={kv_len} page={page_size} {kind}",
        kv_bytes(rows, kv_len) + 2 * rows * query_len * HEADS * HEAD_DIM * DTYPE.itemsize,
        attention_calls(make_backend(name, page_size, device), rows, query_len, kv_len, uniform=uniform),
        num_operations=4 * HEADS * HEAD_DIM * rows * sum(range(kv_len - query_len + 1, kv_len + 1)),
    )


def small_rows(num_tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """The kernels between the linears. Their inputs are warm in L2, as they are in a model."""

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=DTYPE, device=device)

    x, residual, weight = randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN), randn(HIDDEN)
    gate_up = randn(num_tokens, 2 * INTERMEDIATE)
    qkv = randn(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    kv = randn(2, 1 + num_tokens, 16, KV_HEADS, HEAD_DIM)
    positions = torch.arange(num_tokens, device=device) + 1000
    slots = torch.arange(num_tokens, device=device) + 16
    angles = torch.rand(2048, HEAD_DIM // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norms = randn(HEAD_DIM), randn(HEAD_DIM)

    def rope(norm: bool) -> Callable[[], torch.Tensor]:
        return lambda: rope_write(
            qkv,
            positions,
            slots,
            cos_sin,
            kv,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            q_norm_D=norms[0] if norm else None,
            k_norm_D=norms[1] if norm else None,
        )

    shape, size = f"T={num_tokens}", DTYPE.itemsize
    return [
        make_row("rms_norm", shape, 2 * x.numel() * size, [lambda: rms_norm(x, weight, 1e-5)]),
        make_row("add_rms_norm", shape, 4 * x.numel() * size, [lambda: add_rms_norm(x, residual, weight, 1e-5)]),
        make_row("silu_mul", shape, gate_up.numel() * size * 3 // 2, [lambda: silu_mul(gate_up)]),
        make_row("rope_write", shape, 2 * qkv.numel() * size, [rope(False)]),
        make_row("rope_write.qk_norm", shape, 2 * qkv.numel() * size, [rope(True)]),
    ]


def cold_weights(columns: int, size: int, device: torch.device) -> list[torch.Tensor]:
    sets = max(1, -(-COLD_BYTES // (columns * size * DTYPE.itemsize)))
    return [torch.randn(columns, size, dtype=DTYPE, device=device) for _ in range(sets)]


def linear_rows(num_tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Every layer by our kernel and by cuBLAS. The sums of split layers are added up by the norm, not here."""
    rows = []
    for name, columns, size, residual in LINEAR_CASES:
        x, weights = torch.randn(num_tokens, size, dtype=DTYPE, device=device), cold_weights(columns, size, device)
        shape = f"{name} T={num_tokens} N={columns} K={size}"
        num_bytes = (weights[0].numel() + num_tokens * (size + columns)) * DTYPE.itemsize
        operations = 2 * num_tokens * columns * size
        for kind, run in (("", residual_linear if residual else linear), (".cublas", linear_torch)):
            calls = [lambda run=run, x=x, weight=weight: run(x, weight) for weight in weights]
            rows.append(make_row(f"linear{kind}", shape, num_bytes, calls, num_operations=operations))
    return rows


def argmax_rows(num_tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Over logits that the last linear layer has just written."""
    logits = torch.randn(num_tokens, 128256, dtype=DTYPE, device=device)
    shape, num_bytes = f"N={num_tokens} V=128256", logits.numel() * DTYPE.itemsize
    return [
        make_row("argmax", shape, num_bytes, [lambda: argmax(logits)]),
        make_row("argmax.torch", shape, num_bytes, [lambda: argmax_torch(logits)]),
    ]


@torch.inference_mode()
def kernel_rows(device: torch.device, backends: Sequence[str]) -> list[dict[str, Any]]:
    """One row per kernel and shape; times and floors in microseconds. Needs a CUDA device."""
    rows = []
    for num_tokens in (1, 6, 192, 768):
        rows += small_rows(num_tokens, device)
    for num_tokens in (1, 6, 32, 48):
        rows += linear_rows(num_tokens, device)
        rows += argmax_rows(num_tokens, device)
    for batch in (1, 32):
        rows += sampling_rows(make_row, batch, device)
    for name in backends:
        for batch, query_len, kv_len, page_size in ATTENTION_CASES:
            rows.append(attention_row(name, batch, query_len, kv_len, page_size, uniform=True, device=device))
        rows.append(attention_row(name, 8, 6, 1024, 16, uniform=False, device=device))
        for num_tokens, before in PREFILL_CASES:
            rows.append(attention_row(name, 1, num_tokens, before + num_tokens, 16, uniform=False, device=device))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="only the kernels between the linears")
    parser.add_argument("--backends", nargs="+", default=["triton"], help="attention backends that are timed")
    args, device = parser.parse_args(), gpu()
    if args.small:
        rows = [row for num_tokens in (1, 6, 192, 768) for row in small_rows(num_tokens, device)]
    else:
        rows = kernel_rows(device, args.backends)
    for row in rows:
        print(
            f"{row['kernel']:20} {row['shape']:36} {row['value']:8.2f} us "
            f"({row['min']:.2f}-{row['max']:.2f})  floor {row['floor']:7.2f}"
        )


if __name__ == "__main__":
    main()
