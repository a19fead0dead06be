"""EAGLE checkpoints as they are published, and what is wrong with those that cannot work."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.drafters.eagle_config import HEAD_PRESETS, EagleConfig, check_target, parse
from draftloop.drafters.fill import target_ids
from draftloop.drafters.kinds import kind_of, plain_name
from draftloop.drafters.made_for import TARGET_KEY
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.dense import FINAL_HIDDEN
from draftloop.models.fingerprint import fingerprint
from draftloop.models.presets import PRESETS
from heads import config_json, file_names, head_config, head_weights, tiny_head, write_head
from helpers import VOCAB, answers, engine, greedy, make_engine, oracle, prompts, tiny_model

BASE = head_config()
DEEPSPEC = replace(
    BASE,
    model=replace(BASE.model, qk_norm=True),
    num_aux=2,
    layer_ids=(0, 1),
    ids_are_outputs=True,
    draft_vocab_size=VOCAB,
    has_map=False,
    own_embeddings=True,
)
LAYOUTS = [
    # config, where config.json has its keys, how tensors are called, layers whose inputs are read
    pytest.param(BASE, "top", "midlayer", (0, 1, 2), id="eagle3"),
    pytest.param(replace(BASE, layer_ids=(0, 1), num_aux=2), "nested", "midlayer", (1, 2), id="specforge"),
    pytest.param(BASE, "top", "model", (0, 1, 2), id="nemo"),
    pytest.param(replace(BASE, norm_output=True), "speculators", "plain", (0, 1, 2), id="speculators"),
    pytest.param(DEEPSPEC, "deepspec", "plain", (1, 2), id="deepspec"),
    pytest.param(head_config("eagle"), "top", "plain", (FINAL_HIDDEN,), id="eagle1"),
]


def shapes(config: EagleConfig, style: str = "plain") -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in file_names(head_weights(config), style).items()}


def read(config: EagleConfig, layout: str = "top", *, method: str | None = None, **changes: Any) -> EagleConfig:
    values = {**config_json(config, layout), **changes}
    return parse(values, shapes(config), method=method or config.method, name="head")[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("config", "layout", "style", "layers"), LAYOUTS)
def test_every_layout_is_read_and_drafts(config, layout, style, layers):
    found, names = parse(config_json(config, layout), shapes(config, style), method=config.method, name="head")
    said = {"layout": "", "layer_ids": None, "ids_are_outputs": False}  # how it is said, not what the head is
    assert replace(found, **said) == replace(config, **said)
    assert found.aux_layers(2) == layers
    assert set(names) == set(config.shapes())
    folder = tiny_head(f"layout-{layout}-{style}", config, layout=layout, style=style)
    llm = make_engine(
        speculative_config={"method": config.method, "model": folder, "num_speculative_tokens": 2}, enforce_eager=True
    )
    drafter = llm.engine.drafter
    assert drafter.aux_layers == layers
    weights = head_weights(config)
    for name, weight in drafter.head.destinations().items():
        assert torch.equal(weight, weights[name]), name
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


def test_the_module_has_the_tensors_that_its_config_lists():
    normed = replace(BASE, norm_before_fc=True, fc_norm=True)
    cases = ((BASE, "top"), (DEEPSPEC, "deepspec"), (head_config("eagle"), "top"), (normed, "top"))
    for index, (config, layout) in enumerate(cases):
        model = tiny_head(f"tensors-{index}", config, layout=layout)
        spec = {"method": config.method, "model": model, "num_speculative_tokens": 2}
        head = engine(speculative_config=spec, enforce_eager=True).engine.drafter.head
        listed = {name: shape for name, shape in config.shapes().items() if name != "d2t"}
        assert {name: tuple(weight.shape) for name, weight in head.destinations().items()} == listed


def test_older_heads_come_pickled_and_are_read_as_mere_tensors_when_that_is_asked_for():
    folder = tiny_head("pickled", head_config("eagle"), style="plain", pickled=True)
    spec = {"method": "eagle", "model": folder, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model.bin\).* use load_format 'pt'"):
        make_engine(speculative_config=spec, enforce_eager=True)
    spec["load_format"] = "pt"
    llm = make_engine(speculative_config=spec, enforce_eager=True)
    assert torch.equal(llm.engine.drafter.head.fc, head_weights(head_config("eagle"))["fc.weight"])
    torch.save({"fc.weight": Path("x")}, Path(folder) / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="as plain tensors"):
        make_engine(speculative_config=spec, enforce_eager=True)


# ---- which layers ---------------------------------------------------------------------------


def test_what_layer_ids_mean_depends_on_where_they_stand():
    ids = replace(BASE, layer_ids=(1, 17, 33))
    assert read(ids).aux_layers(36) == (1, 17, 33), "top level: inputs, as they are"
    assert read(ids, "nested").aux_layers(36) == (2, 18, 34), "nested: outputs"
    assert read(ids, "speculators").aux_layers(36) == (1, 17, 33)
    assert read(replace(DEEPSPEC, num_aux=5, layer_ids=(1, 9, 17, 25, 33)), "deepspec").aux_layers(36) == (
        2,
        10,
        18,
        26,
        34,
    )
    none = read(replace(BASE, layer_ids=None))
    assert none.aux_layers(32) == (2, 16, 29)
    assert none.aux_layers(36) == (2, 18, 33)


def test_an_offset_replaces_the_rule():
    ids = replace(BASE, layer_ids=(1, 17, 33))
    for layout in ("top", "nested", "speculators"):
        assert [read(ids, layout).aux_layers(36, offset) for offset in (0, 1)] == [(1, 17, 33), (2, 18, 34)]
    assert read(replace(BASE, layer_ids=None)).aux_layers(32, 1) == (3, 17, 30)
    llm = make_engine(
        speculative_config={
            "method": "eagle3",
            "model": tiny_head("offset", replace(BASE, layer_ids=(0, 1), num_aux=2), layout="nested"),
            "num_speculative_tokens": 2,
            "aux_layer_offset": 0,
        },
        enforce_eager=True,
    )
    assert llm.engine.drafter.aux_layers == (0, 1)


def test_layers_that_the_target_does_not_have_are_refused():
    with pytest.raises(ConfigError, match=r"enters target layer 33, but the target has 32 layers; .*another target"):
        read(replace(BASE, layer_ids=(2, 16, 33))).aux_layers(32)
    with pytest.raises(ConfigError, match=r"layer -1, .* or aux_layer_offset -1 is wrong"):
        read(replace(BASE, layer_ids=(0, 1, 2))).aux_layers(2, -1)
    spec = {"method": "eagle", "model": tiny_head("eagle", method="eagle"), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="'eagle' does not use 'aux_layer_offset'"):
        make_engine(speculative_config={**spec, "aux_layer_offset": 1})


# ---- options --------------------------------------------------------------------------------


def test_defaults_of_options_depend_on_the_layout():
    top, speculators = config_json(BASE), config_json(BASE, "speculators")
    for values in (top, speculators):
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            values.pop(key)
    assert not parse(top, shapes(BASE), method="eagle3", name="head")[0].norm_before_residual
    assert parse(speculators, shapes(BASE), method="eagle3", name="head")[0].norm_before_residual
    normed = replace(BASE, norm_before_fc=True, fc_norm=True)
    found = parse(top, shapes(normed), method="eagle3", name="head")[0]
    assert found.norm_before_fc
    assert found.fc_norm, "the tensors tell"


def test_specforge_means_something_else_by_norm_output():
    config = replace(BASE, layer_ids=(0, 1, 1))
    assert not read(config, "nested", norm_output=True).norm_output
    assert read(config, "top", norm_output=True).norm_output


def test_rotation_and_length_are_the_heads_own():
    found = read(BASE, rope_theta=5e5, max_position_embeddings=2048)
    assert (found.model.rope.theta, found.model.max_position_embeddings) == (5e5, 2048)
    assert read(BASE, "speculators").model.rope.theta == 10_000


# ---- borrowed and missing tensors -----------------------------------------------------------


def test_tables_that_a_head_lacks_are_the_targets_and_that_is_said(caplog):
    """B48."""
    whole = replace(BASE, draft_vocab_size=VOCAB, has_map=False, own_head=False)
    for name, config in (("none", whole), ("both", replace(whole, own_head=True, own_embeddings=True))):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            llm = make_engine(
                speculative_config={
                    "method": "eagle3",
                    "model": tiny_head(f"tables-{name}", config),
                    "num_speculative_tokens": 2,
                },
                enforce_eager=True,
            )
        head, target = llm.engine.drafter.head, load_file(Path(tiny_model()) / "model.safetensors")
        weights = head_weights(config)
        said = [r.getMessage().split(" has ")[-1] for r in caplog.records if "it uses the target's" in r.getMessage()]
        if name == "none":
            assert torch.equal(head.embed_tokens, target["model.embed_tokens.weight"])
            assert torch.equal(head.lm_head, target["lm_head.weight"])
            assert said == ["no embed_tokens: it uses the target's", "no lm_head: it uses the target's"]
        else:
            assert torch.equal(head.embed_tokens, weights["embed_tokens.weight"])
            assert torch.equal(head.lm_head, weights["lm_head.weight"])
            assert said == []
        asked = prompts(1)[0]
        assert answers(llm.generate(asked, greedy(6))) == [oracle(asked, 6)], "the target keeps its own, too"


def test_a_head_that_was_made_for_other_weights_says_so(caplog, tmp_path):
    folder = shutil.copytree(tiny_head("eagle3"), tmp_path / "head")
    file = folder / "config.json"
    for made_for, is_warned in (("0123456789abcdef", True), (fingerprint(Path(tiny_model())), False)):
        file.write_text(
            json.dumps({**json.loads(file.read_text()), TARGET_KEY: {"name": "x", "fingerprint": made_for}})
        )
        caplog.clear()
        spec = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
        make_engine(speculative_config=spec, enforce_eager=True).close()
        assert ("was trained for x with weights 0123456789abcdef, but" in caplog.text) == is_warned
        assert ("it may draft badly" in caplog.text) == is_warned


@pytest.mark.parametrize(("config", "layout", "style", "layers"), LAYOUTS)
def test_any_other_tensor_that_is_missing_is_named(config, layout, style, layers):
    for name in shapes(config):
        if name in ("embed_tokens.weight", "lm_head.weight", "fc.bias", "d2t"):
            continue  # borrowed, optional, or said in other words
        rest = {other: shape for other, shape in shapes(config).items() if other != name}
        with pytest.raises(ConfigError, match=f"lacks .*{name}"):
            parse(config_json(config, layout), rest, method=config.method, name="head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ["midlayer.mlp.up_proj.weight"]}, r"lacks layers.0.mlp.up_proj.weight \[128, 64\]; the export"),
        ({"drop": ["norm.weight", "fc.weight"]}, r"lacks fc.weight \[64, 192\], norm.weight \[64\]"),
        ({"drop": ["d2t"]}, "draft vocabulary of 64 of 160 ids, but no tensor d2t that says which"),
        ({"put": {"d2t": torch.arange(64) * 3}}, r"outside of the vocabulary: draft id 40 to 160, .* \(24 such\)"),
        ({"put": {"d2t": -torch.arange(64) - 1}}, "draft id 0 to -1"),
        ({"put": {"d2t": -torch.arange(64)}}, "leads to 1 ids for 64 draft ids"),
        ({"put": {"new_thing.weight": torch.ones(3)}}, r"that an EAGLE-3 head does not: new_thing.weight \[3\]"),
        ({"put": {"fc.weight": torch.ones(64, 96)}}, r"fc.weight .* \[64, 96\], .* asks for \[64, 192\]; it reads 3"),
        ({"put": {"midlayer.mlp.up_proj.weight": torch.ones(128, 64, dtype=torch.int8)}}, "_scale .* is missing"),
        ({"put": {"norm.weight": torch.ones(64, dtype=torch.int32)}}, r"norm.weight of .* is of type torch.int32; a"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "quantised"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"config": {"speculators_model_type": "peagle"}}, "looks like a P-EAGLE head"),
        ({"config": {"architectures": ["DFlashDraftModel"]}}, "looks like a DFlash drafter"),
        ({"config": {"target_hidden_size": 96}, "put": {"fc.weight": torch.ones(64, 288)}},
         r"fc.weight of .* has shape \[64, 288\], but .* needs \[64, 192\]; .* with hidden size 96, not 64"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes, message):
    folder = broken("eagle3", **changes)
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config={"method": "eagle3", "model": folder, "num_speculative_tokens": 2})


def broken(
    method: str, *, drop: list[str] = (), put: dict[str, torch.Tensor] | None = None, config: dict | None = None
):  # type: ignore[assignment]
    """A head's folder with some changes; it is made anew each time."""
    source = Path(tiny_head(method, method=method))
    folder = source.parent / "broken"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for name in drop:
        del weights[name]
    save_file({**weights, **(put or {})}, folder / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}))
    return str(folder)


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        ("eagle3", "eagle", "method is 'eagle3', but .* looks like an EAGLE-1 or EAGLE-2 head; use method 'eagle'"),
        ("eagle", "eagle3", "method is 'eagle', but .* looks like an EAGLE-3 head; use method 'eagle3'"),
        ("draft_model", "eagle3", "method is 'draft_model', but .* looks like an EAGLE-3 head; use method 'eagle3'"),
        ("draft_model", "eagle", "looks like an EAGLE-1 or EAGLE-2 head; use method 'eagle'"),
        ("eagle", "", "method is 'eagle', but .* looks like a whole language model; use method 'draft_model'"),
        ("eagle3", "", "looks like a whole language model"),
    ],
)
def test_a_checkpoint_of_another_method_says_what_it_looks_like(method, model, message):
    folder = tiny_head(model, method=model) if model else tiny_model()
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config={"method": method, "model": folder, "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("config", "target", "message"),
    [
        (BASE, {"hidden": 128}, r"fc.weight of .* \[64, 192\], but .* needs \[64, 384\]; .* size 64, not 128"),
        (head_config("eagle"), {"hidden": 128}, r"fc.weight .* \[64, 128\], .* \[128, 256\]; .* size 64, not 128"),
        (replace(BASE, own_embeddings=True), {"vocab": 256},
         r"embed_tokens.weight .* \[160, 64\], .* needs \[256, 64\]; .* made for a target with 160 ids, not 256"),
        (replace(BASE, draft_vocab_size=160, has_map=False), {"vocab": 256},
         r"lm_head.weight .* \[160, 64\], .* needs \[256, 64\]"),
        (replace(BASE, draft_vocab_size=160, has_map=False, own_head=False), {"vocab": 256},
         "drafts from 160 ids and has no lm_head, but that of .* has 256"),
    ],
)  # fmt: skip
def test_a_head_for_another_target_is_refused_naming_tensor_shapes_and_cause(config, target, message):
    values = {"vocab_size": 160, "hidden_size": 64}
    values |= {"hidden_size": target["hidden"]} if "hidden" in target else {"vocab_size": target["vocab"]}
    with pytest.raises(ConfigError, match=message):
        check_target(config, "head", replace(PRESETS["tiny"], **values), "target")


