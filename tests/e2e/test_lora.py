"""Adapters (LoRA): every row says what the model with its adapter merged in would say, whatever drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from adapters import merged, random_adapter, random_pairs, write_adapter
from draftloop.engine import build
from draftloop.engine.llm import LLM
from draftloop.engine.memory import MemoryLedger
from draftloop.errors import ConfigError, RequestError
from draftloop.request import LoRARequest
from example_drafters import example_configs
from gemma4 import gemma4_target
from helpers import (
    MODES,
    answers,
    assert_all_free,
    drafting_spec,
    engine,
    greedy,
    make_engine,
    oracle,
    prompts,
    run_through,
    tiny_model,
)

NAMES = (None, "one", "two")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def one() -> str:
    return random_adapter(tiny_model(), "one", seed=1)


def two() -> str:
    """Of another rank and scale, and of some modules alone."""
    modules = ("q_proj", "v_proj", "o_proj", "up_proj")
    return random_adapter(tiny_model(), "two", seed=2, rank=8, modules=modules, rslora=True)


def settings(**more: Any) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": 2,
        "lora_modules": (f"one={one()}", json.dumps({"name": "two", "path": two()})),
        "cudagraph_capture_sizes": (2, 8),
        **more,
    }


def asked(count: int = 6) -> tuple[list[list[int]], list[str | None]]:
    return prompts(count), [NAMES[i % 3] for i in range(count)]


def expected(max_tokens: int = 24, count: int = 6, *, device: str = "cpu") -> list[list[int]]:
    """Of merged models, without adapters, drafts or graphs."""
    models = {None: tiny_model(), "one": merged(tiny_model(), one()), "two": merged(tiny_model(), two())}
    rows = zip(*asked(count), strict=True)
    return [oracle(prompt, max_tokens, model=models[name], device=device) for prompt, name in rows]


def test_the_adapters_of_these_tests_change_the_text() -> None:
    said = expected()
    for prompt, name, tokens in zip(*asked(), said, strict=True):
        assert (tokens == oracle(prompt, 24)) == (name is None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_each_row_has_its_adapter_in_every_mode(device: str, mode: str, num_drafts: int) -> None:
    asked_, names = asked()
    more = {"cudagraph_mode": mode, "speculative_config": drafting_spec(num_drafts)}
    said = expected(device=device)
    llm = make_engine(device=device, dtype="float32", **settings(**more))
    for poison in (False, True):
        llm.engine.table.poison = poison
        assert answers(llm.generate(asked_, greedy(), lora_request=names)) == said, poison
        # alone, and other adapters in the rows that were
        assert answers(llm.generate(asked_[1], greedy(), lora_request="one")) == said[1:2]
    assert_all_free(llm)
    llm.close()


def test_a_row_alone_has_its_adapter_at_each_of_its_tokens(device: str) -> None:
    """In a graph for one row, whose number is that of several tokens."""
    more = settings(speculative_config=drafting_spec(), max_num_seqs=1, cudagraph_capture_sizes=(1,))
    llm = make_engine(device=device, dtype="float32", **more)
    (asked_, names), said = asked(3), expected(count=3, device=device)
    assert answers(llm.generate(asked_, greedy(), lora_request=names)) == said
    llm.close()


@pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa", "dflash", "suffix", "cascade"])
def test_drafters_of_the_base_model_change_no_text(device: str, name: str) -> None:
    asked_, names = asked()
    spec = example_configs()[name][-1]  # of eagle3 a tree
    llm = make_engine(device=device, dtype="float32", speculative_config=spec, **settings())
    assert answers(llm.generate(asked_, greedy(), lora_request=names)) == expected(device=device)
    assert_all_free(llm)
    llm.close()


def test_steps_that_the_device_repeats_have_adapters_too(device: str) -> None:
    asked_, names = asked()
    llm = make_engine(
        device=device, dtype="float32", **settings(device_loop=4, speculative_config=drafting_spec(), max_num_seqs=8)
    )
    assert answers(llm.generate(asked_, greedy(), lora_request=names)) == expected(device=device)
    assert llm.engine.table.report().replays["iteration"] > 0
    llm.close()


def test_deterministic_answers_of_adapters_do_not_depend_on_the_company(device: str) -> None:
    asked_, names = asked()
    llm = make_engine(device=device, dtype="bfloat16", deterministic=True, **settings())
    params = greedy(12, logprobs=0)
    together = llm.generate(asked_, params, lora_request=names)
    for prompt, name, output in zip(asked_[:3], names, together, strict=False):
        (alone,) = llm.generate(prompt, params, lora_request=name)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    llm.close()


def shared() -> LLM:
    return engine(speculative_config=drafting_spec(), **settings())


def test_prompts_in_chunks_beside_decoding_rows() -> None:
    llm = engine(max_num_batched_tokens=16, max_prefill_rows=2, **settings())
    long = [(prompt * 8)[:40] for prompt in prompts(6)]
    models = {None: None, "one": merged(tiny_model(), one()), "two": merged(tiny_model(), two())}
    names = asked()[1]
    said = answers(llm.generate(long, greedy(12), lora_request=names))
    assert said == [oracle(prompt, 12, model=models[name]) for prompt, name in zip(long, names, strict=True)]


def test_cached_prefixes_are_those_of_the_same_adapter() -> None:
    llm = shared()
    prompt = prompts(1)[0] * 8
    models = {None: None, "one": merged(tiny_model(), one()), "two": merged(tiny_model(), two())}
    for is_known in (False, True):
        for name in NAMES:
            output = llm.generate(prompt, greedy(8), lora_request=name)[0]
            assert output.outputs[0].token_ids == oracle(prompt, 8, model=models[name])
            assert bool(output.num_cached_tokens) == is_known


def test_a_preempted_request_keeps_its_adapter() -> None:
    llm, (asked_, names) = shared(), asked()
    core = llm.engine.core
    for index, (prompt, name) in enumerate(zip(asked_, names, strict=True)):
        core.add(str(index), prompt, greedy(), lora_request=name)
    steps = iter(range(1000))

    def preempt() -> None:
        if (step := next(steps)) % 2 == 1 and step < 9:
            core.preempt(str(step % 6))

    ended = run_through(llm, preempt)
    assert [ended[str(index)] for index in range(6)] == expected()
    assert core.scheduler.num_preemptions > 0


def test_acceptance_is_reported_by_adapter() -> None:
    llm, (asked_, names) = shared(), asked()
    outputs = llm.generate(asked_, greedy(), lora_request=names)
    parts = llm.get_metrics()["spec_decode_by_adapter"]
    assert set(parts) == {"one", "two"}
    for name, part in parts.items():
        mine = [output.spec for output, own in zip(outputs, names, strict=True) if own == name]
        assert part["num_drafts"] == sum(spec.num_spec_steps for spec in mine) > 0
        assert part["num_accepted_tokens"] == sum(spec.num_accepted_draft_tokens for spec in mine)
        assert part["mean_acceptance_length"] == 1 + part["num_accepted_tokens"] / part["num_drafts"]
    whole = llm.get_metrics()
    base = sum(output.spec.num_spec_steps for output, own in zip(outputs, names, strict=True) if own is None)
    assert whole["spec_decode_num_drafts"] == base + sum(part["num_drafts"] for part in parts.values())


def test_an_adapter_loaded_later_takes_the_place_of_one_that_nobody_uses() -> None:
    llm = make_engine(enable_lora=True, max_loras=2, lora_modules=(f"one={one()}",))
    prompt = prompts(1)[0] * 4
    third = random_adapter(tiny_model(), "three", seed=3)
    paths = {"one": one(), "two": two(), "three": third}
    for name in ("one", "two", "three", "two", "one"):
        request = LoRARequest(name, 1, paths[name])
        said = answers(llm.generate(prompt, greedy(8), lora_request=request))[0]
        assert said == oracle(prompt, 8, model=merged(tiny_model(), paths[name])), name
    core = llm.engine.core
    for index, name in enumerate(("one", "two")):
        core.add(str(index), prompt, greedy(), lora_request=LoRARequest(name, 1, paths[name]))
    with pytest.raises(RequestError, match=r"one adapter more than max_loras, 2"):
        core.add("2", prompt, greedy(), lora_request=LoRARequest("three", 1, third))
    run_through(llm)
    core.add("2", prompt, greedy(), lora_request=LoRARequest("three", 1, third))
    run_through(llm)
    llm.close()


def test_a_model_of_fused_modules_has_adapters_too(tmp_path: Path) -> None:
    """Phi-3 has q, k and v in one module, and so have its adapters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **heads, **ids))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(tmp_path / "phi3")
    target = str(tmp_path / "phi3")
    adapter = random_adapter(target, "phi3", modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    llm = make_engine(target, enable_lora=True, lora_modules=(f"x={adapter}",))
    asked_ = prompts(2)
    said = answers(llm.generate(asked_, greedy(12), lora_request=["x", None]))
    models = (merged(target, adapter), target)
    assert said == [oracle(prompt, 12, model=folder) for prompt, folder in zip(asked_, models, strict=True)]
    llm.close()


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_quantised_model_has_adapters_too(device: str, quantization: str, tmp_path: Path) -> None:
    target = tiny_model("wide", hidden=256)
    zeros = {name: t * (".lora_A." in name) for name, t in random_pairs(target).items()}
    paths = f"zeros={write_adapter(tmp_path / 'zeros', zeros)}", f"some={random_adapter(target, 'wide')}"
    settings = {"device": device, "dtype": "bfloat16", "quantization": quantization}
    llm = make_engine(target, enable_lora=True, max_loras=2, lora_modules=paths, **settings)
    base, same, other = (answers(llm.generate(prompts(3), greedy(), lora_request=n)) for n in (None, "zeros", "some"))
    assert base == same
    assert all(one != own for one, own in zip(base, other, strict=True))
    llm.close()


def test_adapters_count_as_weights_and_are_made_before_a_drafter_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one that does not fit costs nobody the time for the drafter's weights."""
    seen: list[str] = []
    lap, make = MemoryLedger.lap, build.Adapters
    monkeypatch.setattr(MemoryLedger, "lap", lambda self, part: (seen.append(part), lap(self, part))[1])
    monkeypatch.setattr(build, "Adapters", lambda *given: (seen.append("adapters"), make(*given))[1])
    make_engine(enable_lora=True, lora_modules=(f"one={one()}",)).close()
    assert seen[:3] == ["adapters", "weights", "drafter"]


def test_an_engine_without_adapters_has_none_of_it() -> None:
    llm = engine(cudagraph_capture_sizes=(2, 8))
    assert llm.engine.core.worker.state.adapter_M is None
    with pytest.raises(RequestError, match=r"lora_request names an adapter, but this engine has none.*enable_lora"):
        llm.generate(prompts(1)[0], lora_request="one")


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"r": 32}, r"r is 32.*up to max_lora_rank, 16"),
        ({"r": 0}, r"r is 0"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"bias": "lora_only"}, "bias is 'lora_only'.*'none'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'.*'CAUSAL_LM'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'.*'LORA'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has 'embed_tokens'.*q_proj"),
        ({"target_modules": ["lm_head"]}, "target_modules has 'lm_head'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_an_adapter_may_not_say_is_named(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", random_pairs(tiny_model()), **given)
    with pytest.raises(ConfigError, match=words):
        _load(folder)


