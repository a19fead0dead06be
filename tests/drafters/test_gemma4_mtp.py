"""The Gemma 4 assistant in the engine: against transformers' at every step, number by number."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.graphs.phase import ModeSetting
from draftloop.request import SamplingParams
from gemma4 import (
    WINDOW,
    assistant_config,
    assistant_shapes,
    gemma4_assistant,
    gemma4_target,
    random_weights,
    write,
)
from helpers import VOCAB, answering, answers, engine, greedy, make_engine, oracle, prompts, run_through, tiny_model

K = 3


def drafting(
    *, ordered: bool = False, position: str | None = None, forced: float | None = None, k: int = K, **settings: Any
) -> LLM:
    spec: dict[str, Any] = {
        "method": "gemma4_mtp",
        "model": gemma4_assistant(ordered=ordered),
        "num_speculative_tokens": k,
    }
    if position:
        spec["gemma4_position"] = position
    if forced:
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": forced}
    return engine(gemma4_target(), speculative_config=spec, **{"cudagraph_capture_sizes": (2, 8), **settings})


# ---- what transformers drafts ----------------------------------------------------------------


@functools.cache
def hf_target():
    return transformers.Gemma4ForCausalLM.from_pretrained(gemma4_target(), dtype=torch.float32).eval()


@functools.cache
def hf_assistant(ordered: bool):
    folder = gemma4_assistant(ordered=ordered)
    return transformers.Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def seen(tokens: list[int]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The target over all tokens but the last: the final state of the last one, and keys and values to be read."""
    out = hf_target()(
        torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
    )
    shared = {kind: out.shared_kv_states[kind] for kind in ("sliding_attention", "full_attention")}
    # a window's worth, as is left of them in a sliding cache; the mask of transformers would let one more pass
    keys, values = shared["sliding_attention"]
    shared["sliding_attention"] = (keys[:, :, -WINDOW:], values[:, :, -WINDOW:])
    return out.hidden_states[-1][:, -1:], shared


@torch.no_grad()
def chain(tokens: list[int], num_drafts: int, *, ordered: bool, behind: int = 0) -> tuple[list[int], Tensor, Tensor]:
    """Greedy drafts after `tokens`, the last hidden state and each step's logits, by transformers' modules.

    `behind`: how far before the bonus token the queries stand.
    """
    hidden, shared = seen(tokens)
    embed, assistant = hf_target().get_input_embeddings(), hf_assistant(ordered)
    position, token = torch.tensor([[len(tokens) - 1 - behind]]), tokens[-1]
    drafts, logits = [], []
    for _ in range(num_drafts):
        inputs = torch.cat([embed(torch.tensor([[token]])), hidden], -1)
        out = assistant(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
        hidden, token = out.last_hidden_state, int(out.logits[0, -1].argmax())
        drafts.append(token)
        logits.append(out.logits[0, -1])
    return drafts, hidden[0, -1], torch.stack(logits)


def steps(llm: LLM, asked: list[list[int]], max_tokens: int, check: Any) -> None:
    """Run requests; `check(sequence, tokens)` for each that decodes, after every step."""
    core = llm.engine.core
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(max_tokens))

    def look() -> None:
        for sequence in answering(core):
            check(sequence, sequence.token_ids)

    run_through(llm, look)


@pytest.mark.parametrize("position", [None, "vllm"])
@pytest.mark.parametrize("ordered", [False, True], ids=["all_ids", "ordered"])
def test_drafts_and_hidden_states_are_those_of_transformers_after_every_step(ordered, position):
    """B43, B44: K drafts are returned; blocks end at every place, prompts come in chunks, and contexts grow past the
    window, whose edge is inside what is rolled back."""
    llm = drafting(ordered=ordered, position=position, forced=2.5, max_num_batched_tokens=24, poison=True)
    state, drafter = llm.engine.core.worker.state, llm.engine.drafter
    lengths, contexts = set(), set()

    def check(sequence, tokens: list[int]) -> None:
        drafts, hidden, _ = chain(tokens, K, ordered=ordered, behind=1 if position else 0)
        assert state.drafts_MK[sequence.row].tolist() == drafts
        assert (drafter.hidden_MB[sequence.row] - hidden).norm() < 1e-4 * hidden.norm()
        lengths.update(i for i, count in enumerate(sequence.acceptance_histogram) if count)
        contexts.add(len(tokens))

    steps(llm, [*prompts(3), prompts(1, longest=40)[0] * 8, [7]], 14, check)
    assert lengths == {0, 1, 2, 3}
    assert min(contexts) < WINDOW < max(contexts) - 20


