"""Quantised checkpoints that cannot work are refused by name: what is wrong, what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from draftloop.errors import ConfigError
from draftloop.models.loader import load_config, resolve_model
from helpers import make_engine, tiny_model
from loading import change, load
from quantized import Q, quantised_copy


def compressed(bits: int, kind: str, strategy: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int" else "float-quantized",
        "config_groups": {"group": {"weights": weights, "input_activations": inputs}},
    }


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
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, ["bits is 8, not 4"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["blocks are [128], not rows and columns"]),
        ({"quant_method": "fp8", "weight_block_size": 128}, ["blocks are 128, not rows and columns"]),
        (
            compressed(8, "float", "channel") | {"sparsity_config": {"format": "2:4"}},
            ["sparsity_config has"],
        ),
        (compressed(8, "float", "group"), ["the strategy of 8-bit floats is 'group', not 'tensor'"]),
        (compressed(8, "float", "channel", {"num_bits": 8, "type": "int"}), ["activations are 8 bits of 'int'"]),
        (compressed(4, "int", "tensor"), ["the strategy of 4-bit integers is 'tensor', not 'group'"]),
        (compressed(4, "int", "channel", {"num_bits": 8}), ["activations are quantised beside weights of 4 bits"]),
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
        ("awq", {f"{Q}.qweight": torch.zeros(48, 8).int()}, [f"{Q} has 48 input columns, which groups of 32"]),
        (
            "awq",
            {f"{Q}.qweight": torch.zeros(8).int()},
            [f"{Q}.qweight is missing or not a matrix, but config.json says"],
        ),
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


def test_asking_for_a_format_of_plain_weights_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"quantization is 'awq', but the checkpoint's weights are plain; .*fp8, int4"
    ):
        load(tiny_model(), quantization="awq")
    with pytest.raises(ConfigError, match="quantization is 'int8'; it must be one of 'fp8', 'int4'"):
        make_engine(quantization="int8")


@pytest.mark.usefixtures("keeps_quantised")
def test_layers_whose_rows_are_reordered_cannot_be_quantised(tmp_path: Path) -> None:
    """GLM's rotation turns neighbours."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    config = transformers.Glm4Config(**sizes, pad_token_id=0, eos_token_id=1, architectures=["Glm4ForCausalLM"])
    transformers.Glm4ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rows of a quantised q, k and v cannot be reordered"):
        load(tmp_path, quantization="fp8")
