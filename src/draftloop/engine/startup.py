"""From a configuration to an engine that is ready: everything that happens once.

Cheap checks come first, so that a wrong setting fails before any weights are read. Then what is loaded
(engine/loading.py), memory (engine/memory.py), phases (engine/phases.py), their graphs (engine/capture.py), and the
engine around them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from draftloop.attention.registry import attention_backend
from draftloop.config.engine import EngineConfig
from draftloop.config.env import Environment
from draftloop.config.resolve import Facts, Resolved, resolve, sparse_ladder
from draftloop.distributed.group import Group
from draftloop.distributed.launcher import Ranks, take_place
from draftloop.distributed.replica import ALONE, Replica
from draftloop.drafters.base import Drafter, drafter_class
from draftloop.engine.acceptance import Acceptance
from draftloop.engine.adapters import Adapters, check_adapters
from draftloop.engine.capture import capture
from draftloop.engine.check_settings import check_engines
from draftloop.engine.core import EngineCore
from draftloop.engine.device_loop import make_device_loop
from draftloop.engine.draft_schedule import make_drafting
from draftloop.engine.follower import gather
from draftloop.engine.iteration import iteration_phases
from draftloop.engine.loading import Layout, load_target, make_drafter
from draftloop.engine.lockstep import Lockstep
from draftloop.engine.memory import MemoryLedger, fill_pool, make_pool
from draftloop.engine.phases import engine_phases
from draftloop.engine.ranges import check_nvtx, name_steps, nvtx_range
from draftloop.engine.start_log import Clock, log_start
from draftloop.engine.target import PagedTarget
from draftloop.engine.worker import Worker
from draftloop.errors import CapacityError, DraftloopError
from draftloop.graphs.phase import GraphMode, ModeSetting, Phase
from draftloop.graphs.program import Recorder
from draftloop.graphs.sizes import Ladders
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from draftloop.kvcache.pages import PageAllocator
from draftloop.kvcache.pool import CachePool
from draftloop.kvcache.rows import RowState
from draftloop.models.config import SUPPORTED, ModelConfig
from draftloop.models.decoder import cache_specs
from draftloop.models.dense import DenseDecoder
from draftloop.models.loader import (
    ModelSource,
    bytes_per_weight,
    eos_token_ids,
    load_config,
    load_tokenizer,
    resolve_model,
    sampling_defaults,
)
from draftloop.models.shards import check as check_shards
from draftloop.models.streamed import describe
from draftloop.sampling.logits_processors import load_logits_processors
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


def start(
    config: EngineConfig, *, progress: bool = True, ranks: Ranks | None = None, replica: Replica = ALONE
) -> Engine:
    """Build an engine. Raises ConfigError, CapacityError or GraphError with what to change.

    `ranks`: this process among those that share the engine; left out, they are started. `replica`: which of several
    engines this is.
    """
    clock = Clock()
    if Environment.read().nvtx:
        check_nvtx()
    source = resolve_model(
        config.model, revision=config.revision, download_dir=config.download_dir, load_format=config.load_format
    )
    model_config = load_config(source, quantization=config.quantization)
    check_adapters(config, model_config)
    check_engines(config, model_config, ranks.engines.size if ranks and ranks.engines else replica.size)
    spec = config.speculation
    drafter_type = drafter_class(spec) if spec else None
    resolved = resolve(
        config,
        facts=Facts(
            cuda_available=torch.cuda.is_available(),
            model_max_len=model_config.max_position_embeddings,
            model_dtype=model_config.dtype,
            num_speculative_tokens=drafter_type.count_drafts(spec) if drafter_type and spec else 0,
            host_drafter=drafter_type.needs_host(spec) if drafter_type and spec else False,
            drafter_reuses_prefixes=drafter_type.can_reuse_prefixes(spec) if drafter_type and spec else True,
            waiting_attention=attention_backend(config.attention_backend, "cuda").waits,
        ),
    )
    check_shards(config, model_config)
    if ranks is None:
        ranks = take_place(replica, resolved.device) if replica.size > 1 else gather(config, resolved.device)
    try:
        if ranks.followers is not None:
            ranks.followers.send(config)
        return _build(config, source, model_config, resolved, ranks, replica, clock, progress=progress)
    except Exception as error:
        if ranks.followers is not None:
            if not isinstance(error, DraftloopError):
                ranks.followers.explain()
            ranks.followers.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise CapacityError(
                f"{str(error).partition('. ')[0]} while the engine was made; use a smaller model, --quantization fp8 "
                "or int4, more GPUs (-tp), or lower --max-num-seqs or --max-model-len"
            ) from error
        raise


def _build(
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
    device, group = ranks.device, ranks.group
    layout = Layout.of(config, model_config, resolved, ranks)
    drafter = make_drafter(config, source, model_config, resolved, layout, ranks)
    acceptance = Acceptance.of(config.speculation, drafter)
    ledger = MemoryLedger(device, config.gpu_memory_utilization)
    clock.lap("resolve")

    show = progress and config.use_tqdm_on_load
    # what is quantised, shared between engines, or laid out by transformers' code is not known before it is there
    is_plain = model_config.quantisation is None and config.quantization is None and ranks.engines is None
    if is_plain and model_config.architecture in SUPPORTED:
        size = layout.dtype.itemsize
        if group.size == 1:
            size = bytes_per_weight(model_config, config.load_format, device=device, dtype=layout.dtype)
        ledger.check_weights(layout.layers.num_parameters * size, config.model)
    model = load_target(
        config,
        source,
        model_config,
        layout,
        ranks,
        show=show,
        report=lambda loaded: clock.notes.update(weights=f" (files: {loaded})"),
    )
    if isinstance(model, DenseDecoder) and model.final_norm.is_cuda:
        passes = describe(model.decoder_layers, model.backend, model.final_norm.device)
        logger.info("passes of few tokens: %s", passes)
    adapters = Adapters(model, config) if config.enable_lora else None
    ledger.lap("weights")
    if drafter:
        drafter.borrow(model)
        drafter.load(progress=show)
    ledger.lap("drafter")
    clock.lap("weights")

    target_specs = cache_specs(layout.layers, layout.kv_dtype, windows=layout.windows)
    specs = [*target_specs, *(drafter.cache_specs() if drafter else [])]
    num_groups = len({spec.window for spec in specs})
    state = _make_rows(config, model_config, resolved, layout, drafter, device, num_groups=num_groups)
    ledger.lap("rows")
    num_drafts = drafter.num_drafts if drafter else 0
    row_needs = {"pages_per_row": state.page_table_MN.shape[1], "num_drafts": num_drafts}
    pool = make_pool(config, resolved, specs, ledger, **row_needs, group=group)
    tables = dict(zip(pool.windows, state.page_tables_UMN.unbind(0), strict=True))
    target_caches, draft_caches = pool.caches[: len(target_specs)], pool.caches[len(target_specs) :]
    ledger.lap("pages")

    processors = load_logits_processors(
        config.logits_processors,
        num_rows=state.padding_row + 1,
        vocab_size=model_config.vocab_size,
        device=device,
    )
    target = PagedTarget(
        model=model,
        caches=model.layer_caches(target_caches, windows=layout.windows),
        state=state,
        page_size=resolved.block_size,
        support=layout.attention.graph_support(device.type),
        aux_layers=drafter.aux_layers if drafter else (),
        window_tables={window: table for window, table in tables.items() if window is not None},
    )
    phases = engine_phases(
        config,
        target,
        drafter,
        acceptance,
        target_caches=[(cache, tables[spec.window]) for cache, spec in zip(target_caches, target_specs, strict=True)],
        draft_caches=draft_caches,
        processors=processors,
    )
    iterations = iteration_phases(phases, drafter) if resolved.iteration_graph else []

    def poison() -> None:
        for pages in groups:
            pool.poison(pages.newly_free(), window=pages.window)

    table = _make_table(config, resolved, [*phases, *iterations], ranks, poison_more=poison)
    loop = make_device_loop(table, iterations, state, resolved.device_loop, group=group)
    ledger.lap("buffers")
    clock.lap("memory")
    capture(table, show=show)
    if pool.is_reserved:
        table.run_largest()
    ledger.lap("graphs and workspace")
    if pool.is_reserved:
        fill_pool(pool, ledger, **row_needs, group=group)
        ledger.lap("pages")
    groups = [PageAllocator(pool.num_pages_of(window), resolved.block_size, window) for window in pool.windows]
    clock.lap("capture")
    drafting = make_drafting(config.speculation, drafter, table, table.ladders.sparse_rows)
    clock.lap("costs")

    tokenizer = _tokenizer(config, source)
    core = EngineCore(
        _make_scheduler(config, resolved, groups, drafting, drafter),
        Worker(
            table,
            state,
            drafter,
            pool,
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
        pool=pool,
        drafter=drafter,
        tokenizer=tokenizer,
        model_config=model_config,
        resolved=resolved,
        sampling_defaults=sampling_defaults(source),
        memory=ledger,
        seconds=clock.laps,
    )
    log_start(config, engine, clock)
    return engine


def _make_rows(
    config: EngineConfig,
    model_config: ModelConfig,
    resolved: Resolved,
    layout: Layout,
    drafter: Drafter | None,
    device: torch.device,
    *,
    num_groups: int,
) -> RowState:
    return RowState.create(
        num_rows=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        num_drafts=drafter.num_drafts if drafter else 0,
        overhang=layout.overhang,
        num_groups=num_groups,
        page_size=resolved.block_size,
        draft_vocab=model_config.vocab_size if drafter and drafter.sampled else 0,
        device=device,
        vocab_size=model_config.vocab_size,
        has_adapters=config.enable_lora,
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
