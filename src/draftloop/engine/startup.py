"""From a configuration to an engine that is ready: everything that happens once.

Cheap checks come first, so that a wrong setting fails before any weights are read.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.draft_tree import DraftTree
from draftloop.config.engine import EngineConfig
from draftloop.config.env import Environment
from draftloop.config.resolve import Facts, Resolved, resolve, sparse_ladder
from draftloop.distributed.group import Group
from draftloop.distributed.launcher import Ranks, take_place
from draftloop.distributed.replica import ALONE, Replica
from draftloop.drafters.base import Drafter, Target, drafter_class, is_of_fewer
from draftloop.drafters.made_for import warn_of_other_target
from draftloop.engine.adapters import Adapters, check_adapters
from draftloop.engine.capture import capture
from draftloop.engine.check_settings import check_deterministic, check_engines
from draftloop.engine.core import EngineCore
from draftloop.engine.device_loop import make_device_loop
from draftloop.engine.draft_schedule import make_drafting
from draftloop.engine.follower import gather
from draftloop.engine.iteration import iteration_phases, no_drafts_phase
from draftloop.engine.lockstep import Lockstep
from draftloop.engine.logprobs import logprob_phases
from draftloop.engine.memory import MemoryLedger, make_pool
from draftloop.engine.ranges import check_nvtx, name_steps, nvtx_range
from draftloop.engine.target import outcome_width, target_phases
from draftloop.engine.worker import Worker
from draftloop.errors import ConfigError, DraftloopError
from draftloop.graphs.phase import GraphMode, ModeSetting
from draftloop.graphs.program import Recorder
from draftloop.graphs.sizes import Ladders
from draftloop.graphs.table import GraphTable
from draftloop.graphs.tape import TapeRecorder
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.kernels.fp8_cache import FP8
from draftloop.kvcache.pages import PageAllocator
from draftloop.kvcache.pool import CachePool
from draftloop.kvcache.rows import RowState
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import attention_shapes, cache_specs
from draftloop.models.loader import (
    ModelSource,
    eos_token_ids,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
    sampling_defaults,
)
from draftloop.models.shards import check as check_shards
from draftloop.models.shards import share
from draftloop.sampling.accept import accept_sampled_rows, conditional_rates
from draftloop.sampling.block_verification import accept_block_rows
from draftloop.sampling.commit import Rule
from draftloop.sampling.logits_processors import load_logits_processors
from draftloop.sampling.typical import TYPICAL_ALPHA, TYPICAL_THRESHOLD, accept_typical_rows
from draftloop.scheduler.drafting import describe
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
    clock = _Clock()
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
        raise


def _build(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    resolved: Resolved,
    ranks: Ranks,
    replica: Replica,
    clock: _Clock,
    *,
    progress: bool,
) -> Engine:
    spec, group, device = config.speculation, ranks.group, ranks.device
    in_step = ranks.engines or group
    drafter_type = drafter_class(spec) if spec else None
    dtype = getattr(torch, resolved.dtype)
    num_drafts = drafter_type.count_drafts(spec) if drafter_type and spec else 0
    overhang = drafter_type.overhang(spec) if drafter_type and spec else 1
    max_positions = resolved.max_model_len + overhang
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else FP8
    layers = share(model_config, group.size)
    shapes = attention_shapes(layers, page_size=resolved.block_size, dtype=dtype, kv_dtype=kv_dtype)
    backend_class = attention_backend(resolve_attention_name(config.attention_backend, device.type), device.type)
    if config.deterministic:
        check_deterministic(config, model_config, device.type)
    if spec and spec.tree:
        for layer in range(model_config.num_layers):
            backend_class.check_tree(spec.tree, model_config.window(layer))
    for shape in shapes:
        backend_class.check(shape, device.type)
    drafter: Drafter | None = None
    if drafter_type and spec:
        drafter = drafter_type(
            spec,
            Target(
                name=config.model,
                folder=source.folder,
                config=replace(model_config, quantisation=None),  # never inherited
                vocab_size=model_config.vocab_size,
                max_model_len=resolved.max_model_len,
                max_positions=max_positions,
                page_size=resolved.block_size,
                device=device,
                dtype=dtype,
                kv_dtype=kv_dtype,
                load_format=config.load_format,
                seed=config.seed,
                group=group,
            ),
        )
        warn_of_other_target(drafter.folder, source.folder, name=str(spec.model), target_name=config.model)
    rates = _synthetic_rates(config, drafter)
    ledger = MemoryLedger(device, config.gpu_memory_utilization)
    clock.lap("resolve")

    show = progress and config.use_tqdm_on_load
    model = load_model(
        source,
        model_config,
        backend_class(shapes[0], device),
        device=device,
        dtype=dtype,
        max_positions=max_positions,
        load_format=config.load_format,
        seed=config.seed,
        group=group,
        engines=ranks.engines,
        show_progress=None if show else False,
        report=lambda loaded: clock.notes.update(weights=f" (files: {loaded})"),
    )
    adapters = Adapters(model, config) if config.enable_lora else None
    ledger.lap("weights")
    if drafter:
        drafter.borrow(model)
        drafter.load(progress=show)
    ledger.lap("drafter")
    clock.lap("weights")

    state = RowState.create(
        num_rows=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        num_drafts=num_drafts,
        overhang=overhang,
        page_size=resolved.block_size,
        draft_vocab=model_config.vocab_size if drafter and drafter.sampled else 0,
        device=device,
        vocab_size=model_config.vocab_size,
        has_adapters=config.enable_lora,
    )
    target_specs = cache_specs(layers, kv_dtype)
    specs = [*target_specs, *(drafter.cache_specs() if drafter else [])]
    ledger.lap("rows")
    pool = make_pool(config, resolved, specs, ledger, pages_per_row=state.page_table_MN.shape[1], group=group)
    ledger.lap("pages")
    target_caches = model.layer_caches(pool.caches[: len(target_specs)])
    processors = load_logits_processors(
        config.logits_processors,
        num_rows=state.padding_row + 1,
        vocab_size=model_config.vocab_size,
        device=device,
    )
    pages = PageAllocator(pool.num_pages, resolved.block_size)
    counts = drafter.counts if drafter else ()
    if ranks.steps and len(counts) > 1:
        raise ConfigError(
            "engines that share experts take every step together, and do not agree on a number of drafts that follows "
            "the load; leave adaptive and num_speculative_tokens_per_batch_size out"
        )
    several = drafter is not None and len(drafter.drafters) > 1
    phases = target_phases(
        model,
        target_caches,
        state,
        tree=drafter.tree if drafter else DraftTree.chain(0),
        counts=counts,
        caches=pool.caches[: len(target_specs)],
        page_size=resolved.block_size,
        support=backend_class.graph_support(device.type),
        aux_layers=drafter.aux_layers if drafter else (),
        several_drafters=several,
        rule=_rule(config, drafter),
        synthetic_rates=rates,
        num_top_logprobs=config.max_logprobs,
        processors=processors,
    )
    phases += logprob_phases(
        state,
        tree=drafter.tree if drafter else DraftTree.chain(0),
        counts=counts,
        outcome_width=outcome_width(num_drafts, several),
        vocabulary=model.vocabulary,
        dtype=dtype,
        num_top=config.max_logprobs,
        mode=config.logprobs_mode,
        processors=processors,
    )
    if drafter:
        drafter.read_target(target_caches)
        phases += drafter.phases(state, pool.caches[len(target_specs) :])
        if len(counts) > 1:
            phases = [replace(phase, sparse=is_of_fewer(phase.name)) for phase in [*phases, no_drafts_phase(state)]]
    if config.deterministic:
        phases = [replace(phase, fn=batch_invariant(phase.fn)) for phase in phases]
    iterations = iteration_phases(phases, drafter) if resolved.iteration_graph else []
    phases += iterations
    setting = ModeSetting(resolved.graph_mode)
    sparse_rows = resolved.row_buckets if config.cudagraph_capture_sizes else sparse_ladder(resolved.row_buckets)
    table = GraphTable(
        phases,
        Ladders(
            rows=resolved.row_buckets,
            sparse_rows=sparse_rows,
            tokens=resolved.token_buckets,
            prefill_rows=resolved.max_prefill_rows,
        ),
        setting,
        _recorder(device, in_step),
        device,
        largest_rows=resolved.max_num_seqs,
        largest_tokens=resolved.max_num_batched_tokens,
        require_graphs=resolved.require_graphs,
        group=in_step,
        poison_more=lambda: pool.poison(pages.newly_free()),
    )
    loop = make_device_loop(table, iterations, state, resolved.device_loop, group=group)
    ledger.lap("buffers")
    clock.lap("memory")
    capture(table, show=show)
    ledger.lap("graphs and workspace")
    clock.lap("capture")
    drafting = make_drafting(spec, drafter, table, sparse_rows)
    clock.lap("costs")

    tokenizer = _tokenizer(config, source)
    core = EngineCore(
        Scheduler(
            pages,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_prefill_rows=resolved.max_prefill_rows,
            min_prefill_rows=config.min_prefill_rows,
            max_model_len=resolved.max_model_len,
            num_drafts=num_drafts,
            prefix_caching=resolved.prefix_caching,
            drafting=drafting,
            num_rerun=drafter.num_rerun if drafter else 1,
            prompt_sizes=resolved.token_buckets if setting.ragged is not GraphMode.NONE else (),
        ),
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
    _log(config, engine, clock)
    return engine


def _rule(config: EngineConfig, drafter: Drafter | None) -> Rule:
    spec = config.speculation
    if spec is None or drafter is None:
        return accept_sampled_rows
    rule = spec.rejection_sample_method or ("block" if drafter.sampled else "standard")
    if rule == "typical":
        return partial(
            accept_typical_rows,
            threshold=spec.typical_acceptance_threshold or TYPICAL_THRESHOLD,
            alpha=spec.typical_acceptance_alpha or TYPICAL_ALPHA,
        )
    return accept_block_rows if rule == "block" else accept_sampled_rows


def _synthetic_rates(config: EngineConfig, drafter: Drafter | None) -> list[float] | None:
    spec = config.speculation
    if drafter is None or spec is None:
        return None
    if not drafter.forced_acceptance and spec.rejection_sample_method != "synthetic":
        return None
    return conditional_rates(
        drafter.tree.depth,
        synthetic_acceptance_rates=spec.synthetic_acceptance_rates,
        synthetic_acceptance_length=spec.synthetic_acceptance_length,
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


def _log(config: EngineConfig, engine: Engine, clock: _Clock) -> None:
    for choice in engine.resolved.choices:
        logger.info("%s = %s: %s", choice.name, choice.value, choice.reason)
    pool = engine.pool
    tokens = (pool.num_pages - 1) * pool.page_size
    logger.info("cache: %d pages, %d tokens, %.0f MiB", pool.num_pages - 1, tokens, pool.nbytes / 2**20)
    logger.info("memory: %s", engine.memory.format())
    engine.memory.check()
    logger.info("drafter: %s", engine.drafter.describe() if engine.drafter else "none")
    if len(engine.core.scheduler.drafting.counts) > 1:
        logger.info("drafts per step: %s", describe(engine.core.scheduler.drafting))
    if config.speculation and config.speculation.rejection_sample_method == "typical":
        logger.warning(
            "acceptance: typical, which is LOSSY: text at temperatures above 0 does not have the model's distribution"
        )
    logger.info("graphs: %s", engine.table.report().at_start())
    logger.info("start-up: %s", clock)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{name} {s:.1f} s{self.notes.get(name, '')}" for name, s in self.laps.items())
