"""Logits and hidden states of tiny random models, through the paged cache, against transformers."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from draftloop.attention.base import AttentionBatch
from draftloop.attention.sdpa import SdpaBackend
from draftloop.models import fill
from draftloop.models.architectures import FAMILIES
from draftloop.models.config import ModelConfig
from draftloop.models.decoder import Decoder, attention_shapes, cache_specs
from draftloop.models.loader import load_config, load_model, resolve_model

CPU = torch.device("cpu")
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
"""Of logits and hidden states, absolute."""
PAGE_SIZE = 4
NUM_PAGES = 40
NUM_TOKENS = 61

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
THETA = {"rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 7}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-no-gqa": ("Llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-llama3": (
        "Llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 5e5}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0}},
    ),
    "llama-yarn-untruncated": (
        "Llama",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False, "attention_factor": 1.3}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    ),
    "qwen3-moe-window": ("Qwen3Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 9}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-biases": ("Gemma2", {**GEMMA, "attention_bias": True, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3-linear": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-window": ("Phi3", {"pad_token_id": 0, "sliding_window": 8}),
    "phi4-partial": (
        "Phi3",
        {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75, **THETA}},
    ),
    "phi3-long": (
        "Phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": {**LONGROPE, **THETA}},
    ),
    "phi3-short": (
        "Phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 256, "rope_parameters": {**LONGROPE, **THETA}},
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"pad_token_id": 0, "no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 7},
    ),
    "glm4": ("Glm4", {"pad_token_id": 0, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
"""Where they are not named like their models."""


def make_reference(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A random transformers model, saved to `folder`."""
    family, settings = CASES[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        **{
            "num_hidden_layers": len(settings.get("layer_types") or range(3)),
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            **settings,
        },
    )
    torch.manual_seed(0)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    reference.set_attn_implementation("eager")  # some releases of transformers drop Gemma 2's cap of scores else
    with torch.no_grad():
        for parameter in reference.parameters():
            # norms and biases too: ones and zeros would hide a weight in the wrong place
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(folder)
    return reference


def load(folder: Path, device: torch.device = CPU) -> Decoder:
    source = resolve_model(str(folder))
    config = load_config(source)
    backend = SdpaBackend(attention_shapes(config, page_size=PAGE_SIZE, dtype=torch.float32)[0], device)
    return load_model(source, config, backend, device=device, dtype=torch.float32)


