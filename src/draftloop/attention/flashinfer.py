"""Attention by FlashInfer's paged prefill and decode wrappers.

FlashInfer schedules a pass on the host before it runs (its `plan`), from lengths that only the
device knows here. So each pass reads them back once, and is planned once, whatever its number of
layers; none of it can be inside a captured graph. Piecewise graphs call it between their segments.

Shape suffixes: T tokens, R rows, H query heads, G key/value heads, D head size, P pages, S tokens
per page, M rows of the engine, N pages per row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape, GraphSupport, unsupported
from draftloop.errors import ConfigError

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
DTYPES = (torch.bfloat16, torch.float16)

KERNELS = "fa2"
"""FlashInfer's kernels for few query tokens per row; those of fa3 pad every row to 128 and took twice as long."""

_LONGEST_TILE = 128
_CTAS_PER_SM = 2


def load_flashinfer() -> Any:
    """The package. Raises ConfigError where it is missing."""
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"attention backend flashinfer needs a package that cannot be imported ({error}); "
            "pip install 'draftloop[cuda]', or use attention backend triton"
        ) from error


@dataclass(frozen=True, kw_only=True)
class WrapperKey:
    """What one wrapper is made for. Its grid is fixed by rows and query length."""

    rows: int
    """0: ragged batches of any size, whose grid is chosen by each plan."""
    query_len: int
    causal: bool
    window: int
    """0: none."""


@dataclass(kw_only=True)
class _Wrapper:
    wrapper: Any
    workspace: Tensor
    schedule: Tensor
    """What its plan wrote, needed until the pass is over; so no two wrappers share it."""


@dataclass(kw_only=True)
class _Pass:
    """One forward pass: what the host knows of it, and the wrappers that are planned for it."""

    batch: AttentionBatch
    num_tokens: int
    """Tokens of its rows; those after them are padding."""
    query_starts_R1: Tensor
    page_starts_R1: Tensor
    last_page_lens_R: Tensor
    page_indices: Tensor
    """int32 [pages in use], on the device."""
    layers: set[int] = field(default_factory=set)
    """Caches attended to so far, by address."""
    planned: dict[WrapperKey, _Wrapper] = field(default_factory=dict)


