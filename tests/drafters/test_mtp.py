"""Multi-token-prediction modules in the engine: against a reference in plain torch and against transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle_reference import hf_model, hf_states
from mtp_reference import MtpReference, round_robin
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpModel

from draftloop.attention.base import AttentionBatch
from draftloop.attention.sdpa import SdpaBackend
from draftloop.drafters.mtp_config import of_target
from draftloop.drafters.mtp_model import MtpModule
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.graphs.phase import ModeSetting
from draftloop.kernels.rms_norm import Store
from draftloop.kvcache.rows import NO_DRAFT
from draftloop.models.config import ModelConfig
from draftloop.models.dense import attention_shape
from draftloop.models.presets import PRESETS
from gemma4 import gemma4_target
from heads import MTP_KEYS, module_weights, mtp_target, mtp_variant, mtp_weights, write_mtp_target
from helpers import (
    HIDDEN,
    LAYERS,
    VOCAB,
    answering,
    answers,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

K = 4
CASES = [
    ("qwen", ""),
    ("qwen", "-qk_norm"),
    ("mimo", ""),
    ("mimo", "-biases"),
    ("deepseek", ""),
    ("deepseek", "-tables"),
]


def drafting(style: str, variant: str = "", *, forced: float | None = None, k: int = K, **settings: Any) -> LLM:
    spec: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": k}
    if forced:
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": forced}
    return engine(
        mtp_target(style, variant), speculative_config=spec, **{"cudagraph_capture_sizes": (2, 8), **settings}
    )


def reference(style: str, variant: str = "") -> MtpReference:
    tables = hf_model(tiny_model())
    return MtpReference(style, mtp_variant(style, variant), tables.model.embed_tokens.weight, tables.lm_head.weight)


def references(style: str, num_modules: int) -> list[MtpReference]:
    tables = hf_model(tiny_model())
    embed, head = tables.model.embed_tokens.weight, tables.lm_head.weight
    return [MtpReference(style, module_weights(style, m), embed, head) for m in range(num_modules)]


@pytest.mark.parametrize(("style", "variant"), CASES)
def test_drafts_and_hidden_states_are_the_references_after_every_step(style, variant):
    """K = 4 of one module: each step takes the last one's hidden state. Prompts start at position 0, which some
    styles zero; one has a single token, so that this is all it has."""
    llm = drafting(style, variant, forced=3.0, max_num_batched_tokens=24, cudagraph_mode="FULL_AND_PIECEWISE")
    llm.engine.table.poison = True
    core, state, drafter = llm.engine.core, llm.engine.core.worker.state, llm.engine.drafter
    other, lengths = reference(style, variant), set()
    for i, prompt in enumerate([*prompts(3), [7]]):
        core.add(str(i), prompt, greedy(14))

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts, hidden, _ = other.chain(tokens, hf_states(tiny_model(), tokens)[1], K)
            assert state.drafts_MK[sequence.row].tolist() == drafts
            assert (drafter.hidden_MC[sequence.row] - hidden).norm() < 1e-4 * hidden.norm()
            lengths.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    run_through(llm, check)
    assert len(lengths) >= 4, "blocks end at many places"


@pytest.mark.parametrize("mode", ModeSetting)
def test_the_reference_holds_in_every_mode(mode):
    llm = drafting("mimo", forced=3.0, max_num_batched_tokens=24, cudagraph_mode=mode.value, poison=True)
    core, state, other, seen = llm.engine.core, llm.engine.core.worker.state, reference("mimo"), []
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(12))

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts = other.chain(tokens, hf_states(tiny_model(), tokens)[1], K)[0]
            assert state.drafts_MK[sequence.row].tolist() == drafts
            seen.append(len(tokens))

    run_through(llm, check)
    assert len(seen) > 6


@pytest.mark.parametrize("style", MTP_KEYS)
def test_logits_are_the_references(style):
    llm = drafting(style, k=1)
    core, prompt = llm.engine.core, prompts(4)[2]
    core.add("0", prompt, greedy(4))
    core.step()
    (sequence,) = core.scheduler.running
    tokens = prompt + sequence.output_ids
    drafter = llm.engine.drafter
    ours = drafter.head.logits(drafter.hidden_MC[sequence.row][None])[0]
    _, _, expected = reference(style).chain(tokens, hf_states(tiny_model(), tokens)[1], 1)
    torch.testing.assert_close(ours, expected[0], atol=1e-4, rtol=1e-4)
    run_through(llm)


@torch.no_grad()
def test_the_module_is_that_of_transformers():
    """Without the zeros at position 0, which transformers leaves out."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config.num_mtp_layers = 1
    torch.manual_seed(0)
    main = LlamaForCausalLM(config).eval()
    theirs = MtpModel(main, 1).eval()
    for weight in theirs.parameters():
        weight.add_(torch.randn_like(weight) * 0.1)
    model = ModelConfig.from_hf({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    shape = of_target(model)
    shape = replace(shape, style=replace(shape.style, zeroed_first=False))
    cpu = torch.device("cpu")
    ours = MtpModule(
        shape,
        SdpaBackend(attention_shape(model, page_size=16, dtype=torch.float32), cpu),
        device=cpu,
        dtype=torch.float32,
        max_positions=64,
        embed_tokens=main.model.embed_tokens.weight,
        lm_head=main.lm_head.weight,
    )
    around = {
        "embed_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "fc.weight": "eh_proj.weight",
        "norm.weight": "post_norm.weight",
    }
    weights = dict(theirs.layers[0].named_parameters())
    for name, destination in ours.destinations().items():
        destination.copy_(weights[around.get(name, name.replace("layers.0.", "mtp_block."))])
    ids, hidden, count = torch.arange(3, 23) % 64, torch.randn(20, 64), 20
    batch = AttentionBatch(
        rows_R=torch.zeros(1, dtype=torch.int32),
        query_starts_R1=torch.tensor([0, count], dtype=torch.int32),
        kv_lens_R=torch.tensor([count], dtype=torch.int32),
        positions_T=torch.arange(count),
        slots_T=torch.arange(count) + 16,
        page_table_MN=torch.tensor([[1, 2]], dtype=torch.int32),
        max_query_len=count,
        uniform=True,
    )
    memory = torch.zeros(count, 64)
    store = Store(memory, torch.arange(count, dtype=torch.int32))
    out = ours(ids, hidden, torch.zeros(1, 2, 3, 16, 2, 16), batch, store=store)
    expected = theirs.forward_layer(0, hidden[None], torch.arange(count)[None], None, input_ids=ids[None])[0]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(memory, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("style", "num_modules", "k"),
    [("deepseek", 2, 1), ("deepseek", 2, 2), ("deepseek", 3, 3), ("mimo", 2, 3), ("mimo", 3, 4), ("qwen", 2, 4)],
)
def test_several_modules_draft_as_the_reference_after_every_step(style, num_modules, k):
    """Fewer drafts than modules, as many, and more. Blocks end everywhere, prompts come in chunks, and some are
    shorter than what the last module reads ahead."""
    spec = {"method": "mtp", "num_speculative_tokens": k, "rejection_sample_method": "synthetic"}
    spec["synthetic_acceptance_length"] = 1 + k / 2
    llm = make_engine(
        mtp_target(style, modules=num_modules),
        speculative_config=spec,
        cudagraph_capture_sizes=(2, 8),
        max_num_batched_tokens=24,
    )
    llm.engine.table.poison = True
    assert f"({min(num_modules, k)} of {num_modules} draft)" in llm.engine.drafter.describe()
    core, state, other = llm.engine.core, llm.engine.core.worker.state, references(style, num_modules)
    for i, prompt in enumerate([*prompts(3), [7], [7, 9]]):
        core.add(str(i), prompt, greedy(20))
    ends = set()

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts = round_robin(other[:k], tokens, hf_states(tiny_model(), tokens)[1], k)
            assert state.drafts_MK[sequence.row].tolist() == drafts
            ends.update(i for i, steps in enumerate(sequence.acceptance_histogram) if steps)

    run_through(llm, check)
    assert {0, k} <= ends
    assert len(ends) >= min(k + 1, 3), "blocks end at many places"
    llm.close()


@pytest.mark.parametrize("num_modules", [3, 18])
def test_behind_a_prefix_that_was_found_several_modules_draft_the_same(num_modules):
    """The last tokens found run again, since what modules keep of them depends on those after them. Of 18 modules
    these are more than a page, and somebody else is still reading it."""
    llm = make_engine(
        mtp_target("deepseek", modules=num_modules),
        speculative_config={"method": "mtp", "num_speculative_tokens": num_modules},
        enable_prefix_caching=True,
        enforce_eager=True,
    )
    core, state, other = llm.engine.core, llm.engine.core.worker.state, references("deepseek", num_modules)
    start = [(7 * i + 3) % VOCAB for i in range(40)]
    core.add("first", [*start, 5, 6], greedy(12))
    core.step()
    core.add("again", [*start[:32], 1], greedy(6))
    found = {}

    def check() -> None:
        for sequence in answering(core):
            tokens = sequence.token_ids
            drafts = round_robin(other, tokens, hf_states(tiny_model(), tokens)[1], num_modules)
            assert state.drafts_MK[sequence.row].tolist() == drafts
            found[sequence.request_id] = sequence.num_cached

    run_through(llm, check)
    assert found == {"first": 0, "again": 32 - num_modules}
    llm.close()


def test_several_modules_draft_as_the_reference_after_steps_of_any_number_of_drafts():
    """By a schedule: nothing at first, then one draft, then five of three modules."""
    k = 5
    llm = make_engine(
        mtp_target("deepseek", modules=3),
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": k,
            "num_speculative_tokens_per_batch_size": [[1, 1, k], [2, 2, 1], [3, 8, 0]],
        },
        cudagraph_capture_sizes=(2, 8),
    )
    llm.engine.table.poison = True
    core, state, other = llm.engine.core, llm.engine.core.worker.state, references("deepseek", 3)
    for i, prompt in enumerate(prompts(3)):
        core.add(str(i), prompt, greedy(20 * (i + 1)))
    drafting, seen = core.scheduler.drafting, Counter()

    def check() -> None:
        for sequence in core.scheduler.running:
            if sequence.output_ids and drafting.current:
                tokens = sequence.token_ids
                drafts = [draft for draft in state.drafts_MK[sequence.row].tolist() if draft != NO_DRAFT]
                expected = round_robin(other, tokens, hf_states(tiny_model(), tokens)[1], k)
                assert drafts == expected[: len(drafts)]
                seen[len(drafts)] += 1

    ended = run_through(llm, check)
    assert ended == {str(i): oracle(prompt, 20 * (i + 1)) for i, prompt in enumerate(prompts(3))}
    assert min(drafting.steps_by_count.values()) > 0, "nothing, one and five"
    assert set(seen) == {3, k}, "all modules run, for one draft too"
    llm.close()


@pytest.mark.parametrize("style", MTP_KEYS)
def test_a_target_with_a_module_says_what_it_says_without(style):
    """The loader leaves the module's tensors alone, and verification what they draft."""
    asked = prompts(3)
    expected = [oracle(prompt, 16) for prompt in asked]
    assert [oracle(prompt, 16, model=mtp_target(style)) for prompt in asked] == expected
    assert answers(drafting(style).generate(asked, greedy(16))) == expected


def test_random_weights_take_the_targets_shape():
    llm = make_engine(
        "tiny", load_format="dummy", speculative_config={"method": "mtp", "num_speculative_tokens": 2}, max_model_len=64
    )
    assert llm.engine.drafter.config.model.hidden_size == PRESETS["tiny"].hidden_size
    plain = make_engine("tiny", load_format="dummy", max_model_len=64)
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(8))) == answers(plain.generate(asked, greedy(8)))
    llm.close()
    plain.close()


