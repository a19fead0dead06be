"""Settings that contradict what the model, or the attention backend, can do: refused before weights are read."""

from __future__ import annotations

from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.engine import EngineConfig
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.fallback_config import FallbackConfig


def check_engines(config: EngineConfig, model_config: ModelConfig, num_engines: int) -> None:
    """Raises ConfigError where one engine of several was asked for, or there are no experts to share."""
    if config.data_parallel_size != num_engines:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, but this is a single engine; start several by "
            "`draftloop serve`, or make one LLM for each GPU"
        )
    if config.enable_expert_parallel and model_config.experts is None:
        raise ConfigError(
            f"enable_expert_parallel is set, but {config.model} has no experts; leave it out: its engines then share "
            "nothing but the requests"
        )
    if config.steps_together and model_config.experts and model_config.experts.num_experts % num_engines:
        raise ConfigError(
            f"data_parallel_size is {num_engines}, which does not divide the {model_config.experts.num_experts} "
            "experts; choose another number"
        )


def check_deterministic(config: EngineConfig, model_config: ModelConfig, device_type: str) -> None:
    """Attention is where backends differ; raises ConfigError for one whose results depend on the batch."""
    if isinstance(model_config, FallbackConfig):
        raise ConfigError(
            f"deterministic is set, but {model_config.architecture} runs by transformers' code, whose results depend "
            "on the batch; leave it out"
        )
    spec = config.speculation
    parts = (spec, *(spec.drafters or ())) if spec else ()
    for asked in (config.attention_backend, *(part.attention_backend for part in parts)):
        name = resolve_attention_name(asked or "auto", device_type)
        if device_type not in attention_backend(name, device_type).invariant_on:
            raise ConfigError(
                f"deterministic is set, but results of attention backend {name!r} depend on the batch on device "
                f"{device_type!r}; leave attention_backend out"
            )
    if spec and spec.tree and not spec.tree.is_chain:
        raise ConfigError(
            "deterministic is set, but where a token's keys lie in a speculative_token_tree depends on its branch; "
            "leave one out"
        )
