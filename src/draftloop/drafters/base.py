"""What a drafter is: one self-registering file that declares its phases and when they run.

Everything that passes between phases is in the row state or in buffers that phases share by name,
so nobody outside of this package needs to know which drafter it has.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.config.speculative import SpeculativeConfig
from draftloop.distributed.group import ALONE, Group
from draftloop.errors import ConfigError, check_known
from draftloop.graphs.phase import Phase
from draftloop.kvcache.pool import CacheSpec
from draftloop.kvcache.rows import RowState
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import Decoder, LayerCaches
from draftloop.models.resolve import LoadFormat
from draftloop.models.shards import why_not_divided
from draftloop.request import SpeculativeParams

logger = logging.getLogger(__name__)

ENTRY_POINTS = "draftloop.drafters"
"""Group of the entry points by which other packages bring drafters along."""

DRAFTERS: dict[str, type[Drafter]] = {}
"""Every registered drafter by its `method` name."""

ACCEPTANCE_KEYS = frozenset(
    {
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
        "typical_acceptance_threshold",
        "typical_acceptance_alpha",
    }
)
"""Keys of the speculative configuration that say how drafts are accepted."""

SCHEDULE_KEYS = frozenset({"adaptive", "adaptive_num_tokens", "num_speculative_tokens_per_batch_size"})
"""Keys of the speculative configuration by which the number of drafts follows the load."""

COMMON_KEYS = (
    frozenset({"method", "num_speculative_tokens", "parallel_drafting", "draft_tensor_parallel_size"})
    | ACCEPTANCE_KEYS
    | SCHEDULE_KEYS
)
"""Keys of the speculative configuration that every drafter takes."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a drafter may know of the model it drafts for, before any weights are loaded."""

    name: str
    folder: Path | None
    """Where the target's files are; None for shapes without weights."""
    config: ModelConfig
    vocab_size: int
    """Ids from here on are never drafted."""
    max_model_len: int
    max_positions: int
    """Positions that a verify block can reach: `max_model_len` and the draft overhang."""
    page_size: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Of its caches; those of the drafter are of its own dtype."""
    load_format: LoadFormat
    seed: int
    group: Group = ALONE
    """Ranks among which the target is divided."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Which phases run when; names from `phases()`, in order."""

    prompt: tuple[str, ...] = ()
    """Ragged, over each chunk of a prompt, after the target has seen it."""
    first: tuple[str, ...] = ()
    """Over the rows whose prompt has just ended; leaves the first drafts in the row state."""
    next: tuple[str, ...] = ()
    """Over the decoding rows after each acceptance; leaves the next drafts in the row state."""
    host: tuple[str, ...] = ()
    """Over the decoding rows before each verify, once `draft_on_host` has been asked (`on_host` drafters)."""
    plain: tuple[str, ...] | None = None
    """Instead of `next` after a step in which no row had drafts to verify, so that the target ran one
    token per row; None: the same as `next`."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the target computed for tokens of one request that are there to stay: of its prompt, or accepted."""

    number: int
    """Counts the engine's requests; ids may be used again."""
    request_id: str
    first_position: int
    token_ids: list[int]
    hidden: Tensor
    """[tokens, layers * hidden size] of the `aux_layers`, on the host."""


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """What a drafter that works on the host sees of a row."""

    number: int
    """Counts the engine's requests; ids may be used again."""
    request_id: str
    token_ids: list[int]
    """Prompt and accepted tokens, the bonus token included."""
    num_prompt: int
    max_drafts: int
    """Drafts that fit before the row's length limit, at most K."""


