"""The C kernels as torch operators, one op each on a tape.

They take contiguous float32 tensors on the CPU (`takes`); the public functions in the files beside
this folder pick them, and torch's operators for everything else.

Shape suffixes: T tokens, N output columns, K input columns, H hidden size, I inner size of the MLP, Q query
heads, G key/value heads, D head size, L positions, P pages, S tokens per page, R entries, M rows of the
engine, N pages per row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, empty, get_num_threads

from draftloop.kernels.batch_invariance import is_wanted
from draftloop.kernels.native.build import library
from draftloop.kernels.opaque import define

MAX_TOKENS = 16
"""Of a linear layer or of one entry's block of queries; above this, torch."""
MAX_SERIAL = 1 << 17
"""Elements that the norms and the activation, which use one thread, may have."""
PARALLEL_WORK = 1 << 16
"""Multiplications of a linear layer from which on several threads pay."""

_ARGUMENTS = {
    "dl_linear": [c_void_p] * 4 + [c_int64] * 3 + [c_int],
    "dl_rms_norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float],
    "dl_add_rms_norm": [c_void_p] * 5 + [c_int64] * 2 + [c_float],
    "dl_norm_concat": [c_void_p] * 5 + [c_int64] * 2 + [c_float],
    "dl_silu_mul": [c_void_p] * 2 + [c_int64] * 2,
    "dl_rope_write": [c_void_p] * 8 + [c_int64] * 12 + [c_float],
    "dl_paged_attention": [c_void_p] * 8 + [c_int64] * 14 + [c_int, c_int64, c_float, c_float, c_int],
    "dl_row_tokens": [c_void_p] * 13 + [c_int64] * 10,
    "dl_write_draft": [c_void_p] * 7 + [c_int64] * 4 + [c_int, c_int64],
    "dl_accept_block": [c_void_p] * 8 + [c_int64] * 6,
}
_CHECKED = ("dl_rope_write", "dl_paged_attention", "dl_row_tokens", "dl_write_draft", "dl_accept_block")
"""Functions that return whether all indices were good."""

_c: Any = None
"""The functions of the library, once `available`."""
_off = False


def available() -> bool:
    """Whether the kernels can be used; the first call compiles them."""
    global _c
    if _c is None and (loaded := library()) is not None:
        _c = _bind(loaded)
    return _c is not None and not _off


