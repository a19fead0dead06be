"""Hidden states that are written are those of transformers, for every token once, whatever ran beside it."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftloop.drafters import extract_hidden_states
from draftloop.drafters.extract_hidden_states import HiddenStates, read_hidden_states
from draftloop.engine.llm import LLM
from draftloop.errors import CapacityError, ConfigError
from draftloop.request import SamplingParams
from helpers import HIDDEN, LAYERS, MODES, VOCAB, answers, engine, greedy, make_engine, oracle, prompts, tiny_model


def extracting(folder: Path, **settings) -> LLM:
    spec = {"method": "extract_hidden_states", "layer_ids": (0, 1, LAYERS, -1), "output_dir": folder}
    spec |= {key: settings.pop(key) for key in ("layer_ids", "shard_tokens") if key in settings}
    return make_engine(speculative_config=spec, **{"cudagraph_capture_sizes": (2, 8), **settings})


@functools.cache
def reference():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    leaving_last = []
    model.model.norm.register_forward_pre_hook(lambda module, args: leaving_last.append(args[0]))
    return model, leaving_last


@torch.inference_mode()
def expected_states(token_ids: list[int]) -> Tensor:
    """[T, 4 * hidden]: what enters layers 0 and 1, what leaves the last, and what the final norm makes of it."""
    model, leaving_last = reference()
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1
    return torch.cat([states[0], states[1], leaving_last[-1], states[-1]], -1)[0]


def check(states: HiddenStates, token_ids: list[int]) -> None:
    assert states.token_ids.tolist() == token_ids
    torch.testing.assert_close(states.hidden, expected_states(token_ids), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
def test_states_of_prompts_and_decoded_tokens_are_those_of_transformers(tmp_path, mode, overlap):
    """Prompts of 1 to 40 tokens in chunks of at most 24, beside rows that decode."""
    llm = extracting(tmp_path, cudagraph_mode=mode.value, async_scheduling=overlap, max_num_batched_tokens=24,
                     shard_tokens=50)  # fmt: skip
    llm.engine.table.poison = True
    asked = prompts(9, longest=40)
    lengths = [1 + 3 * i for i in range(9)]
    outputs = answers(llm.generate(asked, [greedy(n) for n in lengths]))
    assert outputs == [oracle(prompt, n) for prompt, n in zip(asked, lengths, strict=True)]
    llm.close()
    found = {states.request_id: states for states in read_hidden_states(tmp_path)}
    assert list(found) == sorted(found, key=int)
    assert len(found) == 9
    for states, prompt, answer in zip(found.values(), asked, outputs, strict=True):
        check(states, [*prompt, *answer[:-1]])  # the last token is never fed to the target
    assert len(list(tmp_path.iterdir())) > 3


def test_sampling_stops_and_requests_that_decline_speculation(tmp_path):
    llm = extracting(tmp_path, async_scheduling=True)
    asked = prompts(4)
    stop = oracle(asked[0], 8)[5]
    params = [
        greedy(24, stop_token_ids=(stop,)),
        SamplingParams(temperature=1.0, seed=3, max_tokens=9),
        greedy(1),
        greedy(5),
    ]
    outputs = [*answers(llm.generate(asked, params)), *answers(llm.generate(asked[:1], greedy(6), speculation=False))]
    llm.close()
    assert outputs[0][-1] == stop
    found = list(read_hidden_states(tmp_path))
    for states, prompt, answer in zip(found, [*asked, asked[0]], outputs, strict=True):
        check(states, [*prompt, *answer[:-1]])


def test_an_aborted_request_leaves_what_was_computed(tmp_path):
    llm = extracting(tmp_path, max_num_batched_tokens=16, async_scheduling=True)
    core, (long, short) = llm.engine.core, (list(range(1, 50)), [5, 6, 7])
    core.add("long", long, greedy(5))
    core.add("short", short, greedy(5))
    core.step()
    core.step()
    core.abort("long")
    while not core.idle:
        core.step()
    llm.close()
    found = {states.request_id: states for states in read_hidden_states(tmp_path)}
    check(found["short"], [*short, *oracle(short, 5)[:-1]])
    check(found["long"], long[: len(found["long"].token_ids)])
    assert 0 < len(found["long"].token_ids) < len(long)


def test_what_a_shard_holds(tmp_path):
    llm = extracting(tmp_path, shard_tokens=20, layer_ids=[1])
    asked = prompts(5)
    llm.generate(asked, greedy(10))
    before_close = len(list(tmp_path.glob("*.safetensors")))
    llm.close()
    llm.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == before_close + 1, "closing writes the rest, and nothing unfinished is left"
    seen = []
    for path in paths:
        with safe_open(path, "pt") as shard:
            metadata, tensors = shard.metadata(), {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert json.loads(metadata["layer_ids"]) == [1]
        assert (metadata["dtype"], metadata["hidden_size"], metadata["model"]) == ("float32", str(HIDDEN), tiny_model())
        count = tensors["token_ids"].shape[0]
        assert {name: tuple(t.shape) for name, t in tensors.items()} == {
            "token_ids": (count,), "positions": (count,), "requests": (count,), "hidden_states": (count, HIDDEN),
        }  # fmt: skip
        assert path == paths[-1] or count >= 20
        assert ((tensors["token_ids"] >= 0) & (tensors["token_ids"] < VOCAB)).all()
        places = list(zip(tensors["requests"].tolist(), tensors["positions"].tolist(), strict=True))
        assert places == sorted(places)
        assert {str(number) for number, _ in places} == set(json.loads(metadata["request_ids"]))
        seen += places
    assert len(seen) == len(set(seen)) == sum(map(len, asked)) + 5 * 9


def test_engines_that_write_to_one_folder_do_not_mix(tmp_path):
    for seed in (1, 2):
        llm = extracting(tmp_path)
        llm.generate(prompts(2, seed=seed), greedy(4))
        llm.close()
    found = [tuple(states.token_ids.tolist()) for states in read_hidden_states(tmp_path)]
    assert sorted(found) == sorted(
        (*prompt, *oracle(prompt, 4)[:-1]) for seed in (1, 2) for prompt in prompts(2, seed=seed)
    )


def test_a_full_disk_keeps_the_shards_before_it(tmp_path, monkeypatch):
    llm = extracting(tmp_path, shard_tokens=30)
    save_file = extract_hidden_states.save_file

    def full(tensors, path, metadata):
        if len(list(tmp_path.glob("hidden-*"))) < 2:
            return save_file(tensors, path, metadata=metadata)
        path.write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(extract_hidden_states, "save_file", full)
    with pytest.raises(CapacityError, match="No space left on device; the 2 shards before are complete"):
        llm.generate(prompts(8), greedy(20))
    assert len(list(tmp_path.iterdir())) == 2, "no unfinished file stays"
    for states in read_hidden_states(tmp_path):
        torch.testing.assert_close(states.hidden, expected_states(states.token_ids.tolist()), atol=2e-3, rtol=1e-3)
    with pytest.raises(CapacityError):
        llm.close()


def test_reading_refuses_what_is_not_whole(tmp_path):
    with pytest.raises(ConfigError, match="holds no hidden states"):
        list(read_hidden_states(tmp_path))
    llm = extracting(tmp_path, shard_tokens=8)
    llm.generate([list(range(1, 40))], greedy(20))
    llm.close()
    sorted(tmp_path.iterdir())[1].unlink()
    with pytest.raises(ConfigError, match=r"tokens up to position 3\d, then from .*; a shard before it is missing"):
        list(read_hidden_states(tmp_path))
    for path in tmp_path.iterdir():
        path.unlink()
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "hidden-x.safetensors")
    with pytest.raises(ConfigError, match="not a shard of hidden states"):
        list(read_hidden_states(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_ids": [3]}, "layer_ids names layer 3, but .* has 2 layers; name 0 to 2"),
        ({"layer_ids": [-2]}, "layer_ids names layer -2"),
        ({"layer_ids": [1, 1]}, "name each layer once"),
        ({"layer_ids": []}, "needs 'layer_ids' and 'output_dir'"),
        ({"layer_ids": "1"}, "layer_ids is '1'; it must be a list"),
        ({"output_dir": None}, "needs 'layer_ids' and 'output_dir'"),
        ({"output_dir": "/dev/null/x"}, "cannot be made"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"num_speculative_tokens": 2}, "drafts nothing, but num_speculative_tokens is 2; leave it out"),
        ({"rejection_sample_method": "synthetic"}, "does not use 'rejection_sample_method'"),
        ({"model": "x"}, "does not use 'model'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(tmp_path, change, message):
    spec = {"method": "extract_hidden_states", "layer_ids": [1], "output_dir": str(tmp_path / "new"), **change}
    with pytest.raises(ConfigError, match=message):
        make_engine(speculative_config=spec)


@pytest.mark.parametrize("given", [None, 0, 1])
def test_the_number_of_drafts_is_none_or_one_and_zero_turns_it_off(tmp_path, given):
    """Other engines ask for 1; nothing is drafted either way. 0 is no speculation, as with every drafter."""
    spec = {"method": "extract_hidden_states", "layer_ids": [1], "output_dir": str(tmp_path / "new")}
    llm = make_engine(speculative_config=spec if given is None else {**spec, "num_speculative_tokens": given})
    assert (llm.engine.drafter is None) == (given == 0)
    assert "target.verify" not in llm.engine.table.phases
    assert (tmp_path / "new").exists() == (given != 0)


def test_no_step_runs_past_it_as_one_graph(tmp_path):
    llm = extracting(tmp_path, iteration_graph=True)
    prompt = prompts(3)[2]
    (answer,) = answers(llm.generate([prompt], greedy(9)))
    llm.close()
    (states,) = read_hidden_states(tmp_path)
    check(states, [*prompt, *answer[:-1]])


def test_an_engine_without_it_copies_nothing():
    assert not engine().engine.core.worker.observes