@pytest.mark.parametrize("mode", ModeSetting)
def test_the_same_in_every_mode(mode):
    llm = drafting(ordered=True, forced=2.5, max_num_batched_tokens=24, cudagraph_mode=mode.value, poison=True)
    state, counted = llm.engine.core.worker.state, []

    def check(sequence, tokens: list[int]) -> None:
        assert state.drafts_MK[sequence.row].tolist() == chain(tokens, K, ordered=True)[0]
        counted.append(len(tokens))

    steps(llm, prompts(3), 12, check)
    assert len(counted) > 6


@pytest.mark.parametrize("ordered", [False, True], ids=["all_ids", "ordered"])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_every_steps_logits_are_those_of_transformers(num_drafts, ordered, monkeypatch):
    """B43: as many as were asked for, from keys and values in caches of unlike shape behind one page table."""
    llm = drafting(k=num_drafts, ordered=ordered, cudagraph_mode="NONE")
    assistant, pool, made = llm.engine.drafter.assistant, llm.engine.pool, []
    assert len({cache.shape[4:] for cache in pool.caches}) == len(pool.caches) == 2
    heads = assistant.logits
    monkeypatch.setattr(assistant, "logits", lambda normed: made.append(heads(normed)) or made[-1])
    counted = []

    def check(sequence, tokens: list[int]) -> None:
        drafts, _, expected = chain(tokens, num_drafts, ordered=ordered)
        ours = torch.cat(made)
        scored = ours.isfinite()
        assert scored.sum(-1).tolist() == [6 * VOCAB // 16 if ordered else VOCAB] * num_drafts
        torch.testing.assert_close(ours[scored], expected[scored], atol=1e-4, rtol=0)
        assert llm.engine.core.worker.state.drafts_MK[sequence.row].tolist() == drafts
        made.clear()
        counted.append(len(tokens))

    steps(llm, [prompts(4)[2] * 3], 8, check)
    assert len(counted) == 7


def test_drafting_writes_nothing_to_the_targets_caches():
    """B43. A round that is run again after each step leaves all pages and the same drafts."""
    llm = drafting(cudagraph_mode="FULL", iteration_graph=False)
    drafter, pool, table, state = llm.engine.drafter, llm.engine.pool, llm.engine.table, llm.engine.core.worker.state
    assert drafter.cache_specs() == []

    def check(sequence, tokens: list[int]) -> None:
        before, drafts = [cache.clone() for cache in pool.caches], state.drafts_MK.clone()
        drafter.hidden_MB[sequence.row] = seen(tokens)[0][0, 0]
        for name in drafter.rounds(sampled=False).first:
            table.run(name, 1)
        assert torch.equal(state.drafts_MK, drafts)
        for one, other in zip(before, pool.caches, strict=True):  # pages of nobody may hold NaN
            torch.testing.assert_close(one[:, :, 1:], other[:, :, 1:], rtol=0, atol=0, equal_nan=True)

    steps(llm, [prompts(4)[2] * 3], 8, check)


@pytest.mark.parametrize("ordered", [False, True], ids=["all_ids", "ordered"])
def test_sampled_drafts_keep_the_distribution_that_they_were_drawn_from(ordered):
    """Of ids that are not scored it is zero, so that acceptance stays lossless."""
    llm = drafting(ordered=ordered, cudagraph_mode="FULL", poison=True)
    core, state, counted = llm.engine.core, llm.engine.core.worker.state, []
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=8, seed=i))

    def look() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            logits = chain(tokens, 1, ordered=ordered)[2][0]
            if ordered:
                logits = logits.masked_fill(logits == logits.min(), float("-inf"))
            probs = state.draft_probs_MKV[sequence.row]
            torch.testing.assert_close(probs[0], (logits / 2.0).softmax(-1), rtol=1e-3, atol=1e-5)
            if ordered:
                assert probs.count_nonzero(-1).tolist() == [6 * VOCAB // 16] * K
            drafts = state.drafts_MK[sequence.row].long()
            assert (probs.gather(1, drafts[:, None]) > 0).all()
            counted.append(tuple(drafts.tolist()))

    run_through(llm, look)
    assert len(set(counted)) > 8


@pytest.mark.parametrize("position", ["hf", "vllm"])
def test_text_past_the_window_is_the_targets(position):
    """B44: a window of 16, prompts of up to 40 tokens and 40 more, rolled back across its edge."""
    llm = drafting(position=position, k=4, cudagraph_mode="FULL", poison=True)
    asked = prompts(4, longest=40)
    expected = [oracle(prompt, 40, model=gemma4_target()) for prompt in asked]
    assert answers(llm.generate(asked, greedy(40))) == expected
    model = hf_target()
    for prompt, text in zip(asked, expected, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text, "the oracle is right"


def test_the_target_as_its_own_draft_model_is_always_right():
    """B40: every draft is accepted, so the caches of two kinds of layers hold what they should."""
    spec = {"method": "draft_model", "model": gemma4_target(), "num_speculative_tokens": 3}
    llm = make_engine(gemma4_target(), speculative_config=spec, cudagraph_mode="FULL")
    llm.engine.table.poison = True
    asked = prompts(3, longest=30)
    assert answers(llm.generate(asked, greedy(25))) == [oracle(p, 25, model=gemma4_target()) for p in asked]
    assert llm.get_metrics()["spec_decode_num_accepted_tokens"] >= 0.9 * 3 * (75 / 4)
    llm.close()


# ---- what cannot work, and says so -----------------------------------------------------------


def refused(model: str, target: str | None = None, **spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_engine(
            target or gemma4_target(),
            speculative_config={"method": "gemma4_mtp", "model": model, "num_speculative_tokens": 2, **spec},
        )
    return str(caught.value)


def changed(*, weights: dict[str, Tensor] | None = None, drop: str = "", **changes: Any) -> str:
    config = assistant_config(**changes)
    tensors = {**random_weights(assistant_shapes(config), seed=1), **(weights or {})}
    return write("assistant-changed", config, {k: w for k, w in tensors.items() if not drop or drop not in k})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backbone_hidden_size": 48}, "made for a target with hidden size 48, but that of"),
        ({"text_config": {"vocab_size": 96}}, "vocabulary size 96"),
        ({"text_config": {"head_dim": 24}}, "sliding_attention head size 24"),
        ({"text_config": {"global_head_dim": 16}}, "full_attention head size 16"),
        ({"text_config": {"num_attention_heads": 5, "num_key_value_heads": 5}}, "5 query heads, which do not divide"),
        ({"tie_word_embeddings": False}, "has an output head of its own"),
        (
            {"drop": "layers.0.self_attn.q_norm"},
            "lacks layers.0.self_attn.q_norm.weight [16]; the export is incomplete",
        ),
        (
            {"weights": {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 32)}},
            "has tensors that a Gemma 4 assistant does not: layers.0.self_attn.k_proj.weight [32, 32]",
        ),
        ({"weights": {"pre_projection.weight": torch.zeros(32, 64)}}, "pre_projection.weight of"),
        (
            {
                "use_ordered_embeddings": True,
                "weights": {"masked_embedding.token_ordering": torch.zeros(VOCAB, dtype=torch.int64)},
            },
            "does not name every id once; the export is damaged",
        ),
    ],
)
def test_an_assistant_that_cannot_work_is_named(settings, said):
    assert said in refused(changed(**settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"text_config": {"num_kv_shared_layers": 1}}, "has layers with keys and values, or with embeddings"),
        ({"text_config": {"hidden_size_per_layer_input": 8}}, "has layers with keys and values, or with embeddings"),
        ({"text_config": {"enable_moe_block": True}}, "a mixture of experts"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "scores 6 of 7 groups of 160 ids"),
    ],
)
def test_a_config_that_is_of_no_assistant_is_named(settings, said):
    folder = Path(changed())
    (folder / "config.json").write_text(json.dumps(assistant_config(**settings)))
    assert said in refused(str(folder))


