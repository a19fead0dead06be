"""Tiny EAGLE heads on disk, in every layout that is published, and a toy target for which a head is always right."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.drafters.dflash_config import DFlashConfig
from draftloop.drafters.eagle_config import EagleConfig
from draftloop.engine.llm import LLM
from draftloop.models.config import ModelConfig, RopeConfig
from helpers import HEADS, HIDDEN, KV_HEADS, LAYERS, MAX_LEN, VOCAB, _folder, make_engine, tiny_model

DRAFT_VOCAB = 64


def head_config(method: str = "eagle3", *, width: int = HIDDEN, max_len: int = MAX_LEN, **changes: Any) -> EagleConfig:
    """A one-layer head for the tiny target; three aux states for EAGLE-3, a reduced vocabulary."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=16,
        max_position_embeddings=max_len,
        rope=RopeConfig(original_max_position_embeddings=max_len),
        dtype="float32",
    )
    eagle3 = {"num_aux": 3, "wide_layers": (True,), "input_norms": (True,), "has_map": True, "layer_ids": (0, 1, 2)}
    eagle1 = {"wide_layers": (False,), "input_norms": (False,), "final_norm": False, "own_head": False}
    base = {
        "layout": "test",
        "model": model,
        "target_hidden_size": HIDDEN,
        "draft_vocab_size": DRAFT_VOCAB if method == "eagle3" else VOCAB,
        **(eagle3 if method == "eagle3" else {**eagle1, "fc_bias": True}),
    }
    return EagleConfig(method=method, **{**base, **changes})  # type: ignore[arg-type]


