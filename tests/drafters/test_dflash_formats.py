"""Block drafters' checkpoints as they are published, and what is wrong with those that cannot work."""

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

from blocks import MASK, WINDOW, block_config, block_json, block_weights, mask_row, tiny_block
from draftloop.drafters.dflash_config import BLOCK_PRESETS, DFlashConfig, check_target, parse, spread_layers
from draftloop.drafters.dflash_files import MASK_EMBEDDING
from draftloop.drafters.kinds import kind_of
from draftloop.errors import ConfigError
from draftloop.models.presets import PRESETS
from heads import DRAFT_VOCAB, head_config, tiny_head
from helpers import answers, greedy, make_engine, oracle, prompts, tiny_model

BASE = block_config()
SLIDING = block_config(layers=2, sliding=(1,))
REDUCED = replace(BASE, draft_vocab_size=DRAFT_VOCAB, has_map=True, own_head=True)


def shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in block_weights(config).items()}


def read(config: DFlashConfig, layout: str = "z-lab", **changes: Any) -> DFlashConfig:
    return parse({**block_json(config, layout), **changes}, shapes(config), method="dflash", name="drafter")[0]


def start(folder: str, k: int = 3, **spec: Any):
    spec = {"method": "dflash", "model": folder, "num_speculative_tokens": k, **spec}
    return make_engine(speculative_config=spec, enforce_eager=True)


@pytest.mark.parametrize(
    ("config", "layout", "layers"),
    [
        pytest.param(BASE, "z-lab", (1, 2), id="z-lab"),
        pytest.param(SLIDING, "z-lab", (1, 2), id="z-lab_sliding"),
        pytest.param(replace(BASE, fused_qkv=True), "z-lab", (1, 2), id="fused_qkv"),
        pytest.param(block_config(layers=2, sinks=(True, True)), "z-lab", (1, 2), id="sinks"),
        pytest.param(block_config(layers=2, sinks=(False, True)), "speculators", (0, 1), id="some_sinks"),
        pytest.param(BASE, "speculators", (0, 1), id="speculators"),
        pytest.param(REDUCED, "speculators", (0, 1), id="speculators_reduced"),
        pytest.param(replace(REDUCED, own_head=False), "speculators", (0, 1), id="speculators_borrowed_rows"),
        pytest.param(block_config(layers=2, sliding=(0, 1), causal=(0, 1)), "speculators", (0, 1), id="causal"),
    ],
)
def test_every_layout_is_read_and_drafts(config, layout, layers):
    found, names = parse(block_json(config, layout), shapes(config), method="dflash", name="drafter")
    said = {"layout": "", "ids_are_outputs": False, "num_target_layers": None}  # how it is said, not what it is
    assert replace(found, **said) == replace(config, **said)
    assert set(names) == set(config.shapes())
    folder = tiny_block(f"layout-{layout}-{config.fused_qkv}-{len(names)}-{config.own_head}", config, layout=layout)
    llm = start(folder)
    drafter = llm.engine.drafter
    assert drafter.aux_layers == layers
    assert layout in drafter.describe()
    weights = block_weights(config)
    for name, weight in drafter.model.destinations().items():
        assert torch.equal(weight, weights[name]), name
    assert set(drafter.model.destinations()) == set(config.shapes()) - {"d2t"}
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


def test_where_layer_ids_stand_says_what_they_mean():
    config = replace(BASE, num_aux=5, layer_ids=(1, 9, 17, 25, 33))
    assert read(config).aux_layers(36) == (2, 10, 18, 26, 34), "outputs"
    assert read(config, "speculators").aux_layers(36) == (1, 9, 17, 25, 33), "inputs"
    both = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5, 6]}
    assert read(config, **both).aux_layers(36) == (2, 3, 4, 5, 6), "as they are, before all others"
    top = {**block_json(config, "z-lab"), "target_layer_ids": [3, 4, 5, 6, 7]}
    top["dflash_config"] = {"mask_token_id": MASK}
    assert parse(top, shapes(config), method="dflash", name="drafter")[0].aux_layers(36) == (4, 5, 6, 7, 8)
    assert read(config).aux_layers(36, 0) == (1, 9, 17, 25, 33), "an offset replaces the rule"
    with pytest.raises(ConfigError, match="enters target layer 34, but the target has 32 layers"):
        read(config).aux_layers(32)


def test_layers_are_spread_where_none_is_named():
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(32, 1) == (16,)
    config = replace(BASE, layer_ids=None)
    assert read(config).aux_layers(30) == (2, 28), "as many as fc reads: outputs of layers 1 and 27"


def test_the_mask_token_is_looked_for_in_order():
    config = replace(BASE, mask_token_id=None)
    order = ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"]
    for start_at in range(len(order)):
        values = {key: 10 + i for i, key in enumerate(order) if i >= start_at}
        assert read(config, **values, dflash_config={"target_layer_ids": [0, 1]}).mask_token_id == 10 + start_at
    both = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
    assert read(config, mask_token_id=4, dflash_config=both).mask_token_id == 3, "dflash_config goes before"
    with pytest.raises(ConfigError, match=r"names no mask token: config.json has none of mask_token_id, dspark_noise"):
        read(config, dflash_config={"target_layer_ids": [0, 1]})


