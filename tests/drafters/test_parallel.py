"""P-EAGLE and PARD: all drafts of a round from masks, against references without cache, batch or masks too many."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import Reference, hf_model, hf_states
from safetensors.torch import load_file
from torch import Tensor

from draftloop.drafters.eagle_config import MASK_HIDDEN, EagleConfig
from draftloop.drafters.kinds import kind_of
from draftloop.drafters.masks import masked_block
from draftloop.errors import ConfigError
from draftloop.request import SamplingParams
from heads import step_by_step, tiny_head, wide_config, write_head
from helpers import (
    VOCAB,
    answering,
    answers,
    engine,
    greedy,
    make_engine,
    near_draft,
    oracle,
    prompts,
    run_through,
    tiny_model,
)
from parallel import MASK, peagle_config, peagle_json, peagle_weights, tiny_pard, tiny_peagle, wide_peagle

BASE = peagle_config()
CONFIGS: dict[str, EagleConfig] = {
    "peagle": BASE,
    "four_layers": peagle_config(layers=4),
    "every_layer_wide": replace(BASE, wide_layers=(True, True)),
    "norms": replace(BASE, norm_before_residual=True, norm_before_fc=True, fc_norm=True),
    "whole_vocabulary": replace(BASE, draft_vocab_size=VOCAB, has_map=False),
    "the_targets_tables": replace(BASE, own_embeddings=False, own_head=False, draft_vocab_size=VOCAB, has_map=False),
}


def drafting(spec: dict[str, Any], *, forced: bool = True, **settings: Any):
    if forced:
        spec = {**spec, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    return engine(speculative_config=spec, **{"cudagraph_capture_sizes": (2, 8), "poison": True, **settings})


def peagle(name: str, k: int) -> dict[str, Any]:
    return {"method": "peagle", "model": tiny_peagle(name, CONFIGS[name]), "num_speculative_tokens": k}


@torch.no_grad()
def peagle_logits(
    config: EagleConfig, tokens: list[int], k: int, *, target: str | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [K, W] after `tokens`, the last of which the target has not seen, and the ids that they stand for."""
    target = target or tiny_model()
    weights, model = peagle_weights(config), hf_model(target)
    other = Reference(config, weights, model.model.embed_tokens.weight, model.lm_head.weight)
    streams, _ = hf_states(target, tokens)
    aux = torch.cat([streams[i] for i in config.layer_ids or ()], -1)[: len(tokens) - 1]
    masks = weights[MASK_HIDDEN].reshape(1, -1).expand(k - 1, -1)
    _, logits = other.run(torch.tensor([*tokens[1:], *[MASK] * (k - 1)]), other.fuse(torch.cat([aux, masks])))
    return logits[-k:], other.target_ids()


@torch.no_grad()
def pard_logits(tokens: list[int], k: int, *, model: str | None = None) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[*tokens, *[MASK] * (k - 1)]])
    return hf_model(model or near_draft())(ids).logits[0, -k:], torch.arange(VOCAB)


CASES = [
    *(pytest.param(peagle(name, 5), functools.partial(peagle_logits, CONFIGS[name]), id=name) for name in CONFIGS),
    pytest.param(peagle("peagle", 1), functools.partial(peagle_logits, BASE), id="one_draft"),
    *(
        pytest.param({"method": "pard", "model": tiny_pard(), "num_speculative_tokens": k}, pard_logits, id=f"pard_{k}")
        for k in (5, 1)
    ),
]


@pytest.mark.parametrize(("spec", "reference"), CASES)
def test_drafts_are_the_references_after_every_step(spec, reference):
    """Blocks end at every place (acceptance by coin), and prompts come in chunks: what is drafted next must depend
    on the tokens alone, so whatever masks and rejected drafts have left in the cache is gone."""
    k = spec["num_speculative_tokens"]
    forced = {"synthetic_acceptance_length": 1.5} if k == 1 else {}
    llm = drafting(spec | forced, max_num_batched_tokens=24, cudagraph_mode="FULL_AND_PIECEWISE", forced=k > 1)
    core, state = llm.engine.core, llm.engine.core.worker.state
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(16))
    lengths = set()

    def check() -> None:
        for sequence in answering(core):
            logits, ids = reference(sequence.token_ids, k)
            assert state.drafts_MK[sequence.row].tolist() == ids[logits.argmax(-1)].tolist()
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    run_through(llm, check)
    assert len(lengths) >= min(k, 4), "blocks end at many places"


