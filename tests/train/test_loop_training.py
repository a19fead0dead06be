"""The loop: a kill loses one interval at most, several processes do what one does, and exports are whole."""

from __future__ import annotations

import errno
import functools
import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import toy_options

from draftloop import cli
from draftloop.cli.train import options_from, train_options
from draftloop.errors import CapacityError, ConfigError
from draftloop.train import export as export_module
from draftloop.train import loop as loop_module
from draftloop.train import run as run_module
from draftloop.train.files import write_folder
from draftloop.train.loop import Trainer
from draftloop.train.method import METHODS, Method, load_methods, method_class
from draftloop.train.options import METHOD_OPTIONS, Eagle3Options, TrainOptions
from draftloop.train.plot import plot
from draftloop.train.run import run_train
from draftloop.train.world import World
from forks import Forked
from helpers import _folder, tiny_model

STEPS = 12
HEAD = Eagle3Options(ttt_steps=2)


@pytest.fixture(scope="module", autouse=True)
def _no_pictures():
    """Each takes half a second; tests/train/test_eagle3.py looks at one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "plot", lambda *args, **options: None)
        yield


@functools.cache
def recording() -> str:
    """A recording that the trainings of this file share."""
    return str(run_train(toy_options(_folder() / "shared", record_tokens=6000, record_only=True), HEAD))


def options(out: Path, **changes) -> TrainOptions:
    defaults = {"recording": recording(), "record_tokens": 0, "steps": STEPS, "batch_tokens": 512}
    intervals = {"evaluate_every": 6, "checkpoint_every": 4}
    return toy_options(out, **{**defaults, **intervals, **changes})


@functools.cache
def whole() -> Path:
    """The drafter of an uninterrupted training."""
    return run_train(options(_folder() / "whole"), HEAD)


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def start(chosen: TrainOptions, log: Path, **environ: str) -> Forked:
    """The same training by the command, in a process of its own."""
    flags = []
    for name, value in vars(chosen).items():
        if value is not None and value != getattr(TrainOptions, name):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    arguments = ["train", *flags, "--ttt-steps", str(HEAD.ttt_steps)]
    environ = {**os.environ, "DRAFTLOOP_LOG_LEVEL": "WARNING", **environ}
    return Forked(_train, arguments, log=log, environ=environ)


def _train(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    cli.main(arguments)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# ---- resume ---------------------------------------------------------------------------------


def test_a_killed_training_goes_on_as_if_nothing_had_happened(tmp_path):
    expected = weights(whole())
    chosen = options(tmp_path / "killed", steps=STEPS)
    process = start(chosen, tmp_path / "log")
    checkpoints, deadline = tmp_path / "killed/checkpoints", time.monotonic() + 300
    while not any(int(path.stem[5:]) >= 4 for path in checkpoints.glob("step-*.pt")):
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed/drafter").exists()
    assert len(list(checkpoints.glob("step-*.pt"))) <= 3
    found = weights(run_train(chosen, HEAD))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)
    steps = [row["step"] for row in log(tmp_path / "killed") if "loss" in row]
    assert steps == [row["step"] for row in log(whole().parent) if "loss" in row]


def test_a_finished_training_is_not_repeated_and_a_longer_one_goes_on(tmp_path, monkeypatch):
    chosen = options(tmp_path / "out", steps=4)
    run_train(chosen, HEAD)
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("it trained again"))
    run_train(chosen, HEAD)
    monkeypatch.undo()
    run_train(replace(chosen, steps=8), HEAD)
    assert [row["step"] for row in log(tmp_path / "out") if "held_out" in row] == [0, 4, 6, 8]
    kept = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir())
    assert kept == ["step-0000004.pt", "step-0000008.pt"]


def test_a_checkpoint_of_another_training_is_refused_or_started_over(tmp_path):
    chosen = options(tmp_path / "out", steps=4)
    run_train(chosen, HEAD)
    with pytest.raises(ConfigError, match="is of a training with seed 0, not 1; name another --out, or start over"):
        run_train(replace(chosen, seed=1), HEAD)
    run_train(replace(chosen, seed=1, resume=False), HEAD)
    (tmp_path / "out/checkpoints/step-0000004.pt").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"cannot be read: .*; delete it"):
        run_train(replace(chosen, seed=1), HEAD)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    save, calls = torch.save, []

    def full(content, path):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CapacityError, match="No space left on device; the checkpoint before is complete"):
        run_train(options(tmp_path / "out"), HEAD)
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step-0000004.pt"]


# ---- time and rate --------------------------------------------------------------------------


def test_minutes_end_a_training_and_the_rate_follows_the_clock(tmp_path, monkeypatch):
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(loop_module.time, "perf_counter", tick)
    run_train(options(tmp_path / "out", steps=None, minutes=1.0, evaluate_every=100), HEAD)
    rows = [row for row in log(tmp_path / "out") if "loss" in row]
    assert 10 < log(tmp_path / "out")[-1]["step"] < 60
    assert rows[-1]["learning_rate"] < rows[0]["learning_rate"]
    assert log(tmp_path / "out")[-1]["progress"] == 1.0


def test_the_rate_warms_up_and_falls_to_its_share(tmp_path):
    trainer = Trainer.__new__(Trainer)
    trainer.options = options(tmp_path, learning_rate=1.0, warmup=0.1, final_rate=0.2)
    rates = [trainer.learning_rate(n / 100) for n in range(101)]
    assert rates[0] > 0
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.6)
    assert rates[100] == pytest.approx(0.2)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path, monkeypatch):
    forward = Trainer._forward

    def broken(self, batch, progress):
        losses = forward(self, batch, progress)
        return losses._replace(loss=losses.loss * float("nan"))

    monkeypatch.setattr(Trainer, "_forward", broken)
    with pytest.raises(ConfigError, match="the loss is nan at step 10; lower --learning-rate"):
        run_train(options(tmp_path / "out", checkpoint_every=100), HEAD)


# ---- several processes ----------------------------------------------------------------------


def test_parts_of_a_step_add_up_to_the_whole(tmp_path):
    expected = weights(whole())
    found = weights(run_train(options(tmp_path / "parts", accumulate=2), HEAD))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-2, atol=2e-3)


def test_two_processes_follow_one(tmp_path):
    """FSDP over two gloo processes, which are told what torchrun tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        start(options(tmp_path / "two"), tmp_path / rank, RANK=rank, LOCAL_RANK=rank, **both) for rank in ("0", "1")
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0], (tmp_path / "0").read_text()[-3000:]
    (one,), (two,) = ([row for row in log(folder) if "loss" in row] for folder in (whole().parent, tmp_path / "two"))
    assert two["step"] == one["step"] == 10
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    for name, weight in weights(tmp_path / "two/drafter").items():
        torch.testing.assert_close(weight, weights(whole())[name], rtol=1e-2, atol=2e-3)
    # and one process can go on where two were
    run_train(options(tmp_path / "two", steps=STEPS + 1), HEAD)
    assert log(tmp_path / "two")[-1]["step"] == STEPS + 1


