"""The shape of a model that runs by transformers' own code (see models/fallback.py), and which ones cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.errors import ConfigError
from draftloop.models.config import SUPPORTED, ModelConfig, checkpoint_dtype

HOST_ROPES = ("dynamic", "longrope")
"""Rotations that transformers changes by the longest position of a pass, which the host would have to read."""


@dataclass(frozen=True, kw_only=True)
class FallbackConfig(ModelConfig):
    """A decoder-only model of transformers. Of `ModelConfig` only sizes count: layers are transformers' affair."""

    num_weights: int

    def _check_architecture(self) -> None:
        """`read_fallback_config` did."""

    @property
    def num_parameters(self) -> int:
        return self.num_weights


def read_fallback_config(folder: Path, hf: Mapping[str, Any]) -> FallbackConfig:
    """Of a folder whose `config.json`, `hf`, names an architecture that no decoder here has.

    Raises ConfigError where transformers' code cannot be run either, with the reason.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    names = hf.get("architectures") or []
    named = ", ".join(map(repr, names)) or f"none (model_type {hf.get('model_type')!r})"

    def refusal(why: str) -> ConfigError:
        return ConfigError(
            f"the model's config names architecture {named}, which is none of {', '.join(SUPPORTED)}, and cannot run "
            f"by transformers' code: {why}. Choose another model"
        )

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever a config's own checks raise
        raise refusal(f"its config cannot be read ({str(error).splitlines()[0] if str(error) else error!r})") from error
    if config.is_encoder_decoder:
        raise refusal("it has an encoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal("transformers has no causal language model for its config")
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kinds: tuple[Any, ...] = known if isinstance(known, tuple) else (known,)
    kind = next((kind for kind in kinds if kind.__name__ in names), None)
    if kind is None:
        raise refusal(f"transformers' causal language model for its config is {kinds[0].__name__!r}")
    if kind._is_stateful:
        raise refusal("what it keeps of a sequence is not keys and values of attention alone")
    if not kind._supports_attention_backend:
        raise refusal("its attention cannot be replaced")
    if hf.get("quantization_config"):
        raise refusal("its weights are quantised")
    text = config.get_text_config(decoder=True)
    if other := {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}:
        raise refusal(f"it has layers of type {', '.join(map(repr, sorted(other)))}")
    if (rope := _rope_types(getattr(text, "rope_parameters", None)) & {*HOST_ROPES}) and rope:
        raise refusal(f"its rotation, {', '.join(map(repr, sorted(rope)))}, changes while a sequence grows")
    if getattr(text, "kv_lora_rank", None):
        raise refusal("its keys and values have different sizes")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def need(key: str) -> Any:
        if getattr(text, key, None) is None:
            raise refusal(f"its config has no {key!r}")
        return getattr(text, key)

    heads, eos = need("num_attention_heads"), hf.get("eos_token_id", getattr(text, "eos_token_id", None))
    return FallbackConfig(
        architecture=kind.__name__,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or need("hidden_size") // heads,
        max_position_embeddings=need("max_position_embeddings"),
        attention_cap=getattr(text, "attn_logit_softcapping", None) or 0.0,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        bos_token_id=text.bos_token_id,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        dtype=checkpoint_dtype(hf),
        num_weights=sum(weight.numel() for weight in model.parameters()),
    )


def _rope_types(settings: Mapping[str, Any] | None) -> set[str]:
    """Of all layers, where they differ."""
    found = settings or {}
    return {str(part.get("rope_type")) for part in (found, *found.values()) if isinstance(part, Mapping)}
