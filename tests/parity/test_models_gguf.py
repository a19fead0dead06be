"""GGUF files of every architecture that is read, against the models of transformers that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_models import CASES, NUM_TOKENS, TOLERANCE, load, make_reference, run_chunks

from draftloop.models.gguf_import import CLASSES
from draftloop.models.loader import load_config, resolve_model
from gguf_files import write_gguf

# what GGUF has no key for: sizes of heads in scores, and which layers see everything
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA3_LAYERS = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {}),
    "gemma2": ("Gemma2", GEMMA | GEMMA2, GEMMA2),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": GEMMA3_LAYERS}, {"rope.freq_base": 1e6}),
}
"""Of each name in GGUF: transformers' model, its settings, and what the file says beside the sizes."""


def test_every_architecture_is_compared() -> None:
    assert MODELS.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_those_of_the_model_in_the_file(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLOOP_CACHE_ROOT", str(tmp_path / "cache"))
    family, settings, said = MODELS[name]
    monkeypatch.setitem(CASES, name, (family, settings))
    reference = make_reference(name, tmp_path)
    expected = load_config(resolve_model(str(tmp_path)))
    said = {
        "block_count": expected.num_layers,
        "feed_forward_length": expected.intermediate_size,
        "attention.layer_norm_rms_epsilon": expected.rms_norm_eps,
        "attention.key_length": expected.head_dim,
        **({"attention.sliding_window": GEMMA["sliding_window"]} if name.startswith("gemma") else {}),
        **said,
    }
    tensors = load_file(tmp_path / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", tensors, architecture=name, settings=said)
    token_ids = torch.randint(131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    logits, _ = run_chunks(load(path, device), token_ids, [NUM_TOKENS - 3, 1, 1, 1])
    torch.testing.assert_close(logits, reference(token_ids[None]).logits[0], atol=TOLERANCE[device.type], rtol=0)
