"""The decoder layers of a drafter: how its config describes them, and which tensors they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftloop.drafters.files import Shape
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig

FIRST = "layers.0."
SINK = "attention_sink_bias"
"""Of a layer's attention: a score for each query head."""


def count_layers(shapes: Mapping[str, Shape]) -> int:
    """Layers that have tensors, by plain name; 1 where none is named."""
    return 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=0)


def decoder_config(base: Mapping[str, Any], shapes: Mapping[str, Shape], num_layers: int) -> ModelConfig:
    """The decoder layers, as the config describes them and the tensors (by plain name) show."""
    base = dict(base)
    query, heads = shapes.get(f"{FIRST}self_attn.q_proj.weight"), base.get("num_attention_heads")
    if base.get("head_dim") is None and query and heads:
        base["head_dim"] = query[0] // heads
    model = ModelConfig.from_hf(
        {
            **base,
            "architectures": ["LlamaForCausalLM"],  # one set of layers serves all; the tensors say the rest
            "num_hidden_layers": num_layers,
            "tie_word_embeddings": False,
        }
    )

    if model.quantisation is not None:
        raise ConfigError(
            f"the drafter is quantised ({model.quantisation.method!r}); a head must have plain weights, or int8 "
            "ones with a scale per row"
        )

    def some(*names: str) -> bool:
        return any(FIRST + name in shapes for name in names)

    return replace(
        model,
        vocab_size=shapes.get("embed_tokens.weight", (model.vocab_size,))[0],
        qkv_bias=some(*(f"self_attn.{name}_proj.bias" for name in ("q", "k", "v", "qkv"))),
        o_bias=some("self_attn.o_proj.bias"),
        mlp_bias=some("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"),
        qk_norm=some("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    )


def projection_shapes(model: ModelConfig, layer: int, *, input_size: int | None = None) -> dict[str, Shape]:
    """Attention and MLP of one layer, by plain name; `input_size` of q, k and v, where it is not the hidden size."""
    width, inner, prefix = model.hidden_size, model.intermediate_size, f"layers.{layer}."
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    found: dict[str, Shape] = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        found[f"{prefix}self_attn.{name}_proj.weight"] = (rows, input_size or width)
        if model.qkv_bias:
            found[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
    found[f"{prefix}self_attn.o_proj.weight"] = (width, q)
    if model.o_bias:
        found[f"{prefix}self_attn.o_proj.bias"] = (width,)
    if model.qk_norm:
        found |= {f"{prefix}self_attn.{name}_norm.weight": (model.head_dim,) for name in "qk"}
    if model.sinks and model.sinks[layer]:
        found[f"{prefix}self_attn.{SINK}"] = (model.num_heads,)
    for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
        found[f"{prefix}mlp.{name}_proj.weight"] = shape
        if model.mlp_bias:
            found[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
    return found


def check_shapes(
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    *,
    name: str,
    kind: str,
    causes: Mapping[str, str] | None = None,
) -> None:
    """Compare a checkpoint's tensors with what its config asks for. Raises ConfigError listing what is wrong.

    `kind` says in words what it should be, `causes` why a tensor is likely to have another shape.
    """
    if missing := [f"{tensor} {list(shape)}" for tensor, shape in expected.items() if tensor not in found]:
        raise ConfigError(f"{name!r} lacks {', '.join(missing)}; the export is incomplete")
    if extra := [f"{tensor} {list(shape)}" for tensor, shape in found.items() if tensor not in expected]:
        raise ConfigError(f"{name!r} has tensors that {kind} does not: {', '.join(extra)}")
    for tensor, shape in expected.items():
        if found[tensor] != shape:
            cause = (causes or {}).get(tensor, "check that config.json and weights are of the same drafter")
            raise ConfigError(
                f"{tensor} of {name!r} has shape {list(found[tensor])}, but config.json asks for {list(shape)}; {cause}"
            )


def fc_cause(num_aux: int, target_hidden_size: int) -> str:
    """Why the projection of the target's states is likely to have another shape."""
    return f"it reads {num_aux} states of {target_hidden_size} numbers; check target_hidden_size and the aux layer ids"
