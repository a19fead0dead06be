"""Recording: what the target said is on disk as it was, can be added to, and survives a full disk."""

from __future__ import annotations

import errno
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from draftloop.errors import CapacityError, ConfigError
from draftloop.models.fingerprint import fingerprint
from draftloop.train import record as record_module
from draftloop.train import recording as recording_module
from draftloop.train.options import Eagle3Options, TrainOptions
from draftloop.train.record import record
from draftloop.train.recording import Document, Recording, repetition_starts
from draftloop.train.run import run_train
from helpers import VOCAB, oracle, tiny_model


def opened(folder, vocab_size: int = VOCAB) -> Recording:
    folder.mkdir(exist_ok=True)
    return Recording.open(folder, target="toy", revision="abc", vocab_size=vocab_size, settings={"data": "none"})


def document(*ids: int, given: int = 1, temperature: float = 0.0) -> Document:
    return Document(token_ids=list(ids), num_given=given, temperature=temperature)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_documents_come_back_as_they_were(tmp_path, vocab_size, dtype):
    recording = opened(tmp_path, vocab_size)
    recording.add([document(5, 65_535, 7, given=2), document(8, temperature=0.7)], asked=3, seed=0)
    recording.add([document(1, 2)], asked=1, seed=0)
    found = Recording.read(tmp_path).documents()
    assert found.token_ids.dtype == dtype
    assert [found.token_ids[a:b].tolist() for a, b in zip(found.starts, found.starts[1:], strict=False)] == [
        [5, 65_535, 7],
        [8],
        [1, 2],
    ]
    assert found.num_given.tolist() == [2, 1, 1]
    assert found.temperature.tolist() == pytest.approx([0, 0.7, 0])
    assert (recording.num_tokens(), recording.num_asked(0)) == (2, 4)
    counts = found.token_counts(vocab_size, np.array([True, True, False]))
    assert counts[7] == counts.sum() == 1


def test_a_recording_of_another_target_is_refused(tmp_path):
    opened(tmp_path)
    with pytest.raises(ConfigError, match=r"is of 'toy' \(weights abc\), not of 'other' \(weights def\)"):
        Recording.open(tmp_path, target="other", revision="def", vocab_size=VOCAB, settings={})
    with pytest.raises(ConfigError, match="holds no tokens yet"):
        opened(tmp_path).documents()


def test_a_folder_without_a_recording_or_with_a_damaged_one_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no recording \(recording.json\); name the folder"):
        Recording.read(tmp_path)
    opened(tmp_path).add([document(5, 6)], asked=1, seed=0)
    (shard,) = tmp_path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(ConfigError, match=f"{shard.name} cannot be read: .*; delete this shard"):
        opened(tmp_path).documents()
    (tmp_path / "recording.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="has format 'other'; it must be"):
        Recording.read(tmp_path)


def test_the_fingerprint_tells_weights_apart():
    folders = (tiny_model(), tiny_model(), tiny_model("other-weights", seed=1))
    one, again, other = (fingerprint(Path(folder)) for folder in folders)
    assert one == again != other


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (list(range(40)), 40),
        ([1, 2, 3, 4] * 2, 8),
        ([*range(50, 60), *[1, 2, 3, 4, 5, 6, 7, 8] * 3], 10 + 16),
        ([7] * 20, 2),
        ([], 0),
    ],
)
def test_an_answer_is_cut_where_it_begins_to_go_in_circles(ids, kept):
    """An 8-gram that comes for the third time begins there."""
    assert repetition_starts(ids) == kept


# ---- with the engine ------------------------------------------------------------------------


def options(folder, **changes) -> TrainOptions:
    defaults = {
        "target": tiny_model(),
        "out": str(folder),
        "record_tokens": 600,
        "answer_tokens": 20,
        "row_tokens": 48,
        "max_num_seqs": 8,
        "device": "cpu",
        "record_only": True,
        "held_out_tokens": 48,
        "batch_tokens": 96,
    }
    return TrainOptions(**{**defaults, **changes})


def documents(folder) -> list[tuple[list[int], int, float]]:
    found = Recording.read(folder / "recording").documents()
    bounds = zip(found.starts, found.starts[1:], strict=False)
    ids = [found.token_ids[start:end].tolist() for start, end in bounds]
    return list(zip(ids, found.num_given.tolist(), found.temperature.tolist(), strict=True))


def test_greedy_answers_are_the_engines_and_given_tokens_are_marked(tmp_path):
    run_train(options(tmp_path), Eagle3Options())
    found = documents(tmp_path)
    assert 600 <= sum(len(ids) - given for ids, given, _ in found) < 900
    greedy = [(ids, given) for ids, given, temperature in found if temperature == 0]
    assert 0.3 < len(greedy) / len(found) < 0.7
    for ids, given in greedy[:6]:
        assert ids[given:] == oracle(ids[:given], 20)[: len(ids) - given]
    assert {0.5 <= temperature <= 1 for _, _, temperature in found if temperature > 0} == {True}


def test_a_recording_is_added_to_and_draws_nothing_twice(tmp_path):
    run_train(options(tmp_path, record_tokens=300), Eagle3Options())
    first = documents(tmp_path)
    run_train(options(tmp_path), Eagle3Options())
    both = documents(tmp_path)
    assert both[: len(first)] == first
    assert not {str(ids) for ids, _, _ in first} & {str(ids) for ids, _, _ in both[len(first) :]}
    run_train(options(tmp_path), Eagle3Options())  # all is there: no engine is started
    assert documents(tmp_path) == both


