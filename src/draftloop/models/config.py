"""The shape of a decoder, read from a Hugging Face `config.json`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from draftloop.errors import ConfigError
from draftloop.models.architectures import ACTIVATIONS, FAMILIES, Activation, LayerNorms, LayerType
from draftloop.models.experts_config import ExpertsConfig
from draftloop.models.quantisation import Quantisation, read_quantisation
from draftloop.models.rope_config import RopeConfig, read_rope

ARCHITECTURES = tuple(FAMILIES)
"""What `DenseDecoder` can run."""
GEMMA4_ARCHITECTURES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
)
"""What `Gemma4Decoder` can run; of models for more than text, the text model."""
SUPPORTED = (*ARCHITECTURES, *GEMMA4_ARCHITECTURES)

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose keys and values have one shape, and may have one cache."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: grouped-query attention, gated MLP or a mixture of them, RMSNorm, rotary positions.

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
    whole_qk_norm: bool = False
    """That norm is over all heads at once."""
    norms: LayerNorms = field(default_factory=LayerNorms)
    norm_offset: bool = False
    """Checkpoints hold what norms multiply with less 1."""
    activation: Activation = "silu"
    """Of the MLP's gate."""
    experts: ExpertsConfig | None = None
    """MLPs of which each token goes through a few; None: every layer is dense."""
    scale: float | None = None
    """What attention's scores are multiplied by; None: one over the square root of the head size."""
    attention_cap: float = 0.0
    """Scores are squeezed between minus and plus this; 0: they are not."""
    logit_cap: float | None = None
    """Logits are squeezed between minus and plus this."""
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0
    """What embeddings are multiplied by, rounded to the model's type."""
    residual_multiplier: float = 1.0
    """Of what attention and MLP add to the residual stream."""
    ropes: tuple[RopeConfig, ...] = ()
    """One per layer; empty: all layers turn as `rope` says."""
    interleaved_rope: bool = False
    """Neighbouring dimensions turn together, not those half a head apart; weights are reordered once loaded."""
    fused_qkv: bool = False
    """Checkpoints have queries, keys and values in one matrix."""
    fused_gate_up: bool = False
    """The same of the MLP's gate and what it multiplies."""
    tensor_prefix: str = "model."
    """Before the names of the decoder's tensors in checkpoints."""
    sliding_window: int | None = None
    """Positions that a token of a sliding layer sees, itself included."""
    layer_types: tuple[LayerType, ...] = ()
    """One per layer; empty: every layer slides if there is a window."""
    sinks: tuple[bool, ...] = ()
    """Per layer: each query head has a score that joins its softmax and stands for no value; empty: none has."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """Type of the checkpoint's weights, or of what multiplies them where they are quantised; a name from `DTYPES`."""
    quantisation: Quantisation | None = None
    """Of linear layers; None: all weights are plain."""

    def __post_init__(self) -> None:
        self._check_architecture()
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
        self._check_experts()
        if self.dtype not in DTYPES:
            raise ConfigError(f"the checkpoint's dtype is {self.dtype!r}; supported: {', '.join(DTYPES)}")

    def _check_architecture(self) -> None:
        assert self.architecture in SUPPORTED, self.architecture

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        if self.quantisation is not None:
            raise ConfigError(
                f"{self.architecture} has experts, and quantization is {self.quantisation.method!r}; experts of 8 or 4 "
                "bits are not supported: use plain weights (bfloat16, float16, float32)"
            )
        if self.activation != "silu":
            raise ConfigError(f"hidden_act is {self.activation!r} in the model's config; experts have 'silu' alone")

    def has_experts(self, layer: int) -> bool:
        """Whether one layer's MLP is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer, None where it sees everything."""
        if self.layer_types and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def layer_rope(self, layer: int) -> RopeConfig:
        """How one layer's queries and keys turn."""
        return self.ropes[layer] if self.ropes else self.rope

    def plain(self, *, architecture: str, num_layers: int, qk_norm: bool = False) -> ModelConfig:
        """A model of the same sizes without what sets this one apart from Llama, as drafters are made."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        others = ("max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_ids", "dtype")
        known = self.rope.kind in ("default", "linear", "llama3", "yarn")
        return ModelConfig(
            architecture=architecture,
            num_layers=num_layers,
            qk_norm=qk_norm,
            rope=replace(self.rope, share=1.0) if known else RopeConfig(theta=self.rope.theta),
            **{name: getattr(self, name) for name in (*sizes, *others)},
        )

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The caches that the model needs."""
        layers = tuple(range(self.num_layers))
        return (CacheGroup(layers=layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim),)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return layer

    @property
    def num_parameters(self) -> int:
        """Weights in the model, shared ones counted once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = hidden * (heads + self.num_heads * self.head_dim)
        attention += self.qkv_bias * heads + self.o_bias * hidden
        if self.qk_norm:
            attention += self.head_dim * (self.num_heads + self.num_kv_heads if self.whole_qk_norm else 2)
        mlps = self.num_layers * (3 * hidden * inner + self.mlp_bias * (2 * inner + hidden))
        if self.experts is not None:
            mixture = self.experts.num_experts * (3 * hidden * self.experts.inner_size + hidden)
            mlps = sum(mixture if self.has_experts(layer) else 3 * hidden * inner for layer in range(self.num_layers))
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        norms = hidden * sum(name is not None for name in astuple(self.norms))
        return self.num_layers * (attention + norms) + mlps + tables + hidden

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
        family = FAMILIES[architecture]
        hf = {**family.defaults, **_text(hf)}
        activation = _activation(hf)

        def need(key: str) -> Any:
            if hf.get(key) is None:
                raise ConfigError(f"the model's config has no {key!r}, which {architecture} needs")
            return hf[key]

        num_layers, num_heads, hidden_size = need("num_hidden_layers"), need("num_attention_heads"), need("hidden_size")
        own = family.read(hf)
        eos = hf.get("eos_token_id")
        fields: dict[str, Any] = {
            "architecture": architecture,
            "vocab_size": need("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": need("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
            "head_dim": hf.get("head_dim") or hidden_size // num_heads,
            "max_position_embeddings": need("max_position_embeddings"),
            "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
            "rope": own["rope"] if "rope" in own else read_rope(hf),
            "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
            "activation": activation,
            "bos_token_id": hf.get("bos_token_id"),
            "eos_token_ids": () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            "dtype": checkpoint_dtype(hf),
            "quantisation": read_quantisation(hf.get("quantization_config")),
            "tensor_prefix": hf.get("tensor_prefix", "model."),
        }
        return cls(**fields | own)


def _text(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about text of the config of a model for more than that."""
    if "text_config" not in hf:
        return hf
    outer = {key: hf[key] for key in ("eos_token_id", "dtype", "torch_dtype", "quantization_config") if hf.get(key)}
    return {**hf["text_config"], **outer, "tensor_prefix": "language_model.model."}


def _activation(hf: Mapping[str, Any]) -> Activation:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act is {name!r} in the model's config; supported: {', '.join(map(repr, ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """Type of the weights, in either spelling."""
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
