"""Quantised checkpoints: every format read exactly, run with drafters, and refused by name where it cannot work."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.attention.sdpa import SdpaBackend
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.kernels.linear_fp8 import Fp8Weight, quantise_fp8
from draftloop.kernels.linear_int4 import Int4Weight, quantise_int4
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.models import loader
from draftloop.models.decoder import attention_shapes
from draftloop.models.dense import DenseDecoder, attention_shape
from draftloop.models.loader import load_config, load_model, resolve_model
from draftloop.models.quantisation import read_quantisation
from draftloop.models.weights import named_weights
from draftloop.request import SamplingParams
from gemma4 import gemma4_target
from heads import tiny_head, wide_head
from helpers import answers, greedy, make_engine, prompts, tiny_model
from quantized import FORMATS, PLAIN, change, change_config, quantised_copy

CPU = torch.device("cpu")


@pytest.fixture
def keeps_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps quantised weights too, as a GPU does."""
    monkeypatch.setattr(loader, "keeps_quantised", lambda device: True)


def load(folder: Path | str, **settings: Any) -> DenseDecoder:
    source = resolve_model(str(folder), load_format=settings.get("load_format", "auto"))
    config = load_config(source, quantization=settings.pop("quantization", None))
    dtype = settings.pop("dtype", torch.float32)
    backend = SdpaBackend(attention_shape(config, page_size=16, dtype=dtype), CPU)
    model = load_model(source, config, backend, device=CPU, dtype=dtype, max_positions=64, **settings)
    assert isinstance(model, DenseDecoder)
    return model


def quantised(model: torch.nn.Module) -> dict[str, QuantisedWeight]:
    return {name: weight for name, weight in named_weights(model) if isinstance(weight, QuantisedWeight)}


def drafter_of(llm: LLM) -> Any:
    assert llm.engine.drafter is not None
    return llm.engine.drafter


# ---- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_exactly(tmp_path: Path, name: str) -> None:
    """As the plain weights that the writer says, fused ones and those left alone included."""
    folder, plain = quantised_copy(tiny_model(), tmp_path, name)
    expected = load(plain).state_dict()
    found = load(folder).state_dict()
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ["fp8 per block", "compressed fp8 per channel", "gptq, act-order", "awq"])
@pytest.mark.usefixtures("keeps_quantised")
def test_weights_stay_small_where_kernels_read_them(tmp_path: Path, name: str) -> None:
    """All but those that are left alone; the rest of the model has its own type."""
    folder, plain = quantised_copy(tiny_model(), tmp_path, name)
    model, expected = load(folder), load(plain)
    small = quantised(model)
    assert len(small) == 7
    assert "layers.1.mlp.down_weight" not in small
    assert model.cost().weight_bytes < 0.5 * expected.cost().weight_bytes
    assert model.cost().flops == expected.cost().flops
    wanted = dict(named_weights(expected))
    for key, weight in small.items():
        torch.testing.assert_close(weight.dequantise(torch.float32), wanted[key].data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["fp8 per tensor, static", "compressed fp8 per tensor, static"])
@pytest.mark.usefixtures("keeps_quantised")
def test_stored_scales_of_activations_reach_the_kernels(tmp_path: Path, name: str) -> None:
    folder, _ = quantised_copy(tiny_model(), tmp_path, name)
    change(folder, **{f"{Q}.input_scale": torch.tensor(0.5)})
    small = quantised(load(folder))
    assert len(small) == 7
    for key, weight in small.items():
        assert isinstance(weight, Fp8Weight)
        assert weight.activations == "static"
        assert weight.input_scale is not None
        # of a fused weight the largest of its parts
        assert float(weight.input_scale) == pytest.approx(0.5 if key == "layers.0.attention.qkv_weight" else 0.03)


@pytest.mark.usefixtures("keeps_quantised")
def test_a_fused_weight_whose_parts_differ_is_plain(tmp_path: Path) -> None:
    folder, plain = quantised_copy(tiny_model(), tmp_path, "compressed fp8 per channel")
    name = "model.layers.0.self_attn.k_proj"
    floats = load_file(plain / "model.safetensors")[f"{name}.weight"]
    change(folder, **{f"{name}.weight": floats, f"{name}.weight_scale": None})
    change_config(folder, ignore=["lm_head", PLAIN, name])
    model = load(folder)
    assert "layers.0.attention.qkv_weight" not in quantised(model)
    assert "layers.1.attention.qkv_weight" in quantised(model)
    torch.testing.assert_close(
        model.state_dict()["layers.0.attention.qkv_weight"], load(plain).state_dict()["layers.0.attention.qkv_weight"]
    )


