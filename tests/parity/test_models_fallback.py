"""Models of transformers by their own code, with our attention and cache, against themselves."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_models import CASES, CPU, NUM_TOKENS, PAGE_SIZE, TOLERANCE, load, make_reference, run_chunks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftloop.attention.sdpa import SdpaBackend
from draftloop.errors import ConfigError
from draftloop.models.decoder import Decoder, attention_shapes
from draftloop.models.fallback import ATTENTION, FallbackDecoder
from draftloop.models.loader import LoadFormat, load_config, load_model, resolve_model

FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "olmo": ("Olmo", {"clip_qkv": 1.0}),
}


@pytest.fixture(autouse=True)
def _more_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in FALLBACKS.items():
        monkeypatch.setitem(CASES, name, case)


@pytest.mark.parametrize("name", FALLBACKS)
@torch.no_grad()
def test_logits_and_hidden_states_are_those_of_transformers(name: str, device: torch.device, tmp_path: Path) -> None:
    reference = make_reference(name, tmp_path)
    token_ids = torch.randint(131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference(token_ids[None], output_hidden_states=True, use_cache=False)
    model, tolerance = load(tmp_path, device), TOLERANCE[device.type]
    assert isinstance(model, FallbackDecoder)
    for chunks in ([NUM_TOKENS], [17, 5, NUM_TOKENS - 30, *[1] * 8]):
        logits, aux = run_chunks(model, token_ids, chunks, aux_layers=(2, 0, 1))
        torch.testing.assert_close(logits, expected.logits[0], atol=tolerance, rtol=0)
        for layer, state in zip((2, 0, 1), aux, strict=True):
            torch.testing.assert_close(state, expected.hidden_states[layer][0], atol=tolerance, rtol=0)


def test_passes_side_by_side_do_not_mix(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are warmed up by passes of several sizes, in threads: each begins while another is inside."""
    make_reference("starcoder2", tmp_path)
    model, lengths = load(tmp_path, device), (NUM_TOKENS, 23)

    def run(length: int) -> list[torch.Tensor]:
        with torch.inference_mode():
            logits, aux = run_chunks(model, torch.arange(length), [length], aux_layers=(1,))
        return [logits, *aux]

    alone = [run(length) for length in lengths]
    meet, attend = threading.Barrier(len(lengths), timeout=120), model.backend.attend

    def attend_together(*args: Any, **options: Any) -> None:
        meet.wait()
        attend(*args, **options)

    monkeypatch.setattr(model.backend, "attend", attend_together)
    with ThreadPoolExecutor(len(lengths)) as pool:
        together = list(pool.map(run, lengths))
    for ours, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.T5Config(architectures=["T5ForConditionalGeneration"]), "it has an encoder"),
        (transformers.MambaConfig(architectures=["MambaForCausalLM"]), "not keys and values of attention alone"),
        (transformers.BertConfig(architectures=["BertForMaskedLM"]), "'BertLMHeadModel'"),
        (transformers.ViTConfig(architectures=["ViTForImageClassification"]), "no causal language model"),
        (
            transformers.Starcoder2Config(
                architectures=["Starcoder2ForCausalLM"],
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "'dynamic', changes while a sequence grows",
        ),
        (
            transformers.Starcoder2Config(
                architectures=["Starcoder2ForCausalLM"], quantization_config={"quant_method": "fp8"}
            ),
            "its weights are quantised",
        ),
        (transformers.BloomConfig(architectures=["BloomForCausalLM"]), "its attention cannot be replaced"),
        (transformers.Llama4TextConfig(architectures=["Llama4ForCausalLM"]), "layers of type 'chunked_attention'"),
        (transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]), "keys and values have different size"),
    ],
    ids=["encoder", "state", "masked", "images", "dynamic", "quantised", "attention", "chunks", "latent"],
)
def test_models_that_cannot_run_are_refused(config: transformers.PreTrainedConfig, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path), load_format="dummy")
    with pytest.raises(ConfigError, match=words):
        load_config(source)


