"""What mixtures of experts have beside dense models. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftloop.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What checkpoints with a tensor per expert call a layer's parts."""

    block: str = "mlp"
    """Of the layer, in place of a dense layer's MLP."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Gated MLPs of which a router chooses a few for each token.

    Raises ConfigError where the numbers do not fit together.
    """

    num_experts: int
    num_per_token: int
    """Experts that each token goes through."""
    inner_size: int
    """Of one expert."""
    normalise: bool = False
    """The chosen experts' shares of the output add up to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have one MLP instead, in order."""
    names: ExpertNames = ExpertNames()

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_per_token", "inner_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of the experts is {value!r} in the model's config; it must be >= 1")
        if self.num_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_per_token} in the model's config; there are {self.num_experts} "
                "experts"
            )


def read_qwen_experts(hf: Mapping[str, Any]) -> ExpertsConfig | None:
    """Of Qwen3-MoE; None where every layer is dense."""
    num_experts = _either(hf, "num_experts", "num_local_experts")
    num_layers, step = hf["num_hidden_layers"], hf["decoder_sparse_step"]
    if not isinstance(step, int) or step < 1:
        raise ConfigError(f"decoder_sparse_step is {step!r} in the model's config; it must be an integer >= 1")
    dense = {*(hf.get("mlp_only_layers") or ()), *(layer for layer in range(num_layers) if (layer + 1) % step)}
    if not num_experts or dense.issuperset(range(num_layers)):
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        normalise=bool(hf["norm_topk_prob"]),
        dense_layers=tuple(sorted(dense)),
    )


def read_mixtral_experts(hf: Mapping[str, Any]) -> ExpertsConfig:
    """Of Mixtral, where every layer has experts."""
    return ExpertsConfig(
        num_experts=_either(hf, "num_local_experts", "num_experts"),
        num_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalise=True,
        names=MIXTRAL_NAMES,
    )


def _either(hf: Mapping[str, Any], *keys: str) -> Any:
    """The first that is there; the last one has a default."""
    return next(hf[key] for key in keys if key in hf)


QWEN_DEFAULTS = {
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
    "norm_topk_prob": False,
}
MIXTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "intermediate_size": 14_336,
}
"""What transformers gives to missing keys."""