def test_an_assistant_whose_config_says_nothing_of_its_layers_is_refused():
    folder = Path(changed())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    assert "has no 'text_config', which" in refused(str(folder))


def test_a_target_of_another_family_is_refused():
    assert "drafts from the keys and values of a Gemma 4 model, but" in refused(gemma4_assistant(), tiny_model())


def test_a_target_without_layers_of_a_kind_is_refused():
    target = json.loads((Path(gemma4_target()) / "config.json").read_text())
    target |= {"layer_types": ["full_attention"] * 4}
    other = write("gemma4-full", target, load_file(Path(gemma4_target()) / "model.safetensors"))
    assert "reads keys and values of sliding_attention layers, of which" in refused(gemma4_assistant(), other)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_an_assistant_is_known_for_what_it_is(method):
    message = refused(gemma4_assistant(), method=method)
    assert "looks like a Gemma 4 assistant; use method 'gemma4_mtp'" in message


def test_another_drafter_is_known_for_what_it_is():
    from heads import tiny_head

    assert "looks like an EAGLE-3 head; use method 'eagle3'" in refused(tiny_head("eagle3"))


def test_a_model_is_needed():
    with pytest.raises(ConfigError, match="needs 'model', the folder or hub id of an assistant"):
        make_engine(gemma4_target(), speculative_config={"method": "gemma4_mtp", "num_speculative_tokens": 1})