def test_a_head_of_another_width_needs_tables_of_its_own():
    config = head_config(width=128)
    with pytest.raises(ConfigError, match=r"is 128 wide and has no embed_tokens of its own, .* which are 64 wide"):
        check_target(config, "head", replace(PRESETS["tiny"], vocab_size=160), "target")


def test_vocabularies_padded_to_other_sizes_are_one():
    target = replace(PRESETS["tiny"], vocab_size=151_936)
    config = replace(BASE, draft_vocab_size=151_669, has_map=False, model=replace(BASE.model, vocab_size=151_669))
    check_target(replace(config, own_embeddings=True), "head", target, "target")


def test_nothing_of_the_targets_quantisation_or_cache_reaches_the_head():
    """B49, from the configuration alone: the head's dtype and cache follow from the head and the activations."""
    target = {**config_json(BASE), "quantization_config": {"quant_method": "fp8"}, "kv_cache_dtype": "fp8"}
    assert "quantization_config" in target
    head = read(BASE)
    assert head.model.quantisation is None
    assert not any("quant" in field or "kv_dtype" in field for field in vars(head))
    spec = {"method": "eagle3", "model": tiny_head("eagle3"), "num_speculative_tokens": 2}
    llm = engine(speculative_config=spec, enforce_eager=True)
    drafter = llm.engine.drafter
    assert not {"quantization", "kv_cache_dtype"} & set(vars(drafter.target)), "a drafter cannot even see them"
    assert {spec.dtype for spec in drafter.cache_specs()} == {drafter.target.dtype}
    assert {weight.dtype for weight in drafter.head.parameters()} == {drafter.target.dtype}
    shape = drafter.head.backend.shape
    assert shape.kv_dtype == shape.dtype == drafter.target.dtype


