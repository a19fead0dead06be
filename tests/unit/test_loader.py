"""Finding and loading models: random weights, and every way a name or checkpoint can be wrong."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.errors import ConfigError
from draftloop.models import resolve, smollm2
from draftloop.models.loader import ModelSource, eos_token_ids, load_config, load_tokenizer, resolve_model
from draftloop.models.presets import PRESETS
from loading import change, load

TINY = PRESETS["tiny"]
TINY_HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": TINY.intermediate_size,
    "num_hidden_layers": TINY.num_layers,
    "num_attention_heads": TINY.num_heads,
    "num_key_value_heads": TINY.num_kv_heads,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_HF))
    model = load(ModelSource(name="tiny", preset="tiny"), load_format="dummy", seed=3)
    save_file(
        {name: part.contiguous().clone() for name, part in model.destinations().items()}, tmp_path / "model.safetensors"
    )
    return tmp_path


def test_dummy_weights_repeat_by_seed() -> None:
    source = resolve_model("tiny", load_format="dummy")
    one, same, other = (load(source, load_format="dummy", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed_tokens"], other["embed_tokens"])
    assert all(torch.isfinite(weight).all() for weight in one.values())
    assert torch.equal(one["final_norm"], torch.ones(TINY.hidden_size))


def test_folder_gives_back_what_was_saved(folder: Path) -> None:
    source = resolve_model(str(folder))
    assert source == ModelSource(name=str(folder), folder=folder)
    assert eos_token_ids(source) == (7,)
    expected = load(ModelSource(name="tiny", preset="tiny"), load_format="dummy", seed=3).state_dict()
    for name, weight in load(source).state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_dummy_weights_for_a_folder_need_only_its_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = resolve_model(str(folder), load_format="dummy")
    assert load(source, load_format="dummy").config.max_position_embeddings == 64


def test_generation_config_goes_before_config_for_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert eos_token_ids(resolve_model(str(folder))) == (1, 2)
    (folder / "generation_config.json").write_text("{}")
    assert eos_token_ids(resolve_model(str(folder))) == (7,)


def test_presets_have_no_tokenizer() -> None:
    assert load_tokenizer(ModelSource(name="tiny", preset="tiny")) is None


def refused(words: list[str], name: str, **settings: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_model(name, **settings)
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_unknown_names_are_refused_with_what_is_known(tmp_path: Path) -> None:
    refused(["'smollm2'", "did you mean 'smollm2-135m'", "llama-3.1-8b", "hub id", "local folder"], "smollm2")
    refused(["a prompt is what --prompt takes"], "Why is the sky blue?")
    refused(["'/no/such/folder'", "does not exist"], "/no/such/folder")
    refused([str(tmp_path), "has no config.json"], str(tmp_path))
    refused(["'llama-3.1-8b'", "without weights", "'dummy'"], "llama-3.1-8b")
    refused(["load_format is 'dumy'", "did you mean 'dummy'"], "tiny", load_format="dumy")
    refused(["revision is 'main'", "leave it out"], "tiny", load_format="dummy", revision="main")


def test_unreachable_hub_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(["'nobody/nothing'", "HF_HUB_OFFLINE"], "nobody/nothing", download_dir=tmp_path)
    refused(["neither a local folder nor a hub id"], "nobody/a..b", download_dir=tmp_path)


def test_alias_falls_through_to_the_wheel(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(smollm2, "prepare", lambda show_progress: folder)
    assert resolve_model("smollm2-135m", download_dir=tmp_path / "hub").folder == folder
    # a revision can only be had from the hub
    refused(["at revision 'v1'"], "smollm2-135m", download_dir=tmp_path / "hub", revision="v1")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def pickled(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickles_are_read_only_when_asked_for(pickled: Path) -> None:
    refused(["only pickled weights (pytorch_model.bin)", "load_format 'pt', which reads tensors"], str(pickled))
    expected = load(ModelSource(name="tiny", preset="tiny"), load_format="dummy", seed=3).state_dict()
    found = load(resolve_model(str(pickled), load_format="pt"), load_format="pt").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    (pickled / "pytorch_model.bin").unlink()
    refused(["no *.safetensors file"], str(pickled))


def test_pickles_run_nothing(pickled: Path, tmp_path: Path) -> None:
    torch.save({"lm_head.weight": Bomb(tmp_path / "made")}, pickled / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="as plain tensors"):
        load(resolve_model(str(pickled), load_format="pt"), load_format="pt")
    assert not (tmp_path / "made").exists()
    torch.save({"lm_head.weight": torch.ones(2), "step": 7}, pickled / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="holds more than tensors by name; convert it to safetensors"):
        load(resolve_model(str(pickled), load_format="pt"), load_format="pt")


def test_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    refused(["names 2 weight files, of which 1 are missing", "model-2.safetensors"], str(folder))


def test_broken_json_is_named(folder: Path) -> None:
    source = resolve_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        load_config(source)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json holds a JSON list"):
        load_config(source)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.norm.weight": None}, ["model.norm.weight [64] is missing"]),
        ({"extra.weight": torch.zeros(2, 3)}, ["extra.weight [2, 3] is unexpected"]),
        (
            {"model.layers.1.self_attn.k_proj.weight": torch.zeros(64, 64)},
            ["model.layers.1.self_attn.k_proj.weight has shape [64, 64]", "asks for [32, 64]"],
        ),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, ["model.norm.weight is of type I8", "BF16"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, tensors: dict[str, torch.Tensor | None], words: list[str]
) -> None:
    change(folder, **tensors)
    with pytest.raises(ConfigError) as raised:
        load(resolve_model(str(folder)))
    for word in [str(folder), *words]:
        assert word in str(raised.value)


def test_long_lists_of_misfits_are_cut(folder: Path) -> None:
    config = replace(TINY, hidden_size=32, head_dim=8)
    with pytest.raises(ConfigError, match=r"; and \d+ more\."):
        load(resolve_model(str(folder)), config)


def test_tied_checkpoint_may_repeat_the_head(folder: Path) -> None:
    change(folder, **{"lm_head.weight": torch.full((256, 64), 9.0)})
    model = load(resolve_model(str(folder)))
    assert model.lm_head is model.embed_tokens
    assert model.lm_head.max() < 9


def test_damaged_file_is_named(folder: Path) -> None:
    source = resolve_model(str(folder))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot read the weights"):
        load(source)


def test_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_tokenizer(resolve_model(str(folder)))


def test_a_folder_named_like_an_alias_hides_it_only_if_it_holds_a_model(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(folder)
    (folder / "tiny").mkdir()
    assert resolve_model("tiny", load_format="dummy").preset == "tiny"
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY_HF))
    assert resolve_model("tiny", load_format="dummy").folder == Path("tiny")


def test_every_alias_is_a_hub_id() -> None:
    assert all(resolve._is_hub_id(hub_id) for hub_id in resolve.ALIASES.values())
