"""From a configuration to an engine that is ready: everything that happens once.

Cheap checks come first, so that a wrong setting fails before any weights are read. Then engine/build.py: what is loaded
(engine/loading.py), memory (engine/memory.py), phases (engine/phases.py), their graphs (engine/capture.py), and the
engine around them.
"""

from __future__ import annotations

import torch

from draftloop.attention.registry import attention_backend
from draftloop.config.engine import EngineConfig
from draftloop.config.env import Environment
from draftloop.config.resolve import Facts, resolve
from draftloop.distributed.launcher import Ranks, take_place
from draftloop.distributed.replica import ALONE, Replica
from draftloop.drafters.base import drafter_class
from draftloop.engine.adapters import check_adapters
from draftloop.engine.build import Engine, build
from draftloop.engine.check_settings import check_engines
from draftloop.engine.follower import gather
from draftloop.engine.ranges import check_nvtx
from draftloop.engine.start_log import Clock
from draftloop.errors import CapacityError, DraftloopError
from draftloop.models.loader import load_config, resolve_model
from draftloop.models.shards import check as check_shards


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
        return build(config, source, model_config, resolved, ranks, replica, clock, progress=progress)
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
