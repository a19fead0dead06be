"""The shape of a DFlash or DSpark drafter, and how its published forms are read. Nothing here reads weights.

Sources: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036, and "DSpark",
arXiv 2607.05147. Layouts: z-lab, DeepSpec, SpecForge, speculators.

Shape letters in comments: C width of the drafter, X width of what the target hands over, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftloop.drafters.aux_config import AuxConfig
from draftloop.drafters.dspark_config import DSparkConfig, read_heads
from draftloop.drafters.files import Shape
from draftloop.drafters.kinds import KINDS, check_kind, plain_name
from draftloop.drafters.shapes import SINK, check_shapes, count_layers, decoder_config, fc_cause, projection_shapes
from draftloop.errors import ConfigError
from draftloop.models.config import LayerType, ModelConfig
from draftloop.models.presets import PRESETS

Method = Literal["dflash", "dspark"]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(AuxConfig):
    """A few decoder layers that fill a block of masks at once, beside keys and values made of the target's states."""

    method: Method
    causal_layers: tuple[bool, ...]
    """Per layer: a slot of the block sees no later ones."""
    block_size: int
    """Slots of the block that it was trained with: a token, and masks after it."""
    samples_from_anchor: bool
    """Slot j predicts the token after its position, so that the first, the anchor, counts; else the token at it."""
    mask_token_id: int | None
    """What the masks are embedded as; None where the checkpoint has an embedding for them."""
    ids_are_outputs: bool = True
    num_target_layers: int | None = None
    """Layers of the target that it was made for, where the checkpoint says it."""
    fused_qkv: bool = False
    """The checkpoint has q, k and v in one tensor."""
    heads: DSparkConfig | None = None
    """What DSpark adds."""

    @property
    def max_drafts(self) -> int:
        """K at most: slots that predict something."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot of a block that predicts a draft."""
        return 0 if self.samples_from_anchor else 1

    def usual_layers(self, num_target_layers: int) -> tuple[tuple[int, ...], bool]:
        return spread_layers(num_target_layers, self.num_aux), True

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of the checkpoint, by its plain name."""
        model, width = self.model, self.model.hidden_size
        found: dict[str, Shape] = {"fc.weight": (width, self.aux_width), "hidden_norm.weight": (width,)}
        for layer in range(model.num_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found[f"layers.{layer}.{norm}.weight"] = (width,)
            found |= projection_shapes(model, layer)
        found["norm.weight"] = (width,)
        if self.own_embeddings:
            found["embed_tokens.weight"] = (model.vocab_size, width)
        if self.own_head:
            found["lm_head.weight"] = (self.draft_vocab_size, width)
        if self.has_map:
            found["d2t"] = (self.draft_vocab_size,)
        if self.heads:
            found |= self.heads.shapes(width, self.draft_vocab_size)
        return _fuse(found) if self.fused_qkv else found


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Layers whose outputs are read where a checkpoint names none: evenly from the second to the third from last."""
    if count == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 3
    return tuple(round(1 + index * (last - 1) / (count - 1)) for index in range(count))


