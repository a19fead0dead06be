"""What drafters share that are a few decoder layers with the target's tables around them: where the layers come from,
how they attend, and which tables they borrow."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend
from draftloop.attention.registry import attention_backend
from draftloop.config.speculative import SpeculativeConfig
from draftloop.distributed.group import Group
from draftloop.drafters.base import Drafter, Target, describe_limit, draft_group
from draftloop.drafters.fill import Head, fill, fill_dummy
from draftloop.kvcache.pool import CacheSpec
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import Decoder
from draftloop.models.dense import attention_shape, cache_spec
from draftloop.models.shards import share

logger = logging.getLogger(__name__)


class HeadConfig(Protocol):
    """The shape of a head."""

    @property
    def model(self) -> ModelConfig:
        """Its decoder layers."""
        ...

    @property
    def own_embeddings(self) -> bool:
        """False: the target's."""
        ...

    @property
    def own_head(self) -> bool:
        """False: the target's."""
        ...


ConfigT = TypeVar("ConfigT", bound=HeadConfig)
ConfigU = TypeVar("ConfigU", bound=HeadConfig, contravariant=True)
HeadU = TypeVar("HeadU", bound=Head, covariant=True)


class MakeHead(Protocol[ConfigU, HeadU]):
    """The constructor of a module without its weights."""

    def __call__(
        self,
        config: ConfigU,
        backend: AttentionBackend,
        /,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
        embed_tokens: Tensor,
        lm_head: Tensor,
        group: Group,
    ) -> HeadU: ...


class HeadDrafter(Drafter, Generic[ConfigT]):
    """Everything but which layers, and what they run when."""

    reuses_prefixes = True
    follows_load = True

    config: ConfigT
    names: dict[str, str]
    """Plain tensor name -> name in the files of `folder`."""

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        self.names = {}
        self.config = self.find()
        # the layers' own weights and cache: nothing of how the target is quantised or cached applies to them
        self.group = draft_group(spec, target, self.config.model)
        self.layers = share(self.config.model, self.group.size)
        """Their sizes on this rank."""
        self.shape = attention_shape(self.layers, page_size=target.page_size, dtype=target.dtype)
        self.backend_class = attention_backend(spec.attention_backend or "auto", target.device.type)
        self.backend_class.check_tree(self.tree, self.config.model.sliding_window)
        self.backend_class.check(self.shape, target.device.type)

    @abstractmethod
    def find(self) -> ConfigT:
        """The shape, having checked that it fits the target; sets `folder` and `names` where there is a checkpoint.

        Reads no weights. Raises ConfigError.
        """

    @property
    def longest(self) -> int | None:
        """See `length_limit`."""
        return self.length_limit(self.config.model.max_position_embeddings)

    def details(self) -> list[str]:
        """Parts of `describe`."""
        return []

    def describe(self) -> str:
        return ", ".join([super().describe(), *self.details(), *describe_limit(self.longest)])

    def borrow(self, target: Decoder) -> None:
        self._tables = {"embed_tokens": target.embed_tokens, "lm_head": target.whole_lm_head()}
        for table, own in (("embed_tokens", self.config.own_embeddings), ("lm_head", self.config.own_head)):
            if not own and self.spec.model:
                logger.info("%s has no %s: it uses the target's", self.spec.model, table)

    def make(self, make_head: MakeHead[ConfigT, HeadU]) -> HeadU:
        """The module with its weights, or random ones; it has the target's tables where it has none."""
        (head,) = self.make_all(make_head, [self.names])
        return head

    def make_all(self, make_head: MakeHead[ConfigT, HeadU], names: Sequence[Mapping[str, str]]) -> list[HeadU]:
        """Several of one shape; `names` of each, as the attribute of that name."""
        tables = self._tables
        del self._tables
        return [self._make(make_head, tables, each) for each in names]

    def _make(
        self, make_head: MakeHead[ConfigT, HeadU], tables: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> HeadU:
        target = self.target
        backend = self.backend_class(self.shape, target.device)
        head = make_head(
            self.config,
            backend,
            device=target.device,
            dtype=target.dtype,
            max_positions=target.max_positions,
            group=self.group,
            **tables,
        )
        if self.folder is None:
            fill_dummy(head, vocab_size=target.vocab_size, seed=target.seed)
        else:
            name = self.spec.model or target.name
            fill(head, self.folder, names, vocab_size=target.vocab_size, name=name)
        return head

    def cache_specs(self) -> list[CacheSpec]:
        return [cache_spec(self.layers, self.target.dtype)]
