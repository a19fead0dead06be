"""States made for training are those that the engine makes while it serves."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftloop.drafters.extract_hidden_states import HiddenStates, read_hidden_states
from draftloop.errors import ConfigError
from draftloop.models.dense import FINAL_HIDDEN
from draftloop.models.loader import load_config, resolve_model
from draftloop.train.packing import PackedRows, Packer
from draftloop.train.recording import Document, Documents
from draftloop.train.states import StoredStates, TargetStates
from helpers import VOCAB, _folder, greedy, make_engine, prompts, tiny_model

LAYERS = (0, 2, 1, FINAL_HIDDEN)
CPU = torch.device("cpu")


@functools.cache
def recorded() -> str:
    """Folder of states that the engine wrote while it answered six prompts."""
    folder = _folder() / "recorded-states"
    spec = {"method": "extract_hidden_states", "layer_ids": list(LAYERS), "output_dir": str(folder)}
    llm = make_engine(speculative_config=spec)
    llm.generate(prompts(6), greedy(20))
    llm.close()
    return str(folder)


def packed(states: list[HiddenStates], row_tokens: int = 80) -> PackedRows:
    made = [Document(token_ids=s.token_ids.tolist(), num_given=1, temperature=0.0) for s in states]
    documents = Documents.of(made, VOCAB)
    packer = Packer(documents, np.arange(len(made)), row_tokens=row_tokens, rows_per_step=1, seed=3)
    return packer.rows(packer._epoch_rows(0))


def test_packed_documents_have_the_states_that_the_engine_recorded():
    found = list(read_hidden_states(recorded()))
    rows = packed(found)
    assert max(len(row) for row in rows.documents) > 1, "no row holds two documents"
    target = TargetStates(tiny_model(), device=CPU, dtype=torch.float32, row_tokens=80, compiled=False)
    aux_BLX, hidden_BLC = target(rows, LAYERS[:-1])
    for row, documents in enumerate(rows.documents):
        at = 0
        for document in documents:
            expected = found[document].hidden
            place = slice(at, at + len(expected))
            mine = torch.cat((aux_BLX[row, place], hidden_BLC[row, place]), -1)
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
            at = place.stop


def test_states_on_disk_are_taken_instead():
    config = load_config(resolve_model(tiny_model()))
    stored = StoredStates(recorded(), config=config, device=CPU, dtype=torch.float32)
    documents = stored.documents(80, VOCAB)
    assert documents.num_generated == sum(len(s.token_ids) - 1 for s in stored.found)
    rows = packed(stored.found)
    target = TargetStates(tiny_model(), device=CPU, dtype=torch.float32, row_tokens=80, compiled=False)
    for mine, computed in zip(stored(rows, (2, 0)), target(rows, (2, 0)), strict=True):
        inside = rows.document_BL > 0
        torch.testing.assert_close(mine[inside], computed[inside], rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match=r"are of layers 0, 2, 1, -1; training needs 3, -1 .*: 3 is missing"):
        stored(rows, (3,))


def test_states_that_cannot_be_trained_on_are_refused(tmp_path, caplog):
    config = load_config(resolve_model(tiny_model()))
    stored = functools.partial(StoredStates, config=config, device=CPU, dtype=torch.float32)
    lengths = [len(states.token_ids) for states in stored(recorded()).found]
    with caplog.at_level("WARNING", "draftloop"):
        stored(recorded()).documents(max(lengths) - 1, VOCAB)
    assert f"{lengths.count(max(lengths))} requests of more than --row-tokens {max(lengths) - 1} tokens" in caplog.text
    with pytest.raises(ConfigError, match=r"every request in .* has more than 5 tokens; raise --row-tokens"):
        stored(recorded()).documents(5, VOCAB)
    with pytest.raises(ConfigError, match="are 64 wide, but the target is 32 wide; they are of another target"):
        stored(recorded(), config=replace(config, hidden_size=32))
    several = shutil.copytree(recorded(), tmp_path / "several")
    spec = {"method": "extract_hidden_states", "layer_ids": [0], "output_dir": str(several)}
    llm = make_engine(speculative_config=spec)
    llm.generate(prompts(1), greedy(2))
    llm.close()
    with pytest.raises(ConfigError, match=r"holds states of layers .*\(0,\).*; keep each in a folder of its own"):
        stored(str(several))


def test_rows_longer_than_the_target_are_refused():
    with pytest.raises(ConfigError, match=r"--row-tokens is 4096, but .* takes 192 tokens"):
        TargetStates(tiny_model(), device=CPU, dtype=torch.float32, row_tokens=4096, compiled=False)
