"""Batches that attention backends are tested with, what must come out, and the backends themselves.

Shape suffixes: Q tokens of one row, S keys, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fake_flashinfer
from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from draftloop.attention.registry import attention_backend
from draftloop.kernels.attention_tiles import choose_tiles
from draftloop.kernels.paged_attention import paged_attention_triton

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch. `lens` is (tokens, keys) of each entry."""

    lens: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    causal: bool = True
    window: int | None = None
    lets_go: bool = False
    """Pages behind the window are another row's, as far as anybody knows."""
    soft_cap: float = 0.0
    sinks: bool = False
    uniform: bool = False
    padding: int = 0
    """Tokens past the last entry's."""
    seed: int = 0


def attend_in_splits(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    case: Case,
    num_splits: int,
    *,
    query_len: int,
    **how: Any,
) -> None:
    """Triton's kernels with so many splits of the keys, however few there are; `how`: of `paged_attention_triton`."""
    tiles = choose_tiles(
        num_tokens=q.shape[0],
        num_rows=len(case.lens),
        query_len=query_len,
        group=case.heads // case.kv_heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        itemsize=q.element_size(),
        max_keys=batch.page_table_MN.shape[1] * case.page_size,
        num_sms=1,
    )
    paged_attention_triton(
        q,
        kv,
        batch.rows_R,
        batch.query_starts_R1,
        batch.kv_lens_R,
        batch.page_table_MN,
        out,
        query_len=query_len,
        scale=case.head_dim**-0.5,
        num_sms=1,
        tiles=replace(tiles, num_splits=num_splits),
        **how,
    )


def dense(q_QHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, case: Case) -> Tensor:
    """Softmax attention of one entry in fp32, one token and one head at a time."""
    num_queries, num_keys = q_QHD.shape[0], k_SGD.shape[0]
    out = torch.zeros(q_QHD.shape)
    for i in range(num_queries):
        position = num_keys - num_queries + i
        first = max(0, position - case.window + 1) if case.window else 0
        last = position + 1 if case.causal else num_keys
        if last <= first:
            continue
        for head in range(case.heads):
            kv_head = head // (case.heads // case.kv_heads)
            score = k_SGD[first:last, kv_head].float() @ q_QHD[i, head].float() / math.sqrt(case.head_dim)
            if case.soft_cap:
                score = case.soft_cap * torch.tanh(score / case.soft_cap)
            if case.sinks:  # one more score, whose weight goes to no value
                score = torch.cat([score, sinks(case)[head][None]])
            weight = torch.softmax(score, 0)[: last - first]
            out[i, head] = weight @ v_SGD[first:last, kv_head].float()
    return out


def sinks(case: Case) -> Tensor:
    """[H]: some that take nearly all of a head's attention, and some nearly nothing."""
    return torch.linspace(-4, 6, case.heads)


def make(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, AttentionBatch, Tensor]:
    """q, cache, batch and what must come out. Pages are shuffled; all that nobody may read is NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(n for n, _ in case.lens) + case.padding
    width = max(1, max(-(-keys // case.page_size) for _, keys in case.lens)) + 1
    num_rows = len(case.lens)
    kv = torch.full((2, num_rows * width + 1, case.page_size, case.kv_heads, case.head_dim), float("nan"))
    pages = torch.randperm(num_rows * width, generator=generator) + 1
    # engine rows in another order than the batch's entries; one row has no entry
    rows = torch.randperm(num_rows, generator=generator) + 1
    table = torch.full((num_rows + 1, width), -1, dtype=torch.int32)
    q = torch.randn(num_tokens, case.heads, case.head_dim, generator=generator).to(dtype)
    expected = torch.zeros(q.shape)
    starts = [0]
    for entry, (queries, keys) in enumerate(case.lens):
        k, v = (torch.randn(keys, case.kv_heads, case.head_dim, generator=generator).to(dtype) for _ in range(2))
        behind = max(keys - queries + 1 - case.window, 0) if case.lets_go and case.window else 0
        for i in range(-(-keys // case.page_size)):
            page = int(pages[entry * width + i])
            table[rows[entry], i] = page
            if i < behind // case.page_size:
                continue
            for side, x in enumerate((k, v)):
                part = x[i * case.page_size : (i + 1) * case.page_size]
                kv[side, page, : part.shape[0]] = part.float()
        start = starts[-1]
        expected[start : start + queries] = dense(q[start : start + queries], k, v, case)
        starts.append(start + queries)
    batch = AttentionBatch(
        rows_R=rows.int().to(device),
        query_starts_R1=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens_R=torch.tensor([keys for _, keys in case.lens], dtype=torch.int32, device=device),
        positions_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slots_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        page_table_MN=table.to(device),
        max_query_len=max(n for n, _ in case.lens),
        uniform=case.uniform,
        causal=case.causal,
    )
    return q.to(device), kv.to(dtype).to(device), batch, expected


def backend(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend for a case. FlashInfer itself needs a GPU; without one a fake of it computes what was planned."""
    shape = AttentionShape(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        scale=case.head_dim**-0.5,
        page_size=case.page_size,
        dtype=dtype,
        kv_dtype=dtype,
        soft_cap=case.soft_cap,
        sinks=case.sinks,
    )
    cls = attention_backend(name, device.type)
    if name == "flashinfer" and device.type == "cpu":
        with mock.patch.dict(sys.modules, flashinfer=fake_flashinfer):
            return cls(shape, device)
    if name == "flashinfer":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its imports' own
            pytest.importorskip("flashinfer", reason="flashinfer is not installed", exc_type=ImportError)
    cls.check(shape, device.type)
    return cls(shape, device)
