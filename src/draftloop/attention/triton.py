"""Attention by draftloop's own split-KV kernels: the default on CUDA.

It takes every length from device memory, so whole iterations can be captured around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape, GraphSupport, unsupported
from draftloop.errors import ConfigError
from draftloop.kernels.cluster_attention import Clusters, Shape, choose_clusters, cluster_attention
from draftloop.kernels.fp8_cache import FP8
from draftloop.kernels.paged_attention import PagedTree, paged_attention_triton
from draftloop.kernels.triton_import import INTERPRETED, triton

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)
PAGE_SIZES = (16, 32, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend(AttentionBackend):
    """Paged attention with a static grid, for uniform and ragged batches alike."""

    name = "triton"
    invariant_on = frozenset({"cuda"})
    takes_trees = True
    keeps_to_windows = True

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.num_sms, self.pdl, self.has_clusters = 8, False, False  # in the interpreter
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_sms, self.pdl = properties.multi_processor_count, properties.major >= 9
            self.has_clusters = (
                (properties.major, properties.minor) == (9, 0)
                and shape.dtype is shape.kv_dtype is torch.bfloat16
                and not shape.soft_cap
            )

    @classmethod
    def graph_support(cls, device_type: str) -> GraphSupport:
        if device_type == "cuda":
            return GraphSupport(uniform=True, ragged=True)
        return GraphSupport(uniform=False, ragged=False, reason="Triton kernels run on CUDA devices")

    @classmethod
    def check(cls, shape: AttentionShape, device_type: str) -> None:
        """Raises ConfigError for a device, head size, page size or dtype without a kernel."""
        if triton is None or not (device_type == "cuda" or INTERPRETED):
            raise ConfigError(
                f"attention backend triton needs a CUDA device and the triton package, not device {device_type}; "
                "use attention backend sdpa"
            )
        if shape.head_dim not in HEAD_DIMS:
            raise unsupported(cls.name, "head size", shape.head_dim, HEAD_DIMS, instead="sdpa")
        if shape.page_size not in PAGE_SIZES:
            raise unsupported(cls.name, "page size", shape.page_size, PAGE_SIZES, instead="sdpa")
        if shape.dtype not in DTYPES:
            raise unsupported(cls.name, "dtype", shape.dtype, DTYPES, instead="sdpa")
        if shape.kv_dtype not in (shape.dtype, FP8):
            raise unsupported(cls.name, "cache dtype", shape.kv_dtype, (shape.dtype, FP8), instead="sdpa")
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(f"{shape.num_heads} query heads do not divide among {shape.num_kv_heads} key/value heads")

    def attend(
        self,
        q_THD: Tensor,
        kv_2PSGD: Tensor,
        batch: AttentionBatch,
        out_THD: Tensor,
        *,
        sliding_window: int | None,
        sinks_H: Tensor | None = None,
    ) -> None:
        if clusters := self.clusters(batch, sliding_window, sinks_H):
            cluster_attention(
                q_THD,
                kv_2PSGD,
                batch.rows_R,
                batch.kv_lens_R,
                batch.page_table_MN,
                out_THD,
                scale=self.shape.scale,
                clusters=clusters,
            )
            return
        paged_attention_triton(
            q_THD,
            kv_2PSGD,
            batch.rows_R,
            batch.query_starts_R1,
            batch.kv_lens_R,
            batch.page_table_MN,
            out_THD,
            query_len=batch.max_query_len if batch.uniform else 0,
            causal=batch.causal,
            tree=None if batch.tree is None else PagedTree(*batch.tree, batch.positions_T),
            window=sliding_window or 0,
            scale=self.shape.scale,
            num_sms=self.num_sms,
            soft_cap=self.shape.soft_cap,
            sinks_H=sinks_H,
            pdl=self.pdl,
            invariant=batch.invariant,
        )

    def clusters(self, batch: AttentionBatch, sliding_window: int | None, sinks_H: Tensor | None) -> Clusters | None:
        """How clusters attend; None: Triton's kernel has to, or is faster."""
        is_plain = batch.uniform and batch.causal and not batch.invariant and batch.tree is None
        if not (self.has_clusters and is_plain) or sliding_window or sinks_H is not None:
            return None
        shape = self.shape
        found = Shape(batch.max_query_len, shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.page_size)
        num_rows, max_keys = batch.rows_R.shape[0], batch.page_table_MN.shape[1] * shape.page_size
        return choose_clusters(found, num_rows=num_rows, num_kv_heads=shape.num_kv_heads, max_keys=max_keys)