class Drafter(ABC):
    """Drafts tokens for the target to verify.

    A subclass with a `name` registers itself by being defined. The engine builds it, loads it,
    gives it its caches, captures its phases and runs them as `rounds` says; see drafters/ngram.py
    for the smallest complete one.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    """Keys of the speculative configuration that this drafter reads, besides `COMMON_KEYS`."""
    samples: ClassVar[bool] = False
    """It can draw drafts from its own distribution and keep that for the acceptance test."""
    on_host: ClassVar[bool] = False
    """It needs the accepted tokens on the host, so steps cannot overlap."""
    drafts: ClassVar[bool] = True
    """False: it only observes. Steps are plain decoding, and K is 0 whatever the configuration says."""
    observes: ClassVar[bool] = False
    """`observe` is called with the target's states of each step's tokens."""
    in_parallel: ClassVar[str | None] = None
    """The method that `parallel_drafting` makes of this one."""
    reuses_prefixes: ClassVar[bool] = False
    """It drafts as well where only the last tokens of a prompt run, since those before them are in its caches from
    an earlier request. Caches are pages, and `prompt` rounds leave nothing elsewhere that depends on more than
    their last token. Where it is False every prompt runs whole."""
    follows_load: ClassVar[bool] = False
    """It goes on after steps that verified fewer than K drafts, or none: it declares phases for all of `counts`, and
    `rounds_after` and `first_rounds` say which run."""
    forced_acceptance: ClassVar[bool] = False
    """Its drafts mean nothing; acceptance is by coin (benchmarks)."""

    drafts_alone: bool = True
    """What steps verify of a row is what this drafter drafted for it; `cascade` denies it of those that it asks."""
    folder: Path | None = None
    """Where its checkpoint is; None for drafters without one, and for shapes."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            return  # a shared base, not a drafter
        if cls.name in DRAFTERS:
            raise TypeError(f"drafter {cls.name!r} is already registered by {DRAFTERS[cls.name].__module__}")
        DRAFTERS[cls.name] = cls

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        """Settle everything that needs no weights. Raises ConfigError for what cannot work."""
        self.spec, self.target = spec, target
        self.num_drafts = self.count_drafts(spec)
        self.counts = spec.draft_counts(self.num_drafts)

    @classmethod
    def count_drafts(cls, spec: SpeculativeConfig) -> int:
        """K: most drafts of a step."""
        return (spec.num_speculative_tokens or 0) if cls.drafts else 0

    @property
    def tree(self) -> DraftTree:
        """Which of its K drafts stands behind which: each behind the one before, unless another shape is asked for."""
        return self.spec.tree or DraftTree.chain(self.num_drafts)

    @classmethod
    def needs_host(cls, spec: SpeculativeConfig) -> bool:
        """It, or one of those that it asks, is `on_host`."""
        return cls.on_host

    @classmethod
    def can_reuse_prefixes(cls, spec: SpeculativeConfig) -> bool:
        """It, and all of those that it asks, `reuses_prefixes`."""
        return cls.reuses_prefixes

    @classmethod
    def reads_target(cls, spec: SpeculativeConfig) -> bool:
        """It, or one of those that it asks, reads the target's caches: by the row's one table, which then leads to all
        of them, whatever windows layers have."""
        return cls.read_target is not Drafter.read_target

    @classmethod
    def remembers(cls, spec: SpeculativeConfig) -> bool:
        """Drafts depend on earlier requests too, so that a seed repeats a request's distribution, not its tokens."""
        return False

    @classmethod
    def overhang(cls, spec: SpeculativeConfig) -> int:
        """Positions past a row's last token that one of its passes may reach; a verify reaches K + 1."""
        return cls.count_drafts(spec) + 1

    @property
    def drafters(self) -> tuple[str, ...]:
        """What drafts are counted under; `RowState.drafted_by_M` is an index into them."""
        return (self.name,)

    @property
    def sampled(self) -> bool:
        """True if drafts are drawn, so that acceptance uses their probabilities."""
        return self.samples and self.spec.draft_sample_method != "greedy"

    def length_limit(self, own: int) -> int | None:
        """Tokens from which on a row drafts nothing, and is verified on: beyond what it was trained for a drafter
        drafts badly. None: no row gets so long. `own`: what the model says, where the settings do not."""
        limit = self.spec.max_model_len or own
        return limit if limit < self.target.max_model_len else None

    @property
    def num_rerun(self) -> int:
        """Last tokens of a prefix found in the caches that run again (drafters that `reuses_prefixes`): what is kept of
        them depends on tokens after them, which were another request's. At least 1."""
        return 1

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs the drafter reads, from the buffer `aux_hidden`, side by side in this order.

        `models.decoder.FINAL_HIDDEN` among them means the states after the target's final norm.
        """
        return ()

    @property
    def aux_layer_offset(self) -> int | None:
        """What is added to the layer ids in the drafter's config to make `aux_layers`; None: nothing to choose."""
        return None

    def describe(self) -> str:
        """One line for the start-up log."""
        return f"{self.name}, K={self.num_drafts}, " + ("sampled drafts" if self.sampled else "greedy drafts")

    def borrow(self, target: Decoder) -> None:
        """The target has its weights: a drafter may keep tables that it shares. Called before `load`."""

    def load(self, *, progress: bool) -> None:
        """Load weights, if there are any."""

    def cache_specs(self) -> list[CacheSpec]:
        """Paged caches that the drafter needs beside the target's."""
        return []

    def read_target(self, caches: LayerCaches) -> None:
        """The target's caches, one for each of its layers: a drafter may read them. Called before `phases`."""

    def row_memory(self) -> Mapping[str, Tensor]:
        """What the drafter keeps per engine row beside the row state, by name; made by `phases`."""
        return {}

    def admit(self, row: int, params: SpeculativeParams | None) -> None:
        """A row begins a request: write to the device what the drafter keeps of its wishes, or that it has none."""

    @abstractmethod
    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        """Declare what is run; `caches` are those asked for by `cache_specs`, in order."""

    @abstractmethod
    def rounds(self, *, sampled: bool) -> Rounds:
        """When the phases run. `sampled`: some row of the batch has a temperature above 0."""

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        """What runs instead of `Rounds.next` after a step that verified so many drafts of each row, one of `counts`.

        It keeps caches fed, and leaves at least so many drafts; after 0 it drafts nothing. By default it is the same
        as ever, which suits drafters that keep nothing.
        """
        return self.rounds(sampled=sampled).next if num_drafts else ()

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        """What runs instead of `Rounds.first` where steps verify so many drafts of each row, one of `counts`.

        As `rounds_after`: caches are fed, and at least so many drafts are left. By default it is the same as ever.
        """
        return self.rounds(sampled=sampled).first

    def draft_on_host(self, rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        """Drafts of all decoding rows, at most `max_drafts` each (`on_host` drafters).

        The phases of `Rounds.host` find them in the slot `host_drafts`; see drafters/host.py.
        """
        raise NotImplementedError

    def observe(self, rows: Sequence[Observed]) -> None:
        """Take the states of a committed step (drafters that `observes`); each token comes once, in order."""

    def close(self) -> None:
        """The engine is closed: finish what is written."""


def describe_limit(longest: int | None) -> list[str]:
    """A part of `Drafter.describe`, if there is a limit."""
    return [] if longest is None else [f"rows stop drafting at {longest} tokens"]


def draft_group(spec: SpeculativeConfig, target: Target, model: ModelConfig) -> Group:
    """The ranks among which a drafter's layers are divided: the target's, or each has all of them.

    Raises ConfigError where so many cannot divide them, or that is not what was asked for.
    """
    asked, size = spec.draft_tensor_parallel_size, target.group.size
    if size == 1 or asked == 1:
        return ALONE
    why = why_not_divided(model, size)
    if not why:
        return target.group
    if asked is not None:
        raise ConfigError(f"draft_tensor_parallel_size is {asked}, but {why} of {str(spec.model)!r}; say 1")
    logger.info("every rank has all of %s: %d ranks cannot divide it, since %s", spec.model, size, why)
    return ALONE


def sampled_name(phase: str, sampled: bool) -> str:
    """A draft phase's name, or that of its variant for batches with a temperature above 0."""
    return f"{phase}.sampled" if sampled else phase


def count_name(phase: str, num_drafts: int, most: int) -> str:
    """A phase's name where it belongs to steps of `num_drafts` drafts, of at most `most`."""
    return phase if num_drafts == most else f"{phase}.k{num_drafts}"


def is_of_fewer(phase: str) -> bool:
    """It is one of several, and not that of the most drafts; see `count_name`."""
    return re.search(r"\.k\d+(\.|$)", phase) is not None


@functools.cache
def load_drafters() -> None:
    """Import every module of this package, and what others bring along, so that all drafters are registered.

    Raises ConfigError for an entry point of the group `draftloop.drafters` that cannot be loaded.
    """
    package = import_module("draftloop.drafters")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        who = f"entry point {entry.name!r} of package {entry.dist.name if entry.dist else '?'!r} ({entry.value})"
        try:
            found = entry.load()
        except Exception as error:  # it may be anything
            raise ConfigError(f"{who} cannot be loaded: {error}; repair or uninstall that package") from error
        if DRAFTERS.get(entry.name) is not found:
            raise ConfigError(f"{who} brings no drafter of that name; the entry point must be named as its class is")


def drafter_class(spec: SpeculativeConfig) -> type[Drafter]:
    """The drafter that a configuration names. Nothing heavy is loaded.

    Raises ConfigError for an unknown method (naming the nearest), a key that the method does not
    use, or a missing number of drafts.
    """
    load_drafters()
    method = spec.method or "draft_model"
    check_known("speculative method", [method], DRAFTERS)
    cls = DRAFTERS[method]
    if spec.parallel_drafting:
        if cls.in_parallel is None:
            can = ", ".join(sorted(name for name, other in DRAFTERS.items() if other.in_parallel))
            raise ConfigError(f"speculative method {method!r} cannot do parallel_drafting; these can: {can}")
        method, cls = cls.in_parallel, DRAFTERS[cls.in_parallel]
    known = (COMMON_KEYS if cls.drafts else {"method", "num_speculative_tokens"}) | cls.options
    for key in (k for k, value in vars(spec).items() if value is not None and k not in known):
        takes = ", ".join(sorted(known))
        raise ConfigError(f"speculative method {method!r} does not use {key!r}; leave it out. It takes: {takes}")
    if not cls.follows_load and (given := [key for key in sorted(SCHEDULE_KEYS) if getattr(spec, key)]):
        raise ConfigError(
            f"speculative method {method!r} drafts the same number of tokens in every step, but {given[0]} is set; "
            "leave it out"
        )
    if not cls.drafts and spec.num_speculative_tokens not in (None, 1):
        raise ConfigError(
            f"speculative method {method!r} drafts nothing, but num_speculative_tokens is "
            f"{spec.num_speculative_tokens}; leave it out (1, which other engines ask for, is taken too)"
        )
    if cls.drafts and spec.num_speculative_tokens is None:
        raise ConfigError(f"speculative method {method!r} needs num_speculative_tokens, 1 to 32 (--spec-tokens)")
    return cls