def test_weights_of_a_wider_type_than_the_targets_are_named(caplog):
    spec = {"method": "eagle3", "model": tiny_head("eagle3"), "num_speculative_tokens": 2}
    with caplog.at_level(logging.WARNING):
        make_engine(dtype="bfloat16", enforce_eager=True, speculative_config=spec).close()
    assert f"tensors in {tiny_head('eagle3')} are F32 and rounded to bfloat16" in caplog.text


# ---- shapes without weights -----------------------------------------------------------------


def test_presets_are_shapes_of_what_is_published():
    head, target = HEAD_PRESETS["eagle3-llama-3.1-8b"], PRESETS["llama-3.1-8b"]
    check_target(head, "head", target, "llama-3.1-8b")
    assert head.aux_layers(target.num_layers) == (2, 16, 29)
    assert head.shapes()["fc.weight"] == (4096, 3 * 4096)
    assert head.shapes()["layers.0.self_attn.q_proj.weight"] == (4096, 8192)
    assert head.shapes()["lm_head.weight"] == (32_000, 4096)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "eagle3-tiny", "load_format": "auto"}, "is a shape without weights; use load_format 'dummy'"),
        ({"model": "eagle3-tinny"}, "but 'eagle3-tinny' is none; did you mean 'eagle3-tiny'"),
        ({"model": "eagle3-tiny", "method": "eagle"}, "shape of an EAGLE-3 head; use method 'eagle3'"),
        ({"model": "tiny"}, "'tiny' is none"),
        ({"model": None}, "'eagle3' needs 'model'"),
        ({"model": "/nowhere", "load_format": "auto"}, "'/nowhere' does not exist"),
    ],
)
def test_shapes_that_cannot_draft_are_refused(values, message):
    spec = {"method": "eagle3", "num_speculative_tokens": 2, **values}
    with pytest.raises(ConfigError, match=message):
        make_engine("tiny", load_format="dummy", speculative_config=spec)


