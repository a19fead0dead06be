"""Attention by torch's own kernels: the default on CPU, and what the other backends are compared with.

On the CPU, blocks of few float32 queries, which torch answers at a cost per call and not per byte,
go to a C kernel where there is one.

The whole of it is one opaque operator that reads the lengths from memory when it runs, as a GPU
kernel reads them from device memory. So a CPU tape records one call and replays it on the
lengths of the moment.

Shape suffixes: T tokens, R rows, H query heads, G key/value heads, D head size, P pages, S tokens
per page, M rows of the engine, N pages per row, Q tokens of one row.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape, GraphSupport
from draftloop.errors import ConfigError
from draftloop.kernels.fp8_cache import FP8, as_bytes
from draftloop.kernels.native import ops as native
from draftloop.kernels.native.functions import takes
from draftloop.kernels.opaque import define

MAX_CACHED_QUERY_LEN = 64
"""Masks of longer (prefill) blocks are built when needed; shorter ones repeat in every layer and step."""
MAX_KEPT_MASK = 16 << 20
MASK_64 = 2**64 - 1


class Tree(NamedTuple):
    """`TreeMask` on the host."""

    ancestors: tuple[int, ...]
    num_keys: int


def build_mask(
    query_len: int, kv_len: int, window: int, causal: bool, like: Tensor, tree: Tree | None = None
) -> Tensor:
    """[Q, keys] additive mask: 0 where query i (at position kv_len - Q + i) sees key j, else -inf."""
    keys_S = torch.arange(kv_len, device=like.device)
    first = kv_len - (query_len if tree is None else tree.num_keys)
    if tree is None:
        positions_Q1 = torch.arange(first, kv_len, device=like.device).unsqueeze(1)
        hidden = keys_S > positions_Q1 if causal else torch.zeros_like(keys_S > positions_Q1)
    else:
        # the first of its keys is the first ancestor, and one position holds one of them
        heights = [bits.bit_count() - 1 for bits in tree.ancestors]
        positions_Q1 = first + torch.tensor(heights, device=like.device).unsqueeze(1)
        seen = [[bits >> place & 1 for place in range(tree.num_keys)] for bits in tree.ancestors]
        hidden = F.pad(torch.tensor(seen, device=like.device) == 0, (first, 0))
    if window:
        hidden |= keys_S - positions_Q1 <= -window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


class MaskCache:
    """Masks of short blocks. They depend only on the distance to a row's end, so one wide mask,
    cut to a row's last keys, serves every length."""

    def __init__(self) -> None:
        self._masks: dict[tuple, Tensor] = {}
        self._last: tuple[tuple, Tensor | None] = ((), None)

    def get(
        self, query_len: int, kv_len: int, window: int, causal: bool, like: Tensor, tree: Tree | None = None
    ) -> Tensor:
        """As `build_mask`."""
        key = (query_len, window, causal, like.dtype, like.device, tree)
        if query_len > MAX_CACHED_QUERY_LEN:
            return self._get_long(key, query_len, kv_len, window, causal, like)
        mask = self._masks.get(key)
        if mask is None or mask.shape[1] < kv_len:
            width = max(256, 1 << (kv_len - 1).bit_length())
            mask = self._masks[key] = build_mask(query_len, width, window, causal, like, tree)
        return mask[:, mask.shape[1] - kv_len :]

    def _get_long(self, key: tuple, query_len: int, kv_len: int, window: int, causal: bool, like: Tensor) -> Tensor:
        """A prompt chunk's mask is kept for the next layer, if it is not huge."""
        last_key, mask = self._last
        if mask is None or last_key != (*key, kv_len):
            mask = build_mask(query_len, kv_len, window, causal, like)
            self._last = ((*key, kv_len), mask if mask.numel() <= MAX_KEPT_MASK else None)
        return mask


MASKS = MaskCache()


