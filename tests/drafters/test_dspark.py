"""DSpark in the engine: against a reference in plain torch, for every head and layout, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dspark_reference import DSparkReference
from eagle_reference import hf_model
from test_dflash import aux_states

from blocks import block_config, block_json, block_weights, dspark_heads, tiny_block
from draftloop.drafters.dflash_config import BLOCK_PRESETS, DFlashConfig, check_target, parse
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.models.presets import PRESETS
from draftloop.request import SamplingParams
from heads import DRAFT_VOCAB, write_head
from helpers import (
    VOCAB,
    answering,
    answers,
    assert_all_free,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

K = 5
BASE = block_config("dspark")
CONFIGS: dict[str, DFlashConfig] = {
    "vanilla": BASE,
    "gated": replace(BASE, heads=dspark_heads("gated")),
    "rnn": replace(BASE, heads=dspark_heads("rnn", confidence_bias=False)),
    "no_markov": replace(BASE, heads=dspark_heads(None)),
    "no_confidence": replace(BASE, heads=dspark_heads(confidence=False, confidence_reads_markov=False)),
    "plain_confidence": replace(BASE, heads=dspark_heads(confidence_reads_markov=False)),
    "own_tables": block_config("dspark", layers=2, own_embeddings=True, own_head=True),
    "reduced_vocabulary": replace(BASE, draft_vocab_size=DRAFT_VOCAB, own_head=True, has_map=True),
    "borrowed_rows": replace(BASE, draft_vocab_size=DRAFT_VOCAB, has_map=True, heads=dspark_heads("rnn")),
    "not_from_the_anchor": replace(BASE, samples_from_anchor=False),
}


def drafting(name: str, *, forced: float | None = None, poison: bool | None = None, **settings: Any) -> LLM:
    model = tiny_block(f"dspark-{name}", CONFIGS[name], layout="speculators")
    spec = {"method": "dspark", "model": model, "num_speculative_tokens": K}
    if forced:
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": forced}
    return engine(speculative_config=spec, poison=poison, **{"cudagraph_capture_sizes": (2, 8), **settings})


def reference(name: str) -> DSparkReference:
    model, config = hf_model(tiny_model()), CONFIGS[name]
    return DSparkReference(config, block_weights(config), model.model.embed_tokens.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_and_confidences_are_the_references_after_every_step(name):
    llm = drafting(name, forced=3.0, max_num_batched_tokens=24, cudagraph_mode="FULL_AND_PIECEWISE", poison=True)
    core, state, drafter = llm.engine.core, llm.engine.core.worker.state, llm.engine.drafter
    other, config = reference(name), CONFIGS[name]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(16))
    lengths, corrected = set(), 0

    def check() -> None:
        nonlocal corrected
        for sequence in answering(core):
            tokens = sequence.token_ids
            aux = aux_states(config, tokens)
            drafts, _, confidence = other.all(tokens, aux, K)
            assert state.drafts_MK[sequence.row].tolist() == drafts
            if config.heads.confidence:
                ours = drafter.confidence_MK[sequence.row]
                torch.testing.assert_close(ours, confidence, rtol=1e-4, atol=1e-5)
            first = 0 if config.samples_from_anchor else 1
            hidden = other.block(tokens[-1], aux[: len(tokens) - 1], K + first)[first:]
            corrected += [int(other.ids[i]) for i in (hidden @ other.head.T).argmax(-1)] != drafts
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    with torch.no_grad():
        run_through(llm, check)
    assert len(lengths) >= 4, "blocks end at many places"
    assert (corrected > 2) == (config.heads.markov_kind is not None), "the Markov head matters"


@pytest.mark.parametrize("name", ["vanilla", "rnn", "borrowed_rows"])
def test_each_sampled_draft_is_drawn_from_what_the_one_before_leaves(name):
    """The distributions that are kept follow the drafts that were drawn, so acceptance stays lossless."""
    llm = drafting(name, cudagraph_mode="FULL", poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    other, config = reference(name), CONFIGS[name]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=8, seed=i))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drawn = state.drafts_MK[sequence.row].tolist()
            _, logits, _ = other.all(tokens, aux_states(config, tokens), K, said=drawn)
            expected = torch.zeros(K, VOCAB)
            expected[:, other.ids] = (logits / 2.0).softmax(-1)
            probs = state.draft_probs_MKV[sequence.row]
            torch.testing.assert_close(probs, expected, rtol=1e-3, atol=1e-5)
            assert (probs.gather(1, torch.tensor(drawn)[:, None]) > 0).all()
            seen.append(tuple(drawn))

    run_through(llm, check)
    assert len(set(seen)) > 8


# ---- layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "layers"),
    [
        ("vanilla", "speculators", (0, 1)),
        ("reduced_vocabulary", "speculators", (0, 1)),
        ("own_tables", "deepspec", (1, 2)),
        ("gated", "deepspec", (1, 2)),
        ("rnn", "specforge", (1, 2)),
        ("no_confidence", "specforge", (1, 2)),
    ],
)
def test_every_layout_is_read_and_drafts(name, layout, layers):
    config = CONFIGS[name]
    shapes = {tensor: tuple(weight.shape) for tensor, weight in block_weights(config).items()}
    found, _ = parse(block_json(config, layout), shapes, method="dspark", name="drafter")
    said = {"layout": "", "ids_are_outputs": False, "num_target_layers": None}  # how it is said, not what it is
    assert replace(found, **said) == replace(config, **said)
    folder = tiny_block(f"dspark-{name}-{layout}", config, layout=layout)
    spec = {"method": "dspark", "model": folder, "num_speculative_tokens": 8}
    llm = make_engine(speculative_config=spec, enforce_eager=True)
    assert llm.engine.drafter.aux_layers == layers
    weights = block_weights(config)
    destinations = llm.engine.drafter.model.destinations()
    assert set(destinations) == set(config.shapes()) - {"d2t"}
    assert all(torch.equal(weight, weights[tensor]) for tensor, weight in destinations.items())
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


def test_what_the_confidence_head_reads_is_seen_from_its_tensor_where_nobody_says_it():
    for name in ("vanilla", "plain_confidence"):
        shapes = {tensor: tuple(weight.shape) for tensor, weight in block_weights(CONFIGS[name]).items()}
        values = {
            k: v for k, v in block_json(CONFIGS[name], "deepspec").items() if not k.startswith(("conf", "enable"))
        }
        found = parse(values, shapes, method="dspark", name="drafter")[0]
        assert found.heads == CONFIGS[name].heads


def test_where_drafting_starts_is_honoured():
    config = CONFIGS["vanilla"]
    shapes = {tensor: tuple(weight.shape) for tensor, weight in block_weights(config).items()}
    for layout in ("speculators", "deepspec", "specforge"):
        values = {k: v for k, v in block_json(config, layout).items() if k != "sample_from_anchor"}
        default = parse(values, shapes, method="dspark", name="drafter")[0]
        assert (default.samples_from_anchor, default.max_drafts) == (True, 8)
        other = parse({**values, "sample_from_anchor": False}, shapes, method="dspark", name="drafter")[0]
        assert (other.samples_from_anchor, other.max_drafts) == (False, 7)


@pytest.mark.parametrize(
    ("config", "changes", "k", "message"),
    [
        (BASE, {}, 9, "is 9, but .* fills blocks of 8, so that it drafts at most 8; ask for 8 or fewer"),
        (CONFIGS["not_from_the_anchor"], {}, 8, "is 8, but .* drafts at most 7"),
        (BASE, {"markov_head_type": "gatd"}, 3, "markov_head_type of .* is 'gatd'; did you mean 'gated'"),
        (BASE, {"markov_head_type": "rnn"}, 3, r"lacks markov_head.joint_proj.weight \[36, 88\]"),
        (BASE, {"enable_confidence_head": False}, 3, "does not: confidence_head.proj.bias"),
        (BASE, {"confidence_head_with_markov": False}, 3, r"\[1, 76\], but config.json asks for \[1, 64\]"),
        (replace(BASE, heads=dspark_heads(vocab=64)), {}, 3, r"markov_w1.weight of .* has 64 rows, but .* 160 ids"),
    ],
)
def test_what_cannot_work_is_refused(config, changes, k, message):
    values = {**block_json(config, "speculators"), **changes}
    folder = write_head("dspark-refused", values, block_weights(config))
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config={"method": "dspark", "model": folder, "num_speculative_tokens": k})


def test_confidences_are_kept_per_row_and_said():
    llm = drafting("vanilla", cudagraph_mode="FULL")
    memory = llm.engine.drafter.row_memory()["confidence_MK"]
    assert memory.shape == (9, K)
    memory.zero_()
    llm.generate(prompts(3), greedy(8))
    assert ((memory[:3] > 0) & (memory[:3] < 1)).all()
    said = llm.engine.drafter.describe()
    assert "vanilla Markov head of rank 12, confidence head" in said
    assert "no Markov head" in drafting("no_markov").engine.drafter.describe()


@pytest.mark.parametrize("whole", [False, True], ids=["apart", "one_graph"])
def test_drafts_end_where_the_product_of_confidences_falls_below_the_threshold(whole):
    """Also before the first one; a row that had none is drafted for again, from a context without gaps."""
    model, threshold = tiny_block("dspark-vanilla", CONFIGS["vanilla"], layout="speculators"), 0.3
    spec = {"method": "dspark", "model": model, "num_speculative_tokens": K, "confidence_threshold": threshold}
    llm = engine(
        speculative_config=spec, cudagraph_capture_sizes=(2, 8), max_num_batched_tokens=24, poison=True,
        cudagraph_mode="FULL", iteration_graph=whole, async_scheduling=False,
    )  # fmt: skip
    core, state, other = llm.engine.core, llm.engine.core.worker.state, reference("vanilla")
    lengths: dict[str, list[int]] = {str(i): [] for i in range(3)}
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(24))

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts, _, confidence = other.all(tokens, aux_states(CONFIGS["vanilla"], tokens), K)
            product = confidence.cumprod(0)
            assert (product - threshold).abs().min() > 1e-4, "the reference cannot tell"
            kept = int((product >= threshold).sum())
            assert state.drafts_MK[sequence.row].tolist() == drafts[:kept] + [-1] * (K - kept)
            lengths[sequence.request_id].append(kept)

    with torch.no_grad():
        ended = run_through(llm, check)
    assert ended == {str(i): oracle(prompt, 24) for i, prompt in enumerate(prompts(3))}
    seen = [length for row in lengths.values() for length in row]
    assert len(set(seen)) >= 3, seen
    assert 0 in seen
    replays = llm.get_graph_report().replays
    if not whole:
        assert replays["draft.plain"] > 0
        assert replays["target.decode"] > 0, "a batch without drafts costs what plain decoding costs"
    assert_all_free(llm)


def test_a_threshold_needs_a_confidence_head_and_a_chance():
    model = tiny_block("dspark-no_confidence", CONFIGS["no_confidence"], layout="speculators")
    spec = {"method": "dspark", "model": model, "num_speculative_tokens": K}
    with pytest.raises(ConfigError, match=r"confidence_threshold is 0.5, but .* has no confidence head; leave it out"):
        make_engine(speculative_config=spec | {"confidence_threshold": 0.5})
    with pytest.raises(ConfigError, match=r"confidence_threshold is 1.5; it must be in \[0, 1\]"):
        make_engine(speculative_config=spec | {"confidence_threshold": 1.5})
    with pytest.raises(ConfigError, match="'ngram' does not use 'confidence_threshold'"):
        make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "confidence_threshold": 0.5})


def test_presets_are_shapes_of_what_is_published():
    config, target = BLOCK_PRESETS["dspark-llama-3.1-8b"], PRESETS["llama-3.1-8b"]
    check_target(config, "drafter", target, "llama-3.1-8b")
    assert config.max_drafts == 7
    assert config.shapes()["markov_head.markov_w2.weight"] == (128_256, 256)
    assert config.shapes()["confidence_head.proj.weight"] == (1, 4096 + 256)
    spec = {"method": "dspark", "model": "dspark-tiny", "num_speculative_tokens": 7}
    llm = make_engine("tiny", load_format="dummy", speculative_config=spec, cudagraph_mode="FULL")
    plain = make_engine("tiny", load_format="dummy", enforce_eager=True)
    asked = prompts(3)
    assert answers(llm.generate(asked, greedy(12))) == answers(plain.generate(asked, greedy(12)))
    drafter = llm.engine.drafter
    cost, block = llm.engine.table.phases["draft.block"].cost, drafter.model.block_cost()
    per_step = 256 * 8 + (64 + 8) + 1
    assert cost.weight_bytes == block.weight_bytes + 4 * 7 * per_step
    assert cost.flops == block.flops + 2 * per_step