def test_a_mask_may_have_an_embedding_of_its_own():
    folder = tiny_block("own-mask", replace(BASE, mask_token_id=10_000), mask_embedding=True)
    assert torch.equal(start(folder).engine.drafter.model.mask_C, mask_row(BASE))
    torch.save({"embedding": torch.ones(7)}, Path(folder) / MASK_EMBEDDING)
    with pytest.raises(ConfigError, match="holds 7 numbers, but the drafter is 64 wide"):
        start(folder)
    (Path(folder) / MASK_EMBEDDING).write_bytes(b"no tensor")
    with pytest.raises(ConfigError, match=r"cannot read .*mask_embedding.pt as a plain tensor"):
        start(folder)


def test_which_layers_slide_and_are_causal():
    def causal(config: DFlashConfig, layout: str = "z-lab", drop: tuple[str, ...] = (), **nested: Any):
        values = block_json(config, layout)
        if layout == "z-lab":
            kept = {k: v for k, v in values["dflash_config"].items() if k != "causal"}
            values["dflash_config"] = {**kept, **nested}
        values = {k: v for k, v in values.items() if k not in drop}
        found = parse(values, shapes(config), method="dflash", name="drafter")[0]
        return [found.model.window(i) for i in range(2)], found.causal_layers

    assert causal(SLIDING) == ([None, WINDOW], (False, True)), "sliding layers by layer_types are causal"
    assert causal(SLIDING, causal=False) == ([None, WINDOW], (False, False))
    assert causal(SLIDING, causal=True) == ([None, WINDOW], (True, True)), "said, it holds for all"
    plain = block_config(layers=2)
    assert causal(plain, use_swa=True, swa_window_size=9) == ([9, 9], (False, False))
    assert causal(SLIDING, "speculators") == ([None, WINDOW], (False, False))
    mixed = replace(SLIDING, causal_layers=(False, True))
    assert causal(mixed, "speculators") == ([None, WINDOW], (False, True)), "full layers see the whole block"
    assert causal(mixed, "speculators", drop=("sliding_window_non_causal",))[1] == (False, False)
    with pytest.raises(ConfigError, match="neither sliding_window nor swa_window_size says how wide"):
        causal(plain, use_swa=True)


def test_what_speculators_leaves_out_is_transformers_default():
    values = block_json(BASE, "speculators")
    layer = values["transformer_layer_config"]
    for key in ("max_position_embeddings", "rms_norm_eps"):
        del layer[key]
    found = parse(values, shapes(BASE), method="dflash", name="drafter")[0]
    assert found.model.max_position_embeddings == 32_768


def test_tables_that_a_drafter_lacks_are_the_targets_and_that_is_said(caplog):
    target = load_file(Path(tiny_model()) / "model.safetensors")
    for name, config in (("none", BASE), ("both", replace(BASE, own_embeddings=True, own_head=True))):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            model = start(tiny_block(f"tables-{name}", config)).engine.drafter.model
        said = [r.getMessage().split(" has ")[-1] for r in caplog.records if "it uses the target's" in r.getMessage()]
        weights = {"embed_tokens.weight": target["model.embed_tokens.weight"], **target}
        if name == "both":
            weights = block_weights(config)
        assert torch.equal(model.embed_tokens, weights["embed_tokens.weight"])
        assert torch.equal(model.lm_head, weights["lm_head.weight"])
        assert len(said) == (2 if name == "none" else 0)