def _bind(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int if name in _CHECKED else None
    return loaded


@contextmanager
def switched_off() -> Generator[None]:
    """Inside, torch's operators are used."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels can work on these: float32, contiguous, on the CPU, no gradient wanted."""
    for x in tensors:
        if x is None:
            continue
        if x.device.type != "cpu" or x.dtype is not torch.float32 or not x.is_contiguous():
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
    return available()


def takes_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    """Whether `linear` takes this layer."""
    return x.dim() == 2 and 0 < x.shape[0] <= MAX_TOKENS and takes(x, weight_NK, bias_N)


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
    _c.dl_linear(
        x_TK.data_ptr(),
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        out_TN.data_ptr(),
        num_tokens,
        num_columns,
        size,
        get_num_threads() if num_columns * size >= PARALLEL_WORK else 1,
    )


def _rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    out_TH = empty(x_TH.shape)
    _c.dl_rms_norm(x_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(), *x_TH.shape, eps)
    return out_TH


def _add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape = x_TH.shape
    normed_TH, sum_TH = empty(shape), empty(shape)
    _c.dl_add_rms_norm(
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
    _c.dl_norm_concat(
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
    _c.dl_silu_mul(gate_up_T2I.data_ptr(), out_TI.data_ptr(), num_tokens, double // 2)
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
    failed = _c.dl_rope_write(
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


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _row_tokens(
    rows_R: Tensor,
    tokens_ML: Tensor,
    num_tokens_M: Tensor,
    drafts_MK: Tensor,
    page_table_MN: Tensor,
    num_drafted_M: Tensor | None,
    emitted_R: Tensor | None,
    ids_T: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_lens_R: Tensor,
    query_starts_R1: Tensor,
    last_R: Tensor,
    num_per_row: int,
    page_size: int,
    offset: int,
    ahead: int,
    num_ids: int,
) -> None:
    failed = _c.dl_row_tokens(
        rows_R.data_ptr(),
        tokens_ML.data_ptr(),
        num_tokens_M.data_ptr(),
        drafts_MK.data_ptr(),
        page_table_MN.data_ptr(),
        _pointer(num_drafted_M),
        _pointer(emitted_R),
        ids_T.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        kv_lens_R.data_ptr(),
        query_starts_R1.data_ptr(),
        last_R.data_ptr(),
        rows_R.shape[0],
        *tokens_ML.shape,
        drafts_MK.shape[1],
        page_table_MN.shape[1],
        num_per_row,
        page_size,
        offset,
        ahead,
        num_ids,
    )
    if failed:
        raise IndexError("a row, or a position of its block, does not exist")


def _write_draft(
    rows_R: Tensor,
    tokens_R: Tensor,
    drafts_MK: Tensor,
    num_drafted_M: Tensor,
    draft_limit_M: Tensor,
    num_tokens_M: Tensor,
    target_ids_W: Tensor | None,
    first: bool,
    longest: int,
) -> None:
    failed = _c.dl_write_draft(
        rows_R.data_ptr(),
        tokens_R.data_ptr(),
        drafts_MK.data_ptr(),
        num_drafted_M.data_ptr(),
        draft_limit_M.data_ptr(),
        num_tokens_M.data_ptr(),
        _pointer(target_ids_W),
        rows_R.shape[0],
        *drafts_MK.shape,
        0 if target_ids_W is None else target_ids_W.shape[0],
        first,
        longest,
    )
    if failed:
        raise IndexError("a row, a token of the draft vocabulary, or the place for one more draft does not exist")


def _accept_block(
    rows_R: Tensor,
    targets_X: Tensor,
    drafts_MK: Tensor,
    tokens_ML: Tensor,
    num_tokens_M: Tensor,
    max_tokens_M: Tensor,
    num_emitted_R: Tensor,
    outcome_RO: Tensor,
    num_drafts: int,
) -> None:
    failed = _c.dl_accept_block(
        rows_R.data_ptr(),
        targets_X.data_ptr(),
        drafts_MK.data_ptr(),
        tokens_ML.data_ptr(),
        num_tokens_M.data_ptr(),
        max_tokens_M.data_ptr(),
        num_emitted_R.data_ptr(),
        outcome_RO.data_ptr(),
        rows_R.shape[0],
        num_tokens_M.shape[0],
        drafts_MK.shape[1],
        tokens_ML.shape[1],
        num_drafts,
        outcome_RO.shape[1] - 3,
    )
    if failed:
        raise IndexError("a row, or the place for its tokens, does not exist")


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
row_tokens = define(
    "native_row_tokens(Tensor rows, Tensor tokens, Tensor num_tokens, Tensor drafts, Tensor page_table, "
    "Tensor? num_drafted, Tensor? emitted, Tensor(a!) ids, Tensor(b!) positions, Tensor(c!) slots, "
    "Tensor(d!) kv_lens, Tensor(e!) query_starts, Tensor(f!) last, int num_per_row, int page_size, int offset, "
    "int ahead, int num_ids) -> ()",
    _row_tokens,
    "CPU",
)
write_draft = define(
    "native_write_draft(Tensor rows, Tensor tokens, Tensor(a!) drafts, Tensor(b!) num_drafted, Tensor draft_limit, "
    "Tensor num_tokens, Tensor? target_ids, bool first, int longest) -> ()",
    _write_draft,
    "CPU",
)
accept_block = define(
    "native_accept_block(Tensor rows, Tensor targets, Tensor drafts, Tensor(a!) tokens, Tensor(b!) num_tokens, "
    "Tensor max_tokens, Tensor(c!) num_emitted, Tensor(d!) outcome, int num_drafts) -> ()",
    _accept_block,
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
    failed = _c.dl_paged_attention(
        q_TQD.data_ptr(),
        rows_R.data_ptr(),
        None if query_starts_R1 is None else query_starts_R1.data_ptr(),
        kv_lens_R.data_ptr(),
        page_table_MN.data_ptr(),
        out_TQD.data_ptr(),
        kv_2PSGD.data_ptr(),
        _pointer(sinks_Q),
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