def head_weights(config: EagleConfig | DFlashConfig, *, seed: int = 3, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random weights by plain name, large enough that every part of the head changes what is drafted."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        if name == "d2t":
            ids = torch.randperm(vocab, generator=generator)[: shape[0]].sort().values
            weights[name] = ids - torch.arange(shape[0])
        elif len(shape) == 1:
            weights[name] = 1 + 0.3 * torch.randn(shape, generator=generator)
        else:
            std = 1.0 if "embed" in name else 0.6 if "lm_head" in name else 0.2
            weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def config_json(config: EagleConfig, layout: str = "top") -> dict[str, Any]:
    """config.json of a head: "top" and "nested" say where the layer ids stand; "speculators", "deepspec"."""
    model = config.model
    plain = {
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if config.method == "eagle":
        return {"architectures": ["LlamaForCausalLM"], **plain, "bias": config.fc_bias}
    options = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    ids = {"eagle_aux_hidden_state_layer_ids": list(config.layer_ids or ())} if config.layer_ids else {}
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": plain,
            **options,
            **ids,
        }
    if layout == "deepspec":
        ids = {"target_layer_ids": list(config.layer_ids or ()), "ttt_length": 7, "draft_num_hidden_layers": 1}
        return {"architectures": ["Qwen3Eagle3Model"], **plain, "model_type": "qwen3", **ids}
    if layout == "nested":
        ids = {"eagle_config": {**ids, "use_aux_hidden_state": True}}
    return {"architectures": ["LlamaForCausalLMEagle3"], **plain, **options, **ids}


def file_names(weights: dict[str, Tensor], style: str) -> dict[str, Tensor]:
    """Rename from plain names: "midlayer" (EAGLE, SpecForge), "model" (NeMo) or "plain" (speculators)."""
    if style == "midlayer":
        return {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    if style == "model":
        bare = ("lm_head", "d2t")
        return {name if name.startswith(bare) else f"model.{name}": weight for name, weight in weights.items()}
    return weights


def step_by_step(target: str, device: str, spec: dict[str, Any], **settings: Any) -> LLM:
    """An engine to compare after each step, never ahead of that. Blocks end at many places, by coin."""
    forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    return make_engine(
        target,
        device=device,
        dtype="float32",
        cudagraph_capture_sizes=(2, 8),
        async_scheduling=False,
        device_loop="off",
        speculative_config={**forced, **spec},
        **settings,
    )


@functools.cache
def tiny_head(
    name: str,
    config: EagleConfig | None = None,
    *,
    method: str = "eagle3",
    layout: str = "top",
    style: str = "midlayer",
    seed: int = 3,
    pickled: bool = False,
) -> str:
    """Folder of a head with random weights."""
    config = config or head_config(method)
    weights = head_weights(config, seed=seed)
    if "d2t" in weights:  # training's own, which nobody needs
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    return write_head(name, config_json(config, layout), file_names(weights, style), pickled=pickled)


def wide_config(method: str = "eagle3") -> EagleConfig:
    """A head for the tiny target made 256 wide, which every kernel takes."""
    model = replace(head_config().model, hidden_size=256, intermediate_size=512, head_dim=64)
    return head_config(method, model=model, target_hidden_size=256)


def wide_head(method: str = "eagle3") -> str:
    return tiny_head(f"wide-{method}", wide_config(method))


def write_head(name: str, config: dict[str, Any], weights: dict[str, Tensor], *, pickled: bool = False) -> str:
    folder = _folder() / f"head-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file({k: w.contiguous() for k, w in weights.items()}, folder / "model.safetensors")
    return str(folder)


# ---- multi-token-prediction modules, in the tiny target's own checkpoint --------------------------

MTP_KEYS = {
    "qwen": {"mtp_num_hidden_layers": 1},
    "mimo": {"num_nextn_predict_layers": 1},
    "deepseek": {"num_nextn_predict_layers": 1},
}
_AROUND = {
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "deepseek": (f"model.layers.{LAYERS}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
"""Style -> prefix, and what it calls the norms of embedding and hidden state, the projection and the last norm."""


def mtp_weights(
    style: str, *, extra: dict[str, Any] | None = None, qk_norm: bool = False, hidden: int = HIDDEN
) -> dict[str, Tensor]:
    """Random tensors of one module, as the style's files have them; `extra`: shapes of more."""
    generator = torch.Generator().manual_seed(5)
    prefix, embed_norm, hidden_norm, fc, norm = _AROUND[style]
    layer = f"{prefix}layers.0." if style == "qwen" else prefix
    inner, width = 2 * hidden, hidden // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}{embed_norm}.weight": (hidden,),
        f"{prefix}{hidden_norm}.weight": (hidden,),
        f"{prefix}{fc}.weight": (hidden, 2 * hidden),
        f"{prefix}{norm}.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (hidden, hidden),
        f"{layer}self_attn.k_proj.weight": (width, hidden),
        f"{layer}self_attn.v_proj.weight": (width, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        **({f"{layer}self_attn.{name}_norm.weight": (hidden // HEADS,) for name in "qk"} if qk_norm else {}),
        **{f"{layer}{name}": shape for name, shape in (extra or {}).items()},
    }
    weights = {}
    for name, shape in shapes.items():
        std = 1.0 if "embed_tokens" in name else 0.6 if "head.head" in name else 0.2 if len(shape) > 1 else 0.3
        weights[name] = torch.randn(shape, generator=generator) * std
        if len(shape) == 1 and style != "qwen" and "norm" in name:
            weights[name] += 1  # the others' norms multiply by 1 + weight
    return weights


def module_weights(style: str, m: int, **options: Any) -> dict[str, Tensor]:
    """Those of the m-th of several modules, under the names of the first. Qwen's share all but their layers."""
    first = mtp_weights(style, **options)
    other = {name: w.roll(m, 0) for name, w in first.items()}
    return first | {name: w for name, w in other.items() if style != "qwen" or "layers.0." in name}


def _numbered(style: str, name: str, m: int) -> str:
    if style == "deepseek":
        return name.replace(f"layers.{LAYERS}.", f"layers.{LAYERS + m}.")
    return name.replace("layers.0.", f"layers.{m}.")


@functools.cache
def mtp_target(style: str, variant: str = "", modules: int = 1) -> str:
    """Folder of the tiny target with a module beside its layers, or several."""
    if modules > 1:
        return write_mtp_target(f"mtp-{style}-{modules}", style, _several(style, modules))
    return write_mtp_target(f"mtp-{style}{variant}", style, mtp_variant(style, variant))


def _several(style: str, modules: int, **options: Any) -> dict[str, Tensor]:
    return {
        _numbered(style, name, m): weight
        for m in range(modules)
        for name, weight in module_weights(style, m, **options).items()
    }


@functools.cache
def wide_mtp_target(modules: int = 1) -> str:
    """The same for the target made 256 wide, which every kernel takes."""
    weights = _several("deepseek", modules, hidden=256)
    return write_mtp_target(f"mtp-wide-{modules}", "deepseek", weights, target=tiny_model("wide", hidden=256))


def mtp_variant(style: str, variant: str = "") -> dict[str, Tensor]:
    tables = {"embed_tokens.weight": (VOCAB, HIDDEN), "shared_head.head.weight": (VOCAB, HIDDEN)}
    biases = {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", 64), ("k", 32), ("v", 32))}
    extra = {"": {}, "-tables": tables, "-biases": biases, "-qk_norm": {}}[variant]
    return mtp_weights(style, extra=extra, qk_norm=variant == "-qk_norm")


def write_mtp_target(
    name: str, style: str, module: dict[str, Tensor], *, target: str | None = None, **keys: Any
) -> str:
    """Folder of a target, the tiny one if none is given, with a module's tensors beside its own."""
    source = Path(target or tiny_model())
    config = {**json.loads((source / "config.json").read_text()), **MTP_KEYS[style], **keys}
    return write_head(name, config, {**load_file(source / "model.safetensors"), **module})


# ---- a target that counts, and a head that is always right about it ----------------------------

COUNT_VOCAB, COUNT_STEP = 32, 8


def _shift(amount: int, rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Unit vector t -> `scale` * unit vector t + amount, counting around, in the first dimensions."""
    weight = torch.zeros(rows, columns)
    ids = torch.arange(COUNT_VOCAB)
    weight[(ids + amount) % COUNT_VOCAB, ids] = scale
    return weight


def _counting_layer(prefix: str, inputs: int, move: int | None, scale: float = 1.0) -> dict[str, Tensor]:
    """A layer without attention; `move`: its MLP drowns unit vector t in a larger unit vector t + move."""
    inner, width = 2 * HIDDEN, HIDDEN // HEADS * KV_HEADS
    shown = torch.zeros(inner, HIDDEN) if move is None else _shift(0, inner, HIDDEN)
    return {
        f"{prefix}self_attn.q_proj.weight": torch.zeros(HIDDEN, inputs),
        f"{prefix}self_attn.k_proj.weight": torch.zeros(width, inputs),
        f"{prefix}self_attn.v_proj.weight": torch.zeros(width, inputs),
        f"{prefix}self_attn.o_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        f"{prefix}mlp.gate_proj.weight": shown,
        f"{prefix}mlp.up_proj.weight": shown.clone(),
        f"{prefix}mlp.down_proj.weight": _shift(move or 0, HIDDEN, inner, scale),
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


@functools.cache
def counting_target() -> str:
    """Folder of a four-layer Llama that says t + 8 after t.

    What enters layers 0 and 1 shows t, what enters layer 2 shows t + 7, and what enters layer 3, t + 10.
    """
    weights = {
        "model.embed_tokens.weight": torch.eye(COUNT_VOCAB, HIDDEN),
        "lm_head.weight": _shift(-2, COUNT_VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer, (move, scale) in enumerate([(None, 1.0), (7, 1.0), (3, 64.0), (None, 1.0)]):
        weights |= _counting_layer(f"model.layers.{layer}.", HIDDEN, move, scale)
    model = head_config().model
    config = {**config_json(replace(head_config("eagle"), model=replace(model, vocab_size=COUNT_VOCAB, num_layers=4)))}
    return write_head("counting-target", config, weights)


@functools.cache
def counting_head(layer_id: int, layout: str) -> str:
    """Folder of an EAGLE-3 head that is always right if it reads what enters layer 2 of the counting target."""
    model = replace(head_config().model, vocab_size=COUNT_VOCAB)
    config = head_config(
        model=model,
        num_aux=1,
        layer_ids=(layer_id,),
        norm_before_residual=True,
        draft_vocab_size=COUNT_VOCAB,
        has_map=False,
    )
    weights = {
        "fc.weight": torch.eye(HIDDEN),
        **_counting_layer("layers.0.", 2 * HIDDEN, COUNT_STEP),
        "layers.0.hidden_norm.weight": torch.full((HIDDEN,), 0.01),  # so that the last step's state fades
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _shift(1, COUNT_VOCAB, HIDDEN),
    }
    return write_head(f"counting-{layer_id}-{layout}", config_json(config, layout), weights)
