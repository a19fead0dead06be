"""What a drafter's checkpoint looks like, whatever it is called: by its config and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftloop.errors import ConfigError

KINDS = {
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "eagle3": "an EAGLE-3 head",
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
    "mtp": "a multi-token-prediction module",
    "gemma4_mtp": "a Gemma 4 assistant",
    "medusa": "a set of Medusa heads",
    "draft_model": "a whole language model",
}
"""Method name -> what its checkpoints are, in words."""

_SKIPPED = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq)$|^verifier_")
"""Tensors that only training needs."""

_MEDUSA = re.compile(r"^(medusa_heads?\.)?(\d+\.\d+\.(linear\.)?|blocks\.\d+\.layers\.\d+\.)weight$")


def plain_name(name: str) -> str:
    """A tensor's name without the wrappers that exports put around it; empty for one that is not needed.

    `model.layers.0.x` and `midlayer.x` -> `layers.0.x`.
    """
    if _SKIPPED.search(name):
        return ""
    name = name.removeprefix("model.")
    if name == "draft_id_to_target_id":
        return "d2t"
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


READ = ("speculators_model_type", "architectures", "model_type", "dflash_config")
"""What of config.json tells."""


def kind_of(config: Mapping[str, Any], plain_names: Iterable[str]) -> str | None:
    """The method, a key of `KINDS`, that a checkpoint was made for; None where nothing tells.

    Exports of EAGLE heads call themselves `LlamaForCausalLM` as whole models do, so the tensors decide.
    """
    if kind := config.get("speculators_model_type"):
        return str(kind)
    said = " ".join([*(config.get("architectures") or []), str(config.get("model_type") or "")]).lower()
    names = set(plain_names)
    nested = config.get("dflash_config") or {}
    # exports of DSpark drafters may call themselves DFlash
    if nested.get("projector_type") == "dspark" or "markov_head.markov_w1.weight" in names:
        return "dspark"
    if any(map(_MEDUSA.match, names)):
        return "medusa"
    if "gemma4" in said and "assistant" in said:
        return "gemma4_mtp"
    for kind in ("dflash", "dspark", "medusa", "mtp"):
        if kind in said:
            return kind
    if "mask_hidden" in names or ("fc.weight" in names and {"pard_token", "ptd_token_id"} & config.keys()):
        return "peagle"
    if "fc.weight" in names:
        if "layers.0.hidden_norm.weight" in names or "eagle3" in said:
            return "eagle3"
        return "dflash" if "hidden_norm.weight" in names else "eagle"
    if "eagle3" in said:
        return "eagle3"  # and incomplete, which its reader says better
    if "layers.0.input_layernorm.weight" in names:
        return "draft_model"
    return None


def check_kind(method: str, config: Mapping[str, Any], plain_names: Iterable[str], *, name: str) -> None:
    """Raises ConfigError, saying what the checkpoint looks like, if it was made for another method."""
    kind = kind_of(config, plain_names)
    if kind is not None and kind != method:
        looks = KINDS.get(kind, f"something of kind {kind!r}")
        remedy = f"use method {kind!r}, or choose" if kind in KINDS else "choose"
        raise ConfigError(
            f"speculative method is {method!r}, but {name!r} looks like {looks}; {remedy} another checkpoint"
        )
