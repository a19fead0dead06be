"""The shape of an EAGLE head, and how its published forms are read. Nothing here reads weights.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024,
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025, and for
P-EAGLE arXiv 2602.01469.

Shape letters in comments: C width of the head, X width of what the target hands over, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftloop.drafters.aux_config import AuxConfig
from draftloop.drafters.files import Shape
from draftloop.drafters.kinds import KINDS, check_kind, plain_name
from draftloop.drafters.masks import mask_token
from draftloop.drafters.shapes import check_shapes, count_layers, decoder_config, fc_cause, projection_shapes
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.dense import FINAL_HIDDEN
from draftloop.models.presets import PRESETS

Method = Literal["eagle", "eagle3", "peagle"]

MASK_HIDDEN = "mask_hidden"
"""P-EAGLE: what stands for the target's states where the target has seen nothing yet, in any view of X numbers."""

NUM_DEFAULT_AUX = 3


@dataclass(frozen=True, kw_only=True)
class EagleConfig(AuxConfig):
    """An EAGLE head: one or a few decoder layers over token embeddings and the target's hidden states."""

    method: Method
    wide_layers: tuple[bool, ...]
    """Per layer: attention reads the embedding beside the hidden state, 2C wide."""
    input_norms: tuple[bool, ...]
    """Per layer: it has a norm of its input. The only layer of EAGLE-1 has none."""
    fc_bias: bool = False
    norm_before_residual: bool = False
    """The residual stream starts after the hidden state's norm, not before it."""
    norm_before_fc: bool = False
    """One norm over all aux states together."""
    fc_norm: bool = False
    """One norm per aux state."""
    norm_output: bool = False
    """The next step gets the hidden state after the final norm, not before it."""
    final_norm: bool = True
    own_head: bool = True
    mask_token_id: int | None = None
    """P-EAGLE: the token that stands for one that is not known yet."""

    @property
    def fuses_embedding(self) -> bool:
        """EAGLE-1 and 2: `fc` joins embedding and hidden state in every step; EAGLE-3: it joins the aux states once."""
        return self.method == "eagle"

    def usual_layers(self, num_target_layers: int) -> tuple[tuple[int, ...], bool]:
        return (2, num_target_layers // 2, num_target_layers - 3), False

    def aux_layers(self, num_target_layers: int, offset: int | None = None) -> tuple[int, ...]:
        if not self.fuses_embedding:
            return super().aux_layers(num_target_layers, offset)
        assert offset is None, "no option of EAGLE-1, which reads what leaves the last layer"
        return (FINAL_HIDDEN,)

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of the checkpoint, by its plain name."""
        model, width = self.model, self.model.hidden_size
        fc_inputs = 2 * width if self.fuses_embedding else self.aux_width
        found: dict[str, Shape] = {"fc.weight": (width, fc_inputs)}
        if self.fc_bias:
            found["fc.bias"] = (width,)
        if self.norm_before_fc:
            found["input_norm.weight"] = (self.aux_width,)
        if self.fc_norm:
            found |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(self.num_aux)}
        for index, (wide, normed) in enumerate(zip(self.wide_layers, self.input_norms, strict=True)):
            layer = f"layers.{index}."
            if wide:
                found[f"{layer}hidden_norm.weight"] = (width,)
            if normed:
                found[f"{layer}input_layernorm.weight"] = (width,)
            found[f"{layer}post_attention_layernorm.weight"] = (width,)
            found |= projection_shapes(model, index, input_size=2 * width if wide else None)
        if self.final_norm:
            found["norm.weight"] = (width,)
        if self.own_embeddings:
            found["embed_tokens.weight"] = (model.vocab_size, width)
        if self.own_head:
            found["lm_head.weight"] = (self.draft_vocab_size, width)
        if self.has_map:
            found["d2t"] = (self.draft_vocab_size,)
        if self.method == "peagle":
            found[MASK_HIDDEN] = (self.aux_width,)
        return found


def parse(
    config: Mapping[str, Any], tensors: Mapping[str, Shape], *, method: Method, name: str
) -> tuple[EagleConfig, dict[str, str]]:
    """Read a head's config.json and the names and shapes of its tensors.

    Returns the shape of the head and, for each tensor's plain name, its name in the files. Raises
    ConfigError for a checkpoint of another method, one that cannot work, and for tensors that are
    missing, unexpected or of another shape than the config says. `name` is for messages.
    """
    names = {plain_name(full): full for full in tensors}
    names.pop("", None)
    check_kind(method, config, names, name=name)
    shapes = {plain: tuple(tensors[full]) for plain, full in names.items()}
    if MASK_HIDDEN in shapes:
        shapes[MASK_HIDDEN] = (math.prod(shapes[MASK_HIDDEN]),)
    head = _read(config, shapes, method)
    if method == "peagle":
        head = replace(head, mask_token_id=mask_token(config, head.model.vocab_size, name=name))
    causes = {} if head.fuses_embedding else {"fc.weight": fc_cause(head.num_aux, head.target_hidden_size)}
    check_shapes(head.shapes(), shapes, name=name, kind=KINDS[method], causes=causes)
    head.check_map(name)
    return head, names


def _read(config: Mapping[str, Any], shapes: Mapping[str, Shape], method: Method) -> EagleConfig:
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    speculators = "speculators_model_type" in config
    base: dict[str, Any] = dict(config.get("transformer_layer_config") or {})
    if not base:
        base = dict(config["model"]) if isinstance(config.get("model"), Mapping) else dict(config)

    def option(key: str, tensor: str = "", default: bool = False) -> bool:
        value = nested.get(key, config.get(key))
        return bool(value) if value is not None else (tensor in shapes if tensor else default)

    num_layers = count_layers(shapes)
    model = decoder_config(base, shapes, num_layers)
    width = model.hidden_size
    ids, outputs = _layer_ids(config, nested)
    num_aux = len(ids) if ids is not None else config.get("num_aux_hidden_states") or NUM_DEFAULT_AUX
    own_head = "lm_head.weight" in shapes
    draft_vocab = config.get("draft_vocab_size") or config.get("truncated_vocab_size")
    # SpecForge has a key norm_output too, which says something else: that logits follow a norm
    output_key = "" if nested and not speculators else "norm_output"
    return EagleConfig(
        method=method,
        layout=_layout(config, nested),
        model=model,
        target_hidden_size=config.get("target_hidden_size") or width,
        draft_vocab_size=(shapes["lm_head.weight"][0] if own_head else 0) or draft_vocab or model.vocab_size,
        num_aux=1 if method == "eagle" else num_aux,
        layer_ids=ids,
        ids_are_outputs=outputs,
        wide_layers=tuple(_is_wide(shapes, index, width) for index in range(num_layers)),
        input_norms=tuple(
            method != "eagle" or index > 0 or f"layers.{index}.input_layernorm.weight" in shapes
            for index in range(num_layers)
        ),
        fc_bias="fc.bias" in shapes,
        norm_before_residual=option("norm_before_residual", default=speculators and method == "eagle3"),
        norm_before_fc=option("norm_before_fc", "input_norm.weight"),
        fc_norm=option("fc_norm", "fc_norm.0.weight"),
        norm_output=bool(output_key) and option(output_key),
        final_norm=method != "eagle" or "norm.weight" in shapes,
        own_embeddings="embed_tokens.weight" in shapes,
        own_head=own_head,
        has_map="d2t" in shapes,
    )


def _is_wide(shapes: Mapping[str, Shape], index: int, width: int) -> bool:
    """By its tensors: exports differ in which of several layers see the embedding."""
    query = shapes.get(f"layers.{index}.self_attn.q_proj.weight", ())
    return f"layers.{index}.hidden_norm.weight" in shapes or query[1:] == (2 * width,)


def _layout(config: Mapping[str, Any], nested: Mapping[str, Any]) -> str:
    if "speculators_model_type" in config:
        return "speculators"
    if "target_layer_ids" in config:
        return "DeepSpec"
    return "SpecForge" if nested else "EAGLE"


def _layer_ids(config: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, bool]:
    """Ids, and whether they name outputs. Where an id stands says what it means."""
    key = "eagle_aux_hidden_state_layer_ids"
    for ids, outputs in ((config.get(key), False), (nested.get(key), True), (config.get("target_layer_ids"), True)):
        if ids:
            return tuple(int(index) for index in ids), outputs
    return None, False


def check_target(head: EagleConfig, name: str, target: ModelConfig, target_name: str) -> None:
    """Refuse a head that was made for another target. Raises ConfigError naming tensor, shapes and likely cause."""
    width, vocab = target.hidden_size, target.vocab_size
    borrowed = [n for n, own in (("embed_tokens", head.own_embeddings), ("lm_head", head.own_head)) if not own]
    shapes = head.shapes()

    def refuse(tensor: str, needed: list[int], cause: str) -> None:
        raise ConfigError(
            f"{tensor} of {name!r} has shape {list(shapes[tensor])}, but {target_name!r} needs {needed}; "
            f"the head is probably made for a target {cause}"
        )

    fits = (head.model.hidden_size if head.fuses_embedding else head.target_hidden_size) == width
    if not fits and head.fuses_embedding:
        refuse("fc.weight", [width, 2 * width], f"with hidden size {head.model.hidden_size}, not {width}")
    elif not fits:
        needed = [head.model.hidden_size, head.num_aux * width]
        refuse("fc.weight", needed, f"with hidden size {head.target_hidden_size}, not {width}")
    if borrowed and head.model.hidden_size != width:
        raise ConfigError(
            f"{name!r} is {head.model.hidden_size} wide and has no {' or '.join(borrowed)} of its own, so it cannot "
            f"use those of {target_name!r}, which are {width} wide; the export is incomplete"
        )
    # tables of one tokenizer may be padded differently, but not by much
    padding = min(1024, vocab // 16)
    if head.own_embeddings and abs(head.model.vocab_size - vocab) > padding:
        refuse("embed_tokens.weight", [vocab, head.model.hidden_size], f"with {head.model.vocab_size} ids, not {vocab}")
    if not head.has_map and abs(head.draft_vocab_size - vocab) > padding:
        if head.own_head:
            refuse("lm_head.weight", [vocab, head.model.hidden_size], f"with {head.draft_vocab_size} ids, not {vocab}")
        raise ConfigError(
            f"{name!r} drafts from {head.draft_vocab_size} ids and has no lm_head, but that of {target_name!r} has "
            f"{vocab}; the head is probably made for another target"
        )


def _preset(target: str, draft_vocab_size: int, max_position_embeddings: int) -> EagleConfig:
    """One layer of the target's own shape, three aux states, a reduced vocabulary: what is published for Llama."""
    model = PRESETS[target]
    return EagleConfig(
        method="eagle3",
        layout="preset",
        model=replace(
            model.plain(architecture="LlamaForCausalLM", num_layers=1), max_position_embeddings=max_position_embeddings
        ),
        target_hidden_size=model.hidden_size,
        draft_vocab_size=draft_vocab_size,
        num_aux=NUM_DEFAULT_AUX,
        wide_layers=(True,),
        input_norms=(True,),
        has_map=True,
    )


def _parallel(head: EagleConfig) -> EagleConfig:
    """The same with the four layers of a P-EAGLE head, of which the first alone reads the embedding."""
    return replace(
        head,
        method="peagle",
        model=replace(head.model, num_layers=4),
        wide_layers=(True, False, False, False),
        input_norms=(True,) * 4,
        own_embeddings=True,
        mask_token_id=head.model.vocab_size - 1,
    )


HEAD_PRESETS: dict[str, EagleConfig] = {
    "eagle3-llama-3.1-8b": _preset("llama-3.1-8b", 32_000, 131_072),
    "eagle3-llama-3.1-70b": _preset("llama-3.1-70b", 32_000, 131_072),
    "eagle3-qwen3-30b-a3b": _preset("qwen3-30b-a3b", 32_000, 40_960),
    "eagle3-smollm2-135m": _preset("smollm2-135m-shape", 8192, 8192),
    "eagle3-tiny": replace(_preset("tiny", 64, 1024), layer_ids=(0, 1, 2)),
    "peagle-llama-3.1-8b": _parallel(_preset("llama-3.1-8b", 32_000, 131_072)),
    "peagle-tiny": _parallel(replace(_preset("tiny", 64, 1024), layer_ids=(0, 1, 2))),
}
"""Shapes without weights, for benchmarks and tests with `load_format="dummy"`."""