@pytest.mark.parametrize(
    ("config", "k", "message"),
    [
        (BASE, 8, "num_speculative_tokens is 8, but .* fills blocks of 8, so that it drafts at most 7; ask for 7"),
        (replace(BASE, num_target_layers=36), 3, r"made for a target of 36 layers .*, but .* has 2"),
        (replace(BASE, mask_token_id=999), 3, "mask_token_id of .* is 999, but the embedding has 160 rows"),
        (replace(BASE, target_hidden_size=96), 3, r"\[64, 192\], but .* needs \[64, 128\]; .* size 96, not 64"),
        (block_config(width=128, target_hidden_size=64), 3, "128 wide and has no embed_tokens or lm_head of its own"),
        (replace(BASE, layer_ids=(0, 3)), 3, "enters target layer 3, but the target has 2 layers"),
        (block_config(vocab=400, own_embeddings=True, own_head=True), 3, "has 400 rows, but .* has 160 ids"),
        (block_config(vocab=400, own_head=True), 3, "drafts from 400 ids, but .* has 160"),
    ],
)
def test_a_drafter_for_another_target_or_a_shorter_block_is_refused(config, k, message):
    layout = "speculators" if config.num_target_layers == 2 else "z-lab"
    folder = tiny_block(f"refused-{abs(hash(message))}", config, layout=layout)
    with pytest.raises(ConfigError, match=message):
        start(folder, k)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ["layers.0.mlp.up_proj.weight"]}, r"lacks layers.0.mlp.up_proj.weight \[128, 64\]; the export"),
        ({"drop": ["hidden_norm.weight"]}, r"lacks hidden_norm.weight \[64\]"),
        ({"put": {"fc.weight": torch.ones(64, 192)}}, r"\[64, 192\], .* asks for \[64, 128\]; it reads 2 states of 64"),
        ({"put": {"new_thing.weight": torch.ones(3)}}, "a DFlash drafter does not: new_thing.weight"),
        ({"put": {"lm_head.weight": torch.ones(64, 64)}}, "draft vocabulary of 64 of 160 ids, but no tensor d2t"),
        ({"put": {"layers.0.self_attn.attention_sink_bias": torch.ones(3)}}, r"shape \[3\], but .* asks for \[4\]"),
        ({"config": {"dflash_config": {"attention_sink_bias": True}}}, r"lacks layers.0.self_attn.attention_sink_bias"),
        (
            {
                "put": {"layers.0.self_attn.attention_sink_bias": torch.ones(4)},
                "config": {"add_swa_attention_sink_bias": False},
            },
            "a DFlash drafter does not: layers.0.self_attn.attention_sink_bias",
        ),
        ({"config": {"dflash_config": {"use_aux_hidden_state": False}}}, "use_aux_hidden_state is false"),
        ({"config": {"dflash_config": {"projector_type": "domino"}}}, "projector_type is 'domino'"),
        ({"config": {"dspark_backbone_conv_enabled": True}}, r"needs convolutions \(dspark_backbone_conv_enabled"),
        ({"config": {"logit_scale": 0.5}}, "logit_scale is 0.5"),
        ({"config": {"block_size": None}}, "block_size of .* is None"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "quantised"),
        ({"config": {"speculators_model_type": "dspark"}}, "looks like a DSpark drafter; use method 'dspark'"),
        ({"put": {"markov_head.markov_w1.weight": torch.ones(160, 4)}}, "looks like a DSpark drafter"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        start(broken(**changes))


def broken(
    drop: list[str] | None = None, put: dict[str, torch.Tensor] | None = None, config: dict | None = None
) -> str:
    """A drafter's folder with some changes; it is made anew each time."""
    source = Path(tiny_block("dflash"))
    folder = source.parent / "broken-block"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    weights = {k: v for k, v in load_file(source / "model.safetensors").items() if k not in (drop or [])}
    save_file({**weights, **(put or {})}, folder / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}))
    return str(folder)


def test_kinds_are_told_apart():
    assert kind_of(block_json(BASE, "z-lab"), shapes(BASE)) == "dflash"
    assert kind_of(block_json(BASE, "speculators"), shapes(BASE)) == "dflash"
    assert kind_of({"dflash_config": {"projector_type": "dspark"}}, shapes(BASE)) == "dspark"
    assert kind_of({"architectures": ["Qwen3DSparkModel"]}, shapes(BASE)) == "dspark"
    assert kind_of({}, shapes(BASE)) == "dflash", "by its tensors"
    assert kind_of({}, head_config().shapes()) == "eagle3"
    with pytest.raises(ConfigError, match=r"but .* looks like an EAGLE-3 head; use method 'eagle3'"):
        start(tiny_head("eagle3"))


def test_presets_are_shapes_of_what_is_published():
    config, target = BLOCK_PRESETS["dflash-llama-3.1-8b"], PRESETS["llama-3.1-8b"]
    check_target(config, "drafter", target, "llama-3.1-8b")
    assert config.max_drafts == 15
    assert config.aux_layers(target.num_layers) == (2, 9, 16, 23, 30)
    assert config.shapes()["fc.weight"] == (4096, 5 * 4096)
    assert BLOCK_PRESETS["dspark-llama-3.1-8b"].max_drafts == 7


def test_a_shape_without_weights_runs():
    spec = {"method": "dflash", "model": "dflash-tiny", "num_speculative_tokens": 7}
    llm = make_engine("tiny", load_format="dummy", speculative_config=spec, cudagraph_mode="FULL")
    plain = make_engine("tiny", load_format="dummy", enforce_eager=True)
    asked = prompts(3)
    assert answers(llm.generate(asked, greedy(12))) == answers(plain.generate(asked, greedy(12)))
    phases = llm.engine.table.phases
    context, block = phases["draft.context"].cost, phases["draft.block"].cost
    width, inner, kv = 64, 128, 32
    assert context.weight_bytes == 4 * (width * width + 2 * kv * width)
    assert context.cache_bytes == 0
    assert block.weight_bytes == 4 * (width * (2 * width + 2 * kv + 3 * inner) + 2 * width + 2 * 16 + 256 * width)
    assert block.cache_bytes == 4 * 2 * kv
    with pytest.raises(ConfigError, match="'dflash-tiny' is a shape without weights"):
        start("dflash-tiny")
    with pytest.raises(ConfigError, match="did you mean 'dflash-tiny'"):
        make_engine("tiny", load_format="dummy", speculative_config={**spec, "model": "dflash-tyni"})
    with pytest.raises(ConfigError, match="use method 'dspark'"):
        make_engine("tiny", load_format="dummy", speculative_config={**spec, "model": "dspark-tiny"})
