"""A layer's C kernels as torch operators, one op each on a tape; those of the row state are in `row_ops.py`.

They take contiguous float32 tensors on the CPU, and bf16 weights of linear layers (`takes`); the public functions in
the files beside this folder pick them, and torch's operators for everything else.

Shape suffixes: T tokens, N output columns, K input columns, H hidden size, I inner size of the MLP, Q query
heads, G key/value heads, D head size, L positions, P pages, S tokens per page, R entries, M rows of the
engine, N pages per row.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, empty, get_num_threads

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.native.functions import c, pointer, takes
from draftloop.kernels.opaque import define

MAX_TOKENS = 16
"""Of a linear layer or of one entry's block of queries; above this, torch."""
MAX_SERIAL = 1 << 17
"""Elements that the norms and the activation, which use one thread, may have."""
PARALLEL_WORK = 1 << 16
"""Multiplications of a linear layer from which on several threads pay."""


def takes_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    """Whether `linear` takes this layer."""
    return x.dim() == 2 and 0 < x.shape[0] <= MAX_TOKENS and takes(x, bias_N, weight=weight_NK)


def takes_serial(x: Tensor, *others: Tensor) -> bool:
    """Whether the norms or the activation take x."""
    return x.dim() == 2 and (x.numel() <= MAX_SERIAL or is_wanted()) and takes(x, *others)


def takes_rope_write(
    qkv_TE: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_LD: Tensor,
    kv_2PSGD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
) -> bool:
    """Whether `rope_write` can work on these."""
    return (
        takes(qkv_TE, cos_sin_LD, q_norm_D, k_norm_D)
        and kv_2PSGD.dtype is torch.float32
        and kv_2PSGD.stride(4) == 1
        and (q_norm_D is None) == (k_norm_D is None)
        and all(index.dtype is torch.int64 and index.is_contiguous() for index in (positions_T, slots_T))
    )


def takes_attention(q_TQD: Tensor, kv_2PSGD: Tensor, out_TQD: Tensor, *indices: Tensor) -> bool:
    """Whether `paged_attention` can work on these; `indices` are the batch's tensors."""
    return (
        takes(q_TQD, out_TQD)
        and kv_2PSGD.dtype is torch.float32
        and kv_2PSGD.stride(4) == 1
        and q_TQD.shape[2] % 16 == 0
        and all(index.dtype is torch.int32 and index.is_contiguous() for index in indices)
    )


# Bodies. What can be left out of Python is: they run hundreds of times per token.


def _linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    out_TN = empty((x_TK.shape[0], weight_NK.shape[0]))
    _linear_into(x_TK, weight_NK, bias_N, out_TN)
    return out_TN


