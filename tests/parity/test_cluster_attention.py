"""Attention by clusters: against a dense softmax, on the host with every thread a fiber, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import TOLERANCE, Case, backend, make
from cluster_attention_host import HostAttention, tensors_of
from torch import Tensor

from draftloop.attention.base import TreeMask
from draftloop.attention.triton import TritonBackend
from draftloop.kernels.cluster_attention import (
    CHOSEN,
    MAX_QUERIES,
    SOURCE,
    Clusters,
    Shape,
    choose_clusters,
    cluster_attention,
)
from draftloop.kernels.cuda_source import compile_source

CUDA = torch.device("cuda")
ROWS = ((5, 133), (5, 5), (5, 0), (5, 81), (5, 3), (5, 16))
CASES = [
    (Case(lens=ROWS, uniform=True), Clusters(3)),
    (Case(lens=ROWS[:3], uniform=True, page_size=32), Clusters(3)),
    (Case(lens=((6, 300), (6, 257)), heads=4, kv_heads=1, head_dim=128, uniform=True), Clusters(2, warps=8)),
    (Case(lens=((1, 200), (1, 1), (1, 0)), heads=8, kv_heads=2, uniform=True), Clusters(1)),
    (Case(lens=((1, 333),), heads=4, kv_heads=1, head_dim=128, page_size=64, uniform=True), Clusters(5, 3)),
    (Case(lens=((16, 150), (16, 16)), heads=4, kv_heads=1, uniform=True), Clusters(2)),
    (Case(lens=((5, 150), (5, 40)), heads=9, kv_heads=3, uniform=True), Clusters(4)),
]


def name(value: object) -> str:
    if isinstance(value, Case):
        return f"{value.lens}x{value.heads}-{value.kv_heads}-{value.head_dim}-{value.page_size}".replace(" ", "")
    return "-".join(map(str, value)) if isinstance(value, Clusters) else str(value)


def check(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out.float().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("case", "clusters"), CASES, ids=name)
def test_it_attends_as_fibers_on_the_host(case: Case, clusters: Clusters, tmp_path: Path) -> None:
    """All but the instructions themselves, which have stand-ins, and their timing. Barriers order every two accesses of
    which one writes."""
    host = HostAttention(case, clusters, tmp_path)
    assert not host.run(0)
    check(host.out, host.expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "clusters"), CASES, ids=name)
def test_it_attends_on_a_gpu(case: Case, clusters: Clusters) -> None:
    given, expected = tensors_of(case, CUDA)
    cluster_attention(*given, scale=case.head_dim**-0.5, clusters=clusters)
    check(given[-1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [Clusters(1), Clusters(2), Clusters(3), Clusters(6), Clusters(8, 3)], ids=name)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (32, 8, 64), (9, 3, 64)])
def test_real_shapes(heads: int, kv_heads: int, head_dim: int, clusters: Clusters) -> None:
    """The same bits each time, too."""
    for lens in (((6, 1023), (6, 0), (6, 64), (6, 257)), ((1, 513),) * 40, ((16, 2000), (16, 700))):
        for page_size in (16, 64):
            case = Case(lens=lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, uniform=True)
            given, expected = tensors_of(case, CUDA)
            cluster_attention(*given, scale=head_dim**-0.5, clusters=clusters)
            check(given[-1], expected)
            first = given[-1].clone()
            for _ in range(5):
                cluster_attention(*given, scale=head_dim**-0.5, clusters=clusters)
                assert torch.equal(first, given[-1])


def test_all_shapes_are_served_by_what_fits() -> None:
    """Whatever rows there are."""
    for head_dim in CHOSEN:
        for query_len in range(1, MAX_QUERIES + 1):
            for group in (1, 3, 4, 8):
                shape = Shape(query_len, group, head_dim, 16)
                for num_rows in (1, 4, 8, 16, 32, 1000) if shape.is_served else ():
                    clusters = choose_clusters(shape, num_rows=num_rows, num_kv_heads=8, max_keys=2048)
                    assert clusters
                    assert shape.fits(clusters)
    assert not Shape(0, 4, 128, 16).is_served
    assert not Shape(17, 4, 128, 16).is_served
    assert not Shape(6, 4, 256, 16).is_served
    assert not choose_clusters(Shape(17, 4, 128, 16), num_rows=8, num_kv_heads=8, max_keys=2048)
    assert not choose_clusters(Shape(6, 4, 128, 16), num_rows=8, num_kv_heads=8, max_keys=8192)


@pytest.mark.gpu
def test_the_backend_leaves_what_only_triton_can_to_triton() -> None:
    case = Case(lens=((3, 40), (3, 20)), uniform=True)
    *_, batch, _ = make(case, CUDA, torch.bfloat16)
    found = backend("triton", case, CUDA, torch.bfloat16)
    assert isinstance(found, TritonBackend)
    assert found.clusters(batch, None, None)
    assert not found.clusters(batch, 16, None)
    assert not found.clusters(batch, None, torch.zeros(case.heads, device=CUDA))
    tree = TreeMask(torch.zeros(3, dtype=torch.int64, device=CUDA), 3)
    for change in ({"uniform": False}, {"causal": False}, {"invariant": True}, {"tree": tree}, {"max_query_len": 40}):
        assert not found.clusters(replace(batch, **change), None, None), change
    long_table = batch.page_table_MN.new_zeros(batch.page_table_MN.shape[0], 512)
    assert not found.clusters(replace(batch, page_table_MN=long_table), None, None)
    for other, dtype in ((replace(case, soft_cap=2.0), torch.bfloat16), (case, torch.float16)):
        plain = backend("triton", other, CUDA, dtype)
        assert isinstance(plain, TritonBackend)
        assert not plain.clusters(batch, None, None)


@pytest.mark.parametrize(("head_dim", "query_len", "clusters"), [(128, 6, Clusters(2)), (64, 1, Clusters(6))])
def test_it_compiles(head_dim: int, query_len: int, clusters: Clusters) -> None:
    """With NVRTC, which needs no GPU."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA builds")
    assert compile_source(SOURCE, Shape(query_len, 4, head_dim, 16).definitions(clusters), (9, 0))
