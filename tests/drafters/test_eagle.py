"""EAGLE heads in the engine: against a reference in plain torch, at every step and with every option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle_reference import Reference, hf_model, hf_states
from torch import Tensor

from draftloop.drafters.eagle_config import EagleConfig
from draftloop.engine.llm import LLM
from draftloop.graphs.phase import ModeSetting
from draftloop.request import SamplingParams
from heads import DRAFT_VOCAB, head_config, head_weights, step_by_step, tiny_head, wide_config, wide_head
from helpers import VOCAB, answering, answers, engine, greedy, oracle, prompts, run_through, tiny_model

K = 5
CLOSE = 5e-4
"""Of the norm of the state behind K steps: the reference's own moves by 1.7e-4 where what it reads moves by 1e-6."""


def two_layers(config: EagleConfig, wide: bool) -> EagleConfig:
    return replace(
        config, model=replace(config.model, num_layers=2), wide_layers=(True, wide), input_norms=(True, True)
    )


BASE = head_config()
CONFIGS: dict[str, EagleConfig] = {
    "eagle3": BASE,
    "norm_before_residual": replace(BASE, norm_before_residual=True),
    "norm_before_fc": replace(BASE, norm_before_fc=True),
    "fc_norm": replace(BASE, fc_norm=True),
    "norm_output": replace(BASE, norm_output=True),
    "all_norms": replace(BASE, norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True),
    "qk_norm": replace(BASE, model=replace(BASE.model, qk_norm=True)),
    "qkv_bias": replace(BASE, model=replace(BASE.model, qkv_bias=True)),
    "narrow_second_layer": two_layers(BASE, wide=False),
    "wide_second_layer": two_layers(BASE, wide=True),
    "whole_vocabulary": replace(BASE, draft_vocab_size=VOCAB, has_map=False, own_head=False),
    "own_tables": replace(BASE, own_embeddings=True),
    "other_width": head_config(width=128, own_embeddings=True),
    "two_aux": replace(BASE, num_aux=2, layer_ids=(1, 2)),
    "eagle": head_config("eagle"),
    "eagle_without_bias": head_config("eagle", fc_bias=False),
}


def head(name: str) -> str:
    config = CONFIGS[name]
    return tiny_head(
        f"reference-{name}", config, layout="speculators" if config.method == "eagle3" else "top", style="plain"
    )


def drafting(name: str, *, forced: float | None = None, poison: bool | None = None, k: int = K, **settings: Any) -> LLM:
    spec = {"method": CONFIGS[name].method, "model": head(name), "num_speculative_tokens": k}
    if forced:
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": forced}
    return engine(speculative_config=spec, poison=poison, **{"cudagraph_capture_sizes": (2, 8), **settings})


def reference(name: str) -> Reference:
    model = hf_model(tiny_model())
    return Reference(CONFIGS[name], head_weights(CONFIGS[name]), model.model.embed_tokens.weight, model.lm_head.weight)


def aux_states(config: EagleConfig, tokens: list[int]) -> Tensor:
    streams, final = hf_states(tiny_model(), tokens)
    return final if config.method == "eagle" else torch.cat([streams[i] for i in config.layer_ids or ()], -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_and_hidden_states_are_the_references_after_every_step(name):
    """Blocks end at every place (acceptance by coin), prompts come in chunks; what the head drafts next, and the
    state that its chain ends with, must depend on the tokens alone."""
    llm = drafting(name, forced=3.0, max_num_batched_tokens=24, cudagraph_mode="FULL_AND_PIECEWISE", poison=True)
    core, state, drafter = llm.engine.core, llm.engine.core.worker.state, llm.engine.drafter
    other, config = reference(name), CONFIGS[name]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(16))
    lengths = set()

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts, hidden, _ = other.chain(tokens, aux_states(config, tokens), K)
            assert state.drafts_MK[sequence.row].tolist() == drafts
            assert (drafter.hidden_MC[sequence.row] - hidden).norm() < CLOSE * hidden.norm()
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    run_through(llm, check)
    assert len(lengths) >= 4, "blocks end at many places"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_the_reference_holds_on_each_device(device, method):
    """A head that every kernel takes. On a GPU, sums in another order may tip a close choice."""
    folder, config = tiny_model("wide", hidden=256), wide_config(method)
    llm = step_by_step(folder, device, {"method": method, "model": wide_head(method), "num_speculative_tokens": K})
    core, state, drafter = llm.engine.core, llm.engine.core.worker.state, llm.engine.drafter
    tables = hf_model(folder)
    other = Reference(config, head_weights(config), tables.model.embed_tokens.weight, tables.lm_head.weight)
    close, same = [], []
    for prompt in prompts(3):
        core.add("0", prompt, greedy(20))
        while not core.idle:
            core.step()
            for sequence in core.scheduler.running:
                tokens = sequence.token_ids
                streams, final = hf_states(folder, tokens)
                aux = final if method == "eagle" else torch.cat([streams[i] for i in config.layer_ids or ()], -1)
                drafts, hidden, _ = other.chain(tokens, aux, K)
                same.append(state.drafts_MK[sequence.row].tolist() == drafts)
                if same[-1]:
                    ours = drafter.hidden_MC[sequence.row].cpu()
                    close.append(((ours - hidden).norm() / hidden.norm()).item())
    assert len(same) > 12
    assert sum(same) >= (0.8 if device == "cuda" else 1.0) * len(same)
    assert max(close) < (2e-2 if device == "cuda" else CLOSE)
    llm.close()


