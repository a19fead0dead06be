"""Quantised checkpoints: every format read exactly, and run with drafters."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.attention.sdpa import SdpaBackend
from draftloop.engine.llm import LLM
from draftloop.kernels.linear_fp8 import Fp8Weight, quantise_fp8
from draftloop.kernels.linear_int4 import Int4Weight, quantise_int4
from draftloop.kernels.quantised import QuantisedWeight
from draftloop.models import loader
from draftloop.models.decoder import attention_shapes
from draftloop.models.loader import load_config, load_model, resolve_model
from draftloop.models.quantisation import read_quantisation
from draftloop.models.weights import named_weights
from draftloop.request import SamplingParams
from gemma4 import gemma4_target
from heads import tiny_head, wide_head
from helpers import answers, greedy, make_engine, prompts, tiny_model
from loading import CPU, change, load
from quantized import FORMATS, PLAIN, Q, change_config, quantised_copy


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
