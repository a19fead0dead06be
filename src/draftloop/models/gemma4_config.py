"""The shape of a Gemma 4 text model, read from a Hugging Face `config.json`. Imports nothing heavy.

Source: the published checkpoints and their `config.json`; mixtures of experts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftloop.errors import ConfigError
from draftloop.models.config import (
    GEMMA4_ARCHITECTURES,
    CacheGroup,
    LayerType,
    ModelConfig,
    RopeConfig,
    checkpoint_dtype,
)
from draftloop.models.quantisation import read_quantisation

KINDS: tuple[LayerType, LayerType] = ("sliding_attention", "full_attention")
"""In the order of their caches."""

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """A decoder of two kinds of layers, whose attention differs in head size, heads and rotation.

    `head_dim`, `num_kv_heads` and `rope` are those of sliding layers; `layer_types` names every layer's kind.
    """

    full_head_dim: int
    full_num_kv_heads: int
    full_rope: RopeConfig
    shared_projection: bool = False
    """Values of full layers are their keys before norm and rotation."""
    num_kv_shared_layers: int = 0
    """Layers at the end that have no keys and values: they read those of the last layer of their kind that has."""
    doubled_mlp: bool = False
    """The MLP of layers without keys and values is twice as wide."""
    layer_embedding_size: int = 0
    """Width of what each layer gets from a token embedding of its own; 0: there is none."""
    layer_vocab_size: int = 0
    """Rows of that embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.num_kv_shared_layers <= self.num_layers:
            raise ConfigError(
                f"num_kv_shared_layers is {self.num_kv_shared_layers} in the model's config; it must be in "
                f"[0, {self.num_layers}], the number of layers"
            )
        if self.full_head_dim % 2 or self.num_heads % self.full_num_kv_heads:
            raise ConfigError(
                f"full layers have heads of {self.full_head_dim} numbers and {self.full_num_kv_heads} key/value heads "
                f"in the model's config; it must be an even size, and a divisor of {self.num_heads} query heads"
            )
        reads = [kind for kind in KINDS if kind in self.layer_types[self.num_own_layers :]]
        if self.num_own_layers and (missing := [k for k in reads if k not in self.layer_types[: self.num_own_layers]]):
            raise ConfigError(
                f"the last {self.num_kv_shared_layers} layers read keys of {missing[0]} layers before them, of which "
                "there is none in the model's config; lower num_kv_shared_layers"
            )

    @property
    def num_own_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - self.num_kv_shared_layers

    @property
    def attention_scale(self) -> float:
        return 1.0

    def head_size(self, kind: LayerType) -> int:
        return self.full_head_dim if kind == "full_attention" else self.head_dim

    def kv_heads(self, kind: LayerType) -> int:
        return self.full_num_kv_heads if kind == "full_attention" else self.num_kv_heads

    def inner_size(self, layer: int) -> int:
        """Inner size of a layer's MLP."""
        return self.intermediate_size * (2 if self.doubled_mlp and layer >= self.num_own_layers else 1)

    def last_own_layer(self, kind: LayerType) -> int | None:
        """The layer whose keys and values those without any read; None where no layer of this kind has any."""
        return max((i for i in range(self.num_own_layers) if self.layer_types[i] == kind), default=None)

    def kv_layer(self, layer: int) -> int:
        if layer < self.num_own_layers:
            return layer
        found = self.last_own_layer(self.layer_types[layer])
        assert found is not None
        return found

    @property
    def cache_kinds(self) -> tuple[LayerType, ...]:
        """Kinds that have caches, in the order of `cache_groups`."""
        return tuple(kind for kind in KINDS if kind in self.layer_types[: self.num_own_layers])

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        own = {kind: tuple(i for i in range(self.num_own_layers) if self.layer_types[i] == kind) for kind in KINDS}
        return tuple(
            CacheGroup(layers=own[kind], num_kv_heads=self.kv_heads(kind), head_dim=self.head_size(kind))
            for kind in self.cache_kinds
        )

    @property
    def num_parameters(self) -> int:
        hidden, per_layer = self.hidden_size, self.layer_embedding_size
        total = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2) + hidden
        if per_layer:
            packed = self.num_layers * per_layer
            total += self.layer_vocab_size * packed + hidden * packed + per_layer
            total += self.num_layers * (2 * hidden * per_layer + hidden)
        for layer, kind in enumerate(self.layer_types):
            size, query = self.head_size(kind), self.num_heads * self.head_size(kind)
            total += 2 * hidden * query + size + self.o_bias * hidden + self.qkv_bias * query
            if layer < self.num_own_layers:
                sides = 1 if self.shared_projection and kind == "full_attention" else 2
                total += sides * self.kv_heads(kind) * size * (hidden + self.qkv_bias) + size
            total += 3 * hidden * self.inner_size(layer) + 4 * hidden + 1
        return total

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Gemma4Config:
        """Read a `config.json` of the text model, or of one that holds it. Raises ConfigError for what cannot run."""
        names = hf.get("architectures") or []
        architecture = next((name for name in names if name in GEMMA4_ARCHITECTURES), GEMMA4_ARCHITECTURES[0])
        text = hf.get("text_config") or hf
        eos = hf.get("eos_token_id", text.get("eos_token_id"))
        return cls.from_text(
            text,
            architecture=architecture,
            tensor_prefix="model." if text is hf else "model.language_model.",
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            dtype=checkpoint_dtype({**text, **{k: v for k, v in hf.items() if v is not None}}),
            quantisation=read_quantisation(hf.get("quantization_config")),
        )

    @classmethod
    def from_text(cls, text: Mapping[str, Any], *, architecture: str, **more: Any) -> Gemma4Config:
        """Read the text model's part of a `config.json`; `more` are fields that stand elsewhere. Raises ConfigError."""
        _refuse(text)

        def need(key: str) -> Any:
            if text.get(key) is None:
                raise ConfigError(f"the model's config has no {key!r}, which {architecture} needs")
            return text[key]

        kinds = _layer_types(text, need("num_hidden_layers"))
        heads, kv_heads, head_dim = need("num_attention_heads"), need("num_key_value_heads"), need("head_dim")
        full = _full_layers(text, kinds)
        ropes = need("rope_parameters")
        bias = bool(text.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=need("max_position_embeddings"),
            rms_norm_eps=text.get("rms_norm_eps", NORM_EPS),
            rope=_rope(ropes, "sliding_attention", 10_000.0),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", True)),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            sliding_window=need("sliding_window"),
            layer_types=kinds,
            bos_token_id=text.get("bos_token_id"),
            full_head_dim=full.get("head_dim", head_dim),
            full_num_kv_heads=full.get("num_key_value_heads", kv_heads),
            full_rope=_rope(ropes, "full_attention", 1_000_000.0),
            shared_projection=bool(text.get("attention_k_eq_v", False)),
            num_kv_shared_layers=text.get("num_kv_shared_layers") or 0,
            doubled_mlp=bool(text.get("use_double_wide_mlp", False)),
            layer_embedding_size=text.get("hidden_size_per_layer_input") or 0,
            layer_vocab_size=text.get("vocab_size_per_layer_input") or 0,
            logit_cap=text.get("final_logit_softcapping"),
            **more,
        )