# ---- what cannot work, and says so -----------------------------------------------------------


def refused(folder: str, **spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_engine(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 2, **spec})
    return str(caught.value)


def test_a_target_without_a_module_is_named():
    message = refused(tiny_model())
    assert f"has none (mtp.*, model.mtp_layers.* or model.layers.{LAYERS}.*); choose" in message


def test_a_target_of_layers_of_two_shapes_has_none_either():
    assert "has none (mtp.*" in refused(gemma4_target())
    with pytest.raises(ConfigError, match="Gemma4ForCausalLM has layers of 2 shapes; use another method"):
        make_engine(
            gemma4_target(), load_format="dummy", speculative_config={"method": "mtp", "num_speculative_tokens": 2}
        )


def test_a_module_that_the_config_promises_but_the_export_left_out():
    folder = write_mtp_target("mtp-none", "deepseek", {})
    assert "num_nextn_predict_layers 1, so the export left them out" in refused(folder)


def test_another_model_is_refused():
    message = refused(mtp_target("qwen"), model="some/assistant")
    assert "'model' is 'some/assistant'; leave it out, or use the method" in message
    spec = {"method": "mtp", "model": mtp_target("qwen"), "num_speculative_tokens": 1}
    make_engine(mtp_target("qwen"), speculative_config=spec).close()


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"mlp.experts.0.up_proj.weight": (4, HIDDEN)}, "a mixture of experts (model.layers.2.mlp.experts.0"),
        ({"self_attn.kv_a_proj_with_mqa.weight": (4, HIDDEN)}, "latent attention"),
        ({"self_attn.sinks": (4,)}, "layers.0.self_attn.sinks [4]"),
        ({"self_attn.q_proj.weight": (2 * HIDDEN, HIDDEN)}, "a gate on attention, which is not supported"),
    ],
)
def test_a_module_that_cannot_run_is_named(extra, what):
    folder = write_mtp_target("mtp-refused", "deepseek", mtp_weights("deepseek", extra=extra))
    assert what in refused(folder)


def test_a_layer_past_the_last_without_a_projection_is_still_an_error():
    """It is no module, but a config.json of another model."""
    weights = {f"model.layers.{LAYERS}.input_layernorm.weight": torch.ones(HIDDEN)}
    folder = write_mtp_target("mtp-stray", "deepseek", weights)
    with pytest.raises(ConfigError, match="is unexpected"):
        make_engine(folder)
