"""The steps of a start, in order: weights, memory, phases, their graphs, and the engine around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftloop.config.engine import EngineConfig
from draftloop.config.env import Environment
from draftloop.config.resolve import Resolved, sparse_ladder
from draftloop.distributed.group import Group
from draftloop.distributed.launcher import Ranks
from draftloop.distributed.replica import Replica
from draftloop.drafters.base import Drafter
from draftloop.engine.acceptance import Acceptance
from draftloop.engine.adapters import Adapters
from draftloop.engine.capture import capture
from draftloop.engine.core import EngineCore
from draftloop.engine.device_loop import make_device_loop
from draftloop.engine.draft_schedule import make_drafting
from draftloop.engine.iteration import iteration_phases
from draftloop.engine.loading import Layout, load_target, make_drafter
from draftloop.engine.lockstep import Lockstep
from draftloop.engine.memory import MemoryLedger, fill_pool, make_pool
from draftloop.engine.phases import engine_phases
from draftloop.engine.ranges import name_steps, nvtx_range
from draftloop.engine.start_log import Clock, log_start
from draftloop.engine.target import PagedTarget
from draftloop.engine.worker import Worker
from draftloop.graphs.phase import GraphMode, ModeSetting, Phase
from draftloop.graphs.program import Recorder
from draftloop.graphs.sizes import Ladders
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from draftloop.kvcache.pages import PageAllocator
from draftloop.kvcache.pool import CachePool
from draftloop.kvcache.rows import RowState
from draftloop.models.config import SUPPORTED, ModelConfig
from draftloop.models.decoder import Decoder, cache_specs
from draftloop.models.dense import DenseDecoder
from draftloop.models.loader import (
    ModelSource,
    bytes_per_weight,
    eos_token_ids,
    load_tokenizer,
    resolve_model,
    sampling_defaults,
)
from draftloop.models.streamed import describe
from draftloop.sampling.logits_processors import LogitsProcessor, load_logits_processors
from draftloop.scheduler.drafting import Drafting
from draftloop.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Engine:
    """A ready engine and what it is made of."""

    core: EngineCore
    table: GraphTable
    pool: CachePool
    drafter: Drafter | None
    tokenizer: Any
    model_config: ModelConfig
    resolved: Resolved
    memory: MemoryLedger
    """What each part of the start took."""
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """What the model's generation_config.json says of sampling."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each part of the start took."""

    def close(self) -> None:
        """End what is in flight, finish what a drafter writes, and let other ranks go."""
        try:
            self.core.close()
            if self.drafter is not None:
                self.drafter.close()
        finally:
            self.core.worker.close()


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What every step of a start looks at."""

    config: EngineConfig
    source: ModelSource
    model_config: ModelConfig
    resolved: Resolved
    ranks: Ranks
    layout: Layout
    ledger: MemoryLedger
    clock: Clock
    show: bool
    """Progress, on a terminal."""


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What rows and pages an engine has."""

    state: RowState
    pool: CachePool
    tables: dict[int | None, Tensor]
    """Page tables by sliding window."""
    target_caches: list[tuple[Tensor, Tensor]]
    """Layers that share pages, and their page table."""
    draft_caches: Sequence[Tensor]
    needs: dict[str, int]
    """Of a row, as the pool asks for them."""
    groups: list[PageAllocator] = field(default_factory=list)
    """One for each page table; there when the pool has been filled."""

    def poison(self) -> None:
        for pages in self.groups:
            self.pool.poison(pages.newly_free(), window=pages.window)


