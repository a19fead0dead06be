"""The shape of a Gemma 4 multi-token-prediction assistant, and how its checkpoint is read. Nothing here reads weights.

Source: the published `gemma4_assistant` checkpoints and their `config.json`.

Shape letters in comments: C width of the assistant, B width of the target, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftloop.drafters.files import Shape
from draftloop.drafters.kinds import KINDS, check_kind, plain_name
from draftloop.drafters.shapes import check_shapes
from draftloop.errors import ConfigError
from draftloop.models.config import LayerType, ModelConfig
from draftloop.models.gemma4_config import Gemma4Config

METHOD = "gemma4_mtp"
ORDERING = "masked_embedding.token_ordering"


@dataclass(frozen=True, kw_only=True)
class Gemma4AssistantConfig:
    """A few layers with queries alone, which read the target's keys and values."""

    model: Gemma4Config
    """The layers; none of them has keys and values."""
    target_hidden_size: int
    num_centroids: int = 0
    """Groups of ids, of which only the nearest are scored; 0: all ids are."""
    num_nearest: int = 0
    """Groups that are scored."""

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of the checkpoint, by its plain name."""
        model, width = self.model, self.model.hidden_size
        found: dict[str, Shape] = {
            "embed_tokens.weight": (model.vocab_size, width),
            "norm.weight": (width,),
            "pre_projection.weight": (width, 2 * self.target_hidden_size),
            "post_projection.weight": (self.target_hidden_size, width),
        }
        if self.num_centroids:
            found |= {"masked_embedding.centroids.weight": (self.num_centroids, width), ORDERING: (model.vocab_size,)}
        for layer, kind in enumerate(model.layer_types):
            prefix, query, inner = f"layers.{layer}.", model.num_heads * model.head_size(kind), model.inner_size(layer)
            norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            found |= {f"{prefix}{norm}_layernorm.weight": (width,) for norm in norms}
            found |= {
                f"{prefix}layer_scalar": (1,),
                f"{prefix}self_attn.q_proj.weight": (query, width),
                f"{prefix}self_attn.q_norm.weight": (model.head_size(kind),),
                f"{prefix}self_attn.o_proj.weight": (width, query),
                f"{prefix}mlp.gate_proj.weight": (inner, width),
                f"{prefix}mlp.up_proj.weight": (inner, width),
                f"{prefix}mlp.down_proj.weight": (width, inner),
            }
            if model.qkv_bias:
                found |= {f"{prefix}self_attn.q_proj.bias": (query,), f"{prefix}self_attn.o_proj.bias": (width,)}
        return found

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """Kinds of its layers."""
        return tuple(dict.fromkeys(self.model.layer_types))


def parse(
    config: Mapping[str, Any], tensors: Mapping[str, Shape], *, name: str
) -> tuple[Gemma4AssistantConfig, dict[str, str]]:
    """Read an assistant's config.json and the names and shapes of its tensors.

    Returns its shape and, for each tensor's plain name, its name in the files. Raises ConfigError for a
    checkpoint of another method, one that cannot work, and for tensors that are missing, unexpected or of
    another shape than the config says. `name` is for messages.
    """
    names = {plain_name(full): full for full in tensors}
    names.pop("", None)
    check_kind(METHOD, config, names, name=name)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json of {name!r} has no 'text_config', which {KINDS[METHOD]} needs")
    num_layers = text.get("num_hidden_layers")
    if text.get("num_kv_shared_layers") not in (0, None, num_layers) or text.get("hidden_size_per_layer_input"):
        raise ConfigError(
            f"{name!r} has layers with keys and values, or with embeddings, of their own, which {KINDS[METHOD]} has "
            "not; check num_kv_shared_layers and hidden_size_per_layer_input of its text_config"
        )
    # what says that they have none may be left out; they are no wider for it
    text = {**text, "num_kv_shared_layers": num_layers, "use_double_wide_mlp": False}
    model = Gemma4Config.from_text(text, architecture="Gemma4ForCausalLM")
    if not config.get("tie_word_embeddings", True):
        raise ConfigError(f"{name!r} has an output head of its own; supported: that which is its embedding table")
    names.pop("lm_head.weight", None)
    ordered = bool(config.get("use_ordered_embeddings", False))
    assistant = Gemma4AssistantConfig(
        model=model,
        target_hidden_size=config.get("backbone_hidden_size") or 1536,
        num_centroids=(config.get("num_centroids") or 2048) if ordered else 0,
        num_nearest=(config.get("centroid_intermediate_top_k") or 32) if ordered else 0,
    )
    if ordered and (model.vocab_size % assistant.num_centroids or assistant.num_nearest > assistant.num_centroids):
        raise ConfigError(
            f"{name!r} scores {assistant.num_nearest} of {assistant.num_centroids} groups of {model.vocab_size} ids; "
            "groups must be of one size, and no fewer than are scored: check num_centroids and "
            "centroid_intermediate_top_k"
        )
    check_shapes(
        assistant.shapes(),
        {plain: tuple(tensors[full]) for plain, full in names.items()},
        name=name,
        kind=KINDS[METHOD],
    )
    return assistant, names


def check_target(assistant: Gemma4AssistantConfig, name: str, target: ModelConfig, target_name: str) -> Gemma4Config:
    """The target's shape, if the assistant can read its keys and values. Raises ConfigError naming what differs."""
    if not isinstance(target, Gemma4Config):
        raise ConfigError(
            f"{name!r} drafts from the keys and values of a Gemma 4 model, but {target_name!r} is "
            f"{target.architecture}; choose the Gemma 4 model that it was made for"
        )
    model = assistant.model
    pairs = [
        ("hidden size", assistant.target_hidden_size, target.hidden_size),
        ("vocabulary size", model.vocab_size, target.vocab_size),
    ]
    for kind in assistant.kinds:
        if target.last_own_layer(kind) is None:
            raise ConfigError(f"{name!r} reads keys and values of {kind} layers, of which {target_name!r} has none")
        pairs.append((f"{kind} head size", model.head_size(kind), target.head_size(kind)))
    for what, wanted, found in pairs:
        if wanted != found:
            raise ConfigError(
                f"{name!r} is made for a target with {what} {wanted}, but that of {target_name!r} is {found}; choose "
                "the assistant of this target"
            )
    for kind in assistant.kinds:
        if model.num_heads % target.kv_heads(kind):
            raise ConfigError(
                f"{name!r} has {model.num_heads} query heads, which do not divide among the {target.kv_heads(kind)} "
                f"key/value heads of {kind} layers of {target_name!r}; choose the assistant of this target"
            )
    return target
