"""The method dspark: what it adds to dflash is what is served, and helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from test_dflash_training import ROW, export, make, pack, texts
from toy import served_length, toy_options

from draftloop.drafters.dflash_config import parse
from draftloop.drafters.files import read_shapes
from draftloop.errors import ConfigError
from draftloop.models.resolve import read_json
from draftloop.train.anchors import Anchors
from draftloop.train.dspark import DSparkModule
from draftloop.train.options import DSparkOptions
from draftloop.train.run import run_train
from helpers import answers, greedy, make_engine, oracle, prompts


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_logits_and_confidences_in_training_are_those_that_are_served(tmp_path, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "drafters"))
    from dspark_reference import DSparkReference

    method, module = make("dspark", markov_head=kind, markov_rank=6, block_size=4)
    assert isinstance(module, DSparkModule)
    assert module.confidence_head is not None
    batch = pack(texts())
    module(batch, 1.0)  # which sees how large the target's states are
    anchors = Anchors.draw(batch, 8)
    offset = torch.arange(1, 5)
    said, hidden = anchors.at(batch.token_ids_BL, offset), module.hidden(batch, anchors)
    features, table = module.features(hidden, method.subject.lm_head, anchors, said)
    logits = features @ table.T
    scores = module.confidence_head(torch.cat((hidden, module._previous(anchors, said)), -1)).sigmoid()
    folder = Path(export(method, module, tmp_path / "out"))
    config = parse(read_json(folder / "config.json"), read_shapes(folder), method="dspark", name="x")[0]
    assert config.heads == method.heads()
    tables = method.subject.embed_tokens, method.subject.lm_head
    other = DSparkReference(config, load_file(folder / "model.safetensors"), *tables)
    compared = 0
    for row in range(2):
        for a, anchor in enumerate(anchors.index_BA[row].tolist()):
            document = batch.document_BL[row] == batch.document_BL[row, anchor]
            known = batch.token_ids_BL[row][document & (torch.arange(ROW) <= anchor)].tolist()
            aux = batch.aux_BLX[row][document]
            _, expected, confidence = other.all(known, aux, 4, said=said[row, a].tolist())
            torch.testing.assert_close(logits[row, a], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(scores[row, a], confidence, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared == 16
    spec = {"method": "dspark", "model": str(folder), "num_speculative_tokens": 4}
    llm, asked = make_engine(speculative_config=spec), prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


def test_the_confidence_head_learns_what_is_accepted_and_changes_nothing_else():
    _, module = make("dspark", block_size=4)
    _, without = make("dspark", block_size=4, confidence_head=False)
    batch = pack(texts())
    without.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("confidence")})
    assert isinstance(module, DSparkModule)
    assert module.confidence_head is not None
    losses = []
    for trained in (module, without):
        torch.manual_seed(1)
        found = trained(batch, 0.0)
        found.loss.backward()
        losses.append(found)
    assert losses[0].loss > losses[1].loss
    for name, weight in without.named_parameters():
        torch.testing.assert_close(weight.grad, module.get_parameter(name).grad, msg=name)
    torch.manual_seed(1)
    anchors = Anchors.draw(batch, 256)
    offset = torch.arange(1, 5)
    with torch.no_grad():
        said, hidden = anchors.at(batch.token_ids_BL, offset), module.hidden(batch, anchors)
        features, table = module.features(hidden, module.subject.lm_head, anchors, said)
        right = ((features @ table.T).argmax(-1) == said).float()
        scores = module.confidence_head(torch.cat((hidden, module._previous(anchors, said)), -1))
    weight = anchors.learn(offset) * torch.exp(-(offset - 1) / module.gamma)
    expected = F.binary_cross_entropy_with_logits(scores, right, weight, reduction="sum")
    torch.testing.assert_close(losses[0].loss - losses[1].loss, expected, rtol=1e-3, atol=1e-3)


def test_training_raises_the_served_acceptance(tmp_path):
    """Also where the drafter is stored in 8 bits."""
    options = toy_options(tmp_path / "out", method="dspark", recording=str(tmp_path / "said"), steps=40, store_bits=8)
    method_options = DSparkOptions(block_size=3, anchors=32, markov_rank=8)
    untrained = run_train(replace(options, out=str(tmp_path / "first"), steps=1, learning_rate=1e-9), method_options)
    before = served_length(untrained, method="dspark")
    after = served_length(run_train(options, method_options), method="dspark")
    assert before < 1.3 < 1.8 < after, (before, after)


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="markov_rank is 0; it must be an integer >= 1"):
        make("dspark", markov_rank=0)
    with pytest.raises(ConfigError, match="markov_head is 'gru'"):
        make("dspark", markov_head="gru")
