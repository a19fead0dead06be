"""What the target computes for packed documents: by the engine's own forward, or read from disk.

Shape suffixes: B rows, L tokens of a row, T = B * L, C hidden size, X numbers of the chosen hidden states,
P pages, S tokens per page, G key/value heads, H query heads, D head size.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch, AttentionShape, GraphSupport
from draftloop.drafters.extract_hidden_states import HiddenStates, read_hidden_states
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import FINAL_HIDDEN, Decoder
from draftloop.models.dense import attention_shape
from draftloop.models.loader import load_config, load_model, resolve_model
from draftloop.train.attention import attend_dense, attend_flex, document_blocks, document_mask
from draftloop.train.packing import PackedRows
from draftloop.train.recording import Documents

logger = logging.getLogger(__name__)

PAGE_SIZE = 16


class PackedAttention(AttentionBackend):
    """Attention within documents. The only keys are those of the pass, in the order of its tokens."""

    name = "packed"

    def __init__(self, shape: AttentionShape, device: torch.device, *, compiled: bool) -> None:
        super().__init__(shape, device)
        self.flex = compiled and device.type == "cuda"
        self.document_BL = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._masks: dict[int | None, Any] = {}

    @classmethod
    def graph_support(cls, device_type: str) -> GraphSupport:
        return GraphSupport(uniform=False, ragged=False, reason="it serves training only")

    def pack(self, document_BL: Tensor) -> None:
        """The documents of the passes that follow."""
        self.document_BL = document_BL
        self._masks.clear()

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
        shape = self.document_BL.shape
        if sliding_window not in self._masks:
            make = document_blocks if self.flex else document_mask
            self._masks[sliding_window] = make(self.document_BL, sliding_window)
        mask, scale = self._masks[sliding_window], self.shape.scale
        q = q_THD.unflatten(0, shape)
        k, v = (x.flatten(0, 1)[: q_THD.shape[0]].unflatten(0, shape) for x in kv_2PSGD)
        attend = functools.partial(attend_flex, compiled=True) if self.flex else attend_dense
        out_BLHD = attend(q, k, v, mask, scale)
        out_THD.copy_(out_BLHD.flatten(0, 1))


class States(ABC):
    """Where a batch's hidden states come from."""

    @abstractmethod
    def __call__(self, rows: PackedRows, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Aux states [B, L, X] and the states after the final norm [B, L, C] for rows on the device."""


class TargetStates(States):
    """The target runs over each batch. Nothing is kept, so there is no limit to how much is trained on."""

    def __init__(
        self, target: str, *, device: torch.device, dtype: torch.dtype, row_tokens: int, compiled: bool
    ) -> None:
        """Load the target. Raises ConfigError where it cannot be found or its length is below `row_tokens`."""
        source = resolve_model(target)
        self.config: ModelConfig = load_config(source)
        if row_tokens > self.config.max_position_embeddings:
            raise ConfigError(
                f"--row-tokens is {row_tokens}, but {target!r} takes {self.config.max_position_embeddings} tokens; "
                "lower it"
            )
        shape = attention_shape(self.config, page_size=PAGE_SIZE, dtype=dtype)
        self.attention = PackedAttention(shape, device, compiled=compiled)
        self.model: Decoder = load_model(
            source,
            self.config,
            self.attention,
            device=device,
            dtype=dtype,
            max_positions=row_tokens,
            may_narrow=False,  # training multiplies by the tables with torch
        )
        self.device, self.dtype = device, dtype

    @torch.no_grad()
    def __call__(self, rows: PackedRows, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        shape, device = rows.token_ids_BL.shape, rows.token_ids_BL.device
        num_tokens = rows.token_ids_BL.numel()
        config = self.config
        self.attention.pack(rows.document_BL)
        # one layer's keys and values at a time: they are read in the pass that writes them, and never again
        num_pages = -(-num_tokens // PAGE_SIZE)
        kv_2PSGD = torch.empty(
            (2, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim), dtype=self.dtype, device=device
        )
        none = torch.empty(0, dtype=torch.int32, device=device)
        batch = AttentionBatch(
            rows_R=none,
            query_starts_R1=none,
            kv_lens_R=none,
            positions_T=rows.position_BL.flatten(),
            slots_T=torch.arange(num_tokens, device=device),
            page_table_MN=none,
            max_query_len=shape[1],
            uniform=False,
        )
        hidden_TC, aux = self.model(
            rows.token_ids_BL.flatten(),
            kv_2PSGD.expand(config.num_layers, *kv_2PSGD.shape),
            batch,
            aux_layers=aux_layers,
        )
        aux_TX = torch.cat(aux, -1) if aux else hidden_TC[:, :0]
        return aux_TX.unflatten(0, shape), hidden_TC.unflatten(0, shape)


class StoredStates(States):
    """The shards of `extract_hidden_states`, in memory as a whole."""

    def __init__(self, folder: str, *, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Read a folder. Raises ConfigError where it holds no states, or those of a target of another width."""
        self.found: list[HiddenStates] = list(read_hidden_states(folder))
        self.device, self.dtype, self.width = device, dtype, config.hidden_size
        self.layer_ids = self.found[0].layer_ids
        for states in self.found:
            if states.layer_ids != self.layer_ids:
                raise ConfigError(
                    f"{folder!r} holds states of layers {self.layer_ids} and {states.layer_ids}; keep each in a "
                    "folder of its own"
                )
            if states.hidden.shape[1] != self.width * len(self.layer_ids):
                raise ConfigError(
                    f"the states in {folder!r} are {states.hidden.shape[1] // len(self.layer_ids)} wide, but the "
                    f"target is {self.width} wide; they are of another target: extract those of this one"
                )
        self.folder = folder

    def documents(self, row_tokens: int, vocab_size: int) -> Documents:
        """Their tokens. The shards do not say what the target generated: all but the first token is learnt."""
        from draftloop.train.recording import Document

        dropped = sum(len(states.token_ids) > row_tokens for states in self.found)
        if dropped:
            logger.warning("%d requests of more than --row-tokens %d tokens are left out", dropped, row_tokens)
        self.found = [states for states in self.found if len(states.token_ids) <= row_tokens]
        if not self.found:
            raise ConfigError(f"every request in {self.folder!r} has more than {row_tokens} tokens; raise --row-tokens")
        return Documents.of(
            [Document(token_ids=s.token_ids.tolist(), num_given=1, temperature=1.0) for s in self.found], vocab_size
        )

    def __call__(self, rows: PackedRows, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        wanted = (*aux_layers, FINAL_HIDDEN)
        if missing := [layer for layer in wanted if layer not in self.layer_ids]:
            raise ConfigError(
                f"the states in {self.folder!r} are of layers {', '.join(map(str, self.layer_ids))}; training needs "
                f"{', '.join(map(str, wanted))} ({FINAL_HIDDEN}: after the final norm): {missing[0]} is missing"
            )
        places = [self.layer_ids.index(layer) for layer in wanted]
        states = torch.zeros((*rows.token_ids_BL.shape, len(wanted) * self.width), dtype=self.dtype)
        for row, documents in enumerate(rows.documents):
            at = 0
            for document in documents:
                hidden = self.found[document].hidden
                layers = hidden.unflatten(1, (len(self.layer_ids), self.width))[:, places]
                states[row, at : at + len(hidden)] = layers.flatten(1).to(self.dtype)
                at += len(hidden)
        states = states.to(self.device)
        return states[..., : -self.width], states[..., -self.width :]
