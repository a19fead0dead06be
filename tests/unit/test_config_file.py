"""A `config.json` that somebody has edited: whatever it says, it is read, or refused with one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.errors import ConfigError
from draftloop.models import lora
from draftloop.models.config import ARCHITECTURES
from draftloop.models.config_file import KINDS, read_config
from draftloop.models.loader import eos_token_ids, load_config, sampling_defaults
from draftloop.models.resolve import ModelSource, weight_files
from draftloop.models.vocabulary import same_tokenizer
from draftloop.train.recording import MANIFEST, Recording
from example_drafters import example_configs
from gemma4 import TARGET as GEMMA4
from helpers import engine, example_target
from transformers_models import SIZES

SHAPE: dict[str, Any] = {
    **SIZES,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "original_max_position_embeddings": 256},
    "layer_types": ["full_attention"] * SIZES["num_hidden_layers"],
    "sliding_window": 8,
    "use_sliding_window": False,
    "eos_token_id": [1, 2],
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 1e4,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
}
"""Of every key that some architecture reads."""
QUANTISED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "dynamic": {"-:lm_head": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
            }
        },
    },
]
WRONG = ("x", -1, 0, 2.5, True, ["x"], [None], {}, {"x": []}, None)


def edited(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """With every value, also those of objects inside, left out or replaced by others."""

    def places(part: Any, path: tuple) -> Iterator[tuple]:
        entries = part.items() if isinstance(part, dict) else enumerate(part[:1]) if isinstance(part, list) else ()
        for key, value in entries:
            yield (*path, key)
            yield from places(value, (*path, key))

    for *path, key in places(config, ()):
        for wrong in (*WRONG, ...):
            made = part = copy.deepcopy(config)
            for step in path:
                part = part[step]
            if wrong is ...:
                del part[key]
            else:
                part[key] = copy.deepcopy(wrong)
            yield f"{'.'.join(map(str, (*path, key)))} = {wrong!r}", made


def tracebacks(
    config: dict[str, Any], folder: Path, read: Callable[[], object], *, file: str = "config.json"
) -> list[str]:
    """What raises something else than an error of ours."""
    found = []
    for name, made in edited(config):
        (folder / file).write_text(json.dumps(made))
        try:
            read()
        except ConfigError:
            pass
        except Exception as error:
            found.append(f"{name}: {error!r}")
    return found


def of_a_model(config: dict[str, Any], folder: Path) -> list[str]:
    source = ModelSource(name="edited", folder=folder)
    return tracebacks(config, folder, lambda: load_config(source))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_models_config_is_read_or_refused(architecture, tmp_path):
    assert not of_a_model({"architectures": [architecture], **SHAPE}, tmp_path)


@pytest.mark.parametrize("settings", QUANTISED, ids=lambda settings: settings["quant_method"])
def test_a_quantised_models_config_is_read_or_refused(settings, tmp_path):
    assert not of_a_model({"architectures": ["LlamaForCausalLM"], **SIZES, "quantization_config": settings}, tmp_path)


def test_the_config_of_a_gemma_4_is_read_or_refused(tmp_path):
    assert not of_a_model(GEMMA4, tmp_path)


load_drafters()


@pytest.mark.parametrize(
    "name", [name for name in sorted(DRAFTERS) if "model" in DRAFTERS[name].options or name == "mtp"]
)
def test_a_drafters_config_is_read_or_refused(name, tmp_path):
    given = example_configs()[name][0]
    llm = engine(example_target(given), speculative_config=given)
    drafter = llm.engine.drafter
    folder = drafter.source.folder if name == "draft_model" else drafter.folder
    for path in Path(folder).iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    target = drafter.target
    if name == "mtp":
        spec, target = drafter.spec, replace(target, folder=tmp_path)
    else:
        spec = replace(drafter.spec, model=str(tmp_path))
    config = json.loads((Path(folder) / "config.json").read_text())
    assert not tracebacks(config, tmp_path, lambda: type(drafter)(spec, target))


def test_other_files_are_read_or_refused(tmp_path):
    """Of a model, an adapter, a recording."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SHAPE}))
    source = ModelSource(name="edited", folder=tmp_path)
    read = lambda: (eos_token_ids(source), sampling_defaults(source))  # noqa: E731
    assert not tracebacks({"eos_token_id": [1], "temperature": 0.5}, tmp_path, read, file="generation_config.json")
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "a.safetensors").touch()
    assert not tracebacks(index, tmp_path, lambda: weight_files(tmp_path), file="model.safetensors.index.json")
    other = tmp_path / "other"
    other.mkdir()
    vocabulary = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "b"}]}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert not tracebacks(vocabulary, tmp_path, lambda: same_tokenizer(tmp_path, other), file="tokenizer.json")
    unigram = {"model": {"vocab": [["a", 0.5], ["b", 0.5]]}}
    assert not tracebacks(unigram, tmp_path, lambda: same_tokenizer(tmp_path, other), file="tokenizer.json")
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": False}
    (tmp_path / lora.WEIGHTS).touch()
    assert not tracebacks(adapter, tmp_path, lambda: lora.read_lora_config(tmp_path, max_rank=8), file=lora.CONFIG)
    (tmp_path / "said").mkdir()
    made = Recording.open(tmp_path / "said", target="t", revision="", vocab_size=8, settings={"seed": 1})
    manifest = json.loads((made.folder / MANIFEST).read_text())
    assert not tracebacks(manifest, made.folder, lambda: Recording.read(made.folder), file=MANIFEST)


@pytest.mark.parametrize("key", sorted(KINDS))
def test_a_value_of_another_kind_is_refused_by_name(key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({key: [[1.5]]}))
    with pytest.raises(ConfigError, match=rf"^{key} is \[\[1.5\]\] in .*config.json; it must be {KINDS[key].words}$"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({key: None}))
    assert read_config(tmp_path) == {key: None}