class FlashinferBackend(AttentionBackend):
    """FlashInfer 0.6: wrappers keyed by (rows, query length), planned once per pass.

    A model attends to each layer's cache once in a pass. So a layer that comes again, or another
    batch, begins a new pass, and no model has to say when.
    """

    name = "flashinfer"
    waits = True

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self._flashinfer = load_flashinfer()
        self.num_sms = 8
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.workspace = torch.zeros(0, dtype=torch.uint8, device=device)
        """Partial sums of split rows. It grows to what the largest size in use needs."""
        self._wrappers: dict[WrapperKey, _Wrapper] = {}
        self._pass: _Pass | None = None
        self._lock = threading.Lock()

    @classmethod
    def graph_support(cls, device_type: str) -> GraphSupport:
        reason = "flashinfer plans on the host from lengths that only the device knows"
        return GraphSupport(uniform=False, ragged=False, reason=reason)

    @classmethod
    def check(cls, shape: AttentionShape, device_type: str) -> None:
        """Raises ConfigError where the package is missing, or for a device or shape without a kernel."""
        load_flashinfer()
        if device_type != "cuda":
            raise ConfigError(
                f"attention backend flashinfer needs a CUDA device, not device {device_type}; "
                "use attention backend sdpa"
            )
        for what, value, known in (
            ("head size", shape.head_dim, HEAD_DIMS),
            ("page size", shape.page_size, PAGE_SIZES),
            ("dtype", shape.dtype, DTYPES),
            ("cache dtype", shape.kv_dtype, (shape.dtype,)),
        ):
            if value not in known:
                raise unsupported(cls.name, what, value, known, instead="triton")
        if shape.soft_cap:
            raise unsupported(cls.name, "soft-capping of scores, here at", shape.soft_cap, ("none",), instead="triton")
        if shape.sinks:
            raise unsupported(cls.name, "attention sinks,", "here one per head", ("none",), instead="triton")
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
        assert sinks_H is None
        with self._lock:  # at start-up, phases are warmed up on many threads
            run = self._pass
            layer = kv_2PSGD.data_ptr()
            if run is None or run.batch is not batch or layer in run.layers:
                run = self._pass = self._begin(batch)
            run.layers.add(layer)
            key = WrapperKey(
                rows=batch.kv_lens_R.shape[0] if batch.uniform else 0,
                query_len=batch.max_query_len if batch.uniform else 0,
                causal=batch.causal,
                window=sliding_window or 0,
            )
            made = run.planned.get(key)
            if made is None:
                made = run.planned[key] = self._plan(key, run)
            if num_tokens := run.num_tokens:
                made.wrapper.run(q_THD[:num_tokens], (kv_2PSGD[0], kv_2PSGD[1]), out=out_THD[:num_tokens])
            out_THD[num_tokens:].zero_()

    def _begin(self, batch: AttentionBatch) -> _Pass:
        """Read the lengths back, which waits for the device, and list the pages in use."""
        num_rows, page_size = batch.kv_lens_R.shape[0], self.shape.page_size
        if batch.uniform:
            kv_lens_R = batch.kv_lens_R.to("cpu", copy=True)
            last = (num_rows + 1) * batch.max_query_len
            query_starts_R1 = torch.arange(0, last, batch.max_query_len, dtype=torch.int32)
        else:
            lengths = torch.cat([batch.kv_lens_R, batch.query_starts_R1]).cpu()
            kv_lens_R, query_starts_R1 = lengths[:num_rows], lengths[num_rows:]
        page_counts_R = (kv_lens_R + (page_size - 1)) // page_size
        page_starts_R1 = torch.zeros(num_rows + 1, dtype=torch.int32)
        torch.cumsum(page_counts_R, 0, out=page_starts_R1[1:])
        num_pages = int(page_starts_R1[-1])

        counts_R = (batch.kv_lens_R + (page_size - 1)) // page_size
        rows = torch.arange(num_rows, device=counts_R.device)
        entries = torch.repeat_interleave(rows, counts_R, output_size=num_pages)
        first_R = torch.cumsum(counts_R, 0) - counts_R
        offsets = torch.arange(num_pages, device=counts_R.device) - first_R[entries]
        return _Pass(
            batch=batch,
            num_tokens=int(query_starts_R1[-1]),
            query_starts_R1=query_starts_R1,
            page_starts_R1=page_starts_R1,
            last_page_lens_R=kv_lens_R - (page_counts_R - 1).clamp(min=0) * page_size,
            page_indices=batch.page_table_MN[batch.rows_R.long()[entries], offsets],
        )

    def _plan(self, key: WrapperKey, run: _Pass) -> _Wrapper:
        shape = self.shape
        self._reserve(self.workspace_bytes(key.rows, key.query_len))
        made = self._wrappers.get(key)
        if made is None:
            made = self._wrappers[key] = self._make(key, run.batch.page_table_MN.shape[1])
        if made.workspace is not self.workspace:
            made.wrapper.reset_workspace_buffer(self.workspace, made.schedule)
            made.workspace = self.workspace
        pages = (run.page_starts_R1, run.page_indices, run.last_page_lens_R)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        options: dict[str, Any] = {
            "sm_scale": shape.scale,
            "window_left": key.window - 1,  # keys before the token itself; -1 for all
            "q_data_type": shape.dtype,
            "kv_data_type": shape.kv_dtype,
        }
        if key.query_len == 1:
            made.wrapper.plan(*pages, *heads, **options)
            return made
        if key.window and not key.causal and not key.rows:
            # splits are counted as if no row were longer than a tile
            options["disable_split_kv"] = True
        made.wrapper.plan(run.query_starts_R1, *pages, *heads, causal=key.causal, **options)
        return made

    def _make(self, key: WrapperKey, pages_per_row: int) -> _Wrapper:
        flashinfer, rows = self._flashinfer, key.rows

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self.device)

        if not rows:
            # nothing is captured, so its grid and its buffers may follow each batch
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=KERNELS)
        elif key.query_len == 1:
            # with more tokens per row, this one would plan one and mask none of them
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=ints(rows + 1),
                paged_kv_indices_buffer=ints(rows * pages_per_row),
                paged_kv_last_page_len_buffer=ints(rows),
                backend=KERNELS,
            )
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=ints(rows + 1),
                paged_kv_indptr_buf=ints(rows + 1),
                paged_kv_indices_buf=ints(rows * pages_per_row),
                paged_kv_last_page_len_buf=ints(rows),
                backend=KERNELS,
            )
        # the wrapper's own 8 MiB, for each of dozens of sizes, would be wasted
        schedule = torch.zeros(self._schedule_bytes(key), dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(self.workspace, schedule)
        return _Wrapper(wrapper=wrapper, workspace=self.workspace, schedule=schedule)

    # ---- memory: as in flashinfer/attention/scheduler.cuh, PrefillPlan ------------------------

    def _grid(self, rows: int, query_len: int) -> tuple[int, int]:
        """Most blocks that are scheduled for a size, and query rows (tokens x heads of a group) in each."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        splits = _CTAS_PER_SM * self.num_sms // shape.num_kv_heads
        if not rows:
            return splits, _LONGEST_TILE
        tokens = rows * query_len
        longest = (tokens - rows + 1) * group  # one row may have all tokens but one of each other row
        tile = 16 if longest <= 16 else 64 if longest <= 64 or shape.head_dim >= 256 else _LONGEST_TILE
        return max(splits, -(-tokens * group // tile) + rows - 1), tile

    def workspace_bytes(self, rows: int, query_len: int) -> int:
        """Partial sums of one size: 305 MiB for 128 rows of 6 tokens, 32 heads of 128. Rows 0: ragged."""
        blocks, tile = self._grid(rows, query_len)
        return self.shape.num_heads * blocks * tile * (self.shape.head_dim + 1) * 4 + 1024

    def _schedule_bytes(self, key: WrapperKey) -> int:
        if not key.rows:
            return 8 << 20
        blocks, _ = self._grid(key.rows, key.query_len)
        return 13 * blocks + 4 * (key.rows + key.rows * key.query_len) + 4096

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > self.workspace.numel():
            if self.workspace.is_cuda:
                torch.cuda.synchronize(self.device)  # another stream may still be writing to the old one
            rounded = -(-num_bytes // (32 << 20)) * (32 << 20)
            self.workspace = torch.zeros(rounded, dtype=torch.uint8, device=self.device)
