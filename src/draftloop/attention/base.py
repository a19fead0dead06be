"""What a model asks of attention, and what a backend must say about itself.

Shape suffixes: T tokens in the pass, R rows in the pass, H query heads, G key/value heads,
D head size, P pages in the pool, S tokens per page, M rows in the engine, N pages per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.errors import ConfigError
from draftloop.graphs.program import in_place


class TreeMask(NamedTuple):
    """Where the last keys of each row are a tree of drafts: those of them that each of its tokens sees."""

    ancestors_Q: Tensor
    """int64 [Q], for each token of a row: bit j is set if it sees key `kv_len - num_keys + j`. It sees itself, and of
    two tokens only the later one may see the other. Q tokens of a row are its last Q keys."""
    num_keys: int
    """How many keys those are, at most 64; all before them are seen by all."""


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """Which tokens attend to what in one forward pass. It is passed to the model, never global.

    All tensors live on the device, so a captured graph reads the lengths of the moment.
    A padding row has `kv_lens_R == 0` and attends to nothing; its tokens write to page 0,
    which belongs to nobody.
    """

    rows_R: Tensor
    """int32 [R]: engine row of each entry, an index into `page_table_MN`."""
    query_starts_R1: Tensor
    """int32 [R+1]: entry r's tokens are `query_starts[r] : query_starts[r+1]`."""
    kv_lens_R: Tensor
    """int32 [R]: keys that entry r's *last* token sees, those of this pass included."""
    positions_T: Tensor
    """int64 [T]: position of each token in its sequence (rotary angle)."""
    slots_T: Tensor
    """int64 [T]: where each token's key and value go, `page * page_size + offset`."""
    page_table_MN: Tensor
    """int32 [M, N]: pages of every engine row, in order; 0 where none is assigned."""
    max_query_len: int
    """Upper bound of tokens per entry, frozen at capture."""
    uniform: bool
    """True if every entry has exactly `max_query_len` tokens (T == R * max_query_len)."""
    causal: bool = True
    """False: every token of an entry sees all `kv_lens_R` keys (block drafters)."""
    invariant: bool = False
    """A token's result may depend on its row alone; see `kernels.batch_invariance`."""
    adapters_T: Tensor | None = None
    """int32 [T]: which adapter (LoRA) changes the layers for each token, from 1; 0: none. None: no token has one."""
    tree: TreeMask | None = None
    """Uniform causal batches alone. None: each token sees all keys up to its own."""
    attend: Callable[[Callable[[], None]], None] = in_place
    """Runs an attention call: in place, or between the captured segments of a piecewise graph."""
    windows: Mapping[int, AttentionBatch] = field(default_factory=dict)
    """The same batch over the pages of layers that have a table of their own, by their sliding window."""

    def of(self, window: int | None) -> AttentionBatch:
        """What layers with this sliding window, or with none, write and attend by."""
        return self if window is None else self.windows.get(window, self)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The part of a model that its attention backend must know."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    soft_cap: float = 0.0
    """c > 0: a score s, scaled, counts as `c * tanh(s / c)`; 0: scores are taken as they are."""
    sinks: bool = False
    """Some layers have a sink per query head."""


@dataclass(frozen=True, kw_only=True)
class GraphSupport:
    """What a backend can be captured for, with the reason where it cannot."""

    uniform: bool
    """Full graphs for batches in which every row has the same number of tokens."""
    ragged: bool
    """Full graphs for batches whose lengths are known only on the device."""
    reason: str = ""


class AttentionBackend(ABC):
    """Paged attention over one model's cache. One file per backend; one instance per model."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """Each pass waits for the device, so that steps cannot overlap."""
    invariant_on: ClassVar[frozenset[str]] = frozenset()
    """Kinds of device on which it can serve batches that are `invariant`."""
    takes_trees: ClassVar[bool] = False
    """It has a kernel for `AttentionBatch.tree`."""
    keeps_to_windows: ClassVar[bool] = False
    """What lies in pages behind a sliding window has no effect, not even NaN: they may be another row's."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device

    @classmethod
    @abstractmethod
    def graph_support(cls, device_type: str) -> GraphSupport:
        """What may be captured on this kind of device ("cpu" or "cuda")."""

    @classmethod
    def check(cls, shape: AttentionShape, device_type: str) -> None:
        """Refuse a shape or device that this backend cannot serve. Raises ConfigError."""

    @classmethod
    def check_tree(cls, tree: DraftTree, sliding_window: int | None) -> None:
        """Raises ConfigError where drafts of this shape cannot be served."""
        if tree.is_chain:
            return
        if not cls.takes_trees:
            raise ConfigError(
                f"attention backend {cls.name} has no mask for trees, but there is a speculative_token_tree; leave it "
                "out, or use attention backend triton or sdpa"
            )
        if sliding_window is not None and sliding_window <= tree.depth:
            raise ConfigError(
                f"speculative_token_tree is {tree.depth} drafts deep, but some layers see {sliding_window} tokens "
                "only; make it less deep than that"
            )

    @abstractmethod
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
        """Attend to the pages and write `out_THD`; keys of this pass are already in the pages.

        `kv_2PSGD` is one layer's cache: keys at index 0, values at 1. With a sliding window w, a
        token at position p sees positions p-w+1 .. p; in a tree, which is less deep than w, of the keys before
        it. Rows with no keys get zeros, whatever the
        pages hold (pages that belong to nobody may hold NaN). The table may lead to pages of others behind the window,
        if the backend `keeps_to_windows`.

        `sinks_H` (float32): for each query head a score, as it is, that joins those of the keys in the softmax and
        stands for no value, so that a head may attend to nothing.
        """


def unsupported(backend: str, what: str, value: object, known: Iterable[object], *, instead: str) -> ConfigError:
    """The error for a shape that a backend has no kernel for."""
    supported = ", ".join(map(str, known))
    return ConfigError(
        f"attention backend {backend} does not support {what} {value}; supported: {supported}; "
        f"use attention backend {instead}"
    )