def test_the_same_seed_records_the_same(tmp_path):
    for name in ("one", "two"):
        run_train(options(tmp_path / name, record_tokens=200), Eagle3Options())
    run_train(options(tmp_path / "three", record_tokens=200, seed=1), Eagle3Options())
    assert documents(tmp_path / "one") == documents(tmp_path / "two") != documents(tmp_path / "three")


def test_a_recording_that_will_take_days_says_so_once(tmp_path, monkeypatch, caplog):
    chosen = options(tmp_path, record_tokens=400)
    recording = Recording.open(_made(tmp_path / "r"), target="toy", revision="", vocab_size=VOCAB, settings={})
    clock = SimpleNamespace(monotonic=itertools.count(0, 36_000).__next__)
    monkeypatch.setattr(record_module, "time", clock)
    record(chosen, recording, rounds=1)
    assert recording.next_shard(chosen.seed) > 2
    (said,) = [one.getMessage() for one in caplog.records if "hours" in one.getMessage()]
    assert "--record-minutes ends it earlier" in said


def test_shards_get_no_longer_than_the_minutes_that_are_left(tmp_path, monkeypatch):
    chosen = options(tmp_path, record_tokens=10_000, record_minutes=4.0)
    recording = Recording.open(_made(tmp_path / "r"), target="toy", revision="", vocab_size=VOCAB, settings={})
    monkeypatch.setattr(record_module, "time", SimpleNamespace(monotonic=itertools.count(0, 60).__next__))
    record(chosen, recording, rounds=100)  # a minute for the first 2 answers, and one between shards
    assert recording.num_asked(chosen.seed) == 2 + 4


def test_a_full_disk_is_said_and_what_was_recorded_can_be_trained_on(tmp_path, monkeypatch):
    chosen = options(tmp_path, answer_tokens=10, record_tokens=5000)
    recording = Recording.open(
        _made(tmp_path / "recording"),
        target=chosen.target,
        revision=fingerprint(Path(tiny_model())),
        vocab_size=VOCAB,
        settings={},
    )
    save, calls = recording_module.save_file, []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            args[1].write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(recording_module, "save_file", full)
    with pytest.raises(CapacityError, match=r"No space left on device; the 2 shards before are complete"):
        record(chosen, recording, rounds=3)
    assert sorted(path.name for path in (tmp_path / "recording").iterdir()) == [
        "recording.json",
        "tokens-0-00000.safetensors",
        "tokens-0-00001.safetensors",
    ]
    trained = run_train(options(tmp_path, record_only=False, record_tokens=0, steps=1), Eagle3Options(ttt_steps=1))
    assert (trained / "model.safetensors").is_file()


def test_prompts_of_a_file_are_asked_in_turn(tmp_path):
    target = tiny_model("worded", words="w")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"text": f"w{n} w{n + 1}"}) + "\n" for n in range(12)))
    run_train(options(tmp_path, target=target, data=str(data)), Eagle3Options())
    asked = [tuple(ids[:given]) for ids, given, _ in documents(tmp_path)]
    counts = [asked.count(prompt) for prompt in dict.fromkeys(asked)]
    assert set(asked) == {(n, n + 1) for n in range(12)}
    assert max(counts) - min(counts) <= 1


def test_prompts_that_leave_no_room_for_an_answer_are_left_out(tmp_path, caplog):
    data = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"text": " ".join(["w1"] * count)}) for count in (2, 40)]
    chosen = options(
        tmp_path,
        target=tiny_model("worded", words="w"),
        data=str(data),
        row_tokens=64,
        held_out_tokens=64,
        batch_tokens=128,
    )
    data.write_text("\n".join(lines))
    with caplog.at_level("WARNING", "draftloop"):
        run_train(chosen, Eagle3Options())
    assert "1 prompts of more than 32 tokens are left out" in caplog.text
    data.write_text(lines[1])
    with pytest.raises(ConfigError, match=r"no prompt in .* is short enough; raise --row-tokens"):
        run_train(replace(chosen, out=str(tmp_path / "other")), Eagle3Options())


def test_where_nothing_is_answered_recording_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "repetition_starts", lambda ids: 0)
    with pytest.raises(CapacityError, match="shard 0 came out empty"):
        run_train(options(tmp_path, loop_share=0.0), Eagle3Options())


def _made(folder):
    folder.mkdir(parents=True)
    return folder


def test_runs_with_seeds_of_their_own_record_into_one_folder(tmp_path):
    recording = opened(tmp_path, 100)
    for seed, ids in ((1, (3, 4)), (11, (5, 6)), (1, (7, 8))):
        recording.add([document(*ids)], asked=10 * seed, seed=seed)
    assert [path.name for path in recording.shards(1)] == ["tokens-1-00000.safetensors", "tokens-1-00001.safetensors"]
    assert (recording.next_shard(1), recording.next_shard(11), recording.next_shard(0)) == (2, 1, 0)
    assert (recording.num_asked(1), recording.num_asked(11), recording.num_tokens()) == (20, 110, 3)
    assert Recording.read(tmp_path).documents().token_ids.tolist() == [3, 4, 7, 8, 5, 6]