def build(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    resolved: Resolved,
    ranks: Ranks,
    replica: Replica,
    clock: Clock,
    *,
    progress: bool,
) -> Engine:
    """An engine of settings that have been checked."""
    layout = Layout.of(config, model_config, resolved, ranks)
    drafter = make_drafter(config, source, model_config, resolved, layout, ranks)
    start = _Start(
        config=config,
        source=source,
        model_config=model_config,
        resolved=resolved,
        ranks=ranks,
        layout=layout,
        ledger=MemoryLedger(ranks.device, config.gpu_memory_utilization),
        clock=clock,
        show=progress and config.use_tqdm_on_load,
    )
    acceptance = Acceptance.of(config.speculation, drafter)
    clock.lap("resolve")

    model, adapters = _load_weights(start, drafter)
    memory = _make_memory(start, drafter)
    processors = load_logits_processors(
        config.logits_processors,
        num_rows=memory.state.padding_row + 1,
        vocab_size=model_config.vocab_size,
        device=ranks.device,
    )
    table, iterations = _declare_phases(start, model, drafter, acceptance, memory, processors)
    loop = make_device_loop(table, iterations, memory.state, resolved.device_loop, group=ranks.group)
    start.ledger.lap("buffers")
    clock.lap("memory")

    _capture_and_fill(start, table, memory)
    drafting = make_drafting(config.speculation, drafter, table, table.ladders.sparse_rows)
    clock.lap("costs")

    tokenizer = _tokenizer(config, source)
    core = EngineCore(
        _make_scheduler(config, resolved, memory.groups, drafting, drafter),
        Worker(
            table,
            memory.state,
            drafter,
            memory.pool,
            overlaps=resolved.pipeline_depth > 1,
            loop=loop,
            processors=processors,
            followers=ranks.followers,
        ),
        vocab_size=model_config.vocab_size,
        eos_ids=frozenset(eos_token_ids(source)),
        seed=replica.seed(config.seed),
        pipeline_depth=resolved.pipeline_depth,
        tokenizer=tokenizer,
        max_logprobs=config.max_logprobs,
        adapters=adapters,
        lockstep=Lockstep(ranks.steps) if ranks.steps else None,
    )
    if Environment.read().nvtx:
        name_steps(core, nvtx_range)
    clock.lap("tokenizer")
    engine = Engine(
        core=core,
        table=table,
        pool=memory.pool,
        drafter=drafter,
        tokenizer=tokenizer,
        model_config=model_config,
        resolved=resolved,
        sampling_defaults=sampling_defaults(source),
        memory=start.ledger,
        seconds=clock.laps,
    )
    log_start(config, engine, clock)
    return engine


def _load_weights(start: _Start, drafter: Drafter | None) -> tuple[Decoder, Adapters | None]:
    """The target with its adapters, and the drafter's."""
    config, model_config, layout, ledger = start.config, start.model_config, start.layout, start.ledger
    # what is quantised, shared between engines, or laid out by transformers' code is not known before it is there
    is_plain = model_config.quantisation is None and config.quantization is None and start.ranks.engines is None
    if is_plain and model_config.architecture in SUPPORTED:
        size = layout.dtype.itemsize
        if start.ranks.group.size == 1:
            size = bytes_per_weight(model_config, config.load_format, device=start.ranks.device, dtype=layout.dtype)
        ledger.check_weights(layout.layers.num_parameters * size, config.model)
    model = load_target(
        config,
        start.source,
        model_config,
        layout,
        start.ranks,
        show=start.show,
        report=lambda loaded: start.clock.notes.update(weights=f" (files: {loaded})"),
    )
    if isinstance(model, DenseDecoder) and model.final_norm.is_cuda:
        passes = describe(model.decoder_layers, model.backend, model.final_norm.device)
        logger.info("passes of few tokens: %s", passes)
    adapters = Adapters(model, config) if config.enable_lora else None
    ledger.lap("weights")
    if drafter:
        drafter.borrow(model)
        drafter.load(progress=start.show)
    ledger.lap("drafter")
    start.clock.lap("weights")
    return model, adapters


def _make_memory(start: _Start, drafter: Drafter | None) -> _Memory:
    """Rows' state, and pages for the layers' keys and values: all of them, or addresses to be filled later."""
    layout, resolved = start.layout, start.resolved
    target_specs = cache_specs(layout.layers, layout.kv_dtype, windows=layout.windows)
    specs = [*target_specs, *(drafter.cache_specs() if drafter else [])]
    state = _make_rows(start, drafter, num_groups=len({spec.window for spec in specs}))
    start.ledger.lap("rows")
    needs = {"pages_per_row": state.page_table_MN.shape[1], "num_drafts": drafter.num_drafts if drafter else 0}
    pool = make_pool(start.config, resolved, specs, start.ledger, **needs, group=start.ranks.group)
    start.ledger.lap("pages")
    tables = dict(zip(pool.windows, state.page_tables_UMN.unbind(0), strict=True))
    caches = pool.caches[: len(target_specs)]
    return _Memory(
        state=state,
        pool=pool,
        tables=tables,
        target_caches=[(cache, tables[spec.window]) for cache, spec in zip(caches, target_specs, strict=True)],
        draft_caches=pool.caches[len(target_specs) :],
        needs=needs,
    )