@pytest.mark.parametrize(("spec", "reference"), [CASES[0], CASES[-2]])
def test_logits_are_the_references_number_by_number(spec, reference):
    """Sampled drafts keep the distributions that they were drawn from, over the target's vocabulary."""
    k = spec["num_speculative_tokens"]
    llm = drafting(spec, forced=False, cudagraph_mode="FULL")
    core, state = llm.engine.core, llm.engine.core.worker.state
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=8, seed=i))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            logits, ids = reference(sequence.token_ids, k)
            expected = torch.zeros(k, VOCAB)
            expected[:, ids] = (logits / 2.0).softmax(-1)
            torch.testing.assert_close(state.draft_probs_MKV[sequence.row], expected, rtol=1e-4, atol=1e-6)
            seen.append(tuple(state.drafts_MK[sequence.row].tolist()))

    run_through(llm, check)
    assert len(set(seen)) > 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["peagle", "pard"])
def test_the_reference_holds_on_each_device(device, method):
    """Drafters that every kernel takes. On a GPU, sums in another order may tip a close choice."""
    target, near = tiny_model("wide", hidden=256), tiny_model("wide-near", hidden=256, noise=0.06)
    model, reference = {
        "peagle": (wide_peagle(), functools.partial(peagle_logits, peagle_config(wide_config()), target=target)),
        "pard": (tiny_pard(near), functools.partial(pard_logits, model=near)),
    }[method]
    llm = step_by_step(target, device, {"method": method, "model": model, "num_speculative_tokens": 5})
    core, state, same = llm.engine.core, llm.engine.core.worker.state, []
    for prompt in prompts(3):
        core.add("0", prompt, greedy(20))
        while not core.idle:
            core.step()
            for sequence in core.scheduler.running:
                logits, ids = reference(sequence.token_ids, 5)
                same.append(state.drafts_MK[sequence.row].tolist() == ids[logits.argmax(-1)].tolist())
    assert len(same) > 12
    assert sum(same) >= (0.8 if device == "cuda" else 1.0) * len(same)
    llm.close()


def test_slots_of_a_block():
    """K = 3, so 6 slots: rows with 1, 4 and 2 new tokens, and one of padding."""
    block = masked_block(torch.tensor([1, 4, 2, 0]), 3, 6)
    assert [(~row).sum().item() for row in block.masked_RS] == [1, 4, 2, 1]
    assert block.drafting_N.view(4, 3).tolist() == [[0, 1, 2], [9, 10, 11], [13, 14, 15], [18, 19, 20]]


@pytest.mark.parametrize("method", ["peagle", "pard"])
def test_a_pass_ends_inside_of_the_rows_memory_at_the_longest_sequence(method):
    """2K slots from the first new token on reach further past a row's limit than a verify does."""
    spec = {
        "peagle": {"method": "peagle", "model": tiny_peagle("peagle", BASE)},
        "pard": {"method": "pard", "model": tiny_pard()},
    }[method]
    llm = engine(
        speculative_config={**spec, "num_speculative_tokens": 12},
        max_model_len=48,
        block_size=16,
        cudagraph_capture_sizes=(4,),
        max_num_seqs=4,
        poison=True,
    )
    state = llm.engine.core.worker.state
    assert state.tokens_ML.shape[1] == 48 + 24
    asked = [prompt for prompt in prompts(6, longest=44) if len(prompt) > 20]
    assert answers(llm.generate(asked, greedy(None))) == [oracle(p, 48, max_model_len=48) for p in asked]


