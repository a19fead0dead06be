"""Medusa heads: against a reference in plain torch after every step, in both layouts, and what cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_reference import hf_model, hf_states
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.drafters.kinds import kind_of
from draftloop.drafters.medusa_config import MEDUSA_PRESETS, TOKEN_MAP, MedusaConfig
from draftloop.errors import ConfigError
from draftloop.request import SamplingParams
from heads import tiny_head
from helpers import VOCAB, answering, answers, engine, greedy, make_engine, oracle, prompts, run_through, tiny_model
from medusa_heads import medusa_config, medusa_json, medusa_weights, tiny_medusa

K = 4
BASE = medusa_config()
CONFIGS: dict[str, MedusaConfig] = {
    "original": BASE,
    "vllm": replace(BASE, bias=False),
    "one_layer": replace(BASE, num_layers=1),
    "one_output_head": replace(BASE, output_heads="one"),
    "the_targets_output_head": replace(BASE, output_heads="target", output_size=0),
    "token_map": replace(BASE, output_size=64, map_size=64),
    "token_map_over_whole_heads": replace(BASE, map_size=64),
    "more_heads_than_drafts": replace(BASE, num_heads=6),
}


def folder(name: str) -> str:
    layout = {"original": "original", "one_layer": "prefixed"}.get(name, "vllm")
    return tiny_medusa(name, CONFIGS[name], layout=layout, pickled=name == "original")


def pickles(name: str) -> dict[str, str]:
    """The original's are read when asked for."""
    return {"load_format": "pt"} if name == "original" else {}


def drafting(name: str, **settings):
    spec = {
        "method": "medusa",
        "model": folder(name),
        "num_speculative_tokens": K,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0,
        **pickles(name),
        **settings.pop("spec", {}),
    }
    return engine(speculative_config=spec, **{"cudagraph_capture_sizes": (2, 8), "poison": True, **settings})


@torch.no_grad()
def reference(name: str, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [K, W] after `tokens`, the last of which the target has not seen, and the ids that they stand for."""
    config, weights = CONFIGS[name], medusa_weights(CONFIGS[name])
    hidden = hf_states(tiny_model(), tokens)[1][len(tokens) - 2]
    ids = weights.get(TOKEN_MAP, torch.arange(VOCAB))
    logits = []
    for head in range(K):
        x = hidden
        for layer in range(config.num_layers):
            y = weights[f"blocks.{head}.layers.{layer}.weight"] @ x
            if config.bias:
                y = y + weights[f"blocks.{head}.layers.{layer}.bias"]
            x = x + y / (1 + (-y).exp())
        output = {
            "each": f"lm_heads.{head}.weight",
            "one": "lm_heads.0.weight",
        }.get(config.output_heads)
        table = weights[output] if output else hf_model(tiny_model()).lm_head.weight
        logits.append((table if table.shape[0] == len(ids) else table[ids]) @ x)
    return torch.stack(logits), ids


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_the_references_after_every_step(name):
    """Blocks end at every place (acceptance by coin), and prompts come in chunks."""
    llm = drafting(name, max_num_batched_tokens=24, cudagraph_mode="FULL_AND_PIECEWISE")
    core, state = llm.engine.core, llm.engine.core.worker.state
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(16))
    lengths = set()

    def check() -> None:
        for sequence in answering(core):
            logits, ids = reference(name, sequence.token_ids)
            assert state.drafts_MK[sequence.row].tolist() == ids[logits.argmax(-1)].tolist()
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    run_through(llm, check)
    assert len(lengths) >= 4, "blocks end at many places"


@pytest.mark.parametrize("name", ["original", "one_output_head", "token_map"])
def test_logits_are_the_references_number_by_number(name):
    """Sampled drafts keep the distributions that they were drawn from, over the target's vocabulary."""
    llm = drafting(name, spec={"rejection_sample_method": None, "synthetic_acceptance_length": None})
    core, state = llm.engine.core, llm.engine.core.worker.state
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=8, seed=i))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            logits, ids = reference(name, sequence.token_ids)
            expected = torch.zeros(K, VOCAB)
            expected[:, ids] = (logits / 2.0).softmax(-1)
            probs = state.draft_probs_MKV[sequence.row]
            torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-6)
            drafts = state.drafts_MK[sequence.row]
            assert (probs.gather(1, drafts.long()[:, None]) > 0).all()
            seen.append(tuple(drafts.tolist()))

    run_through(llm, check)
    assert len(set(seen)) > 8