@pytest.mark.parametrize("mode", ModeSetting)
def test_the_reference_holds_in_every_mode(mode):
    llm = drafting("all_norms", forced=3.0, max_num_batched_tokens=24, cudagraph_mode=mode.value, poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    other, config = reference("all_norms"), CONFIGS["all_norms"]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(8))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            assert state.drafts_MK[sequence.row].tolist() == other.chain(tokens, aux_states(config, tokens), K)[0]
            seen.append(len(tokens))

    run_through(llm, check)
    assert len(seen) > 8


@pytest.mark.parametrize("name", ["eagle3", "eagle", "whole_vocabulary"])
def test_sampled_drafts_keep_the_distribution_that_they_were_drawn_from(name):
    """Over the target's vocabulary: zeros where the head has no logit, so acceptance stays lossless."""
    llm = drafting(name, cudagraph_mode="FULL", poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    other, config = reference(name), CONFIGS[name]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=8, seed=i))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            logits = other.chain(tokens, aux_states(config, tokens), 1)[2][0]
            expected = torch.zeros(VOCAB)
            expected[other.target_ids()] = (logits / 2.0).softmax(-1)
            probs = state.draft_probs_MKV[sequence.row]
            torch.testing.assert_close(probs[0], expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(probs.sum(-1), torch.ones(K))
            drafts = state.drafts_MK[sequence.row]
            assert (probs.gather(1, drafts.long()[:, None]) > 0).all()
            seen.append(tuple(drafts.tolist()))

    run_through(llm, check)
    assert len(set(seen)) > 8


def test_only_known_ids_are_drafted():
    llm = drafting("eagle3", cudagraph_mode="FULL")
    state, core = llm.engine.core.worker.state, llm.engine.core
    allowed = set(reference("eagle3").target_ids().tolist())
    assert len(allowed) == DRAFT_VOCAB
    for i, prompt in enumerate(prompts(4)):
        core.add(str(i), prompt, SamplingParams(temperature=i % 2, max_tokens=12, seed=1))
    seen: set[int] = set()
    run_through(llm, lambda: seen.update(state.drafts_MK.flatten().tolist()))
    assert seen - {-1} <= allowed
    assert max(seen) >= DRAFT_VOCAB, "ids are mapped"


# ---- what the target hands over -------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle3", "two_aux", "eagle"])
def test_aux_states_are_those_of_transformers(name):
    """B45: in the buffer, after prompts and after verification, at the documented index."""
    llm = drafting(name, forced=3.0, cudagraph_mode="FULL")
    core, table = llm.engine.core, llm.engine.table
    prompt = prompts(4)[2]
    core.add("0", prompt, greedy(12))
    config = CONFIGS[name]
    core.step()
    prompt_states = table.buffers["aux_hidden"][: len(prompt)]
    torch.testing.assert_close(prompt_states, aux_states(config, prompt), rtol=1e-4, atol=1e-4)
    for _ in range(2):
        (sequence,) = core.scheduler.running
        known = sequence.token_ids
        block = core.worker.state.drafts_MK[sequence.row].tolist()
        core.step()
        verified = aux_states(config, known + block)[len(known) - 1 :]
        torch.testing.assert_close(table.buffers["aux_hidden"][: 1 + K], verified, rtol=1e-4, atol=1e-4)
    run_through(llm)


@pytest.mark.parametrize("name", ["eagle3", "wide_second_layer", "eagle"])
def test_the_cache_of_accepted_positions_is_made_from_true_states(name):
    """B42: after any number of accepted drafts it equals that of a fresh prompt of the same tokens."""
    llm = drafting(name, forced=3.0, cudagraph_mode="FULL", poison=True)
    core, state, pool = llm.engine.core, llm.engine.core.worker.state, llm.engine.pool
    core.add("0", prompts(4)[2], greedy(30))

    def cached(row: int, count: int) -> Tensor:
        pages = state.page_table_MN[row].long()
        return pool.caches[1][:, :, pages].flatten(2, 3)[:, :, :count].clone()

    snapshots = []
    while not core.idle:
        core.step()
        for sequence in core.scheduler.running:
            tokens = sequence.token_ids
            # the bonus token's pair is the last with a state of the target; the chain wrote what follows
            snapshots.append((tokens, cached(sequence.row, len(tokens) - 1)))
    assert len(snapshots) > 6
    for tokens, expected in snapshots[1::2]:
        # cut by one: the first token of the answer is the target's, not the one that was forced
        core.add("1", tokens[:-1], greedy(4))
        core.step()
        (row,) = (s.row for s in core.scheduler.running)
        torch.testing.assert_close(cached(row, len(tokens) - 2), expected[:, :, :-1], rtol=1e-4, atol=1e-4)
        core.abort("1")
        run_through(llm)


def test_fresh_cache_is_compared_with_something_else():
    """What the last test looks for can be seen: the chain's own entries differ from the true ones."""
    llm = drafting("eagle3", forced=3.0, cudagraph_mode="FULL")
    core, state, pool = llm.engine.core, llm.engine.core.worker.state, llm.engine.pool
    core.add("0", prompts(4)[2], greedy(30))
    core.step()
    (sequence,) = core.scheduler.running
    length, row = sequence.num_prompt + 1, sequence.row
    before = pool.caches[1][:, :, state.page_table_MN[row].long()].flatten(2, 3)[:, :, length - 1].clone()
    while len(sequence.output_ids) < 8:
        core.step()
    after = pool.caches[1][:, :, state.page_table_MN[row].long()].flatten(2, 3)[:, :, length - 1]
    assert not torch.allclose(before, after, rtol=1e-2)
    run_through(llm)


# ---- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("by", ["head", "setting"])
def test_rows_stop_drafting_at_the_heads_length_and_neighbours_go_on(by, overlap):
    name = "short-head"
    config = replace(BASE, model=replace(BASE.model, max_position_embeddings=30)) if by == "head" else BASE
    spec = {
        "method": "eagle3",
        "model": tiny_head(f"{name}-{by}", config),
        "num_speculative_tokens": 3,
        **({"max_model_len": 30} if by == "setting" else {}),
    }
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), async_scheduling=overlap, poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    asked = [prompts(1)[0][:4], prompts(7, longest=39)[-1][:2] * 12, [5] * 40]
    seen = {}

    def check() -> None:
        for sequence in core.scheduler.running:
            if sequence.output_ids and not overlap:
                drafts = state.drafts_MK[sequence.row].tolist()
                length = sequence.num_tokens
                fit = min(max(30 - length, 0), 3)
                assert [d >= 0 for d in drafts] == [i < fit for i in range(3)], length
                seen[length] = fit

    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(40))
    ended = run_through(llm, check)
    assert ended == {str(i): oracle(p, 40) for i, p in enumerate(asked)}
    if not overlap:
        assert {0, 1, 2, 3} <= set(seen.values())
    assert llm.get_metrics()["spec_decode_num_steps_without_drafts"] > 30
    assert "stop drafting at 30 tokens" in llm.engine.drafter.describe()


def test_a_batch_past_the_limit_costs_plain_decoding():
    spec = {"method": "eagle3", "model": tiny_head("eagle3"), "num_speculative_tokens": 3, "max_model_len": 16}
    llm = engine(speculative_config=spec, cudagraph_mode="FULL", async_scheduling=False)
    prompt = [5] * 20
    assert answers(llm.generate(prompt, greedy(10))) == [oracle(prompt, 10)]
    replays = llm.get_graph_report().replays
    assert (replays["target.decode"], replays["target.verify"], replays["draft.prefill"]) == (9, 0, 0)
