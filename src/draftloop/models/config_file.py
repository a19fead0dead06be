"""A folder's `config.json`: an object in which every key that is read has a value of its kind. Imports nothing heavy.

Users edit these files. What must be a number, a list or an object is said here once, so that whoever reads a key can
rely on it, or finds null. What transformers' own code reads is its own affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftloop.errors import ConfigError
from draftloop.models.resolve import read_json


class Kind(NamedTuple):
    """Of a value: what it must be, in words, and whether one is."""

    words: str
    takes: Callable[[Any], bool]


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _integer(value) or (isinstance(value, float) and math.isfinite(value))


def _list_of(kind: Kind) -> Kind:
    each = kind.takes
    return Kind(f"a list, each of it {kind.words}", lambda value: isinstance(value, list) and all(map(each, value)))


INTEGER = Kind("an integer", _integer)
SIZE = Kind("an integer >= 1", lambda value: _integer(value) and value >= 1)
COUNT = Kind("an integer >= 0", lambda value: _integer(value) and value >= 0)
NUMBER = Kind("a number", _number)
POSITIVE = Kind("a number above 0", lambda value: _number(value) and value > 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = Kind("an object of objects", lambda value: OBJECT.takes(value) and all(map(OBJECT.takes, value.values())))
IDS = Kind("a token id, or a list of them", lambda value: COUNT.takes(value) or _list_of(COUNT).takes(value))

_KEYS: Mapping[Kind, str] = {
    SIZE: """
        backbone_hidden_size block_size centroid_intermediate_top_k decoder_sparse_step draft_vocab_size
        dspark_block_size global_head_dim head_dim hidden_size intermediate_size max_position_embeddings
        moe_intermediate_size no_rope_layer_interval num_attention_heads num_centroids num_experts num_experts_per_tok
        num_global_key_value_heads num_heads num_hidden_layers num_key_value_heads num_local_experts num_target_layers
        original_max_position_embeddings sliding_window_pattern swa_window_size target_hidden_size
        truncated_vocab_size vocab_size
    """,
    COUNT: """
        hidden_size_per_layer_input markov_rank mask_token_id max_window_layers num_aux_hidden_states
        num_kv_shared_layers num_nextn_predict_layers pard_token ptd_token_id sliding_window vocab_size_per_layer_input
    """,
    NUMBER: """
        attention_factor attn_logit_softcapping final_logit_softcapping logit_scale mscale mscale_all_dim
        partial_rotary_factor residual_multiplier
    """,
    POSITIVE: """
        attention_multiplier beta_fast beta_slow embedding_multiplier factor high_freq_factor logits_scaling
        low_freq_factor query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_theta
    """,
    FLAG: """
        add_swa_attention_sink_bias attention_bias attention_k_eq_v causal confidence_head_with_markov
        enable_confidence_head enable_moe_block mlp_bias norm_topk_prob original_lm_head sliding_window_non_causal
        tie_word_embeddings truncate use_double_wide_mlp use_ordered_embeddings use_sliding_window use_swa
    """,
    TEXT: """
        dtype hidden_act hidden_activation markov_head_type model_type projector_type quant_method rope_type
        speculators_model_type torch_dtype
    """,
    OBJECT: """
        dflash_config draftloop_target eagle_config full_attention input_activations quantization_config
        rope_parameters rope_scaling sliding_attention sparsity_config text_config transformer_layer_config weights
    """,
    OBJECTS: "config_groups per_layer_config",
    IDS: "bos_token_id eos_token_id",
    _list_of(TEXT): "architectures ignore ignored_layers layer_types modules_to_not_convert targets",
    _list_of(INTEGER): """
        aux_hidden_state_layer_ids dspark_target_layer_ids eagle_aux_hidden_state_layer_ids mlp_only_layers
        target_layer_ids
    """,
    _list_of(NUMBER): "long_factor no_rope_layers short_factor",
}
KINDS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}


def read_config(folder: Path, *keys: str, name: str = "config.json") -> dict[str, Any]:
    """A file of a model's or a drafter's folder, of which `keys` are read, or as far as anybody knows all.

    Raises ConfigError for no JSON object, naming the file, and as `check_config`.
    """
    path = folder / name
    config = read_json(path)
    check_config({key: config[key] for key in keys if key in config} if keys else config, path)
    return config


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError for a value that is of another kind than its key's, naming both and the file."""
    for key, value in config.items():
        kind = KINDS.get(key)
        if kind is None or value is None:
            continue
        if not kind.takes(value):
            raise ConfigError(f"{key} is {value!r} in {path}; it must be {kind.words}")
        for part in [value] if kind is OBJECT else value.values() if kind is OBJECTS else ():
            check_config(part, path)
