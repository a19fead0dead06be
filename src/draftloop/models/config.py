"""The shape of a dense decoder, read from a Hugging Face `config.json`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftloop.errors import ConfigError, nearest
from draftloop.models.quantisation import Quantisation, read_quantisation

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]
LayerType = Literal["full_attention", "sliding_attention"]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MiMoForCausalLM",
)
"""What `DenseDecoder` can run. MiMo is Qwen2 with multi-token-prediction heads."""
GEMMA4_ARCHITECTURES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
)
"""What `Gemma4Decoder` can run; of models for more than text, the text model."""
SUPPORTED = (*ARCHITECTURES, *GEMMA4_ARCHITECTURES)

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched for long contexts."""

    kind: RopeKind = "default"
    """"default", "linear", "llama3", "yarn" or "proportional"."""
    theta: float = 10_000.0
    """Base wavelength."""
    factor: float = 1.0
    """How many times longer than in pretraining the context may get."""
    original_max_position_embeddings: int = 0
    """Context length of pretraining, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original / low_freq_factor` are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original / high_freq_factor` are left alone."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is stretched in full."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None: inferred from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    share: float = 1.0
    """proportional: share of a head's dimensions that turn."""


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose keys and values have one shape, and so one cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder: grouped-query attention, gated MLP, RMSNorm, rotary positions.

    Raises ConfigError where the numbers do not fit together.
    """

    architecture: str
    """Hugging Face class name, one of `ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence that the model was made for, in tokens."""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    """The output head is the embedding table."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before the rotation."""
    sliding_window: int | None = None
    """Positions that a token of a sliding layer sees, itself included."""
    layer_types: tuple[LayerType, ...] = ()
    """One per layer; empty: every layer slides if there is a window."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """Type of the checkpoint's weights, or of what multiplies them where they are quantised; a name from `DTYPES`."""
    quantisation: Quantisation | None = None
    """Of linear layers; None: all weights are plain."""

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED:
            raise ConfigError(
                f"architecture {self.architecture!r} is not supported{nearest(self.architecture, SUPPORTED)} "
                f"Supported: {', '.join(SUPPORTED)}"
            )
        sizes = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ]
        for name in [*sizes, "max_position_embeddings"]:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r} in the model's config; it must be an integer >= 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads} in the model's config; it must be a multiple of "
                f"num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim} in the model's config; rotary positions need an even one")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types names {len(self.layer_types)} layers in the model's config; there are {self.num_layers}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window} in the model's config; it must be >= 1 or null")
        if self.dtype not in DTYPES:
            raise ConfigError(f"the checkpoint's dtype is {self.dtype!r}; supported: {', '.join(DTYPES)}")

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer, None where it sees everything."""
        if self.layer_types and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The caches that the model needs."""
        return (CacheGroup(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim),)

    @property
    def num_parameters(self) -> int:
        """Weights in the model, shared ones counted once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = hidden * (heads + self.num_heads * self.head_dim)
        attention += self.qkv_bias * heads + self.o_bias * hidden + self.qk_norm * 2 * self.head_dim
        mlp = 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * hidden) + tables + hidden

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the cache holds for one token, all layers together."""
        return sum(2 * group.num_layers * group.num_kv_heads * group.head_dim for group in self.cache_groups)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`, with the defaults that transformers gives to missing keys.

        Both spellings of the rotary settings are read: `rope_theta` + `rope_scaling` (transformers 4)
        and `rope_parameters` (5). Raises ConfigError for whatever this decoder cannot run.
        """
        names = hf.get("architectures") or []
        architecture = next((name for name in names if name in ARCHITECTURES), None)
        if architecture is None:
            found = ", ".join(map(repr, names)) or f"none (model_type {hf.get('model_type')!r})"
            raise ConfigError(
                f"the model's config names architecture {found}; supported: {', '.join(SUPPORTED)}. "
                "Choose a model of one of these"
            )
        refuse_unsupported(hf)

        def need(key: str) -> Any:
            if hf.get(key) is None:
                raise ConfigError(f"the model's config has no {key!r}, which {architecture} needs")
            return hf[key]

        num_layers, num_heads = need("num_hidden_layers"), need("num_attention_heads")
        head_dim = hf.get("head_dim") or (
            128 if architecture == "Qwen3ForCausalLM" else need("hidden_size") // num_heads
        )
        attention_bias = bool(hf.get("attention_bias", False)) and architecture != "MistralForCausalLM"
        is_qwen2 = architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM")
        sliding_window, layer_types = _sliding(architecture, hf, num_layers)
        eos = hf.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=need("max_position_embeddings"),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=_rope(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=not is_qwen2 and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(hf.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=sliding_window,
            layer_types=layer_types,
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            dtype=checkpoint_dtype(hf),
            quantisation=read_quantisation(hf.get("quantization_config")),
        )


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raises ConfigError for an activation or rotation that no decoder here has."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"hidden_act is {activation!r} in the model's config; supported: 'silu'")
    if (partial := hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor is {partial} in the model's config; supported: 1.0")


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """Type of the weights, in either spelling."""
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")


def _sliding(architecture: str, hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[LayerType, ...]]:
    """The window, and which layers have it, each architecture by its own rule."""
    if architecture == "LlamaForCausalLM":
        return None, ()
    window = hf.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return window, ()
    if not hf.get("use_sliding_window", False) or window is None:
        return None, ()
    types: list[LayerType] | None = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer_types has {kind!r} in the model's config; supported: 'full_attention', 'sliding_attention'"
            )
    return window, tuple(types)


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Rotary settings of a `config.json` in either spelling."""
    settings: dict[str, Any] = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    if nested := [key for key, value in settings.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"the model's config has rotary settings per layer type ({', '.join(nested)}); supported: one"
        )
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope_type is {kind!r} in the model's config; supported: {', '.join(ROPE_KINDS)}")
    if (partial := settings.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor is {partial} in the model's config; supported: 1.0")
    # a length saved beside the rotary settings goes before the one within, as in transformers
    original = hf.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = original or hf.get("max_position_embeddings") or 0
    required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in required.get(kind, ()):
        if settings.get(key) is None:
            raise ConfigError(f"the model's config has rope_type {kind!r} without {key!r}, which it needs")
    factor = settings.get("factor")
    if factor is None:
        factor = hf["max_position_embeddings"] / original if kind == "yarn" else 1.0
    return RopeConfig(
        kind=kind,
        theta=settings.get("rope_theta") or hf.get("rope_theta") or 10_000.0,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=settings.get("low_freq_factor") or 1.0,
        high_freq_factor=settings.get("high_freq_factor") or 4.0,
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        truncate=settings.get("truncate", True),
        attention_factor=settings.get("attention_factor"),
        mscale=settings.get("mscale"),
        mscale_all_dim=settings.get("mscale_all_dim"),
    )


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(kind="llama3", theta=500_000.0, factor=factor, original_max_position_embeddings=8192)


PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(8.0),
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    ),
    "llama-3.2-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(32.0),
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    ),
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope=RopeConfig(theta=1_000_000.0),
        qk_norm=True,
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
    ),
    "smollm2-135m-shape": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "tiny": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
        dtype="float32",
    ),
}
"""Shapes without weights, for benchmarks and tests with `load_format="dummy"`."""
