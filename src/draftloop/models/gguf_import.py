"""A llama.cpp GGUF file of the Llama architecture, written as a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from draftloop.errors import ConfigError
from draftloop.models.progress import progress_bar

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a layer's tensor -> Hugging Face's."""

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN = 3
"""llama.cpp's token type of special tokens."""


def convert(gguf_file: Path, folder: Path, *, show_progress: bool | None = None) -> None:
    """Write config.json, generation_config.json, tokenizer files and bfloat16 model.safetensors.

    Raises ConfigError for another architecture or another tokenizer than SmolLM's.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    facts = {name: reader.fields[name].contents() for name in reader.fields}
    for key, supported in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if facts.get(key) != supported:
            raise ConfigError(f"{key} is {facts.get(key)!r} in {gguf_file.name}; supported: {supported!r}")
    if facts.get("tokenizer.ggml.pre") != "smollm":
        raise ConfigError(
            f"tokenizer.ggml.pre is {facts.get('tokenizer.ggml.pre')!r} in {gguf_file.name}; supported: 'smollm'"
        )
    _write_config(facts, folder, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_tokenizer(facts, folder)
    _write_weights(reader.tensors, facts, folder / "model.safetensors", show_progress=show_progress)


def hf_name(name: str) -> str:
    """Hugging Face's name of a llama.cpp tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of a query or key weight.

    llama.cpp rotates neighbouring rows as pairs, Hugging Face rotates the first half of a head with
    its second half; the rows of each head are stored accordingly.
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_weights(tensors: list, facts: dict[str, Any], path: Path, *, show_progress: bool | None) -> None:
    import gguf.quants
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    found = {}
    for tensor in progress_bar(tensors, "Dequantising", "tensor", show=show_progress):
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        found[hf_name(tensor.name)] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
    save_file(found, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by the owner alone


def _write_config(facts: dict[str, Any], folder: Path, *, tied: bool) -> None:
    heads = facts["llama.attention.head_count"]
    ids = {
        key: facts[f"tokenizer.ggml.{name}_token_id"]
        for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        # float32 in the file: this prints 1e-05, not 9.999999747378752e-06
        "rms_norm_eps": float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(facts["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """A byte-level BPE whose digits stand alone, as SmolLM's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    pairs = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(name: str) -> str:
        return tokens[facts[f"tokenizer.ggml.{name}_token_id"]]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