def test_an_output_head_that_is_quantised_becomes_plain(tmp_path: Path) -> None:
    """Drafters may borrow it."""
    folder, plain = quantised_copy(tiny_model(), tmp_path, "compressed fp8 per channel")
    values = quantise_fp8(load_file(plain / "model.safetensors")["lm_head.weight"])
    change(folder, **{"lm_head.weight": values.weight_NK, "lm_head.weight_scale": values.scale_PQ})
    change_config(folder, ignore=[PLAIN])
    torch.testing.assert_close(load(folder).lm_head.data, values.dequantise())


# ---- online ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "form", "loss"), [("fp8", Fp8Weight, 0.03), ("int4", Int4Weight, 0.13)])
@pytest.mark.usefixtures("keeps_quantised")
def test_plain_weights_are_quantised_while_they_are_read(kind: str, form: type, loss: float) -> None:
    """Each part of a fused weight by itself, embeddings and output head not at all."""
    folder = tiny_model("online", hidden=128)
    model, plain = load(folder, quantization=kind), load(folder)
    small = quantised(model)
    assert len(small) == 8
    assert all(isinstance(weight, form) for weight in small.values())
    wanted = dict(named_weights(plain))
    for key, weight in small.items():
        exact = wanted[key].data
        assert 0 < (weight.dequantise(torch.float32) - exact).norm() / exact.norm() < loss
    assert torch.equal(model.lm_head, plain.lm_head)
    key_rows = plain.state_dict()["layers.0.attention.qkv_weight"][128:192]
    values = quantise_fp8(key_rows) if kind == "fp8" else quantise_int4(key_rows, 128)
    found = small["layers.0.attention.qkv_weight"].dequantise(torch.float32)[128:192]
    assert torch.equal(found, values.dequantise())


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.usefixtures("keeps_quantised")
def test_random_weights_are_quantised_too(kind: str) -> None:
    """Of a shape and of a folder: for benchmarks."""
    model = load("tiny", load_format="dummy", quantization=kind)
    small = quantised(model)
    assert len(small) == 4 * model.config.num_layers
    assert all(0.015 < float(weight.dequantise(torch.float32).std()) < 0.025 for weight in small.values())


@pytest.mark.usefixtures("keeps_quantised")
@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_in_every_format(tmp_path: Path, name: str) -> None:
    folder, _ = quantised_copy(tiny_model(), tmp_path, name)
    model = load(folder, load_format="dummy")
    assert all(torch.isfinite(weight.dequantise(torch.float32)).all() for weight in quantised(model).values())


# ---- engines --------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(loader, "keeps_quantised", lambda device: True)
    return request.param


def make(folder: Path | str, device: str, **settings: Any) -> LLM:
    return make_engine(str(folder), device=device, dtype="float32" if device == "cpu" else "bfloat16", **settings)


@pytest.mark.parametrize("name", ["compressed fp8 per channel", "gptq, act-order", "awq"])
def test_a_quantised_target_with_a_drafter(tmp_path: Path, device: str, name: str) -> None:
    """B15, B49: as eager as captured, as many drafts stand, and the head keeps its own type and weights."""
    hidden = 256 if device == "cuda" else 64
    base = tiny_model("wide", hidden=256) if hidden == 256 else tiny_model()
    folder, plain = quantised_copy(base, tmp_path, name)
    head = wide_head("eagle3") if hidden == 256 else tiny_head("eagle3")
    spec = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    found: dict[str, tuple[list[list[int]], float]] = {}
    for mode, target in (("NONE", folder), ("FULL_DECODE_ONLY", folder), ("plain", plain)):
        llm = make(target, device, speculative_config=spec, cudagraph_mode="NONE" if mode == "plain" else mode)
        found[mode] = answers(llm.generate(prompts(5), greedy(24))), llm.get_metrics()["mean_acceptance_length"]
        drafter = drafter_of(llm)
        assert quantised(drafter.head) == {}
        assert {p.dtype for p in drafter.head.parameters()} == {getattr(torch, llm.engine.resolved.dtype)}
        assert {cache.dtype for cache in llm.engine.pool.caches} == {getattr(torch, llm.engine.resolved.dtype)}
        llm.close()
    assert found["NONE"] == found["FULL_DECODE_ONLY"]
    if device == "cpu":  # the same sums, from the same floats
        assert found["NONE"] == found["plain"]
    else:
        assert found["NONE"][1] == pytest.approx(found["plain"][1], rel=0.2)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_the_drafter_never_inherits_quantisation(device: str, kind: str) -> None:
    """B49: asked for the target alone, the draft model stays plain; asked for it alone, the target does."""
    folder = tiny_model("wide", hidden=256)
    draft = {"method": "draft_model", "model": tiny_model("wide-near", hidden=256, noise=0.06)}
    draft |= {"num_speculative_tokens": 2}
    llm = make(folder, device, quantization=kind, speculative_config=draft)
    assert quantised(drafter_of(llm).model) == {}
    tokens = answers(llm.generate(prompts(3), greedy(12)))
    llm.close()
    alone = make(folder, device, quantization=kind)
    if device == "cpu":
        assert answers(alone.generate(prompts(3), greedy(12))) == tokens
    alone.close()
    llm = make(folder, device, speculative_config={**draft, "quantization": kind})
    assert len(quantised(drafter_of(llm).model)) == 8
    plain = make(folder, device)
    if device == "cpu":
        assert answers(llm.generate(prompts(3), greedy(12))) == answers(plain.generate(prompts(3), greedy(12)))


