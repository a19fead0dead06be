"""Weights stored in 8 bits, and drafters that are shipped: found by name, read as floats, refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftloop.drafters.files import find_checkpoint
from draftloop.errors import ConfigError
from draftloop.models import resolve
from draftloop.models.tensors import LARGEST, open_tensors, quantise_rows, store_in_8_bits
from heads import tiny_head
from helpers import answers, engine, greedy, make_engine, near_draft, prompts, tiny_model


def stored(folder: str, into: Path, **changes: torch.Tensor | None) -> str:
    """A copy of a model folder with its weights in 8 bits; `changes` replace or (None) drop tensors."""
    into.mkdir()
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors, config["quantization_config"] = store_in_8_bits(load_file(Path(folder) / "model.safetensors"))
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    (into / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None},
        into / "model.safetensors",
    )
    return str(into)


@given(st.integers(0, 2**32), st.integers(-30, 30))
def test_every_weight_is_off_by_at_most_half_a_step(seed, exponent):
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[2] = 0
    values, scale = quantise_rows(weight)
    assert values.dtype is torch.int8
    assert scale.shape == (5, 1)
    error = (values.float() * scale.float() - weight).abs()
    # the largest weight of a row may be past 127 steps by the rounding of the scale
    assert (error <= scale.float() * (0.5 + LARGEST * 2**-8)).all()
    assert (error[2] == 0).all()


def test_what_is_stored_in_8_bits_reads_as_floats(tmp_path):
    folder = Path(stored(tiny_model(), tmp_path / "small"))
    plain = load_file(Path(tiny_model()) / "model.safetensors")
    with open_tensors([folder / "model.safetensors"]) as tensors:
        assert tensors.shapes == {name: tuple(weight.shape) for name, weight in plain.items()}
        for name, weight in plain.items():
            torch.testing.assert_close(tensors.read(name), weight, rtol=0, atol=float(weight.abs().max()) / 100)
    assert (folder / "model.safetensors").stat().st_size < 0.4 * sum(w.nbytes for w in plain.values())


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafters_stored_in_8_bits_draft_as_well(tmp_path, method):
    drafter = near_draft() if method == "draft_model" else tiny_head("eagle3")

    def run(model: str) -> tuple[list[list[int]], float]:
        llm = make_engine(speculative_config={"method": method, "model": model, "num_speculative_tokens": 3})
        outputs = llm.generate(prompts(6), greedy(32))
        return answers(outputs), llm.get_metrics()["mean_acceptance_length"]

    tokens, length = run(drafter)
    assert run(stored(drafter, tmp_path / "small")) == (tokens, pytest.approx(length, abs=0.1))


def test_a_target_stored_in_8_bits_runs(tmp_path):
    llm = make_engine(stored(tiny_model(), tmp_path / "small"))
    ours, exact = (answers(e.generate(prompts(4), greedy(1))) for e in (llm, engine()))
    assert sum(a == b for a, b in zip(ours, exact, strict=True)) >= 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"lm_head.weight_scale": None},
            ["lm_head.weight is stored in 8 bits", "lm_head.weight_scale [160, 1] is missing"],
        ),
        ({"lm_head.weight_scale": torch.ones(160)}, ["lm_head.weight_scale is F32 [160]", "[160, 1]"]),
        ({"lm_head.weight_scale": torch.ones(160, 1).int()}, ["lm_head.weight_scale is I32", "BF16"]),
        ({"model.norm.weight_scale": torch.ones(1)}, ["model.norm.weight_scale [1] is unexpected"]),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, changes, words):
    folder = stored(tiny_model(), tmp_path / "broken", **changes)
    with pytest.raises(ConfigError) as raised:
        make_engine(folder)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("change", [{"num_bits": 4}, {"strategy": "tensor"}, {"symmetric": False}])
def test_other_quantisation_is_still_refused(tmp_path, change):
    folder = Path(stored(tiny_model(), tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantised \('compressed-tensors'\); supported are"):
        make_engine(str(folder))


# ---- shipped drafters -----------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path, monkeypatch) -> Path:
    """Two drafters in the package's folder, one of them incomplete."""
    stored(near_draft(), tmp_path / "tiny-draft")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("not a drafter")
    monkeypatch.setattr(resolve, "SHIPPED", tmp_path)
    return tmp_path


def test_a_shipped_drafter_is_found_by_its_name(shipped):
    assert resolve.shipped() == ["half", "tiny-draft"]
    assert find_checkpoint("tiny-draft") == shipped / "tiny-draft"
    spec = {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3}
    llm = make_engine(speculative_config=spec)
    llm.generate(prompts(4), greedy(24))
    assert llm.get_metrics()["mean_acceptance_length"] > 1.3


def test_a_folder_of_the_same_name_goes_before_it(shipped, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stored(near_draft(), tmp_path / "here" / "tiny-draft")
    assert find_checkpoint("tiny-draft") == Path("tiny-draft")


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("tiny-drat", None, "did you mean 'tiny-draft'"),
        ("tiny-draft", "main", "shipped with this package, which has none; leave it out"),
        ("half", None, "has no *.safetensors file"),
    ],
)
def test_shipped_names_that_cannot_work_are_refused(shipped, name, revision, words):
    with pytest.raises(ConfigError) as raised:
        find_checkpoint(name, revision)
    assert words in str(raised.value)
