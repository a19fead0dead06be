"""What all modules have in common that draft from several of the target's hidden states.

Shape suffixes: R rows, C width, W draft vocabulary, L positions, D head size.
"""

from __future__ import annotations

from typing import Generic, NotRequired, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend
from draftloop.distributed.group import ALONE, Group
from draftloop.drafters.aux_config import AuxConfig
from draftloop.kernels.linear import linear
from draftloop.models.layers import parameter
from draftloop.models.output_head import Vocabulary
from draftloop.models.rope import cos_sin_table
from draftloop.models.shards import Plain, shard

ConfigT = TypeVar("ConfigT", bound=AuxConfig)


class Place(TypedDict):
    """Where a module is, and what it borrows where its checkpoint has none: the target's tables."""

    device: torch.device
    dtype: torch.dtype
    max_positions: int
    embed_tokens: Tensor
    lm_head: Tensor
    group: NotRequired[Group]
    """Ranks among which layers and output head are divided."""


class AuxModel(torch.nn.Module, Generic[ConfigT]):
    """Embeddings, an output head, what its rows mean, and rotary angles; layers are for subclasses."""

    def __init__(self, config: ConfigT, backend: AttentionBackend, **place: Unpack[Place]) -> None:
        """`backend` attends for one rank's heads."""
        super().__init__()
        self.config, self.backend, self.group = config, backend, place.get("group", ALONE)
        self.device, self.dtype = place["device"], place["dtype"]
        model, width = config.model, config.model.hidden_size
        # plain attributes where borrowed: what is not ours is neither counted nor filled
        embed_tokens, lm_head = place["embed_tokens"].detach(), place["lm_head"].detach()
        self.embed_tokens = self.make(model.vocab_size, width) if config.own_embeddings else embed_tokens
        self.vocabulary = Vocabulary(config.draft_vocab_size, self.group)
        self.lm_head = self.make(self.vocabulary.width, width) if config.own_head else lm_head
        self.target_ids_W: Tensor | None = None
        if config.has_map:
            self.target_ids_W = torch.arange(config.draft_vocab_size, device=self.device)
        self.cos_sin_LD = cos_sin_table(
            model.rope, head_dim=model.head_dim, max_positions=place["max_positions"], device=self.device
        )

    def make(self, *shape: int) -> torch.nn.Parameter:
        return parameter(*shape, device=self.device, dtype=self.dtype)

    def settle_head(self) -> None:
        """Once the weights are there: of an output head that is the target's, the rows of the draft vocabulary."""
        if not self.config.own_head:
            head_WC = self.lm_head if self.target_ids_W is None else self.lm_head[self.target_ids_W]
            self.vocabulary = Vocabulary(head_WC.shape[0], self.group)
            self.lm_head = self.vocabulary.own_rows(head_WC)

    def logits(self, head_input_RC: Tensor) -> Tensor:
        """[R, C] -> this rank's of [R, W]; entry i stands for the target's id `target_ids_W[i]`, or i without a map."""
        return linear(head_input_RC, self.lm_head)

    def table_destinations(self) -> dict[str, Plain]:
        """Plain tensor name -> the weight that it fills, of the tables that are our own."""
        found: dict[str, Plain] = {}
        if self.config.own_embeddings:
            found["embed_tokens.weight"] = self.embed_tokens
        if self.config.own_head:
            found["lm_head.weight"] = shard(self.lm_head, self.vocabulary.slices)
        return found