def _load(folder: Path, **more: Any) -> None:
    """Refused before any of the engine's own checks would take long."""
    make_engine(**{"enable_lora": True, "lora_modules": (f"x={folder}",), "enforce_eager": True, **more}).close()


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{PREFIX}.lora_B.weight": torch.zeros(60, 4)}, r"q_proj.lora_B.weight has shape \[60, 4\].*\[64, 4\]"),
        ({f"{PREFIX}.lora_A.weight": torch.zeros(3, 64)}, r"q_proj.lora_A.weight has shape \[3, 64\].*\[4, 64\]"),
        ({f"{PREFIX}.lora_A.weight": None}, "lora_B of layers.0.self_attn.q_proj alone"),
        ({f"{PREFIX}.lora_A.weight": torch.full((4, 64), float("nan"))}, "q_proj.lora_A.weight.*NaN"),
        ({f"{PREFIX}.lora_magnitude_vector": torch.zeros(64)}, "lora_magnitude_vector, which is none of"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "lm_head.lora_A.weight, which is none of"),
        ({f"{PREFIX}.lora_A.weight".replace(".0.", ".9."): torch.zeros(4, 64)}, r"layers\.9\..*of 2 layers"),
        ({f"{PREFIX}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int32)}, "of type I32"),
    ],
    ids=["B", "A", "half", "nan", "dora", "head", "layer", "type"],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors = {name: t for name, t in {**random_pairs(tiny_model()), **change}.items() if t is not None}
    with pytest.raises(ConfigError, match=words):
        _load(write_adapter(tmp_path / "x", tensors))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_modules": ("x=/nowhere",)}, "/nowhere is no adapter: it must be a folder with adapter_config.json"),
        ({"lora_modules": ("nameless",)}, "lora_modules has 'nameless'; it must be NAME=FOLDER"),
        ({"lora_modules": ('{"name": 1, "path": 2}',)}, "lora_modules has .*; it must be NAME=FOLDER"),
        ({"lora_modules": ("x=/a", "x=/b"), "max_loras": 2}, "lora_modules has 'x=/b'.*each name once"),
        ({"lora_modules": ("x=/a", "y=/b")}, "lora_modules is .* at most max_loras, 1"),
        ({"enable_lora": False}, "lora_modules is .* without enable_lora"),
        ({"max_lora_rank": 12}, "max_lora_rank is 12; it must be a power of 2"),
        ({"max_loras": 0}, "max_loras is 0"),
    ],
    ids=["folder", "form", "types", "twice", "many", "off", "rank", "none"],
)
def test_settings_that_cannot_work_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _load(Path(one()), **given)


