"""Heads that are right, and telling them from those that read the wrong layers; the benchmark of a head's shape."""

from __future__ import annotations

import json

import pytest
import torch

from draftloop import cli
from draftloop.bench.check_drafter import Measured, check_drafter, judge, method_of
from draftloop.config import EngineConfig
from draftloop.errors import ConfigError
from heads import COUNT_STEP, COUNT_VOCAB, counting_head, counting_target, tiny_head, write_head
from helpers import MODES, answers, engine, greedy, tiny_model

K = 5


def spec(model: str, **values) -> dict:
    return {"method": "eagle3", "model": model, "num_speculative_tokens": K, **values}


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("mode", MODES)
def test_a_head_that_is_always_right_is_accepted_in_full(mode, overlap):
    """Every draft of the chain, in every batch: prompts are cut into chunks, and rows end at different times."""
    llm = engine(
        counting_target(),
        speculative_config=spec(counting_head(2, "top")),
        cudagraph_mode=mode.value,
        cudagraph_capture_sizes=(2, 8),
        max_num_batched_tokens=48,
        async_scheduling=overlap,
        poison=True,
    )
    asked = [[3 * i + j % 5 for j in range(1 + 9 * i)] for i in range(5)]
    params = [greedy(1 + (K + 1) * (2 + i)) for i in range(5)]  # the first token, then whole blocks
    outputs = llm.generate(asked, params)
    for prompt, output, one in zip(asked, answers(outputs), params, strict=True):
        assert output == [(prompt[-1] + COUNT_STEP * (i + 1)) % COUNT_VOCAB for i in range(one.max_tokens)]
    assert llm.get_metrics()["mean_acceptance_length"] == 1 + K


# ---- check-drafter --------------------------------------------------------------------------


def settings(**values) -> EngineConfig:
    return EngineConfig.from_mapping(
        **{
            "model": counting_target(),
            "device": "cpu",
            "max_model_len": 128,
            "kv_cache_memory_bytes": 1 << 24,
            "enforce_eager": True,
            **values,
        }
    )


@pytest.mark.parametrize(
    ("layer_id", "layout", "rule", "fits", "text"),
    [
        (1, "nested", (2,), True, "it fits as it is (aux_layer_offset 1): 6.00 tokens per step"),
        (2, "top", (2,), True, "it fits as it is (aux_layer_offset 0): 6.00 tokens per step"),
        (1, "top", (1,), False, 'it fits with "aux_layer_offset": 1 in the speculative configuration: 6.00'),
        (2, "nested", (3,), False, 'it fits with "aux_layer_offset": 0 in the speculative configuration: 6.00'),
        (3, "top", (3,), False, "it does not fit: 1.00 tokens per step at best"),
    ],
)
def test_the_offset_that_fits_is_found(layer_id, layout, rule, fits, text):
    config = settings(speculative_config=spec(counting_head(layer_id, layout)))
    verdict = check_drafter(config, num_prompts=3, output_tokens=19)
    assert verdict.measured[0].aux_layers == rule
    assert verdict.fits is fits
    assert verdict.text.startswith(text)


def test_a_head_that_is_never_right_is_said_to_be_of_another_target():
    config = settings(model=tiny_model(), speculative_config=spec(tiny_head("eagle3")))
    verdict = check_drafter(config, num_prompts=3, output_tokens=20)
    assert not verdict.fits
    assert "made for another target, or not trained" in verdict.text
    assert len(verdict.measured) == 1, "the other offset leads past the last layer"


