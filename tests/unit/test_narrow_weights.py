"""bf16 matrices stay bf16 where a CPU computes in float32: which, what memory that saves, and no bit of the results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.attention.base import AttentionBatch
from draftloop.kernels.native import functions
from draftloop.models import weights
from draftloop.models.dense import DenseDecoder, cache_spec
from draftloop.models.loader import bytes_per_weight, load_config, resolve_model
from draftloop.models.tensors import store_in_8_bits
from helpers import tiny_model
from loading import change, load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights are all bf16."""
    made = Path(tiny_model())
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    found = load_file(made / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in found.items()}, tmp_path / "model.safetensors")
    return tmp_path


def dtypes(model: DenseDecoder) -> dict[str, torch.dtype]:
    return {name: weight.dtype for name, weight in model.named_parameters()}


def run(model: DenseDecoder, num_tokens: int) -> Tensor:
    """Logits of a prompt."""
    spec = cache_spec(model.config, torch.float32)
    kv = torch.zeros(spec.num_layers, 2, 5, 16, spec.num_kv_heads, spec.head_dim)
    positions = torch.arange(num_tokens)
    batch = AttentionBatch(
        rows_R=torch.zeros(1, dtype=torch.int32),
        query_starts_R1=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lens_R=torch.tensor([num_tokens], dtype=torch.int32),
        positions_T=positions,
        slots_T=positions + 16,
        page_table_MN=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        max_query_len=num_tokens,
        uniform=False,
    )
    with torch.inference_mode():
        return model.logits(model(positions % model.config.vocab_size, list(kv), batch)[0])


def test_matrices_take_half_of_the_memory_and_give_the_same_bits(folder: Path) -> None:
    narrow, wide = load(folder), load(folder, may_narrow=False)
    assert set(dtypes(wide).values()) == {torch.float32}
    assert dtypes(narrow) == {
        name: torch.bfloat16 if weight.dim() == 2 else torch.float32 for name, weight in wide.named_parameters()
    }
    matrices = sum(weight.nbytes for weight in wide.parameters() if weight.dim() == 2)
    assert wide.cost().weight_bytes - narrow.cost().weight_bytes == (matrices - wide.embed_tokens.nbytes) // 2
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in narrow.parameters()}
    assert sum(held.values()) == sum(weight.nbytes for weight in wide.parameters()) - matrices // 2
    for num_tokens in (1, 5, 16, 17, 60):
        assert torch.equal(run(narrow, num_tokens), run(wide, num_tokens)), num_tokens


def test_what_is_not_all_bf16_is_widened(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    first, second = (f"model.layers.{layer}." for layer in (0, 1))
    names = {
        f"{first}self_attn.k_proj.weight": torch.float32,
        f"{second}mlp.down_proj.weight": torch.float16,
    }
    change(folder, **{name: found[name].to(dtype) for name, dtype in names.items()})
    model = load(folder)
    wide = {name for name, dtype in dtypes(model).items() if dtype is torch.float32 and "norm" not in name}
    assert wide == {"layers.0.attention.qkv_weight", "layers.1.mlp.down_weight"}
    q, k = (found[f"{first}self_attn.{name}_proj.weight"].float() for name in "qk")
    assert torch.equal(model.decoder_layers[0].attention.qkv_weight[: len(q) + len(k)], torch.cat((q, k)))
    assert torch.equal(run(model, 5), run(load(folder, may_narrow=False), 5))


def test_numbers_of_8_bits_with_a_scale_are_no_bf16(folder: Path) -> None:
    """Their scales are; their products need more bits."""
    stored, settings = store_in_8_bits(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert set(dtypes(load(folder)).values()) == {torch.float32}


def test_without_a_compiler_all_is_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available", lambda: False)
    assert set(dtypes(load(folder)).values()) == {torch.float32}


def test_other_types_are_as_they_were(folder: Path) -> None:
    assert set(dtypes(load(folder, dtype=torch.bfloat16)).values()) == {torch.bfloat16}
    source = resolve_model(str(folder), load_format="dummy")
    assert set(dtypes(load(source, load_format="dummy")).values()) == {torch.float32}


def test_the_start_says_so(folder: Path) -> None:
    said: list[str] = []
    load(folder, report=lambda loaded: said.append(str(loaded)))
    load(folder, may_narrow=False, report=lambda loaded: said.append(str(loaded)))
    assert ["bfloat16 matrices stay so" in line for line in said] == [True, False]


def test_what_weights_will_take_is_known_before_they_are_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(load_config(resolve_model(str(folder))), dtype="bfloat16")
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    assert bytes_per_weight(config, "auto", **place) == 2
    assert bytes_per_weight(config, "dummy", **place) == 4
    assert bytes_per_weight(replace(config, dtype="float32"), "auto", **place) == 4
    monkeypatch.setattr(functions, "available", lambda: False)
    assert bytes_per_weight(config, "auto", **place) == 4
