"""The shape of a multi-token-prediction module, and the three ways in which checkpoints keep one. Reads no weights.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; the published checkpoints of DeepSeek,
Qwen3-Next and Qwen3.5, and MiMo-7B.

Shape letters in comments: C hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftloop.drafters.files import Shape
from draftloop.drafters.shapes import check_shapes, decoder_config, projection_shapes
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.tensors import mtp_tensors

LAYER = "layers.0."


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one family keeps and runs its modules."""

    name: str
    module: str
    """Prefix of a module's tensors, a pattern whose group is the module's number."""
    shared: str = ""
    """Prefix of tensors that all modules share."""
    names: Mapping[str, str]
    """Our plain name -> theirs, without the prefix, of what is not part of the decoder layer."""
    hidden_first: bool = False
    """`fc` reads the hidden state, then the embedding."""
    zeroed_first: bool = False
    """The pair at position 0 has zeros for its embedding."""
    norms_from_one: bool = False
    """Norms multiply by 1 + weight."""


STYLES = (
    Style(
        name="Qwen",
        module=r"mtp\.layers\.(\d+)\.",
        shared="mtp.",
        names={
            "embed_norm.weight": "pre_fc_norm_embedding.weight",
            "hidden_norm.weight": "pre_fc_norm_hidden.weight",
            "fc.weight": "fc.weight",
            "norm.weight": "norm.weight",
        },
        norms_from_one=True,
    ),
    Style(
        name="MiMo",
        module=r"model\.mtp_layers\.(\d+)\.",
        names={
            "embed_norm.weight": "token_layernorm.weight",
            "hidden_norm.weight": "hidden_layernorm.weight",
            "fc.weight": "input_proj.weight",
            "norm.weight": "final_layernorm.weight",
        },
        hidden_first=True,
        zeroed_first=True,
    ),
    Style(
        name="DeepSeek",
        module=r"model\.layers\.(\d+)\.",
        names={
            "embed_norm.weight": "enorm.weight",
            "hidden_norm.weight": "hnorm.weight",
            "fc.weight": "eh_proj.weight",
            "norm.weight": "shared_head.norm.weight",
            "lm_head.weight": "shared_head.head.weight",
            "embed_tokens.weight": "embed_tokens.weight",
        },
        zeroed_first=True,
    ),
)

_REFUSED = {
    "mlp.experts.": "a mixture of experts",
    "mlp.gate.weight": "a mixture of experts",
    "self_attn.kv_a_proj_with_mqa.": "latent attention",
    "self_attn.q_a_proj.": "latent attention",
}
"""Part of a tensor's name -> what it is a sign of."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """One module: a decoder layer over the embedding of a token and the hidden state before it."""

    style: Style
    model: ModelConfig
    """The decoder layer; `vocab_size` is that of the token ids it is fed."""
    num_modules: int = 1
    """Modules in the checkpoint."""
    own_embeddings: bool = False
    """False: the target's."""
    own_head: bool = False
    """False: the target's."""

    has_map = False
    """It drafts from the target's vocabulary."""

    @property
    def aux_width(self) -> int:
        """Numbers per token that the target hands over."""
        return self.model.hidden_size

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of a module, by its plain name."""
        width, vocab = self.model.hidden_size, self.model.vocab_size
        found: dict[str, Shape] = {"fc.weight": (width, 2 * width)}
        norms = ("embed_norm", "hidden_norm", f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm", "norm")
        found |= {f"{norm}.weight": (width,) for norm in norms}
        found |= projection_shapes(self.model, 0)
        if self.own_embeddings:
            found["embed_tokens.weight"] = (vocab, width)
        if self.own_head:
            found["lm_head.weight"] = (vocab, width)
        return found


def parse(
    config: Mapping[str, Any], tensors: Mapping[str, Shape], *, target: ModelConfig, name: str
) -> tuple[MtpConfig, list[dict[str, str]]]:
    """Read the target's config.json and the names and shapes of its tensors; `target` is its shape.

    Returns the shape of a module and, for each of them, the name in the files of each tensor by its plain name.
    Raises ConfigError where there is none, where it is of a kind that cannot run, and for tensors that are missing,
    unexpected or of another shape than the config says. `name` is for messages.
    """
    ours = mtp_tensors(tensors, target.num_layers)
    style, modules = _find(ours, target.num_layers, config, name)
    every = [_plain_names(style, ours, number) for number in modules]
    names = every[0]
    for part, what in _REFUSED.items():
        if found := next((full for plain, full in names.items() if part in plain), None):
            raise ConfigError(
                f"the multi-token-prediction module of {name!r} is {what} ({found}); supported are dense layers "
                "with grouped-query attention: use another method"
            )
    shapes = {plain: tuple(tensors[full]) for plain, full in names.items()}
    model = decoder_config({**config, "head_dim": target.head_dim, "quantization_config": None}, shapes, 1)
    module = MtpConfig(
        style=style,
        model=replace(model, vocab_size=target.vocab_size),
        num_modules=len(modules),
        own_embeddings="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
    )
    causes = {}
    query = shapes.get(f"{LAYER}self_attn.q_proj.weight")
    if query and query[0] == 2 * model.num_heads * model.head_dim:
        causes[f"{LAYER}self_attn.q_proj.weight"] = "twice as many rows are a gate on attention, which is not supported"
    for names in every:
        found = {plain: tuple(tensors[full]) for plain, full in names.items()}
        check_shapes(module.shapes(), found, name=name, kind="a multi-token-prediction module", causes=causes)
    return module, every


def _find(ours: set[str], num_layers: int, config: Mapping[str, Any], name: str) -> tuple[Style, list[int]]:
    """The style, and the numbers of the modules, rising."""
    for style in STYLES:
        numbers = {int(match[1]) for full in ours if (match := re.match(style.module, full))}
        if numbers:
            return style, sorted(numbers)
    said = {key: config[key] for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if config.get(key)}
    promise = "".join(
        f"; its config.json says {key} {value}, so the export left them out" for key, value in said.items()
    )
    raise ConfigError(
        f"speculative method 'mtp' needs multi-token-prediction tensors in the target's checkpoint, but {name!r} has "
        f"none (mtp.*, model.mtp_layers.* or model.layers.{num_layers}.*){promise}; choose another target or method"
    )


def _plain_names(style: Style, ours: set[str], number: int) -> dict[str, str]:
    """Plain name -> name in the files, of one module and of what all share."""
    theirs = {their: plain for plain, their in style.names.items()}
    names = {}
    for full in ours:
        match = re.match(style.module, full)
        if match and int(match[1]) != number:
            continue
        rest = full[match.end() :] if match else full.removeprefix(style.shared)
        if match and style.shared:
            names[f"{LAYER}{rest}"] = full
        else:
            names[theirs.get(rest, rest if style.shared else f"{LAYER}{rest}")] = full
    return {plain: full for plain, full in names.items() if not plain.endswith("rotary_emb.inv_freq")}


def of_target(target: ModelConfig) -> MtpConfig:
    """A module of the target's own shape, for random weights. Raises ConfigError where its layers are not all alike."""
    if len(target.cache_groups) > 1:
        raise ConfigError(
            f"speculative method 'mtp' makes a random module for a target whose layers are all alike, but "
            f"{target.architecture} has layers of {len(target.cache_groups)} shapes; use another method"
        )
    layer = replace(
        target, num_layers=1, layer_types=(), sliding_window=None, tie_word_embeddings=False, quantisation=None
    )
    return MtpConfig(style=next(style for style in STYLES if style.name == "DeepSeek"), model=layer)