def read_pages(kv_2PSGD: Tensor, pages_N: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The first keys and values of some pages, both [1, G, keys, D]; no copy where the pages are adjacent."""
    _, _, page_size, num_kv_heads, head_dim = kv_2PSGD.shape
    ids = pages_N.tolist()
    if ids == list(range(ids[0], ids[0] + len(ids))):
        # one strided view: a chain of slices and transposes costs more than the attention of a short row
        kv_stride, page_stride, token_stride, head_stride, _ = kv_2PSGD.stride()
        size, stride = (1, num_kv_heads, num_keys, head_dim), (0, head_stride, token_stride, 1)
        if page_stride == page_size * token_stride:
            offset = kv_2PSGD.storage_offset() + ids[0] * page_stride
            return kv_2PSGD.as_strided(size, stride, offset), kv_2PSGD.as_strided(size, stride, offset + kv_stride)
    sides = as_bytes(kv_2PSGD).unbind(0)
    keys, values = (side.index_select(0, pages_N).view(kv_2PSGD.dtype).flatten(0, 1)[:num_keys] for side in sides)
    return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def attend_row(
    q_QHD: Tensor,
    kv_2PSGD: Tensor,
    pages_N: Tensor,
    kv_len: int,
    out_QHD: Tensor,
    causal: bool,
    window: int,
    scale: float,
    soft_cap: float,
    tree: Tree | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """One row with at least one key. `window` and `soft_cap` 0 mean none."""
    query_len, num_heads, head_dim = q_QHD.shape
    page_size, num_kv_heads = kv_2PSGD.shape[2:4]
    # whole pages before the first key that the first token sees are left out
    reach = query_len if tree is None else tree.num_keys
    first_page = max(0, kv_len - reach + 1 - window) // page_size if window else 0
    num_keys = kv_len - first_page * page_size
    keys, values = read_pages(kv_2PSGD, pages_N[first_page : -(-kv_len // page_size)], num_keys)
    if keys.dtype is not q_QHD.dtype:
        keys, values = keys.to(q_QHD.dtype), values.to(q_QHD.dtype)

    if soft_cap or sinks_H is not None:
        mask = MASKS.get(query_len, num_keys, window, causal, q_QHD, tree) if causal or window else None
        q_1HQD = q_QHD.transpose(0, 1).unsqueeze(0)
        out_1HQD = written_out_attention(q_1HQD, keys, values, mask, scale, soft_cap, sinks_H)
        out_QHD.copy_(out_1HQD[0].transpose(0, 1))
    elif query_len == 1 and tree is None and (not window or num_keys <= window):
        # the query heads of one key/value head are its queries: keys are read once, and no mask is needed
        packed = (1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out_QHD.view(packed).copy_(scaled_dot_product_attention(q_QHD.view(packed), keys, values, scale=scale))
    else:
        mask, whole = None, causal and tree is None and query_len == kv_len and not window
        if (causal or window) and not whole:
            mask = MASKS.get(query_len, num_keys, window, causal, q_QHD, tree)
        out_1HQD = scaled_dot_product_attention(
            q_QHD.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        out_QHD.copy_(out_1HQD[0].transpose(0, 1))
    if query_len > kv_len and causal:
        # tokens before the sequence's first position see nothing; a softmax over nothing is not a number
        out_QHD[: query_len - kv_len].zero_()


def written_out_attention(
    q_1HQD: Tensor,
    keys_1GSD: Tensor,
    values_1GSD: Tensor,
    mask_QS: Tensor | None,
    scale: float,
    soft_cap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """What torch's kernels have not, computed in fp32: scores squeezed between minus and plus `soft_cap` (0: not)
    before the mask, and sinks beside them."""
    group = q_1HQD.shape[1] // keys_1GSD.shape[1]
    keys, values = (side.float().repeat_interleave(group, 1) for side in (keys_1GSD, values_1GSD))
    scores = q_1HQD.float() @ keys.transpose(2, 3) * scale
    if soft_cap:
        scores = (scores / soft_cap).tanh() * soft_cap
    if mask_QS is not None:
        scores = scores + mask_QS
    if sinks_H is None:
        return (scores.softmax(-1) @ values).to(q_1HQD.dtype)
    sinks_1HQ1 = sinks_H[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks_1HQ1], -1).softmax(-1)[..., :-1]
    return (weights @ values).to(q_1HQD.dtype)


def paged_attention(
    q_THD: Tensor,
    kv_2PSGD: Tensor,
    rows_R: Tensor,
    query_starts_R1: Tensor,
    kv_lens_R: Tensor,
    page_table_MN: Tensor,
    out_THD: Tensor,
    query_len: int,
    causal: bool,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    invariant: bool = False,
    ancestors_Q: Tensor | None = None,
    num_tree_keys: int = 0,
    sinks_H: Tensor | None = None,
) -> None:
    """Body of `draftloop::paged_attention`. `query_len` > 0: every row has that many tokens; 0: ragged."""
    longest = 0  # of the blocks that the C kernel has answered
    # it adds up each token by itself, but is slow for many
    most = max(q_THD.shape[0], native.MAX_TOKENS) if invariant else native.MAX_TOKENS
    if q_THD.device.type == "cpu" and ancestors_Q is None and 0 <= query_len <= most:
        indices = (rows_R, query_starts_R1, kv_lens_R, page_table_MN)
        if native.takes_attention(q_THD, kv_2PSGD, out_THD, *indices) and takes(sinks_H):
            native.paged_attention(
                q_THD,
                kv_2PSGD,
                rows_R,
                None if query_len else query_starts_R1,
                kv_lens_R,
                page_table_MN,
                out_THD,
                query_len or most,
                causal,
                window,
                scale,
                soft_cap,
                sinks_H,
            )
            if query_len:
                return
            longest = most
    # a tape refuses host reads while it records; those below happen again at every replay.
    # torch's memory-efficient CUDA kernel wants aligned masks, which odd lengths do not give
    with torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH) if q_THD.is_cuda else nullcontext():
        kv_lens = kv_lens_R.tolist()
        tree = None
        if ancestors_Q is not None:
            tree = Tree(tuple(bits & MASK_64 for bits in ancestors_Q.tolist()), num_tree_keys)
        starts = range(0, query_len * (len(kv_lens) + 1), query_len) if query_len else query_starts_R1.tolist()
        for entry, row in enumerate(rows_R.tolist()):
            start, end, kv_len = starts[entry], starts[entry + 1], kv_lens[entry]
            if end - start <= longest:
                continue
            if kv_len <= 0:
                out_THD[start:end].zero_()
                continue
            # without the C kernel, one token at a time; blocks that are not causal have one size anyway
            step = 1 if invariant and causal else end - start
            for at in range(start, end, step):
                part, seen = slice(at, at + step), kv_len - (end - at - step)
                if seen > 0:
                    pages, out = page_table_MN[row], out_THD[part]
                    attend_row(q_THD[part], kv_2PSGD, pages, seen, out, causal, window, scale, soft_cap, tree, sinks_H)
                else:
                    out_THD[part].zero_()
        if starts[-1] < out_THD.shape[0]:
            out_THD[starts[-1] :].zero_()


_PAGED_ATTENTION = define(
    "paged_attention(Tensor q, Tensor kv, Tensor rows, Tensor query_starts, Tensor kv_lens, Tensor page_table, "
    "Tensor(a!) out, int query_len, bool causal, int window, float scale, float soft_cap, bool invariant, "
    "Tensor? ancestors=None, int num_tree_keys=0, Tensor? sinks=None) -> ()",
    paged_attention,
    "CPU",
    "CUDA",
)


class SdpaBackend(AttentionBackend):
    """torch.nn.functional.scaled_dot_product_attention, row by row."""

    name = "sdpa"
    invariant_on = frozenset({"cpu"})
    takes_trees = True
    keeps_to_windows = True

    @classmethod
    def graph_support(cls, device_type: str) -> GraphSupport:
        if device_type == "cpu":
            return GraphSupport(uniform=True, ragged=True)
        return GraphSupport(uniform=False, ragged=False, reason="sdpa reads the lengths on the host")

    @classmethod
    def check(cls, shape: AttentionShape, device_type: str) -> None:
        """Raises ConfigError where the cache has another dtype than the model."""
        if shape.kv_dtype not in (shape.dtype, FP8):
            raise ConfigError(
                f"attention backend sdpa needs a cache in the model's dtype {shape.dtype}, or in {FP8}, not "
                f"{shape.kv_dtype}; use kv_cache_dtype auto"
            )

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
        _PAGED_ATTENTION(
            q_THD,
            kv_2PSGD,
            batch.rows_R,
            batch.query_starts_R1,
            batch.kv_lens_R,
            batch.page_table_MN,
            out_THD,
            batch.max_query_len if batch.uniform else 0,
            batch.causal,
            sliding_window or 0,
            self.shape.scale,
            self.shape.soft_cap,
            batch.invariant,
            *(batch.tree or (None, 0)),
            sinks_H,
        )
