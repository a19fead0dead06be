"""A tiny Gemma 4 target and assistants for it, on disk."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftloop.attention.sdpa import SdpaBackend
from draftloop.drafters.gemma4_mtp_config import ORDERING, Gemma4AssistantConfig
from draftloop.models.decoder import attention_shapes
from draftloop.models.gemma4 import Gemma4Decoder
from draftloop.models.gemma4_config import Gemma4Config
from helpers import MAX_LEN, NO_EOS, VOCAB, _folder

WINDOW = 16
TARGET: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": NO_EOS,
    "dtype": "float32",
}
"""Two caches of unlike shape, a layer that reads another's, a window, and all that small models have."""

ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 64,
    "use_ordered_embeddings": False,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 6,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "text_config": {
        **{key: value for key, value in TARGET.items() if key not in ("architectures", "final_logit_softcapping")},
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
}


def random_weights(shapes: dict[str, tuple[int, ...]], *, seed: int) -> dict[str, Tensor]:
    """Large enough that every part changes what is said."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if name == ORDERING:
            weights[name] = torch.randperm(shape[0], generator=generator)
        elif len(shape) == 1:
            weights[name] = 1 + 0.3 * torch.rand(shape, generator=generator)
        else:
            std = 0.125 if "embed_tokens.weight" in name else 0.6 if "lm_head" in name else 0.2
            weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def write(name: str, config: dict[str, Any], weights: dict[str, Tensor]) -> str:
    folder = _folder() / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: weight.contiguous() for key, weight in weights.items()}, folder / "model.safetensors")
    return str(folder)


WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "global_head_dim": 128}
"""Changes to the target that every kernel takes."""


@functools.cache
def gemma4_target(*, wide: bool = False) -> str:
    """Folder of a four-layer Gemma 4."""
    hf = {**TARGET, **(WIDE if wide else {})}
    config, cpu = Gemma4Config.from_hf(hf), torch.device("cpu")
    backend = SdpaBackend(attention_shapes(config, page_size=16, dtype=torch.float32)[0], cpu)
    model = Gemma4Decoder(config, backend, device=cpu, dtype=torch.float32, max_positions=1)
    shapes = {key: tuple(weight.shape) for key, weight in model.destinations().items()}
    return write("gemma4-wide" if wide else "gemma4", hf, random_weights(shapes, seed=0))


def assistant_config(**changes: Any) -> dict[str, Any]:
    """config.json of an assistant; `changes` to it, those of `text_config` merged into what is there."""
    text = {**ASSISTANT["text_config"], **changes.pop("text_config", {})}
    return {**ASSISTANT, **changes, "text_config": text}


def assistant_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all tensors, by their names in the files."""
    ordered = config["use_ordered_embeddings"]
    shape = Gemma4AssistantConfig(
        model=Gemma4Config.from_text(config["text_config"], architecture="Gemma4ForCausalLM"),
        target_hidden_size=config["backbone_hidden_size"],
        num_centroids=config["num_centroids"] if ordered else 0,
        num_nearest=config["centroid_intermediate_top_k"] if ordered else 0,
    )
    inner = ("embed_tokens", "norm", "layers")
    return {f"model.{key}" if key.startswith(inner) else key: value for key, value in shape.shapes().items()}


@functools.cache
def gemma4_assistant(*, ordered: bool = False, wide: bool = False) -> str:
    """Folder of a two-layer assistant with random weights."""
    config = assistant_config(use_ordered_embeddings=ordered)
    if wide:
        text = {"hidden_size": 128, "head_dim": WIDE["head_dim"], "global_head_dim": WIDE["global_head_dim"]}
        config = assistant_config(use_ordered_embeddings=ordered, backbone_hidden_size=256, text_config=text)
    name = f"assistant-{'ordered' if ordered else 'plain'}{'-wide' if wide else ''}"
    return write(name, config, random_weights(assistant_shapes(config), seed=1))