def test_kinds_are_told_by_tensors_and_names():
    assert kind_of({"architectures": ["LlamaForCausalLM"]}, shapes(BASE)) == "eagle3"
    assert kind_of({"architectures": ["LlamaForCausalLM"]}, shapes(head_config("eagle"))) == "eagle"
    assert kind_of({"architectures": ["Qwen3DSparkModel"]}, []) == "dspark"
    assert kind_of({}, ["fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"]) == "dflash"
    assert kind_of({}, ["layers.0.input_layernorm.weight"]) == "draft_model"
    assert kind_of({}, ["something.else"]) is None
    assert plain_name("midlayer.mlp.up_proj.weight") == plain_name("model.layers.0.mlp.up_proj.weight")
    assert [plain_name(n) for n in ("t2d", "draft_id_to_target_id", "verifier_norm.weight")] == ["", "d2t", ""]


def test_ids_of_the_target_are_distances():
    assert target_ids(torch.tensor([0, 2, 2]), vocab_size=5, name="x").tolist() == [0, 3, 4]


def test_eagle1_wrapper_of_vllm_is_read():
    config = head_config("eagle")
    values = {"model_type": "eagle", "model": config_json(config), "architectures": ["EAGLEModel"]}
    found = parse(values, shapes(config), method="eagle", name="head")[0]
    assert isinstance(found.model, ModelConfig)
    assert found.fc_bias
    assert write_head("wrapped", values, head_weights(config))
