"""DFlash in the engine: against a reference in plain torch, at every step and with every option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_reference import BlockReference
from eagle_reference import hf_model, hf_states
from torch import Tensor

from blocks import WINDOW, block_config, block_weights, mask_row, tiny_block, wide_block, wide_block_config
from draftloop.attention.batches import tail_batch
from draftloop.drafters.dflash_config import DFlashConfig
from draftloop.engine.llm import LLM
from draftloop.graphs.phase import Launch, ModeSetting
from draftloop.graphs.program import in_place
from draftloop.request import SamplingParams
from heads import DRAFT_VOCAB, step_by_step
from helpers import VOCAB, answering, answers, engine, greedy, make_engine, oracle, prompts, run_through, tiny_model

K = 5
BASE = block_config()
CONFIGS: dict[str, DFlashConfig] = {
    "one_layer": BASE,
    "two_layers": block_config(layers=2),
    "sliding": block_config(layers=2, sliding=(0, 1)),
    "mixed_causal": block_config(layers=3, sliding=(0, 2), causal=(0, 2)),
    "sinks": block_config(layers=2, sinks=(True, True)),
    "sliding_sinks": block_config(layers=3, sliding=(0, 2), causal=(0, 2), sinks=(True, False, True)),
    "plain_heads": replace(BASE, model=replace(BASE.model, qk_norm=False)),
    "fused_qkv": replace(block_config(layers=2), fused_qkv=True),
    "own_tables": replace(BASE, own_embeddings=True, own_head=True),
    "reduced_vocabulary": replace(BASE, draft_vocab_size=DRAFT_VOCAB, own_head=True, has_map=True),
    "borrowed_rows": replace(BASE, draft_vocab_size=DRAFT_VOCAB, has_map=True),
    "from_the_anchor": replace(BASE, samples_from_anchor=True),
    "mask_embedding": BASE,
    "other_width": block_config(width=128, own_embeddings=True, own_head=True, target_hidden_size=64),
}


def folder(name: str) -> str:
    return tiny_block(f"reference-{name}", CONFIGS[name], layout="speculators", mask_embedding=name == "mask_embedding")


def drafting(name: str, *, forced: float | None = None, poison: bool | None = None, k: int = K, **settings: Any) -> LLM:
    spec = {"method": "dflash", "model": folder(name), "num_speculative_tokens": k}
    if forced:
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": forced}
    return engine(speculative_config=spec, poison=poison, **{"cudagraph_capture_sizes": (2, 8), **settings})


def reference(name: str) -> BlockReference:
    model, config = hf_model(tiny_model()), CONFIGS[name]
    mask = mask_row(config) if name == "mask_embedding" else None
    tables = model.model.embed_tokens.weight, model.lm_head.weight
    return BlockReference(config, block_weights(config), *tables, mask)


def aux_states(config: DFlashConfig, tokens: list[int], model: str | None = None) -> Tensor:
    """What enters the layers that the drafter reads; ids of the speculators layout are inputs."""
    streams, _ = hf_states(model or tiny_model(), tokens)
    return torch.cat([streams[i] for i in config.layer_ids or ()], -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_the_references_after_every_step(name):
    """Blocks end at every place (acceptance by coin), prompts come in chunks; what is drafted next must depend on
    the tokens alone. Prompts and answers together are longer than the window (B44)."""
    llm = drafting(name, forced=3.0, max_num_batched_tokens=24, cudagraph_mode="FULL_AND_PIECEWISE", poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    other, config = reference(name), CONFIGS[name]
    for i, prompt in enumerate([*prompts(3), prompts(1, longest=40)[0] * 8]):
        core.add(str(i), prompt, greedy(16))
    lengths, longest = set(), 0

    def check() -> None:
        nonlocal longest
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts, _ = other.drafts(tokens, aux_states(config, tokens), K)
            assert state.drafts_MK[sequence.row].tolist() == drafts
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)
            longest = max(longest, len(tokens))

    run_through(llm, check)
    assert len(lengths) >= 4, "blocks end at many places"
    assert longest > 2 * WINDOW


@pytest.mark.parametrize("name", ["two_layers", "mixed_causal", "sliding_sinks"])
def test_context_and_block_are_the_references_number_by_number(name):
    """Keys and values of accepted positions, however they came to be accepted, and what the output head reads."""
    llm = drafting(name, forced=3.0, max_num_batched_tokens=24, cudagraph_mode="FULL", poison=True)
    core, state, kv = llm.engine.core, llm.engine.core.worker.state, llm.engine.pool.caches[1]
    other, config, model = reference(name), CONFIGS[name], llm.engine.drafter.model
    launch = Launch(rows=1, tokens=1 + K, attend=in_place)
    seen = []

    def check() -> None:
        for sequence in core.scheduler.running:
            tokens = sequence.token_ids
            count, pages = len(tokens) - 1, state.page_table_MN[sequence.row].long()
            aux = aux_states(config, tokens)[:count]
            cached = kv[:, :, pages].flatten(2, 3)[:, :, :count]
            for layer, (keys, values) in enumerate(other.context(aux)):
                torch.testing.assert_close(cached[layer, 0], keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(cached[layer, 1], values, rtol=1e-4, atol=1e-4)
            rows = torch.tensor([sequence.row], dtype=torch.int32)
            page_size, num_ids = llm.engine.pool.page_size, llm.engine.core.vocab_size
            batch, _ = tail_batch(state, rows, 1 + K, page_size, launch, offset=-1, num_ids=num_ids)
            hidden = model(torch.tensor(tokens[-1:]), kv, batch)[0]
            torch.testing.assert_close(hidden, other.block(tokens[-1], aux, 1 + K), rtol=1e-4, atol=1e-4)
            seen.append(count)

    core.add("0", prompts(4)[2], greedy(30))
    with torch.inference_mode():
        run_through(llm, check)
    assert len(set(seen)) > 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sinks", [(), (True, True)], ids=["plain", "sinks"])
def test_the_reference_holds_on_each_device(device, sinks):
    """A drafter that every kernel takes. On a GPU, sums in another order may tip a close choice."""
    target, config = tiny_model("wide", hidden=256), wide_block_config(sinks=sinks)
    llm = step_by_step(
        target, device, {"method": "dflash", "model": wide_block(sinks=sinks), "num_speculative_tokens": K}
    )
    core, state = llm.engine.core, llm.engine.core.worker.state
    tables = hf_model(target)
    other = BlockReference(config, block_weights(config), tables.model.embed_tokens.weight, tables.lm_head.weight)
    same = []
    for prompt in prompts(3):
        core.add("0", prompt, greedy(20))
        while not core.idle:
            core.step()
            for sequence in core.scheduler.running:
                tokens = sequence.token_ids
                drafts, _ = other.drafts(tokens, aux_states(config, tokens, target), K)
                same += [a == b for a, b in zip(state.drafts_MK[sequence.row].tolist(), drafts, strict=True)]
    assert len(same) > 60
    assert sum(same) >= (0.9 if device == "cuda" else 1.0) * len(same)
    llm.close()


@pytest.mark.parametrize("mode", ModeSetting)
def test_the_reference_holds_in_every_mode(mode):
    llm = drafting("mixed_causal", forced=3.0, max_num_batched_tokens=24, cudagraph_mode=mode.value, poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    other, config = reference("mixed_causal"), CONFIGS["mixed_causal"]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(8))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            assert state.drafts_MK[sequence.row].tolist() == other.drafts(tokens, aux_states(config, tokens), K)[0]
            seen.append(len(tokens))

    run_through(llm, check)
    assert len(seen) >= 8


@pytest.mark.parametrize("name", ["one_layer", "borrowed_rows"])
def test_sampled_drafts_keep_the_distributions_that_they_were_drawn_from(name):
    """Over the target's vocabulary: zeros where the drafter has no logit, so acceptance stays lossless."""
    llm = drafting(name, cudagraph_mode="FULL", poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    other, config = reference(name), CONFIGS[name]
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, SamplingParams(temperature=2.0, max_tokens=8, seed=i))
    seen = []

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            _, logits = other.drafts(tokens, aux_states(config, tokens), K)
            expected = torch.zeros(K, VOCAB)
            expected[:, other.ids] = (logits / 2.0).softmax(-1)
            probs = state.draft_probs_MKV[sequence.row]
            torch.testing.assert_close(probs, expected, rtol=1e-3, atol=1e-5)
            drafts = state.drafts_MK[sequence.row]
            assert (probs.gather(1, drafts.long()[:, None]) > 0).all()
            seen.append(tuple(drafts.tolist()))

    run_through(llm, check)
    assert len(set(seen)) > 8