@pytest.mark.parametrize(("target", "draft"), [(160, 150), (150, 160)])
def test_vocabularies_of_other_sizes(tmp_path: Path, device: str, target: int, draft: int) -> None:
    """B47, target and draft model quantised each in its own way: no id outside of either, the target's own text."""
    folder, _ = quantised_copy(tiny_model(f"vocab-{target}", vocab=target), tmp_path / "target", "awq")
    drafter, _ = quantised_copy(tiny_model(f"vocab-{draft}", vocab=draft), tmp_path / "draft", "fp8 per tensor, static")
    spec = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    llm, plain = make(folder, device, speculative_config=spec), make(folder, device)
    asked = prompts(4, vocab=150)
    ours = answers(llm.generate(asked, greedy(16)))
    if device == "cpu":
        assert ours == answers(plain.generate(asked, greedy(16)))
    sampled = answers(llm.generate(asked, SamplingParams(temperature=1, max_tokens=16, seed=1)))
    assert max(max(row) for row in ours + sampled) < target
    assert llm.get_metrics()["mean_acceptance_length"] > 1.2


def test_a_mixture_of_types_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that a narrower model rounds are counted and named; the other way nothing is lost or said."""
    tensors = load_file(Path(tiny_model()) / "model.safetensors")
    tensors = {name: weight if "norm" in name else weight.bfloat16() for name, weight in tensors.items()}
    (tmp_path / "mixed").mkdir()
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    (tmp_path / "mixed" / "config.json").write_text((Path(tiny_model()) / "config.json").read_text())
    with caplog.at_level(logging.WARNING):
        wide = load(tmp_path / "mixed")
        assert caplog.text == ""
        load(tmp_path / "mixed", dtype=torch.bfloat16)
    assert f"5 of 21 tensors in {tmp_path / 'mixed'} are F32 and rounded to bfloat16" in caplog.text
    assert "norm.weight; dtype float32 keeps them" in caplog.text
    assert torch.equal(wide.state_dict()["embed_tokens"], tensors["model.embed_tokens.weight"].float())


def test_the_time_that_loading_took_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_engine().close()
    assert "s (files: 0.00 GiB in " in caplog.text
    assert "GB/s" in caplog.text


# ---- what cannot work -----------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["quantised ('bitsandbytes')", "gptq and awq (gemm) of 4 bits", "fp8 (a"]),
        ({"quant_method": "gpt"}, ["did you mean 'gptq'"]),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, ["bits is 8, not 4"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, ["group size is 16"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:x": {"bits": 8}}}, ["'+:x'"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, ["'marlin'"]),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, ["version is 'gemv'"]),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, ["activation_scheme is 'odd'"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt is 'e5m2'"]),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, ["is empty"]),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {}}},
            },
            ["format 'int-quantized' with 8 bits of 'int'"],
        ),
    ],
)
def test_other_quantisation_is_named_with_what_works(
    tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    config = json.loads((Path(tiny_model()) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError) as raised:
        load_config(resolve_model(str(tmp_path), load_format="dummy"))
    for word in ["the checkpoint is quantised", "compressed-tensors float-quantized", *words]:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        (
            "fp8 per tensor, dynamic",
            {f"{Q}.weight_scale": None},
            [f"{Q}.weight_scale [64, 1] is missing", "fp8 weight"],
        ),
        ("fp8 per tensor, dynamic", {f"{Q}.weight_scale": torch.ones(3)}, [f"{Q}.weight_scale is F32 [3]", "[64, 1]"]),
        ("fp8 per tensor, static", {f"{Q}.input_scale": None}, [f"{Q}.input_scale [1] is missing"]),
        ("fp8 per block", {f"{Q}.weight_scale_inv": torch.ones(2, 3)}, ["[2, 3]", "needs [2, 2] of F32"]),
        (
            "fp8 per tensor, dynamic",
            {f"{Q}.weight": torch.ones(64, 64)},
            [f"{Q}.weight is of type F32", "says that it"],
        ),
        ("gptq", {f"{Q}.qzeros": None}, [f"{Q}.qzeros [2, 8] is missing"]),
        ("gptq", {f"{Q}.scales": torch.ones(1, 64)}, [f"{Q}.scales is F32 [1, 64]", "[2, 64]"]),
        ("gptq", {f"{Q}.g_idx": torch.arange(64).flip(0).int() // 32}, ["set 'desc_act' to true"]),
        ("gptq", {f"{Q}.g_idx": torch.zeros(64).int()}, [f"{Q} has groups of unequal size"]),
        ("gptq", {f"{Q}.qzeros": torch.zeros(2, 8).int()}, ["zero points other than 8", "set 'sym' to false"]),
        ("gptq", {f"{Q}.bias": torch.ones(64)}, [f"{Q}.bias is not zero"]),
        ("gptq, act-order", {f"{Q}.g_idx": torch.arange(64).int() // 32}, ["cannot be joined", "different orders"]),
        ("compressed int4, zeros", {f"{Q}.weight_zero_point": None}, [f"{Q}.weight_zero_point [8, 2] is missing"]),
        ("awq", {f"{Q}.qweight": torch.zeros(64, 9).int()}, [f"{Q}.scales is F16 [2, 64]", "[2, 72]"]),
    ],
)
@pytest.mark.usefixtures("keeps_quantised")
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, tensors: dict[str, Any], words: list[str]
) -> None:
    folder, _ = quantised_copy(tiny_model(), tmp_path, name)
    change(folder, **tensors)
    with pytest.raises(ConfigError) as raised:
        load(folder)
    for word in words:
        assert word in str(raised.value)


def test_nan_among_the_weights_is_named(tmp_path: Path) -> None:
    folder, _ = quantised_copy(tiny_model(), tmp_path, "fp8 per tensor, dynamic")
    weight = load_file(folder / "model.safetensors")[f"{Q}.weight"]
    weight.view(torch.uint8)[3, 5] = 0x7F
    change(folder, **{f"{Q}.weight": weight})
    with pytest.raises(ConfigError, match=r"q_proj\.weight holds NaN"):
        load(folder)


def test_quantised_tensors_without_a_config_are_named(tmp_path: Path) -> None:
    folder, plain = quantised_copy(tiny_model(), tmp_path, "fp8 per tensor, dynamic")
    (folder / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"is of type F8_E4M3, but config\.json does not say how"):
        load(folder)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("int4", "quantization is 'int4', but the checkpoint is quantised already \\('awq'\\)"),
        ("gptq", "quantization is 'gptq', but the checkpoint is quantised already \\('awq'\\)"),
        ("awq", None),
    ],
)
def test_asking_for_another_quantisation_is_refused(tmp_path: Path, asked: str, words: str | None) -> None:
    folder, _ = quantised_copy(tiny_model(), tmp_path, "awq")
    if words is None:
        load(folder, quantization=asked)
        return
    with pytest.raises(ConfigError, match=words):
        load(folder, quantization=asked)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_layers_of_gemma_4_are_quantised(quantization: str, keeps_quantised: None) -> None:
    """Those of attention and MLP; what a layer is told of each token by itself stays plain."""
    source = resolve_model(gemma4_target())
    config = load_config(source, quantization=quantization)
    backend = SdpaBackend(attention_shapes(config, page_size=16, dtype=torch.float32)[0], CPU)
    kept = load_model(source, replace(config, quantisation=None), backend, device=CPU, dtype=torch.float32)
    floats = dict(named_weights(kept))
    model = load_model(source, config, backend, device=CPU, dtype=torch.float32)
    quantised = {name: w for name, w in named_weights(model) if isinstance(w, QuantisedWeight)}
    kinds = {name.rpartition(".")[2] for name in quantised}
    assert kinds == {"qkv_weight", "o_weight", "gate_up_weight", "down_weight"}
    assert len(quantised) == 4 * config.num_layers
    for name, weight in quantised.items():
        error = (weight.dequantise(torch.float32) - floats[name]).norm() / floats[name].norm()
        assert error < (0.04 if quantization == "fp8" else 0.15), name


def test_a_checkpoint_whose_layers_are_all_left_out_runs_as_floats_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = resolve_model(gemma4_target())
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["re:.*"]}
    config = replace(load_config(source), quantisation=read_quantisation(settings))
    backend = SdpaBackend(attention_shapes(config, page_size=16, dtype=torch.float32)[0], CPU)
    with caplog.at_level(logging.WARNING):
        load_model(source, config, backend, device=CPU, dtype=torch.float32)
    assert "run as plain ones, though the checkpoint is quantised" in caplog.text


def test_asking_for_a_format_of_plain_weights_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"quantization is 'awq', but the checkpoint's weights are plain; .*fp8, int4"
    ):
        load(tiny_model(), quantization="awq")
    with pytest.raises(ConfigError, match="quantization is 'int8'; it must be one of 'fp8', 'int4'"):
        make_engine(quantization="int8")