def _declare_phases(
    start: _Start,
    model: Decoder,
    drafter: Drafter | None,
    acceptance: Acceptance,
    memory: _Memory,
    processors: Sequence[LogitsProcessor],
) -> tuple[GraphTable, list[Phase]]:
    """The table of all phases, none of which is captured yet, and those of them that are whole iterations."""
    layout, resolved = start.layout, start.resolved
    target = PagedTarget(
        model=model,
        caches=model.layer_caches([cache for cache, _ in memory.target_caches], windows=layout.windows),
        state=memory.state,
        page_size=resolved.block_size,
        support=layout.attention.graph_support(start.ranks.device.type),
        aux_layers=drafter.aux_layers if drafter else (),
        window_tables={window: table for window, table in memory.tables.items() if window is not None},
    )
    phases = engine_phases(
        start.config,
        target,
        drafter,
        acceptance,
        target_caches=memory.target_caches,
        draft_caches=memory.draft_caches,
        processors=processors,
    )
    iterations = iteration_phases(phases, drafter) if resolved.iteration_graph else []
    phases = [*phases, *iterations]
    return _make_table(start.config, resolved, phases, start.ranks, poison_more=memory.poison), iterations


def _capture_and_fill(start: _Start, table: GraphTable, memory: _Memory) -> None:
    """Graphs, then pages in what memory they have left, where addresses alone were reserved."""
    pool, ledger = memory.pool, start.ledger
    capture(table, show=start.show)
    if pool.is_reserved:
        table.run_largest()
    ledger.lap("graphs and workspace")
    if pool.is_reserved:
        fill_pool(pool, ledger, **memory.needs, group=start.ranks.group)
        ledger.lap("pages")
    memory.groups.extend(
        PageAllocator(pool.num_pages_of(window), start.resolved.block_size, window) for window in pool.windows
    )
    start.clock.lap("capture")


def _make_rows(start: _Start, drafter: Drafter | None, *, num_groups: int) -> RowState:
    resolved, vocab_size = start.resolved, start.model_config.vocab_size
    return RowState.create(
        num_rows=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        num_drafts=drafter.num_drafts if drafter else 0,
        overhang=start.layout.overhang,
        num_groups=num_groups,
        page_size=resolved.block_size,
        draft_vocab=vocab_size if drafter and drafter.sampled else 0,
        device=start.ranks.device,
        vocab_size=vocab_size,
        has_adapters=start.config.enable_lora,
    )


def _make_table(
    config: EngineConfig, resolved: Resolved, phases: list[Phase], ranks: Ranks, *, poison_more: Callable[[], None]
) -> GraphTable:
    in_step = ranks.engines or ranks.group
    buckets = resolved.row_buckets
    return GraphTable(
        phases,
        Ladders(
            rows=buckets,
            sparse_rows=buckets if config.cudagraph_capture_sizes else sparse_ladder(buckets),
            tokens=resolved.token_buckets,
            prefill_rows=resolved.max_prefill_rows,
        ),
        ModeSetting(resolved.graph_mode),
        _recorder(ranks.device, in_step),
        ranks.device,
        largest_rows=resolved.max_num_seqs,
        largest_tokens=resolved.max_num_batched_tokens,
        require_graphs=resolved.require_graphs,
        group=in_step,
        poison_more=poison_more,
    )


def _make_scheduler(
    config: EngineConfig,
    resolved: Resolved,
    groups: list[PageAllocator],
    drafting: Drafting,
    drafter: Drafter | None,
) -> Scheduler:
    captures_prompts = ModeSetting(resolved.graph_mode).ragged is not GraphMode.NONE
    return Scheduler(
        groups,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_prefill_rows=resolved.max_prefill_rows,
        min_prefill_rows=config.min_prefill_rows,
        max_model_len=resolved.max_model_len,
        num_drafts=drafter.num_drafts if drafter else 0,
        prefix_caching=resolved.prefix_caching,
        drafting=drafting,
        num_rerun=drafter.num_rerun if drafter else 1,
        prompt_sizes=resolved.token_buckets if captures_prompts else (),
    )


def _recorder(device: torch.device, group: Group) -> Recorder:
    if device.type == "cuda":
        from draftloop.graphs.cuda import CudaRecorder

        return CudaRecorder(device, group)
    return TapeRecorder(on_first_use=True)


def _tokenizer(config: EngineConfig, source: ModelSource) -> Any:
    if config.tokenizer is not None:
        return load_tokenizer(resolve_model(config.tokenizer, revision=config.revision, load_format="dummy"))
    folder = source.folder
    if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        logger.info("no tokenizer in %s: prompts must be token ids", config.model)
        return None
    return load_tokenizer(source)