# ---- what is read, and what is wrong with it ---------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_is_read(name):
    spec = {"method": "medusa", "model": folder(name), "num_speculative_tokens": K, **pickles(name)}
    llm = make_engine(speculative_config=spec, enforce_eager=True)
    drafter, weights = llm.engine.drafter, medusa_weights(CONFIGS[name])
    layout = "FasterDecoding" if name == "original" else "vLLM"
    assert replace(drafter.config, layout="test") == CONFIGS[name]
    assert layout in drafter.describe()
    for plain, weight in drafter.heads.destinations().items():
        assert torch.equal(weight, weights[plain]), plain
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


def changed(name: str, *, config: dict | None = None, **tensors: Tensor | None) -> str:
    """A copy of a checkpoint with other values in its config, and tensors replaced or left out."""
    source, copy = Path(folder("vllm")), Path(f"{folder('vllm')}-{name}")
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_text(json.dumps({**medusa_json(CONFIGS["vllm"]), **(config or {})}))
    weights = {**load_file(source / "model.safetensors"), **{k.replace("__", "."): w for k, w in tensors.items()}}
    save_file({k: w.contiguous() for k, w in weights.items() if w is not None}, copy / "model.safetensors")
    return str(copy)


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: changed("short", blocks__3__layers__1__weight=None),
            r"lacks blocks.3.layers.1.weight \[64, 64\]; the export is incomplete",
        ),
        (
            lambda: changed("fewer", config={"num_heads": 5}),
            "lacks blocks.4.layers.0.weight .*lm_heads.4.weight",
        ),
        (lambda: changed("no_head", lm_heads__2__weight=None), r"lacks lm_heads.2.weight \[160, 64\]"),
        (
            lambda: changed("wrong", blocks__1__layers__0__weight=torch.zeros(64, 32)),
            r"blocks.1.layers.0.weight .* has shape \[64, 32\], but .* \[64, 64\]",
        ),
        (lambda: changed("extra", other__weight=torch.zeros(2, 2)), "has tensors that a set of Medusa heads does not"),
        (
            lambda: changed("truncated", config={"truncated_vocab_size": 32}),
            "a draft vocabulary of 32 of 160 ids, but no tensor token_map",
        ),
        (
            lambda: changed("outside", token_map=ids(3, 999)),
            "token_map of .* leads outside of the vocabulary: draft id 1 to 999",
        ),
        (lambda: changed("twice", token_map=ids(3, 3)), "token_map of .* leads to 1 ids for 2 draft ids"),
        (
            lambda: tiny_medusa("vocabulary", replace(BASE, output_size=100)),
            r"lm_heads.0.weight .* has shape \[100, 64\], but .* has 160 ids; the heads are made for another target",
        ),
        (
            lambda: tiny_medusa("wide", replace(BASE, hidden_size=128)),
            r"blocks.0.layers.0.weight .* has shape \[128, 128\], but .* has hidden size 64",
        ),
        (lambda: tiny_head("eagle3"), "looks like an EAGLE-3 head; use method 'eagle3'"),
    ],
)
def test_what_cannot_work_is_refused(made, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(
            speculative_config={"method": "medusa", "model": made(), "num_speculative_tokens": 2}, enforce_eager=True
        )


def test_more_drafts_than_heads_are_refused():
    spec = {"method": "medusa", "model": folder("vllm"), "num_speculative_tokens": 5}
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 5, but .* has 4 heads, .* ask for 4 or fewer"):
        make_engine(speculative_config=spec)


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_are_told_from_their_tensors(name):
    path = Path(folder(name))
    weights = torch.load(path / "medusa_lm_head.pt") if name == "original" else load_file(path / "model.safetensors")
    assert kind_of({}, weights) == "medusa"
    spec = {"method": "eagle", "model": folder(name), "num_speculative_tokens": 2, **pickles(name)}
    with pytest.raises(ConfigError, match="looks like a set of Medusa heads; use method 'medusa'"):
        make_engine(speculative_config=spec)


def test_a_shape_without_weights_drafts():
    assert MEDUSA_PRESETS["medusa-llama-3.1-8b"].shapes()["lm_heads.4.weight"] == (128_256, 4096)
    llm = make_engine(
        "tiny",
        load_format="dummy",
        speculative_config={"method": "medusa", "model": "medusa-tiny", "num_speculative_tokens": 3},
        cudagraph_capture_sizes=(2,),
        max_num_seqs=2,
    )
    llm.generate([[1, 2, 3]], greedy(8))
    assert llm.get_metrics()["spec_decode_num_draft_tokens"] > 0
