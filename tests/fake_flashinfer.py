"""A stand-in for FlashInfer: the same calls, checked as FlashInfer checks them, computed from what was planned.

Put it into `sys.modules["flashinfer"]`. Nothing but the planned arrays is used, so a wrong one gives a wrong answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

EVENTS: list[tuple[str, FakeWrapper]] = []
"""("make" | "plan" | "run", wrapper), in order."""


class FakeWrapper:
    """What the two wrappers share."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, use_cuda_graph: bool, backend: str) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"
        self.workspace, self.backend, self.use_cuda_graph = workspace, backend, use_cuda_graph
        self.fixed_rows = 0
        self.indices_buf: Tensor | None = None
        self.planned: dict = {}
        EVENTS.append(("make", self))

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert int_workspace_buffer.dtype is torch.uint8
        self.workspace, self.schedule = float_workspace_buffer, int_workspace_buffer

    def _plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool = False,
    ) -> None:
        rows = len(last_page_len)
        assert len(qo_indptr) == len(indptr) == rows + 1
        for host in (qo_indptr, indptr, last_page_len):
            assert host.device.type == "cpu"
            assert host.dtype is torch.int32
        assert indices.dtype is torch.int32
        counts = indptr.diff()
        assert indptr[0] == qo_indptr[0] == 0
        assert (counts >= 0).all()
        assert (qo_indptr.diff() >= 0).all()
        assert len(indices) == int(indptr[-1])
        assert ((last_page_len >= 1) & (last_page_len <= page_size) | (counts == 0) & (last_page_len == 0)).all()
        if self.use_cuda_graph:
            assert rows == self.fixed_rows, "the batch size is fixed in CUDA graph mode"
            assert self.indices_buf is not None
            assert len(indices) <= len(self.indices_buf)
            assert not disable_split_kv, "the grid would be larger than the schedule"
        self.planned = {
            "qo_indptr": qo_indptr.clone(), "indptr": indptr.clone(), "indices": indices.clone(),
            "last_page_len": last_page_len.clone(), "heads": (num_qo_heads, num_kv_heads, head_dim, page_size),
            "causal": causal, "scale": sm_scale, "window_left": window_left, "dtypes": (q_data_type, kv_data_type),
        }  # fmt: skip
        EVENTS.append(("plan", self))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        EVENTS.append(("run", self))
        plan = self.planned
        num_heads, num_kv_heads, head_dim, page_size = plan["heads"]
        assert q.shape == out.shape == (int(plan["qo_indptr"][-1]), num_heads, head_dim)
        assert (q.dtype, paged_kv_cache[0].dtype) == plan["dtypes"]
        starts = plan["qo_indptr"].tolist()
        for row, last in enumerate(plan["last_page_len"].tolist()):
            first, end = plan["indptr"][row : row + 2].tolist()
            pages = plan["indices"][first:end].long()
            kv_len = max(end - first - 1, 0) * page_size + last
            k, v = (side[pages].flatten(0, 1)[:kv_len] for side in paged_kv_cache)
            assert k.shape[1:] == (num_kv_heads, head_dim)
            mine = q[starts[row] : starts[row + 1]]
            out[starts[row] : starts[row + 1]] = self._row(mine, k, v, num_heads // num_kv_heads)
        return out

    def _row(self, q_QHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, group: int) -> Tensor:
        plan, num_queries, kv_len = self.planned, q_QHD.shape[0], k_SGD.shape[0]
        if not num_queries or not kv_len:
            return torch.zeros_like(q_QHD)
        position_Q1 = torch.arange(kv_len - num_queries, kv_len)[:, None]
        key_S = torch.arange(kv_len)
        hidden = key_S > position_Q1 if plan["causal"] else torch.zeros(num_queries, kv_len, dtype=torch.bool)
        if plan["window_left"] >= 0:
            hidden |= key_S < position_Q1 - plan["window_left"]
        k_SHD, v_SHD = (x.repeat_interleave(group, 1).float() for x in (k_SGD, v_SGD))
        score_HQS = torch.einsum("qhd,shd->hqs", q_QHD.float(), k_SHD) * plan["scale"]
        share_HQS = score_HQS.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hqs,shd->qhd", share_HQS, v_SHD).to(q_QHD.dtype)


class BatchPrefillWithPagedKVCacheWrapper(FakeWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph=use_cuda_graph, backend=backend)
        if use_cuda_graph:
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self.fixed_rows, self.indices_buf = len(qo_indptr_buf) - 1, paged_kv_indices_buf
            assert len(paged_kv_indptr_buf) == self.fixed_rows + 1
            assert len(paged_kv_last_page_len_buf) == self.fixed_rows
        self.max_tokens: int | None = None

    def plan(self, qo_indptr: Tensor, *args, causal: bool = False, **options) -> None:
        if self.use_cuda_graph:
            self.max_tokens = self.max_tokens or int(qo_indptr[-1])
            assert int(qo_indptr[-1]) <= self.max_tokens, "the first plan fixes the most tokens"
        self._plan(qo_indptr, *args, causal=causal, **options)


class BatchDecodeWithPagedKVCacheWrapper(FakeWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph=use_cuda_graph, backend=backend)
        assert use_cuda_graph
        assert use_tensor_cores
        assert paged_kv_indptr_buffer is not None
        assert paged_kv_last_page_len_buffer is not None
        self.fixed_rows, self.indices_buf = len(paged_kv_last_page_len_buffer), paged_kv_indices_buffer
        assert len(paged_kv_indptr_buffer) == self.fixed_rows + 1

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *args, **options) -> None:
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        # FlashInfer plans this one without a mask: right for one token per row and no other number
        self._plan(one_each, indptr, indices, last_page_len, *args, causal=False, **options)
