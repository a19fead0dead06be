"""llama.cpp GGUF files: their weights by Hugging Face's names, and a Hugging Face model folder around them.

Weights are dequantised when they are read. Source: the GGUF specification and its `gguf` package.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftloop.config.env import Environment
from draftloop.errors import ConfigError
from draftloop.observability.progress import progress_bar

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""llama.cpp's name of an architecture -> Hugging Face's class."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a layer's tensor -> Hugging Face's."""
GEMMA_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Of Llama 3.1 and later: by how much each wavelength is stretched. The config says it in other words."""
CONTROL_TOKEN = 3
"""llama.cpp's token type of special tokens."""
SHORT_GEMMA_WAVELENGTH = 10_000.0
"""Base wavelength of Gemma 3's sliding layers."""
GEMMA3_PERIOD = 6
"""Every sixth layer sees everything."""


class GgufFile:
    """A GGUF file of a known architecture. Raises ConfigError for what cannot be read."""

    def __init__(self, path: Path) -> None:
        import gguf

        try:
            self.reader: GGUFReader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path} as a GGUF file: {error}; download it again") from error
        self.path = path
        self.architecture = self.said("general.architecture")
        if self.architecture not in CLASSES:
            raise ConfigError(
                f"general.architecture is {self.architecture!r} in {path.name}; supported: {', '.join(CLASSES)}"
            )
        self.tensors = {self._hf_name(t.name): t for t in self.reader.tensors if t.name != ROPE_FACTORS}

    @property
    def is_gemma(self) -> bool:
        return self.architecture in ("gemma2", "gemma3")

    def said(self, key: str, default: Any = None) -> Any:
        """What the metadata says under a key."""
        field = self.reader.fields.get(key)  # vocabularies take seconds: nothing is read that is not asked for
        return default if field is None else field.contents()

    def fact(self, name: str, default: Any = None) -> Any:
        """By its name within the architecture; needed unless there is a default."""
        found = self.said(f"{self.architecture}.{name}", default)
        if found is None:
            raise ConfigError(f"{self.path.name} does not say {self.architecture}.{name}; the file is damaged")
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights, by Hugging Face's names."""
        # GGUF counts dimensions from the innermost
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """fp32, as Hugging Face keeps it. Raises ConfigError for a type that cannot be dequantised."""
        import gguf.quants

        tensor = self.tensors[name]
        try:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(f"{tensor.name} in {self.path.name} is {tensor.tensor_type.name}: {error}") from error
        weight = weight.reshape([int(n) for n in reversed(tensor.shape)])
        if self.architecture == "llama" and (heads := self._rotated_heads(name)):
            return unpermute(weight, heads)
        if self.is_gemma and name.endswith("norm.weight"):
            return weight - 1  # llama.cpp keeps what is multiplied with
        return weight

    def _rotated_heads(self, name: str) -> int:
        """Heads of a projection to queries or keys, 0 for others."""
        heads = int(self.fact("attention.head_count"))
        if ".q_proj." in name:
            return heads
        return int(self.fact("attention.head_count_kv", heads)) if ".k_proj." in name else 0

    def _hf_name(self, name: str) -> str:
        try:
            return hf_name(name, GEMMA_NAMES if self.is_gemma else LAYER_NAMES)
        except (KeyError, ValueError):
            raise ConfigError(f"{self.path.name} holds {name!r}, which {self.architecture} has not") from None

    # ---- config.json ------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """What `config.json` says."""
        heads, hidden = int(self.fact("attention.head_count")), int(self.fact("embedding_length"))
        head_dim = int(self.fact("attention.key_length", self.fact("rope.dimension_count", hidden // heads)))
        kind = CLASSES[str(self.architecture)]
        found: dict[str, Any] = {
            "architectures": [kind],
            "model_type": {"gemma3": "gemma3_text"}.get(str(self.architecture), self.architecture),
            "vocab_size": self.shapes()["model.embed_tokens.weight"][0],
            "hidden_size": hidden,
            "intermediate_size": int(self.fact("feed_forward_length")),
            "num_hidden_layers": int(self.fact("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.fact("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": int(self.fact("context_length")),
            "rms_norm_eps": _short(self.fact("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self.fact("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "attention_bias": any(name.endswith("q_proj.bias") for name in self.tensors) and kind.startswith("Llama"),
            "mlp_bias": False,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "torch_dtype": "bfloat16",
            **self.token_ids(),
        }
        return found | (self._gemma(found) if self.is_gemma else {})

    def _gemma(self, common: Mapping[str, Any]) -> dict[str, Any]:
        layers = common["num_hidden_layers"]
        period = GEMMA3_PERIOD if self.architecture == "gemma3" else 2
        # the largest ones divide scores by what their hidden size gives, not by the head size
        is_largest = layers == {"gemma3": 62, "gemma2": 46}[str(self.architecture)]
        found: dict[str, Any] = {
            "hidden_act": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": int(self.fact("attention.sliding_window")),
            "layer_types": [
                "full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)
            ],
            "query_pre_attn_scalar": common["hidden_size"] // common["num_attention_heads"]
            if is_largest
            else common["head_dim"],
        }
        if self.architecture == "gemma3":
            found["rope_local_base_freq"] = SHORT_GEMMA_WAVELENGTH
        for key, name in (("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping",) * 2):
            found[key] = self.said(f"{self.architecture}.{name}")
        return {key: value for key, value in found.items() if value is not None or key == "hidden_act"}

    def token_ids(self) -> dict[str, Any]:
        """Ids of special tokens, under Hugging Face's names; every id that ends an answer counts as its end."""
        names = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot"), "pad_token_id": ("padding",)}
        found: dict[str, Any] = {}
        for key, sources in names.items():
            ids = [self.said(f"tokenizer.ggml.{source}_token_id") for source in sources]
            known = list(dict.fromkeys(int(i) for i in ids if i is not None))
            if known:
                found[key] = known[0] if len(known) == 1 else known
        return found

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self.said(f"{self.architecture}.rope.scaling.type")
        factors = next((t.data for t in self.reader.tensors if t.name == ROPE_FACTORS), None)
        if factors is not None:
            return self._llama3_scaling(np.asarray(factors, np.float32), head_dim)
        if kind in (None, "none"):
            return None
        scaling = {"rope_type": kind, "factor": float(self.fact("rope.scaling.factor"))}
        if original := self.said(f"{self.architecture}.rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = int(original)
        return scaling

    def _llama3_scaling(self, factors: np.ndarray, head_dim: int) -> dict[str, Any]:
        """The settings that give these factors; they were 1, 4 and 8192 in every model so far."""
        low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
        wavelengths = 2 * np.pi * float(self.fact("rope.freq_base")) ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.allclose(factors, expected, rtol=1e-3):
            raise ConfigError(f"{ROPE_FACTORS} in {self.path.name} stretches wavelengths in a way that is not known")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    # ---- tokenizer --------------------------------------------------------------------------

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, if there is one. Raises ConfigError where that fails."""
        if "tokenizer.ggml.tokens" not in self.reader.fields:
            return  # prompts must be token ids
        if self.said("tokenizer.ggml.pre") == "smollm":
            facts = {key: self.said(key) for key in self.reader.fields if key.startswith("tokenizer.")}
            _write_smollm_tokenizer({**facts, "context_length": self.fact("context_length")}, folder)
            return
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
            assert isinstance(tokenizer, PreTrainedTokenizerBase)
            tokenizer.save_pretrained(str(folder))
        except Exception as error:  # whatever conversion trips over
            raise ConfigError(
                f"cannot make a tokenizer of {self.path.name} ({self.said('tokenizer.ggml.model')!r}, "
                f"{self.said('tokenizer.ggml.pre')!r}): {error}; name one with --tokenizer"
            ) from error


def read_tensors(path: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """Shapes by Hugging Face's names, and a function that reads one as fp32. Raises ConfigError."""
    import torch

    file = GgufFile(path)
    return file.shapes(), lambda name: torch.from_numpy(np.require(file.read(name), requirements=["C", "W"]))


def folder_of(path: Path) -> Path:
    """A model folder around a GGUF file: config and tokenizer from its metadata, and a link to it.

    It is made once, in the cache, and made again when the file changes. Raises ConfigError.
    """
    from draftloop.models.resolve import GGUF_NAME

    if not path.is_file():
        raise ConfigError(f"{str(path)!r} does not exist; check the path")
    path = path.resolve()
    status = path.stat()
    said = f"{path} {status.st_size} {status.st_mtime_ns} {VERSION}"
    folder = Environment.read().cache_root / "models" / f"{path.stem}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    file = GgufFile(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            (work / GGUF_NAME).symlink_to(path)
            file.write_tokenizer(work)
            _write_config(file, work)
            work.chmod(0o755)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if not (folder / "config.json").is_file():  # else another process was faster
            raise ConfigError(
                f"cannot write {folder}: {error}; set DRAFTLOOP_CACHE_ROOT to a folder that can be written"
            ) from error
    return folder


VERSION = 1
"""Raise it when folders must be made again."""


def convert(gguf_file: Path, folder: Path, *, show_progress: bool | None = None) -> None:
    """Write config.json, generation_config.json, tokenizer files and bfloat16 model.safetensors. Raises ConfigError."""
    import torch
    from safetensors.torch import save_file

    file = GgufFile(gguf_file)
    _write_config(file, folder)
    file.write_tokenizer(folder)
    found = {
        name: torch.from_numpy(np.array(file.read(name))).to(torch.bfloat16)
        for name in progress_bar(list(file.tensors), description="Dequantising", unit="tensor", show=show_progress)
    }
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner alone


def hf_name(name: str, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """Hugging Face's name of a llama.cpp tensor. Raises KeyError or ValueError for one that is not known."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{layer_names[part]}.{kind}"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of a query or key weight (or bias).

    llama.cpp rotates neighbouring rows as pairs, Hugging Face rotates the first half of a head with
    its second half; the rows of each head are stored accordingly.
    """
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _short(number: float) -> float:
    """float32 in the file: this gives 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _write_config(file: GgufFile, folder: Path) -> None:
    _write_json(folder / "config.json", file.config())
    _write_json(folder / "generation_config.json", file.token_ids())


def _write_smollm_tokenizer(facts: Mapping[str, Any], folder: Path) -> None:
    """A byte-level BPE whose digits stand alone."""
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
        "model_max_length": facts["context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
