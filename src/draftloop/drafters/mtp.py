"""Multi-token prediction: a module that was trained with the target, and is in its checkpoint, drafts.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; there one module drafts one token.
A single module makes all drafts, each step from the hidden state of the one before: what a round runs is then in
drafters/pairs.py. Of several each makes its own draft, and for more drafts than modules they take turns: see
drafters/mtp_chain.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from draftloop.drafters.base import Rounds
from draftloop.drafters.files import read_shapes
from draftloop.drafters.mtp_chain import ModuleChain
from draftloop.drafters.mtp_config import MtpConfig, of_target, parse
from draftloop.drafters.mtp_model import MtpModule
from draftloop.drafters.pairs import PairDrafter
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Phase
from draftloop.kvcache.pool import CacheSpec
from draftloop.kvcache.rows import RowState
from draftloop.models.config_file import read_config
from draftloop.models.decoder import FINAL_HIDDEN
from draftloop.models.dense import cache_spec


class MtpDrafter(PairDrafter[MtpConfig, MtpModule]):
    """The weights come from the target's folder, or are random where the target's are."""

    name = "mtp"
    options = frozenset({"model", "draft_sample_method", "attention_backend", "max_model_len"})
    aux_layers = (FINAL_HIDDEN,)

    module_names: list[dict[str, str]]
    """`names` of each module."""
    modules: list[MtpModule]
    chain: ModuleChain | None = None
    """What is run where there are several."""

    @property
    def num_modules(self) -> int:
        """Those that draft: with fewer drafts than modules the last ones have nothing to do."""
        return min(self.config.num_modules, self.num_drafts)

    @property
    def num_rerun(self) -> int:
        return self.num_modules  # the last reads so many tokens ahead

    def find(self) -> MtpConfig:
        spec, target = self.spec, self.target
        if spec.model not in (None, target.name):
            raise ConfigError(
                f"speculative method 'mtp' drafts with what is in the checkpoint of {target.name!r}, but 'model' is "
                f"{spec.model!r}; leave it out, or use the method that it was made for ('gemma4_mtp' for an assistant "
                "of Gemma 4)"
            )
        if target.folder is None or target.load_format == "dummy":
            self.module_names = [{}]
            return of_target(target.config)
        self.folder = target.folder
        config = read_config(target.folder)
        found, self.module_names = parse(config, read_shapes(target.folder), target=target.config, name=target.name)
        return found

    def details(self) -> list[str]:
        module = f"{self.config.style.name} style module in the target's checkpoint"
        if self.config.num_modules > 1:
            module += f" ({self.num_modules} of {self.config.num_modules} draft)"
        return [module]

    def load(self, *, progress: bool) -> None:
        several = self.num_modules > 1
        self.modules = self.make_all(partial(MtpModule, reaches_start=several), self.module_names[: self.num_modules])
        for module in self.modules:
            module.settle()
        self.head = self.modules[0]

    def cache_specs(self) -> list[CacheSpec]:
        return [cache_spec(replace(self.layers, num_layers=self.num_modules), self.target.dtype)]

    def row_memory(self) -> Mapping[str, Tensor]:
        return self.chain.row_memory() if self.chain else super().row_memory()

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        if self.num_modules == 1:
            return super().phases(state, caches)
        (kv,) = caches
        self.chain = ModuleChain(
            self.modules,
            kv,
            state,
            counts=self.counts,
            page_size=self.target.page_size,
            vocab_size=self.target.vocab_size,
            longest=self.longest,
            sampled=self.sampled,
            support=self.backend_class.graph_support(self.target.device.type),
        )
        return self.chain.phases()

    def rounds(self, *, sampled: bool) -> Rounds:
        return self.chain.rounds(sampled=sampled) if self.chain else super().rounds(sampled=sampled)

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if self.chain:
            return self.chain.rounds_after(num_drafts, sampled=sampled)
        return super().rounds_after(num_drafts, sampled=sampled)

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if self.chain:
            return self.chain.first_rounds(num_drafts, sampled=sampled)
        return super().first_rounds(num_drafts, sampled=sampled)