def test_unknown_architectures_are_refused_with_all_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "no-such"}))
    with pytest.raises(ConfigError, match=r"'NoSuchModel'.*LlamaForCausalLM"):
        load_config(resolve_model(str(tmp_path), load_format="dummy"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_reference("starcoder2", tmp_path)
    return tmp_path


def test_missing_weights_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("q_proj.weight"))
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=gone):
        load(folder)


def read(
    folder: Path,
    *,
    load_format: LoadFormat = "auto",
    quantization: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    source = resolve_model(str(folder), load_format=load_format)
    config = load_config(source, quantization=quantization)
    backend = SdpaBackend(attention_shapes(config, page_size=PAGE_SIZE, dtype=dtype)[0], CPU)
    return load_model(source, config, backend, device=CPU, dtype=dtype, load_format=load_format)


def test_weights_that_it_would_quantise_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'fp8', but Starcoder2ForCausalLM .* leave it out"):
        read(folder, quantization="fp8")


def test_weights_of_a_wider_type_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: weight if "layers.1" in name else weight.bfloat16() for name, weight in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read(folder)
    assert "rounded" not in caplog.text
    read(folder, dtype=torch.bfloat16)
    wide = [name for name in tensors if "layers.1" in name]
    assert f"{len(wide)} of {len(tensors)} tensors in {folder} are F32 and rounded to bfloat16" in caplog.text


def test_pickles_are_read_only_when_asked_for(folder: Path) -> None:
    """Beside safetensors that are none of the model's too."""
    expected = read(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="only pickled weights"):
        read(folder)
    found = read(folder, load_format="pt").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="transformers cannot load"):
        read(folder)


@pytest.mark.parametrize(
    ("layer", "causal", "words"),
    [(1, True, "not each of its layers asks for attention, once"), (None, False, "its attention is not causal")],
)
def test_code_that_attends_otherwise_is_refused(
    layer: int | None, causal: bool, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a token that is run for a try, not by what the config says."""
    kind = transformers.models.starcoder2.modeling_starcoder2.Starcoder2Attention
    forward = kind.forward

    def changed(self: Any, hidden_states: torch.Tensor, **given: Any) -> Any:
        self.is_causal = causal
        return (hidden_states, None) if self.layer_idx == layer else forward(self, hidden_states, **given)

    monkeypatch.setattr(kind, "forward", changed)
    with pytest.raises(ConfigError, match=f"Starcoder2ForCausalLM cannot run by transformers' code: {words}"):
        read(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda query, more: (query[:, :1], more), "heads of other numbers or sizes than its config says"),
        (lambda query, more: (query, {**more, "softcap": 30.0}), "caps them in a way that its config does not say"),
        (lambda query, more: (query, {**more, "s_aux": torch.ones(4)}), "its attention adds terms to scores"),
    ],
    ids=["heads", "cap", "sinks"],
)
def test_attention_of_which_the_config_says_nothing_is_refused(
    change: Callable[..., Any], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def theirs(module: Any, query: torch.Tensor, *given: Any, **more: Any) -> Any:
        query, more = change(query, more)
        return ours(module, query, *given, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, ATTENTION, theirs)
    with pytest.raises(ConfigError, match=f"Starcoder2ForCausalLM cannot run by transformers' code: .*{words}"):
        read(folder)


def test_code_that_is_built_otherwise_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.Starcoder2ForCausalLM
    with monkeypatch.context() as patch:
        patch.setattr(kind, "get_output_embeddings", lambda self: None)
        with pytest.raises(ConfigError, match="it has no table of embeddings, or no output head of one matrix"):
            read(folder)
    source, config = (found := resolve_model(str(folder))), load_config(found)
    for change, words in (({"num_layers": 5}, "its layers cannot be found"), ({"vocab_size": 7}, "one number per tok")):
        other = replace(config, **change)
        backend = SdpaBackend(attention_shapes(other, page_size=PAGE_SIZE, dtype=torch.float32)[0], CPU)
        with pytest.raises(ConfigError, match=words):
            load_model(source, other, backend, device=CPU, dtype=torch.float32)