# ---- what is read, and what is wrong with it ---------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "key"), [("speculators", "mask_token_id"), ("top", "pard_token"), ("nested", "ptd_token_id")]
)
def test_every_layout_is_read(layout, key):
    folder = tiny_peagle(f"layout-{layout}", BASE, layout=layout, key=key)
    spec = {"method": "peagle", "model": folder, "num_speculative_tokens": 3, "aux_layer_offset": 0}
    llm = make_engine(speculative_config=spec, enforce_eager=True)
    drafter, weights = llm.engine.drafter, peagle_weights(BASE)
    assert replace(drafter.config, layout="test", ids_are_outputs=False) == BASE
    assert drafter.config.ids_are_outputs == (layout == "nested")
    for plain, weight in drafter.head.destinations().items():
        assert torch.equal(weight, weights[plain]), plain
    torch.testing.assert_close(drafter.mask_C, weights[MASK_HIDDEN].flatten() @ weights["fc.weight"].T)
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


@pytest.mark.parametrize(
    ("method", "model", "name"),
    [("eagle3", lambda: tiny_peagle("peagle", BASE), "peagle"), ("draft_model", tiny_pard, "pard")],
)
def test_parallel_drafting_is_the_other_name_of_both(method, model, name):
    spec = {"method": method, "model": model(), "parallel_drafting": True, "num_speculative_tokens": 3}
    assert make_engine(speculative_config=spec, enforce_eager=True).engine.drafter.name == name


def checkpoint(name: str, *, without: tuple[str, ...] = (), mask: Tensor | None = None, **config: Any) -> str:
    weights = peagle_weights(BASE) | ({} if mask is None else {MASK_HIDDEN: mask})
    return write_head(
        f"peagle-{name}",
        {k: v for k, v in {**peagle_json(BASE), **config}.items() if v is not None},
        {k: w for k, w in weights.items() if k not in without},
    )


@pytest.mark.parametrize(
    ("method", "made", "message"),
    [
        (
            "peagle",
            lambda: checkpoint("no-token", mask_token_id=None),
            "does not say which token is its mask: config.json has none of mask_token_id, pard_token, ptd_token_id",
        ),
        (
            "peagle",
            lambda: checkpoint("far", mask_token_id=160),
            "mask_token_id of .* is 160, but it embeds ids 0 to 159",
        ),
        ("peagle", lambda: checkpoint("no-hidden", without=(MASK_HIDDEN,)), r"lacks mask_hidden \[192\]"),
        (
            "peagle",
            lambda: checkpoint("narrow", mask=torch.ones(1, 64)),
            r"mask_hidden of .* has shape \[64\], but config.json asks for \[192\]",
        ),
        ("peagle", lambda: tiny_head("eagle3"), "looks like an EAGLE-3 head; use method 'eagle3'"),
        ("eagle3", lambda: tiny_peagle("peagle", BASE), "looks like a P-EAGLE head; use method 'peagle'"),
        ("pard", lambda: tiny_pard(mask=None), "does not say which token is its mask"),
        ("pard", lambda: tiny_pard(mask=999), "pard_token of .* is 999, but it embeds ids 0 to 159"),
        ("pard", lambda: tiny_peagle("peagle", BASE), "looks like a P-EAGLE head"),
    ],
)
def test_what_cannot_work_is_refused(method, made, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(
            speculative_config={"method": method, "model": made(), "num_speculative_tokens": 2}, enforce_eager=True
        )


def test_a_method_that_cannot_draft_in_parallel_is_refused():
    spec = {"method": "ngram", "num_speculative_tokens": 2, "parallel_drafting": True}
    with pytest.raises(ConfigError, match="'ngram' cannot do parallel_drafting; these can: draft_model, eagle3, pard"):
        make_engine(speculative_config=spec)


def test_a_head_is_told_from_its_tensors():
    weights = load_file(Path(tiny_peagle("peagle", BASE)) / "model.safetensors")
    assert kind_of({}, weights) == "peagle"
    del weights[MASK_HIDDEN]
    assert kind_of({}, weights) == "eagle3"
    assert kind_of({"ptd_token_id": 7}, weights) == "peagle"


@pytest.mark.parametrize(("method", "model"), [("peagle", "peagle-tiny"), ("pard", "tiny")])
def test_a_shape_without_weights_drafts(method, model):
    llm = make_engine(
        "tiny",
        load_format="dummy",
        speculative_config={"method": method, "model": model, "num_speculative_tokens": 3},
        cudagraph_capture_sizes=(2,),
        max_num_seqs=2,
    )
    llm.generate([[1, 2, 3]], greedy(8))
    assert llm.get_metrics()["spec_decode_num_draft_tokens"] > 0