# ---- export ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_export_leaves_what_was_there(tmp_path, monkeypatch, error):
    chosen = options(tmp_path / "out", steps=4)
    drafter = run_train(chosen, HEAD)
    before = {path.name: path.read_bytes() for path in drafter.iterdir()}

    def interrupted(tensors, path, **_):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(export_module, "save_file", interrupted)
    expected = CapacityError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        run_train(replace(chosen, steps=5), HEAD)
    assert {path.name: path.read_bytes() for path in drafter.iterdir()} == before
    assert not [path for path in drafter.parent.iterdir() if path.name.startswith(".")]


def test_a_folder_appears_whole(tmp_path):
    seen = []

    def write(part: Path) -> None:
        (part / "one").write_text("1")
        seen.append((tmp_path / "folder").exists())

    write_folder(tmp_path / "folder", write, kept="")
    assert seen == [False]
    assert (tmp_path / "folder/one").read_text() == "1"


# ---- options --------------------------------------------------------------------------------


def test_every_method_has_options_and_options_of_one_name_one_type():
    load_methods()
    assert METHODS.keys() == METHOD_OPTIONS.keys()
    types: dict[str, object] = {}
    for cls in METHOD_OPTIONS.values():
        for name, annotation in cls.__annotations__.items():
            assert types.setdefault(name, annotation) == annotation, name
        assert not cls.__annotations__.keys() & TrainOptions.__annotations__.keys()
    with pytest.raises(ConfigError, match="unknown training method 'eagle'; did you mean 'eagle3'"):
        method_class("eagle")