def test_requests_for_adapters_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    llm = shared()
    for request, words in (
        ("tow", r"lora_request names 'tow'; did you mean 'two'\? This engine's adapters: one, two"),
        (LoRARequest("one", 1, two()), "'one' at .* loaded from .*; rename one"),
        (LoRARequest("new", 1, str(tmp_path)), "'new', which cannot be loaded: .* is no adapter"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate(prompts(1)[0], lora_request=request)
    with pytest.raises(RequestError, match="lora_name is ''"):
        LoRARequest("")
    with pytest.raises(RequestError, match="lora_path is 3; it must be a text"):
        LoRARequest("new", 1, 3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts came with 1 of lora_request"):
        llm.generate(prompts(2), lora_request=["one"])
    assert_all_free(llm)


@pytest.mark.parametrize("name", ["Gemma4ForCausalLM", "Glm4ForCausalLM", "Starcoder2ForCausalLM"])
def test_models_whose_layers_cannot_have_adapters_are_refused(name: str, tmp_path: Path) -> None:
    """One with layers of its own, one whose rows are reordered, and one by transformers' own code."""
    if name.startswith("Gemma4"):
        model = gemma4_target()
    else:
        sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = {"Glm4": transformers.Glm4Config, "Starcoder2": transformers.Starcoder2Config}[name[:-11]]
        config(**sizes, head_dim=16, pad_token_id=0, eos_token_id=1, architectures=[name]).save_pretrained(tmp_path)
        model = str(tmp_path)
    with pytest.raises(ConfigError, match=f"enable_lora is set, but layers of {name} cannot have adapters; .* merge"):
        _load(Path(one()), model=model, load_format="auto" if name.startswith("Gemma4") else "dummy")


def test_pickled_adapters_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", random_pairs(tiny_model()))
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors, but has pickled weights"):
        _load(folder)


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is empty; train the adapter again"):
        _load(write_adapter(tmp_path / "x", {}))


def test_adapters_of_a_wider_type_than_the_model_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        _load(Path(one()), dtype="bfloat16")
    assert f"28 of 28 tensors in {one()} are F32 and rounded to bfloat16" in caplog.text