def _linear_into(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    num_tokens, size = x_TK.shape
    num_columns = weight_NK.shape[0]
    c.dl_linear(
        x_TK.data_ptr(),
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        out_TN.data_ptr(),
        num_tokens,
        num_columns,
        size,
        weight_NK.dtype is bfloat16,
        get_num_threads() if num_columns * size >= PARALLEL_WORK else 1,
    )


def _rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    out_TH = empty(x_TH.shape)
    c.dl_rms_norm(x_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(), *x_TH.shape, eps)
    return out_TH


def _add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape = x_TH.shape
    normed_TH, sum_TH = empty(shape), empty(shape)
    c.dl_add_rms_norm(
        x_TH.data_ptr(),
        residual_TH.data_ptr(),
        weight_H.data_ptr(),
        normed_TH.data_ptr(),
        sum_TH.data_ptr(),
        *shape,
        eps,
    )
    return normed_TH, sum_TH


def _norm_concat(
    first_TH: Tensor, second_TH: Tensor, first_weight_H: Tensor, second_weight_H: Tensor, eps: float
) -> Tensor:
    num_tokens, size = first_TH.shape
    out_T2H = empty((num_tokens, 2 * size))
    c.dl_norm_concat(
        first_TH.data_ptr(),
        second_TH.data_ptr(),
        first_weight_H.data_ptr(),
        second_weight_H.data_ptr(),
        out_T2H.data_ptr(),
        num_tokens,
        size,
        eps,
    )
    return out_T2H


def _silu_mul(gate_up_T2I: Tensor) -> Tensor:
    num_tokens, double = gate_up_T2I.shape
    out_TI = empty((num_tokens, double // 2))
    c.dl_silu_mul(gate_up_T2I.data_ptr(), out_TI.data_ptr(), num_tokens, double // 2)
    return out_TI


def _rope_write(
    qkv_TE: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_LD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    q_TQD: Tensor,
    kv_2PSGD: Tensor,
    eps: float,
) -> None:
    num_tokens, num_heads, head_dim = q_TQD.shape
    _, num_pages, page_size, num_kv_heads, _ = kv_2PSGD.shape
    failed = c.dl_rope_write(
        qkv_TE.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        cos_sin_LD.data_ptr(),
        None if q_norm_D is None else q_norm_D.data_ptr(),
        None if k_norm_D is None else k_norm_D.data_ptr(),
        q_TQD.data_ptr(),
        kv_2PSGD.data_ptr(),
        *kv_2PSGD.stride()[:4],
        num_pages,
        page_size,
        num_tokens,
        cos_sin_LD.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        cos_sin_LD.shape[1],
        eps,
    )
    if failed:
        raise IndexError(f"a position is outside of 0..{cos_sin_LD.shape[0] - 1}, or a slot outside of the cache")


linear = define("native_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, "CPU")
linear_into = define(
    "native_linear_into(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()", _linear_into, "CPU"
)
rms_norm = define("native_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, "CPU")
add_rms_norm = define(
    "native_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)", _add_rms_norm, "CPU"
)
norm_concat = define(
    "native_norm_concat(Tensor first, Tensor second, Tensor first_weight, Tensor second_weight, float eps) -> Tensor",
    _norm_concat,
    "CPU",
)
silu_mul = define("native_silu_mul(Tensor gate_up) -> Tensor", _silu_mul, "CPU")
rope_write = define(
    "native_rope_write(Tensor qkv, Tensor positions, Tensor slots, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, "
    "Tensor(a!) q, Tensor(b!) kv, float eps) -> ()",
    _rope_write,
    "CPU",
)


def paged_attention(
    q_TQD: Tensor,
    kv_2PSGD: Tensor,
    rows_R: Tensor,
    query_starts_R1: Tensor | None,
    kv_lens_R: Tensor,
    page_table_MN: Tensor,
    out_TQD: Tensor,
    max_query_len: int,
    causal: bool,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks_Q: Tensor | None = None,
) -> None:
    """`attention.sdpa.paged_attention` for the entries of at most `max_query_len` tokens, and for padding.

    `query_starts_R1` None: every entry has that many. `window` and `soft_cap` 0 mean none.
    """
    num_tokens, num_heads, head_dim = q_TQD.shape
    _, num_pages, page_size, num_kv_heads, _ = kv_2PSGD.shape
    failed = c.dl_paged_attention(
        q_TQD.data_ptr(),
        rows_R.data_ptr(),
        None if query_starts_R1 is None else query_starts_R1.data_ptr(),
        kv_lens_R.data_ptr(),
        page_table_MN.data_ptr(),
        out_TQD.data_ptr(),
        kv_2PSGD.data_ptr(),
        pointer(sinks_Q),
        *kv_2PSGD.stride()[:4],
        num_pages,
        page_size,
        num_tokens,
        rows_R.shape[0],
        *page_table_MN.shape,
        num_heads,
        num_kv_heads,
        head_dim,
        max_query_len,
        causal,
        window,
        scale,
        soft_cap,
        get_num_threads(),
    )
    if failed:
        raise IndexError("a row, a length or a page that attention must read does not exist")
