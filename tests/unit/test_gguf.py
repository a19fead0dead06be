"""GGUF files as models: names, order of rows, norms, settings and values, against the folder that they were made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.models.gguf_import import GEMMA_NAMES, GgufFile, hf_name, unpermute
from draftloop.models.loader import load_config, resolve_model
from draftloop.models.resolve import read_json
from draftloop.models.rope import cos_sin_table
from draftloop.models.tensors import open_tensors
from gguf_files import permuted, write_gguf
from helpers import HIDDEN, LAYERS, answers, engine, greedy, make_engine, prompts, tiny_model

Q8_0, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(tmp_path / "cache"))


def weights() -> dict[str, Tensor]:
    return load_file(Path(tiny_model()) / "model.safetensors")


def test_a_file_is_a_model(tmp_path: Path) -> None:
    """Of plain weights, the same text as the folder; made once, and again when the file changes."""
    path = write_gguf(tmp_path / "tiny.gguf", weights())
    llm = make_engine(str(path))
    assert llm.engine.tokenizer is None
    asked, params = prompts(4), greedy(16, ignore_eos=True)
    assert answers(llm.generate(asked, params)) == answers(engine().generate(asked, params))
    source = resolve_model(str(path))
    assert source.folder == resolve_model(str(path)).folder
    config = load_config(source)
    assert config.vocab_size == 160
    assert config.eos_token_ids == (3, 5)
    assert not config.tie_word_embeddings
    write_gguf(path, weights(), settings={"context_length": 100})
    assert load_config(resolve_model(str(path))).max_position_embeddings == 100


def test_a_quantised_file_is_what_its_numbers_stand_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", weights(), kind=Q8_0)
    assert path.stat().st_size < 0.35 * sum(weight.nbytes for weight in weights().values())
    with open_tensors([path]) as tensors:
        for name, weight in weights().items():
            assert tensors.shapes[name] == weight.shape
            torch.testing.assert_close(tensors.read(name), weight, rtol=0, atol=float(weight.abs().max()) / 120)
    plain = tmp_path / "plain"
    plain.mkdir()
    with open_tensors([path]) as tensors:
        save_file({name: tensors.read(name) for name in tensors.shapes}, plain / "model.safetensors")
    (plain / "config.json").write_text((Path(tiny_model()) / "config.json").read_text())
    ours, theirs = (
        make_engine(str(model)).generate(prompts(3), greedy(12, ignore_eos=True)) for model in (path, plain)
    )
    assert answers(ours) == answers(theirs)


def test_rows_of_qwen_stay_where_they_are_and_biases_come_along(tmp_path: Path) -> None:
    bias = torch.randn(HIDDEN)
    tensors = {**weights(), "model.layers.0.self_attn.q_proj.bias": bias}
    path = write_gguf(tmp_path / "qwen.gguf", tensors, architecture="qwen2")
    with open_tensors([path]) as found:
        name = "model.layers.0.self_attn.q_proj"
        assert torch.equal(found.read(f"{name}.weight"), tensors[f"{name}.weight"])
        assert torch.equal(found.read(f"{name}.bias"), bias)
    config = load_config(resolve_model(str(path)))
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.qkv_bias


def test_biases_of_llama_are_reordered_like_their_weights() -> None:
    bias = np.arange(32, dtype=np.float32)
    assert np.array_equal(unpermute(permuted(bias, 2), 2), bias)


def test_gemma_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    norm = torch.randn(HIDDEN)
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    tensors = {f"model.layers.0.{name}_layernorm.weight": norm for name in names}
    tensors["model.embed_tokens.weight"] = torch.randn(160, HIDDEN)
    settings = {"attention.sliding_window": 16, "attention.key_length": 32}
    path = write_gguf(tmp_path / "gemma.gguf", tensors, architecture="gemma3", settings=settings)
    file = GgufFile(path)
    for name in tensors:
        np.testing.assert_allclose(file.read(name), tensors[name], atol=1e-6)
    config = file.config()
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["tie_word_embeddings"]
    assert config["head_dim"] == config["query_pre_attn_scalar"] == 32
    assert config["layer_types"] == ["sliding_attention"] * LAYERS


def test_stretched_wavelengths_of_llama_3(tmp_path: Path) -> None:
    """Factors in the file become the settings that give the same rotation; other factors are refused."""
    settings = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings["original_max_position_embeddings"] = 8192
    folder = tmp_path / "folder"
    folder.mkdir()
    hf = json.loads((Path(tiny_model()) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"rope_theta": 500000.0, "rope_scaling": settings}))
    expected = load_config(resolve_model(str(folder), load_format="dummy")).rope
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = torch.tensor(1 / ((1 - smooth) / 8 + smooth), dtype=torch.float32)
    base = {"rope.freq_base": 500000.0}
    path = write_gguf(tmp_path / "long.gguf", {**weights(), "rope_freqs.weight": factors}, settings=base)
    found = load_config(resolve_model(str(path))).rope
    options = {"head_dim": 16, "max_positions": 64, "device": torch.device("cpu")}
    assert torch.equal(cos_sin_table(found, **options), cos_sin_table(expected, **options))
    path = write_gguf(tmp_path / "odd.gguf", {**weights(), "rope_freqs.weight": factors * 1.5}, settings=base)
    with pytest.raises(ConfigError, match="in a way that is not known"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.gguf", "does not exist; check the path"), ("text.gguf", "as a GGUF file"), ("bert.gguf", "'bert'")],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "text.gguf").write_text("not a model " * 100)
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(tmp_path / name))


def test_tensors_that_the_architecture_has_not_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", {**weights(), "rope_other.weight": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"odd\.gguf holds 'rope_other\.weight', which llama has not"):
        resolve_model(str(path))


def test_a_file_that_lacks_something_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"bare\.gguf does not say llama\..*; the file is damaged"):
        resolve_model(str(tmp_path / "bare.gguf"))
    odd = {"tokenizer.ggml.model": "odd", "tokenizer.ggml.tokens": ["a", "b"]}
    path = write_gguf(tmp_path / "words.gguf", weights(), settings=odd)
    with pytest.raises(ConfigError, match=r"tokenizer of words\.gguf \('odd', None\): .*; name one with --tokenizer"):
        resolve_model(str(path))
    whole = {**weights(), "model.norm.weight": torch.ones(HIDDEN, dtype=torch.int32)}
    with (
        open_tensors([write_gguf(tmp_path / "whole.gguf", whole)]) as tensors,
        pytest.raises(ConfigError, match=r"output_norm\.weight in whole\.gguf is I32: "),
    ):
        tensors.read("model.norm.weight")
    path = write_gguf(tmp_path / "tiny.gguf", weights())
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", "/dev/null/x")
    with pytest.raises(ConfigError, match=r"cannot write .*; set DRAFTLOOP_CACHE_ROOT to a folder that can be written"):
        resolve_model(str(path))


def test_names_of_all_parts() -> None:
    assert hf_name("blk.7.ffn_down.weight") == "model.layers.7.mlp.down_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight", GEMMA_NAMES) == "model.layers.0.pre_feedforward_layernorm.weight"
    assert hf_name("output.weight") == "lm_head.weight"


def test_the_folder_holds_a_link_and_no_copy(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights(), kind=F16)
    folder = resolve_model(str(path)).folder
    assert folder is not None
    assert (folder / "model.gguf").resolve() == path
    assert read_json(folder / "config.json")["model_type"] == "llama"
    assert sum(file.lstat().st_size for file in folder.iterdir()) < 4096