def run_chunks(
    model: Decoder, token_ids: torch.Tensor, chunks: list[int], aux_layers: tuple[int, ...] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a sequence in pieces through shuffled pages; what is not written holds NaN. Results are on the CPU."""
    device, specs = model.lm_head.device, cache_specs(model.config, torch.float32)
    caches = [spec.allocate(NUM_PAGES, PAGE_SIZE, device).fill_(float("nan")) for spec in specs]
    kv = model.layer_caches(caches)
    page_table = torch.zeros(3, NUM_TOKENS // PAGE_SIZE + 1, dtype=torch.int32)
    row = 1
    order = torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(1)) + 1
    page_table[row] = order[: page_table.shape[1]]
    token_ids, page_table = token_ids.to(device), page_table.to(device)
    hidden_states, aux_states, start = [], [], 0
    for length in chunks:
        positions = torch.arange(start, start + length, device=device)
        batch = AttentionBatch(
            rows_R=torch.tensor([row], dtype=torch.int32, device=device),
            query_starts_R1=torch.tensor([0, length], dtype=torch.int32, device=device),
            kv_lens_R=torch.tensor([start + length], dtype=torch.int32, device=device),
            positions_T=positions,
            slots_T=page_table[row, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE,
            page_table_MN=page_table,
            max_query_len=length,
            uniform=True,
        )
        hidden, aux = model(token_ids[start : start + length], kv, batch, aux_layers=aux_layers)
        hidden_states.append(hidden)
        aux_states.append(aux)
        start += length
    states = [torch.cat(parts).cpu() for parts in zip(*aux_states, strict=True)]
    return model.logits(torch.cat(hidden_states)).cpu(), states


def test_every_architecture_that_is_described_is_compared():
    """Classes of one description are one; those without a case here would be wrong unseen."""
    compared = {id(FAMILIES[f"{family}ForCausalLM"]) for family, _ in CASES.values()}
    missing = [name for name, family in FAMILIES.items() if id(family) not in compared]
    assert missing == [], "add a case for each to CASES"


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers(name: str, device: torch.device, tmp_path: Path) -> None:
    reference = make_reference(name, tmp_path)
    token_ids = torch.randint(131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference(token_ids[None], output_hidden_states=True)
    model, tolerance = load(tmp_path, device), TOLERANCE[device.type]
    decode = [1] * 12
    for chunks in ([NUM_TOKENS], [17, 5, NUM_TOKENS - 22 - len(decode), *decode]):
        logits, aux = run_chunks(model, token_ids, chunks, aux_layers=(2, 0, 1))
        torch.testing.assert_close(logits, expected.logits[0], atol=tolerance, rtol=0)
        for layer, state in zip((2, 0, 1), aux, strict=True):
            torch.testing.assert_close(state, expected.hidden_states[layer][0], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-moe-some-dense", "mixtral"])
@torch.no_grad()
def test_experts_in_one_tensor_load_like_one_by_one(name: str, tmp_path: Path) -> None:
    """As transformers 5 holds them, and saves them where it is told to change nothing."""
    reference = make_reference(name, tmp_path / "one")
    (tmp_path / "fused").mkdir()
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "fused")
    weights = {name: weight.contiguous() for name, weight in reference.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in weights)
    save_file(weights, tmp_path / "fused" / "model.safetensors")
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as stored:
        assert any(".experts.0." in name for name in stored.keys())  # noqa: SIM118
    one, fused = (dict(load(tmp_path / name).named_parameters()) for name in ("one", "fused"))
    for name, weight in one.items():
        assert torch.equal(weight, fused[name]), name


@torch.no_grad()
def test_mimo_is_qwen2_by_another_name(tmp_path: Path) -> None:
    reference = make_reference("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MiMoForCausalLM"]}))
    logits, _ = run_chunks(load(tmp_path), torch.arange(NUM_TOKENS), [NUM_TOKENS])
    torch.testing.assert_close(logits, reference(torch.arange(NUM_TOKENS)[None]).logits[0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_last_aux_layer_is_the_stream_before_the_norm(tmp_path: Path) -> None:
    reference = make_reference("llama", tmp_path)
    seen = []
    reference.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    token_ids = torch.arange(NUM_TOKENS)
    reference(token_ids[None])
    _, (state,) = run_chunks(load(tmp_path), token_ids.int(), [NUM_TOKENS], aux_layers=(3,))
    torch.testing.assert_close(state, seen[0][0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by many threads, as for a GPU, of which two are within a tensor at once."""
    reference = make_reference("qwen3", tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, meet, put = dict(load(tmp_path / "one").named_parameters()), threading.Barrier(2, timeout=60), fill._put

    def put_together(name: str, *args: Any) -> None:
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            meet.wait()
        put(name, *args)

    monkeypatch.setattr(fill, "_num_threads", lambda device: 8)
    monkeypatch.setattr(fill, "_put", put_together)
    many = dict(load(tmp_path / "many").named_parameters())
    for name, weight in one.items():
        assert torch.equal(weight, many[name]), name


@pytest.mark.parametrize("name", [name for name in CASES if "rope_parameters" in CASES[name][1]])
def test_rotary_settings_read_alike_in_both_spellings(name: str, tmp_path: Path) -> None:
    make_reference(name, tmp_path)
    modern = json.loads((tmp_path / "config.json").read_text())
    legacy = dict(modern)
    scaling = dict(legacy.pop("rope_parameters"))
    if "full_attention" in scaling:
        legacy["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = scaling["full_attention"]
    legacy["rope_theta"] = scaling.pop("rope_theta")
    legacy["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}
    assert ModelConfig.from_hf(legacy) == ModelConfig.from_hf(modern)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@torch.no_grad()
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    make_reference(name, tmp_path)
    token_ids = torch.arange(NUM_TOKENS)
    expected, _ = run_chunks(load(tmp_path), token_ids, [NUM_TOKENS])
    source = resolve_model(str(tmp_path))
    config = load_config(source)
    (shape,) = attention_shapes(config, page_size=PAGE_SIZE, dtype=torch.bfloat16)
    backend = SdpaBackend(shape, CPU)
    model = load_model(source, config, backend, device=CPU, dtype=torch.bfloat16)
    kv = torch.zeros(3, 2, NUM_PAGES, PAGE_SIZE, 2, config.head_dim, dtype=torch.bfloat16)
    page_table = torch.arange(1, NUM_PAGES, dtype=torch.int32)[None]
    batch = AttentionBatch(
        rows_R=torch.zeros(1, dtype=torch.int32),
        query_starts_R1=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        kv_lens_R=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        positions_T=torch.arange(NUM_TOKENS),
        slots_T=torch.arange(NUM_TOKENS) + PAGE_SIZE,
        page_table_MN=page_table,
        max_query_len=NUM_TOKENS,
        uniform=True,
    )
    hidden, _ = model(token_ids, kv, batch)
    assert hidden.dtype == torch.bfloat16
    error = (model.logits(hidden).float() - expected).abs().max() / expected.abs().max()
    assert error < 0.05


@torch.no_grad()
def test_the_text_model_within_a_gemma_3_that_sees(tmp_path: Path) -> None:
    text = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, **GEMMA}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 16, "patch_size": 8}, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    reference = transformers.Gemma3ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    token_ids = torch.arange(NUM_TOKENS)
    logits, _ = run_chunks(load(tmp_path), token_ids, [NUM_TOKENS])
    torch.testing.assert_close(logits, reference(token_ids[None]).logits[0], atol=1e-4, rtol=0)