def test_other_drafters_are_measured_as_they_are():
    config = settings(
        model=tiny_model(),
        speculative_config={"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 2},
    )
    verdict = check_drafter(config, num_prompts=2, output_tokens=19)
    (measured,) = verdict.measured
    assert measured.offset is None
    assert measured.acceptance_length == 3
    assert verdict.fits


def test_the_better_offset_must_be_clearly_better():
    def at(offset: int, length: float) -> Measured:
        return Measured(offset=offset, aux_layers=(offset,), acceptance_length=length, per_position=())

    assert judge([at(0, 2.5), at(1, 1.4)]).text.startswith("it fits as it is (aux_layer_offset 0)")
    assert not judge([at(0, 1.4), at(1, 2.5)]).fits
    assert "both offsets do alike" in judge([at(0, 2.5), at(1, 2.45)]).text
    assert judge([at(0, 2.4), at(1, 2.5)]).fits
    assert not judge([at(0, 1.02), at(1, 1.05)]).fits


def run(*arguments: str) -> int:
    try:
        cli.main(["check-drafter", *arguments, "--num-prompts", "2", "--output-tokens", "12", "--device", "cpu"])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_on_the_command_line(capsys):
    common = ["--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", str(1 << 24)]
    assert run(counting_target(), counting_head(1, "top"), *common) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "aux_layer_offset 0 (as its config says), reads what enters layers 1: 1.00 tokens per step"
    )
    assert lines[1].startswith("aux_layer_offset 1, reads what enters layers 2: ")
    assert lines[2].startswith('it fits with "aux_layer_offset": 1')
    assert run(counting_target(), counting_head(2, "top"), *common) == 0
    capsys.readouterr()
    assert run(counting_target(), "/nowhere", *common) == 2
    assert "'/nowhere' does not exist" in capsys.readouterr().err
    assert run(counting_target(), counting_head(2, "top"), *common, "--spec-tokens", "0") == 2
    assert "num_speculative_tokens is 0, so there is nothing to check" in capsys.readouterr().err
    asked = json.dumps({"aux_layer_offset": 1})
    assert run(counting_target(), counting_head(2, "top"), *common, "-sc", asked) == 2
    assert "leave it out" in capsys.readouterr().err
    assert run(counting_target(), counting_head(2, "top"), *common, "--aux-layer-offset", "1") == 2
    assert "leave it out" in capsys.readouterr().err


def test_the_method_is_read_off_the_checkpoint():
    assert method_of(tiny_head("eagle3")) == "eagle3"
    assert method_of(tiny_head("eagle", method="eagle")) == "eagle"
    assert method_of(tiny_model()) == "draft_model"
    tensors = {f"part.{i}": torch.ones(1) for i in range(7)}
    unknown = write_head("unknown", {"architectures": ["LlamaForCausalLM"]}, tensors)
    with pytest.raises(
        ConfigError,
        match=r"says architectures \['LlamaForCausalLM'\], its tensors are part.0, .* and 2 more; say --spec-method",
    ):
        method_of(unknown)
    with pytest.raises(ConfigError, match="'tiny' is the shape of a whole model; name the folder or hub id of a dra"):
        method_of("tiny")


# ---- benchmark ------------------------------------------------------------------------------


def test_the_latency_of_a_heads_shape_is_measured_without_weights(tmp_path, capsys):
    asked = {
        "method": "eagle3",
        "model": "eagle3-tiny",
        "num_speculative_tokens": K,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.5,
    }
    arguments = ["bench", "latency", "tiny", "--load-format", "dummy", "--device", "cpu", "-sc", json.dumps(asked)]
    sizes = ["--batch-sizes", "2", "--prompt-tokens", "16", "--output-tokens", "240", "--repeats", "1"]
    cli.main([*arguments, *sizes, "--max-num-seqs", "2", "--max-model-len", "512", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.json")
    rows = {row["metric"]: row for row in json.loads(file.read_text())["rows"]}
    step = rows["iteration_ms"]
    assert (step["method"], step["drafter"], step["k"], step["eager_runs"]) == ("eagle3", "eagle3-tiny", K, 0)
    assert step["acceptance_length"] == pytest.approx(3.5, abs=0.8)  # 80 blocks
    # verify, accept, the head over the verified block, and K - 1 steps of its chain
    assert step["launches"] == 3 + K - 1


def test_what_a_heads_phases_cost_is_declared():
    llm = engine(
        "tiny",
        load_format="dummy",
        speculative_config={"method": "eagle3", "model": "eagle3-tiny", "num_speculative_tokens": K},
    )
    phases = llm.engine.table.phases
    prefill, decode = phases["draft.prefill"].cost, phases["draft.decode"].cost
    layer = 64 * 4 * 64 // 2 * 2 + 64 * 64 + 3 * 64 * 128  # q, k, v; o; the MLP
    norms, head, fc = 3 * 64, 64 * 64, 64 * 192
    assert decode.weight_bytes == 4 * (layer + norms + head)
    assert prefill.weight_bytes == decode.weight_bytes + 4 * fc
    assert decode.cache_bytes == prefill.cache_bytes == 4 * 2 * 2 * 16
    assert decode.flops == 2 * (layer + norms + head)
    assert decode.flops < 2 * (fc + layer + norms + head) > prefill.flops