def _refuse(text: Mapping[str, Any]) -> None:
    if text.get("enable_moe_block"):
        raise ConfigError(
            "the model's config has enable_moe_block, a mixture of experts; supported: dense Gemma 4 models"
        )
    if text.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention is 'all' in the model's config; supported: causal text models")
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(f"hidden_activation is {activation!r} in the model's config; supported: 'gelu_pytorch_tanh'")


def _layer_types(text: Mapping[str, Any], num_layers: int) -> tuple[LayerType, ...]:
    """Every sixth layer sees everything, and so does the last, unless the config names them."""
    found: Sequence[Any] = text.get("layer_types") or [KINDS[layer % 6 == 5] for layer in range(num_layers)]
    for kind in found:
        if kind not in KINDS:
            raise ConfigError(
                f"layer_types has {kind!r} in the model's config; supported: {', '.join(map(repr, KINDS))}"
            )
    return (*found[:-1], "full_attention")


def _full_layers(text: Mapping[str, Any], kinds: tuple[LayerType, ...]) -> dict[str, int]:
    """How the attention of full layers differs, in either spelling."""
    if per_layer := text.get("per_layer_config"):
        index = next((i for i, kind in enumerate(kinds) if kind == "full_attention"), None)
        return {key: value for key, value in (per_layer.get(str(index)) or {}).items() if value is not None}
    found = {"head_dim": text.get("global_head_dim") or 512}
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
        found["num_key_value_heads"] = text["num_global_key_value_heads"]
    return found


def _rope(ropes: Mapping[str, Any], kind: LayerType, theta: float) -> RopeConfig:
    settings = ropes.get(kind) or {}
    rope_type = settings.get("rope_type", "default")
    if rope_type not in ("default", "linear", "proportional"):
        raise ConfigError(
            f"rope_type of {kind} layers is {rope_type!r} in the model's config; supported: 'default', 'linear', "
            "'proportional'"
        )
    return RopeConfig(
        kind=rope_type,
        theta=settings.get("rope_theta") or theta,
        factor=settings.get("factor") or 1.0,
        share=(settings.get("partial_rotary_factor") or 1.0) if rope_type == "proportional" else 1.0,
    )