def _fuse(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Instead of q, k and v of each layer, one tensor with their rows."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        fused = name
        for part in "qkv":
            fused = fused.replace(f"self_attn.{part}_proj", "self_attn.qkv_proj")
        rows = found[fused][0] if fused in found else 0
        found[fused] = (rows + shape[0], *shape[1:])
    return found


def parse(
    config: Mapping[str, Any],
    tensors: Mapping[str, Shape],
    *,
    method: Method,
    name: str,
    mask_embedding: bool = False,
) -> tuple[DFlashConfig, dict[str, str]]:
    """Read a drafter's config.json and the names and shapes of its tensors.

    Returns its shape and, for each tensor's plain name, its name in the files. `mask_embedding`: the
    checkpoint brings one. Raises ConfigError for a checkpoint of another method, one that cannot work, and
    for tensors that are missing, unexpected or of another shape than the config says. `name` is for messages.
    """
    names = {plain_name(full): full for full in tensors}
    names.pop("", None)
    check_kind(method, config, names, name=name)
    shapes = {plain: tuple(tensors[full]) for plain, full in names.items()}
    _refuse_unsupported(config, name)
    drafter = _read(config, shapes, method, name)
    causes = {"fc.weight": fc_cause(drafter.num_aux, drafter.target_hidden_size)}
    check_shapes(drafter.shapes(), shapes, name=name, kind=KINDS[method], causes=causes)
    drafter.check_map(name)
    if mask_embedding:
        return replace(drafter, mask_token_id=None), names
    if drafter.mask_token_id is None:
        raise ConfigError(
            f"{name!r} names no mask token: config.json has none of {', '.join(MASK_KEYS)}; the export is incomplete"
        )
    return drafter, names


MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where a mask token may be named, first come first served; the first also in `dflash_config`, which goes before."""


def _refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    nested: Mapping[str, Any] = config.get("dflash_config") or {}
    both = {**config, **nested}
    if both.get(key := "dspark_backbone_conv_enabled"):
        raise ConfigError(f"{name!r} needs convolutions ({key} is {both[key]!r}); choose another checkpoint")
    if both.get("use_aux_hidden_state") is False:
        raise ConfigError(f"use_aux_hidden_state is false in {name!r}; supported are drafters that read hidden states")
    if (projector := both.get("projector_type", "dflash")) not in ("dflash", "dspark"):
        raise ConfigError(f"projector_type is {projector!r} in {name!r}; supported: 'dflash', 'dspark'")
    if (scale := both.get("logit_scale", 1.0)) != 1.0:
        raise ConfigError(f"logit_scale is {scale!r} in {name!r}; supported: 1.0")


def _read(config: Mapping[str, Any], shapes: Mapping[str, Shape], method: Method, name: str) -> DFlashConfig:
    nested: Mapping[str, Any] = config.get("dflash_config") or {}
    speculators = "speculators_model_type" in config
    base = _complete(config.get("transformer_layer_config") or config)
    model = decoder_config(base, shapes, count_layers(shapes))
    model = replace(_slide(model, base, nested, name), sinks=_sinks(model.num_layers, config, nested, shapes))
    ids, outputs = _layer_ids(config, nested)
    target_width = config.get("target_hidden_size") or model.hidden_size
    fc = shapes.get("fc.weight", (0, 0))
    own_head = "lm_head.weight" in shapes
    draft_vocab = config.get("draft_vocab_size") or shapes.get("d2t", (0,))[0]
    block_size = nested.get("block_size") or config.get("block_size") or config.get("dspark_block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise ConfigError(f"block_size of {name!r} is {block_size!r}; config.json must name one of 2 or more")
    mask = next((ids[key] for ids in (nested, config) for key in MASK_KEYS if ids.get(key) is not None), None)
    shifted = next(
        (d[key] for d in (nested, config) for key in ("sample_from_anchor", "shift_label") if key in d), None
    )
    return DFlashConfig(
        method=method,
        layout="speculators"
        if speculators
        else "z-lab"
        if method == "dflash"
        else "SpecForge"
        if nested
        else "DeepSpec",
        model=model,
        causal_layers=_causal_layers(model, config, nested, base),
        block_size=block_size,
        samples_from_anchor=method == "dspark" if shifted is None else bool(shifted),
        mask_token_id=mask,
        target_hidden_size=target_width,
        draft_vocab_size=(shapes["lm_head.weight"][0] if own_head else 0) or draft_vocab or model.vocab_size,
        num_aux=len(ids) if ids is not None else max(1, fc[1] // target_width),
        layer_ids=ids,
        ids_are_outputs=outputs,
        num_target_layers=config.get("num_target_layers"),
        fused_qkv="layers.0.self_attn.qkv_proj.weight" in shapes,
        own_embeddings="embed_tokens.weight" in shapes,
        own_head=own_head,
        has_map="d2t" in shapes,
        heads=read_heads(config, shapes, vocab_size=model.vocab_size, name=name) if method == "dspark" else None,
    )


def _complete(base: Mapping[str, Any]) -> Mapping[str, Any]:
    """speculators leaves out what transformers would fill in."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    if all(key in base for key in needed) or "model_type" not in base:
        return base
    from transformers import AutoConfig

    return {**AutoConfig.for_model(base["model_type"]).to_dict(), **base}


def _layer_ids(config: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, bool]:
    """Ids, and whether they name outputs. Where an id stands says what it means."""
    for ids, outputs in (
        (config.get("eagle_aux_hidden_state_layer_ids"), False),
        (config.get("aux_hidden_state_layer_ids"), False),
        (nested.get("target_layer_ids"), True),
        (config.get("dspark_target_layer_ids"), False),
        (config.get("target_layer_ids"), True),
    ):
        if ids:
            return tuple(int(index) for index in ids), outputs
    return None, True


def _slide(model: ModelConfig, base: Mapping[str, Any], nested: Mapping[str, Any], name: str) -> ModelConfig:
    """The sliding layers: those that `layer_types` names, or all of them with `use_swa`."""
    types: tuple[LayerType, ...] = tuple((base.get("layer_types") or ())[: model.num_layers])
    if "sliding_attention" not in types:
        types = ("sliding_attention",) * model.num_layers if nested.get("use_swa") else ()
    if not types:
        return model
    window = nested.get("swa_window_size") or base.get("sliding_window")
    if window is None:
        raise ConfigError(f"{name!r} has sliding layers, but neither sliding_window nor swa_window_size says how wide")
    return replace(model, sliding_window=window, layer_types=types)


def _sinks(
    num_layers: int, config: Mapping[str, Any], nested: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> tuple[bool, ...]:
    """Layers with a sink per head: those with a tensor for it, where config.json does not say otherwise."""
    said = nested.get(SINK, config.get("add_swa_attention_sink_bias"))
    there = tuple(f"layers.{layer}.self_attn.{SINK}" in shapes for layer in range(num_layers))
    if any(there) if said is None else said:
        return there if any(there) else (True,) * num_layers
    return ()


def _causal_layers(
    model: ModelConfig, config: Mapping[str, Any], nested: Mapping[str, Any], base: Mapping[str, Any]
) -> tuple[bool, ...]:
    """Full layers see the whole block; of sliding ones, each export has its own rule."""
    if nested.get("causal") is not None:
        return (bool(nested["causal"]),) * model.num_layers
    if "speculators_model_type" in config:
        causal = not config.get("sliding_window_non_causal", True)
    else:
        causal = "sliding_attention" in (base.get("layer_types") or ())
    return tuple(causal and model.window(layer) is not None for layer in range(model.num_layers))


def check_target(drafter: DFlashConfig, name: str, target: ModelConfig, target_name: str) -> None:
    """Refuse a drafter that was made for another target. Raises ConfigError naming what differs."""
    width, vocab, shapes = target.hidden_size, target.vocab_size, drafter.shapes()
    made_for = "it is probably made for another target"
    if drafter.num_target_layers not in (None, target.num_layers):
        raise ConfigError(
            f"{name!r} is made for a target of {drafter.num_target_layers} layers (num_target_layers), but "
            f"{target_name!r} has {target.num_layers}; choose a drafter made for it"
        )
    if drafter.target_hidden_size != width:
        raise ConfigError(
            f"fc.weight of {name!r} has shape {list(shapes['fc.weight'])}, but {target_name!r} needs "
            f"{[drafter.model.hidden_size, drafter.num_aux * width]}; the drafter is probably made for a target with "
            f"hidden size {drafter.target_hidden_size}, not {width}"
        )
    borrowed = [n for n, own in (("embed_tokens", drafter.own_embeddings), ("lm_head", drafter.own_head)) if not own]
    if borrowed and drafter.model.hidden_size != width:
        raise ConfigError(
            f"{name!r} is {drafter.model.hidden_size} wide and has no {' or '.join(borrowed)} of its own, so it cannot "
            f"use those of {target_name!r}, which are {width} wide; the export is incomplete"
        )
    # tables of one tokenizer may be padded differently, but not by much
    padding = min(1024, vocab // 16)
    if drafter.own_embeddings and abs(drafter.model.vocab_size - vocab) > padding:
        raise ConfigError(
            f"embed_tokens.weight of {name!r} has {drafter.model.vocab_size} rows, but {target_name!r} has {vocab} "
            f"ids; {made_for}"
        )
    if not drafter.has_map and abs(drafter.draft_vocab_size - vocab) > padding:
        raise ConfigError(
            f"{name!r} drafts from {drafter.draft_vocab_size} ids, but {target_name!r} has {vocab}; {made_for}"
        )
    heads = drafter.heads
    if heads and heads.markov_kind and abs(heads.vocab_size - vocab) > padding:
        raise ConfigError(
            f"markov_head.markov_w1.weight of {name!r} has {heads.vocab_size} rows, but {target_name!r} has {vocab} "
            f"ids, each of which may come before a draft; {made_for}"
        )
    num_rows = drafter.model.vocab_size if drafter.own_embeddings else vocab
    if drafter.mask_token_id is not None and not 0 <= drafter.mask_token_id < num_rows:
        raise ConfigError(
            f"mask_token_id of {name!r} is {drafter.mask_token_id}, but the embedding has {num_rows} rows and there "
            f"is no mask_embedding.pt; {made_for}"
        )


def _preset(target: str, *, method: Method, num_layers: int, block_size: int) -> DFlashConfig:
    """Layers of the target's own shape with head norms, as many aux states as layers: what is published."""
    model = PRESETS[target]
    return DFlashConfig(
        method=method,
        layout="preset",
        model=replace(model, num_layers=num_layers, tie_word_embeddings=False, qk_norm=True),
        causal_layers=(False,) * num_layers,
        block_size=block_size,
        samples_from_anchor=method == "dspark",
        mask_token_id=model.vocab_size - 1,
        target_hidden_size=model.hidden_size,
        draft_vocab_size=model.vocab_size,
        num_aux=num_layers,
    )


def _dspark_preset(target: str, *, num_layers: int, block_size: int, rank: int) -> DFlashConfig:
    """Tables of its own, a plain Markov head, and a confidence head that reads it."""
    made = _preset(target, method="dspark", num_layers=num_layers, block_size=block_size)
    heads = DSparkConfig(
        markov_kind="vanilla",
        markov_rank=rank,
        vocab_size=made.model.vocab_size,
        confidence=True,
        confidence_reads_markov=True,
    )
    return replace(made, heads=heads, own_embeddings=True, own_head=True)


BLOCK_PRESETS: dict[str, DFlashConfig] = {
    "dflash-llama-3.1-8b": _preset("llama-3.1-8b", method="dflash", num_layers=5, block_size=16),
    "dspark-llama-3.1-8b": _dspark_preset("llama-3.1-8b", num_layers=5, block_size=7, rank=256),
    "dflash-tiny": _preset("tiny", method="dflash", num_layers=1, block_size=8),
    "dspark-tiny": _dspark_preset("tiny", num_layers=1, block_size=7, rank=8),
}
"""Shapes without weights, for benchmarks and tests with `load_format="dummy"`."""