# ---- limits ---------------------------------------------------------------------------------


def test_rows_stop_drafting_at_the_drafters_length_and_neighbours_go_on():
    config = replace(BASE, model=replace(BASE.model, max_position_embeddings=30))
    spec = {"method": "dflash", "model": tiny_block("short", config), "num_speculative_tokens": 3}
    llm = engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), async_scheduling=False, poison=True)
    core, state = llm.engine.core, llm.engine.core.worker.state
    asked, fits = [prompts(1)[0][:4], [7, 9] * 12, [5] * 40], set()

    def check() -> None:
        for sequence in answering(core):
            drafts = state.drafts_MK[sequence.row].tolist()
            fit = min(max(30 - sequence.num_tokens, 0), 3)
            assert [d >= 0 for d in drafts] == [i < fit for i in range(3)]
            fits.add(fit)

    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(40))
    assert run_through(llm, check) == {str(i): oracle(p, 40) for i, p in enumerate(asked)}
    assert fits == {0, 1, 2, 3}
    assert "stop drafting at 30 tokens" in llm.engine.drafter.describe()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_every_buffer_has_the_size_that_batches_are_padded_to(mode):
    """B11: 33 rows of 1 + 3 tokens; no phase is dispatched at a size that some buffer does not have."""
    spec = {"method": "dflash", "model": tiny_block("dflash"), "num_speculative_tokens": 3}
    llm = engine(
        speculative_config=spec,
        max_num_seqs=33,
        max_prefill_rows=8,
        max_num_batched_tokens=256,
        cudagraph_mode=mode,
        kv_cache_memory_bytes=1 << 25,
        poison=True,
    )
    table, padded = llm.engine.table, 0
    for phase in table.phases.values():
        for rows in range(1, 34):
            if phase.ragged or (key := table.key_for(phase.name, rows)) is None:
                continue
            padded += key.rows > rows
            for name, spec in {**phase.slots, **phase.outputs}.items():
                assert table.buffers[name].shape[0] >= spec.unit.count(key.rows, key.tokens), (phase.name, name)
    assert padded
    asked = prompts(33)
    assert answers(llm.generate(asked, greedy(9))) == [oracle(p, 9) for p in asked]


def test_nothing_undrafted_reaches_an_embedding():
    """B52: rows that wait for budget, rows that draft nothing, drafts that are all wrong."""
    spec = {"method": "dflash", "model": tiny_block("dflash"), "num_speculative_tokens": 3}
    settings = {"max_num_batched_tokens": 16, "async_scheduling": True, "enforce_eager": True}
    llm = make_engine(speculative_config=spec, **settings)
    core, asked, looked, original = llm.engine.core, prompts(6), [], torch.nn.functional.embedding

    def embedding(ids: Tensor, table: Tensor) -> Tensor:
        looked.append((int(ids.min()), int(ids.max())))
        return original(ids, table)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "embedding", embedding)
        for i, prompt in enumerate(asked):
            core.add(str(i), prompt, greedy(12), speculation=i % 2 == 0)
        assert run_through(llm) == {str(i): oracle(p, 12) for i, p in enumerate(asked)}
    assert looked
    assert all(0 <= low <= high < VOCAB for low, high in looked)
    llm.close()
