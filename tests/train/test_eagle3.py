"""EAGLE-3 training: the module is the serving head, the format is the published one, and training helps."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import VOCAB, served, served_length, text, toy_options, toy_target

from drafters.eagle_reference import Reference
from draftloop.drafters.eagle_config import parse
from draftloop.drafters.files import read_shapes
from draftloop.drafters.made_for import TARGET_KEY
from draftloop.errors import ConfigError
from draftloop.models.loader import load_config, resolve_model
from draftloop.models.resolve import read_json
from draftloop.train.eagle3 import Eagle3Method, Eagle3Module
from draftloop.train.export import export
from draftloop.train.fitting import copy_stored
from draftloop.train.method import Batch, Losses, Subject
from draftloop.train.options import Eagle3Options
from draftloop.train.packing import Packer, batch_fields
from draftloop.train.recording import Document, Documents
from draftloop.train.run import run_train
from draftloop.train.states import TargetStates
from helpers import _folder, answers, greedy, make_engine

STEPS, ROW = 3, 48
TRAINED_STEPS = 40
EAGER = Eagle3Options(ttt_steps=STEPS)


@functools.cache
def target() -> TargetStates:
    torch.set_num_threads(1)
    return TargetStates(toy_target(), device=torch.device("cpu"), dtype=torch.float32, row_tokens=ROW, compiled=False)


def subject() -> Subject:
    model = target().model
    return Subject(
        name=toy_target(),
        folder=Path(toy_target()),
        config=load_config(resolve_model(toy_target())),
        embed_tokens=model.embed_tokens.detach(),
        lm_head=model.lm_head.detach(),
        final_norm=model.final_norm.detach(),
        eos_ids=(),
        row_tokens=ROW,
    )


def method(**options: Any) -> Eagle3Method:
    return Eagle3Method(replace(EAGER, **options), subject())


def random_module(made: Eagle3Method, *, seed: int = 0) -> Eagle3Module:
    """Weights large enough that every part of the head shows."""
    torch.manual_seed(seed)
    counts_V = torch.arange(VOCAB) * 7 % 31
    module = made.build(counts_V)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * (0.2 if "fc" not in name else 0.1))
    return module


def batch(made: Eagle3Method, rows: list[list[list[int]]], *, given: int = 1) -> Batch:
    """Rows of documents with the states of the toy target."""
    documents = [Document(token_ids=ids, num_given=given, temperature=0.0) for row in rows for ids in row]
    packer = Packer(
        Documents.of(documents, VOCAB), torch.arange(len(documents)).numpy(), row_tokens=ROW, rows_per_step=1, seed=0
    )
    numbers = iter(range(len(documents)))
    packed = packer.rows([[next(numbers) for _ in row] for row in rows])
    aux_BLX, hidden_BLC = target()(packed, made.aux_layers)
    return Batch(**batch_fields(packed), aux_BLX=aux_BLX, hidden_BLC=hidden_BLC)


def texts(*lengths: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [text(rng, length) for length in lengths]


# ---- the module is the serving head ---------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_fc": False, "norm_before_residual": False},
        {"draft_vocab_size": 40},
        {"draft_vocab_size": 40, "store_lm_head": False},
        {"aux_layer_ids": (2, 0)},
    ],
    ids=["default", "plain", "reduced", "borrowed-rows", "layers"],
)
def test_a_chain_in_training_is_a_chain_in_serving(tmp_path, options):
    """Step by step: the logits of the exported head, run by an independent reference, on its own drafts."""
    made = method(**options)
    module = random_module(made)
    export(tmp_path / "head", made, module.state_dict(), revision="", data={}, log=[])
    config, names = parse(
        read_json(tmp_path / "head/config.json"), read_shapes(tmp_path / "head"), method="eagle3", name="head"
    )
    weights = load_file(tmp_path / "head/model.safetensors")
    known = subject()
    rows = known.lm_head if module.draft_ids is None else known.lm_head[module.draft_ids]
    reference = Reference(config, {n: weights[full] for n, full in names.items()}, known.embed_tokens, rows)
    assert config.aux_layers(2) == made.aux_layers, "the loader reads other layers than were trained on"
    (tokens,) = texts(20)
    states = batch(made, [[tokens]]).aux_BLX[0, : len(tokens)]
    drafts, _, expected = reference.chain(tokens, states, STEPS)
    with torch.no_grad():
        found = [
            (hidden_BLC[0, len(tokens) - 2] @ module.head().T)
            for hidden_BLC in module.passes(batch(made, [[tokens + drafts]]))
        ]
    torch.testing.assert_close(torch.stack(found), torch.as_tensor(expected), rtol=1e-4, atol=1e-4)


def test_served_drafts_are_those_of_the_training_pass(trained):
    """Acceptance of a text, worked out from the training pass alone, is what the engine counts."""
    made = method()
    module = made.build(torch.zeros(VOCAB, dtype=torch.int64))
    made.initialise(module, trained)
    outputs, llm = served(trained, drafts=STEPS)
    llm.close()
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            passes = module.passes(batch(made, [[tokens]]))
            drafts_KL = torch.stack([(hidden[0] @ module.head().T).argmax(-1) for hidden in passes])
        known, accepted = len(output.prompt_token_ids) + 1, 0
        while known < len(tokens):
            right = 0
            while (
                right < STEPS and known + right < len(tokens) and drafts_KL[right, known - 2] == tokens[known + right]
            ):
                right += 1
            accepted, known = accepted + right, known + right + 1
        assert accepted == output.spec.num_accepted_draft_tokens


# ---- loss -----------------------------------------------------------------------------------


def losses(module: Eagle3Module, given: Batch) -> Losses:
    with torch.no_grad():
        return module(given, 1.0)


def test_documents_never_see_each_other():
    made = method()
    module = random_module(made)
    together = losses(module, batch(made, [texts(20, 9, 15)]))
    apart = [losses(module, batch(made, [[ids]])) for ids in texts(20, 9, 15)]
    for index, value in enumerate(together):
        torch.testing.assert_close(value, sum(one[index] for one in apart), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("given", [1, 4])
def test_what_is_learnt_ends_with_the_document_and_begins_with_the_answer(given):
    """Step i has something to learn at place p if the token at p + 2 + i was generated, in the same document."""
    made, lengths = method(), (12, 3, 2, 1)
    counted = losses(random_module(made), batch(made, [texts(*lengths)], given=given)).counted_K.tolist()
    expected = []
    for step in range(STEPS):
        places = [(n, p) for n in lengths for p in range(n) if p + 2 >= given and p + 2 + step < n]
        expected.append(len(places))
    assert counted == expected


def test_the_loss_is_the_cross_entropy_to_the_target_at_the_shifted_place():
    made = method(ttt_decay=0.5)
    module, (ids,) = random_module(made), texts(14)
    given = batch(made, [[ids]])
    with torch.no_grad():
        log_q = [(hidden[0] @ module.head().T).log_softmax(-1) for hidden in module.passes(given)]
        p = (given.hidden_BLC[0] @ subject().lm_head.T).softmax(-1)
    places = range(len(ids))
    pairs = [(i, place) for i in range(STEPS) for place in places if place + 2 + i < len(ids)]
    expected = -sum(0.5**i * (p[place + 1 + i] * log_q[i][place]).sum() for i, place in pairs)
    found = losses(module, given)
    torch.testing.assert_close(found.loss, torch.as_tensor(expected), rtol=1e-4, atol=1e-4)
    assert found.weight.item() == pytest.approx(sum(0.5**i for i, _ in pairs))


def test_a_reduced_vocabulary_learns_where_the_target_says_a_word_of_it():
    made = method(draft_vocab_size=40)
    module, (ids,) = random_module(made), texts(20)
    given = batch(made, [[ids]])
    assert module.draft_ids is not None
    likeliest = (given.hidden_BLC[0] @ subject().lm_head.T).argmax(-1)
    known = torch.isin(likeliest, module.draft_ids)
    expected = sum(
        0.8**i * float(known[place + 1 + i]) for i in range(STEPS) for place in range(len(ids)) if place + 2 + i < 20
    )
    assert losses(module, given).weight.item() == pytest.approx(expected, rel=1e-5)


def test_only_the_head_is_trained():
    made = method(draft_vocab_size=40, train_lm_head=True)
    module = random_module(made)
    module(batch(made, [texts(20)]), 0.0).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())
    assert subject().embed_tokens.grad is None
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    assert names == {"fc", "input_norm", "layers", "norm", "lm_head"}


# ---- format ---------------------------------------------------------------------------------

PLAIN_TENSORS = {
    "fc.weight",
    "input_norm.weight",
    "norm.weight",
    *(f"layers.0.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, set()),
        ({"train_lm_head": True}, {"lm_head.weight"}),
        ({"draft_vocab_size": 40}, {"lm_head.weight", "d2t", "t2d"}),
        ({"draft_vocab_size": 40, "store_lm_head": False}, {"d2t", "t2d"}),
    ],
    ids=["borrowed", "own", "reduced", "reduced-borrowed"],
)
def test_tensors_are_named_as_in_the_speculators_layout(tmp_path, options, more):
    made = method(**options)
    export(tmp_path / "head", made, random_module(made).state_dict(), revision="abc", data={}, log=[])
    tensors = load_file(tmp_path / "head/model.safetensors")
    assert tensors.keys() == PLAIN_TENSORS | more
    config = json.loads((tmp_path / "head/config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config[TARGET_KEY] == {"name": toy_target(), "fingerprint": "abc"}
    if "d2t" in more:
        ids = torch.arange(40) + tensors["d2t"]
        assert tensors["t2d"].nonzero().flatten().equal(ids)
        assert tensors["d2t"].dtype == torch.int64
        # the most frequent ids, by the counts of `random_module`
        counts = torch.arange(VOCAB) * 7 % 31
        assert counts[ids].min() >= counts[~tensors["t2d"]].max()


def test_a_head_may_take_the_targets_rows_for_a_reduced_vocabulary(tmp_path):
    """The same drafts whether the rows are stored or taken from the target."""
    histograms = []
    for stored in (True, False):
        made = method(draft_vocab_size=60, store_lm_head=stored)
        folder = tmp_path / str(stored)
        export(folder, made, random_module(made).state_dict(), revision="", data={}, log=[])
        outputs, llm = served(folder)
        assert llm.engine.drafter.head.lm_head.shape[0] == 60
        histograms.append((answers(outputs), [output.spec.acceptance_histogram for output in outputs]))
        llm.close()
    assert histograms[0] == histograms[1]


def test_default_layers_are_those_of_the_reference():
    deep = replace(subject(), config=replace(subject().config, num_layers=30))
    assert Eagle3Method(EAGER, deep).aux_layers == (2, 15, 27)
    with pytest.raises(ConfigError, match=r"aux_layer_ids names layer 3, but .* has 2 layers"):
        method(aux_layer_ids=(0, 3))
    with pytest.raises(ConfigError, match=f"draft_vocab_size is 72, but .* has {VOCAB} ids"):
        method(draft_vocab_size=VOCAB)


# ---- training -------------------------------------------------------------------------------


@functools.cache
def _trained() -> Path:
    return run_train(toy_options(_folder() / "eagle3-run", steps=TRAINED_STEPS, evaluate_every=20), EAGER)


@pytest.fixture
def trained() -> Path:
    """Folder of a head that was trained for some seconds on what the toy target says."""
    return _trained()


def test_training_raises_the_served_acceptance(trained, tmp_path):
    made = method()
    torch.manual_seed(0)
    untrained = made.build(torch.zeros(VOCAB, dtype=torch.int64))
    export(tmp_path / "untrained", made, untrained.state_dict(), revision="", data={}, log=[])
    before, after = served_length(tmp_path / "untrained"), served_length(trained)
    assert before < 1.3
    assert after > 2.4


def test_the_log_and_the_card_say_what_was_measured(trained):
    log = [json.loads(line) for line in (trained.parent / "log.jsonl").read_text().splitlines()]
    held_out = [row["held_out"] for row in log if "held_out" in row]
    assert held_out[-1]["acceptance_length"] > 2 > held_out[0]["acceptance_length"]
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    rates = held_out[-1]["acceptance"]
    assert len(rates) == STEPS
    assert held_out[-1]["acceptance_length"] == pytest.approx(1 + sum(rates), abs=1e-3)
    card = (trained / "README.md").read_text()
    assert f"| {TRAINED_STEPS} | {held_out[-1]['acceptance_length']:.3f} |" in card
    assert (trained.parent / "training.png").stat().st_size > 10_000


def test_training_goes_on_from_an_exported_head(trained, tmp_path):
    options = toy_options(tmp_path / "more", recording=trained.parent / "recording", init_from=str(trained), steps=1)
    run_train(options, EAGER)
    first = json.loads((tmp_path / "more/log.jsonl").read_text().splitlines()[0])
    assert first["held_out"]["acceptance_length"] > 2
    with pytest.raises(ConfigError, match=r"norm_before_fc True, but False is to be trained"):
        run_train(replace(options, out=str(tmp_path / "other")), replace(EAGER, norm_before_fc=False))
    message = r"fc.weight of the drafter in .* has shape \[2, 2\], but \[2, 3\] is to be trained; it is made"
    with pytest.raises(ConfigError, match=message):
        copy_stored(torch.zeros(2, 3), torch.zeros(2, 2), "fc.weight", trained)


def test_states_on_disk_are_trained_on(tmp_path):
    """What `extract_hidden_states` wrote while the engine served."""
    states = tmp_path / "states"
    spec = {"method": "extract_hidden_states", "layer_ids": [0, 1, 2, -1], "output_dir": str(states)}
    llm = make_engine(toy_target(), speculative_config=spec)
    llm.generate([[word] for word in range(24)], greedy(60))
    llm.close()
    options = toy_options(tmp_path / "out", hidden_states=str(states), held_out_tokens=128, batch_tokens=256, steps=25)
    run_train(options, EAGER)
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    held_out = [row["held_out"]["acceptance_length"] for row in log if "held_out" in row]
    assert held_out[-1] > held_out[0] + 0.3


def test_another_revision_of_the_target_is_named_at_start(trained, tmp_path, caplog):
    with caplog.at_level("WARNING", "draftloop"):
        served(trained)[1].close()
        assert "was trained for" not in caplog.text
        config = json.loads((trained / "config.json").read_text())
        mine = config[TARGET_KEY]["fingerprint"]
        moved = tmp_path / "moved"
        moved.mkdir()
        (moved / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes())
        config[TARGET_KEY]["fingerprint"] = "0123456789abcdef"
        (moved / "config.json").write_text(json.dumps(config))
        served(moved)[1].close()
    assert "with weights 0123456789abcdef" in caplog.text
    assert f"has weights {mine}" in caplog.text