def given(**changes):
    defaults = {option.name: option.default for option in train_options()}
    return options_from(defaults | {"target": TrainOptions.target} | changes)


def test_the_command_gives_options_to_the_method():
    assert given() == (TrainOptions(), Eagle3Options())
    _, chosen = given(ttt_steps=3, draft_vocab_size=100)
    assert chosen == Eagle3Options(ttt_steps=3, draft_vocab_size=100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5, "minutes": 1.0}, "both --steps 5 and --minutes 1.0 are given"),
        ({"method": "eagle"}, "unknown training method 'eagle'; did you mean 'eagle3'"),
        ({"batch_tokens": 1500}, "batch_tokens is 1500; it must be a multiple of 1024"),
        ({"held_out_tokens": 5}, "held_out_tokens is 5; it must be at least --row-tokens, 1024"),
        ({"greedy_share": 1.5}, r"greedy_share is 1.5; it must be in \[0, 1\]"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be above 0"),
        ({"hidden_states": "x", "record_only": True}, "--hidden-states is trained on as it is"),
        ({"ttt_steps": 0}, r"ttt_steps is 0; it must be in \[1, 32\]"),
        ({"method": "dflash", "ttt_steps": 3}, "'dflash' does not use --ttt-steps, which belongs to eagle3; leave it"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        given(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "/nowhere.jsonl"}, "--data is '/nowhere.jsonl', which is no file; check the path"),
        ({"device": "cuda"}, "--device is 'cuda', but there is no usable GPU; leave it out"),
        ({"out": "/dev/null/x"}, "--out '/dev/null/x' cannot be made: .*; name another folder"),
        ({"recording": "/dev/null/x"}, "--recording '/dev/null/x' cannot be made: .*; name another folder"),
    ],
    ids=["data", "device", "out", "recording"],
)
def test_what_this_machine_does_not_have_is_named_before_anything_is_loaded(tmp_path, changes, message):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    chosen = TrainOptions(**{"target": tiny_model(), "out": str(tmp_path), "device": "cpu", **changes})
    with pytest.raises(ConfigError, match=message):
        run_train(chosen, HEAD)


def test_processes_that_cannot_share_the_work_say_so(tmp_path):
    three = World(rank=0, size=3)
    with pytest.raises(ConfigError, match="a step has 8 rows, which 3 processes in 1 parts cannot share evenly"):
        run_module._rows_per_step(toy_options(tmp_path, target="x"), 512, three)
    with pytest.raises(ConfigError, match="several processes would record at once; run with --record-only in one"):
        run_module._recorded(toy_options(tmp_path, target="x"), "", 100, three)


def test_documents_longer_than_a_row_lose_their_end_and_the_log_says_so(tmp_path, caplog):
    with caplog.at_level("WARNING", "draftloop"):
        run_train(options(tmp_path, row_tokens=32, held_out_tokens=256, batch_tokens=256, steps=1), HEAD)
    assert "documents of more than --row-tokens 32 tokens lose their end" in caplog.text


def test_without_matplotlib_no_picture_is_drawn_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot(tmp_path / "training.png", [], title="x")
    assert "that needs matplotlib; pip install 'draftloop[train]'" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_method_whose_name_is_taken_is_refused_naming_the_owner():
    load_methods()
    with pytest.raises(TypeError, match=r"'eagle3' is already registered by draftloop\.train"):
        type("Again", (Method,), {"name": "eagle3"})
