"""Training where it is meant to run: compiled, in bf16, with flex_attention."""

from __future__ import annotations

import json

import pytest
import torch
from toy import served_length, text, toy_options, toy_target

from draftloop.train.options import Eagle3Options
from draftloop.train.run import run_train
from draftloop.train.states import TargetStates

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def test_training_raises_acceptance_on_a_gpu(tmp_path):
    options = toy_options(
        tmp_path / "out", device="cuda", row_tokens=128, batch_tokens=4096, record_tokens=40_000, held_out_tokens=4096
    )
    drafter = run_train(options, Eagle3Options(ttt_steps=3))
    log = [json.loads(line) for line in (drafter.parent / "log.jsonl").read_text().splitlines()]
    held_out = [row["held_out"]["acceptance_length"] for row in log if "held_out" in row]
    assert held_out[0] < 1.5 < 2.0 < held_out[-1]
    assert served_length(drafter) > 2.0


def test_compiled_states_are_those_of_the_cpu():
    import random

    import numpy as np
    from toy import VOCAB

    from draftloop.train.packing import Packer
    from draftloop.train.recording import Document, Documents

    rng = random.Random(0)
    made = [Document(token_ids=text(rng, n), num_given=1, temperature=0.0) for n in (60, 40, 100, 20)]
    packer = Packer(Documents.of(made, VOCAB), np.arange(4), row_tokens=128, rows_per_step=1, seed=0)
    rows = packer.rows([[0, 1], [2, 3]])
    found = []
    for device, compiled in (("cpu", False), ("cuda", True)):
        target = TargetStates(
            toy_target(), device=torch.device(device), dtype=torch.float32, row_tokens=128, compiled=compiled
        )
        states = target(rows.to(torch.device(device)), (0, 1, 2))
        inside = rows.document_BL > 0
        found.append([part.cpu()[inside] for part in states])
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=2e-2, atol=2e-2)
