"""The method draft_model: its module is the model that is served, documents stay apart, and training helps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.resolve import read_json
from draftloop.models.tensors import open_tensors
from draftloop.train.draft_model import DraftModel, DraftModelMethod, narrowed
from draftloop.train.export import export
from draftloop.train.method import Batch, Subject, method_class
from draftloop.train.options import DraftModelOptions
from heads import COUNT_VOCAB, counting_target
from helpers import VOCAB, answers, engine, greedy, make_engine, prompts, tiny_model

ROW = 48
OPTIONS = {"hidden_size": 32, "num_layers": 2, "head_dim": 16, "num_drafts": 3}


def subject(model: str) -> Subject:
    folder = Path(model)
    with open_tensors([folder / "model.safetensors"]) as tensors:
        names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        embed, head, norm = map(tensors.read, names)
    return Subject(
        name="tiny",
        folder=folder,
        config=ModelConfig.from_hf(read_json(folder / "config.json")),
        embed_tokens=embed,
        lm_head=head,
        final_norm=norm,
        eos_ids=(),
        row_tokens=ROW,
    )


def make(model: str | None = None, **options) -> tuple[DraftModelMethod, DraftModel]:
    torch.manual_seed(0)
    target = subject(model or tiny_model())
    method = method_class("draft_model")(DraftModelOptions(**{**OPTIONS, **options}), target)
    module = method.build(torch.arange(target.vocab_size))
    assert isinstance(method, DraftModelMethod)
    assert isinstance(module, DraftModel)
    return method, module


def pack(rows: list[list[list[int]]], *, model: str | None = None, num_prompt: int = 1) -> Batch:
    """Documents in rows, with the target's states of transformers; all but the first tokens are to be learnt."""
    target = AutoModelForCausalLM.from_pretrained(model or tiny_model(), dtype=torch.float32).eval()
    ids, document, position = (torch.zeros(len(rows), ROW, dtype=torch.int64) for _ in range(3))
    hidden = torch.zeros(len(rows), ROW, target.config.hidden_size)
    for row, documents in enumerate(rows):
        start = 0
        for number, tokens in enumerate(documents, 1):
            part = slice(start, start + len(tokens))
            ids[row, part], document[row, part] = torch.tensor(tokens), number
            position[row, part] = torch.arange(len(tokens))
            with torch.no_grad():
                hidden[row, part] = target.model(torch.tensor([tokens])).last_hidden_state[0]
            start += len(tokens)
    return Batch(
        token_ids_BL=ids,
        document_BL=document,
        position_BL=position,
        learn_BL=(document > 0) & (position >= num_prompt),
        aux_BLX=torch.zeros(len(rows), ROW, 0),
        hidden_BLC=hidden,
    )


def written(method: DraftModelMethod, module: DraftModel, folder: Path, *, store_bits: int | None = None) -> str:
    export(folder, method, module.state_dict(), revision="", data={}, log=[], store_bits=store_bits)
    return str(folder)


def logits(module: DraftModel, batch: Batch) -> Tensor:
    return module.hidden(batch) @ module.embed_tokens.weight.T


@torch.no_grad()
def test_the_module_is_the_model_that_transformers_reads(tmp_path):
    method, module = make(num_heads=4, num_kv_heads=2)
    for parameter in module.parameters():  # far enough from its start that every part shows
        parameter.add_(torch.randn_like(parameter) * 0.2)
    documents = [[3, 1, 4, 1, 5, 9, 2, 6], [53, 58, 97, 93]]
    ours = logits(module, pack([documents]))
    model = AutoModelForCausalLM.from_pretrained(written(method, module, tmp_path / "out"), dtype=torch.float32)
    start = 0
    for tokens in documents:
        expected = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours[0, start : start + len(tokens)], expected, rtol=1e-4, atol=1e-4)
        start += len(tokens)


def test_loss_and_acceptance_are_what_they_say():
    _, module = make()
    batch = pack([[[5, 6, 7, 8, 9], [10, 11, 12]], [[13, 14, 15, 16]]], num_prompt=2)
    losses = module(batch, 1.0)
    with torch.no_grad():
        log_q = F.log_softmax(logits(module, batch), -1)
        p = F.softmax(batch.hidden_BLC @ subject(tiny_model()).lm_head.T, -1)
        choice = log_q.argmax(-1)
    loss, counted, accepted = torch.zeros(()), [0, 0, 0], [0, 0, 0]
    for row, start, length in ((0, 0, 5), (0, 5, 3), (1, 0, 4)):
        for at in range(start + 1, start + length - 1):  # at + 1 is the first token to be learnt, or a later one
            loss -= (p[row, at] * log_q[row, at]).sum()
            for k in range(3):
                if at + k + 1 < start + length:
                    right = (choice[row, at : at + k + 1] == batch.token_ids_BL[row, at + 1 : at + k + 2]).all()
                    counted[k] += 1
                    accepted[k] += int(right)
    torch.testing.assert_close(losses.loss, loss)
    assert losses.weight == counted[0] == 6
    assert losses.counted_K.tolist() == counted
    assert losses.accepted_K.tolist() == accepted


def test_the_narrow_embedding_keeps_what_frequent_ids_mean():
    head = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(VOCAB)
    counts[:20] = 1e6
    exact = head @ head.T

    def error(width: int) -> Tensor:
        """Of the products of all pairs, once both are of the same size."""
        narrow = narrowed(head, counts, width)
        assert narrow.shape == (VOCAB, width)
        kept = narrow @ narrow.T
        return (kept * (exact[:20, :20].norm() / kept[:20, :20].norm()) - exact).abs()

    assert error(24)[:20, :20].max() < 0.1 < error(24)[20:, 20:].mean()
    assert error(64).max() < 1e-2
    assert narrowed(head, counts, 64).square().mean() == pytest.approx(1 / 64)
    assert narrowed(head, counts, 80).shape == (VOCAB, 80)


def test_training_raises_acceptance_of_the_served_model(tmp_path):
    target = counting_target()
    asked = prompts(24, longest=12, vocab=COUNT_VOCAB)
    told = answers(engine(target).generate(asked, greedy(24)))
    batch = pack([[prompt + answer] for prompt, answer in zip(asked, told, strict=True)], model=target)
    method, module = make(target)

    def served(name: str, store_bits: int | None = None) -> float:
        folder = written(method, module, tmp_path / name, store_bits=store_bits)
        drafter = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
        llm = make_engine(target, speculative_config=drafter)
        llm.generate(prompts(12, vocab=COUNT_VOCAB, seed=7), greedy(24))
        return llm.get_metrics()["mean_acceptance_length"]

    before = served("before")
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(60):
        losses = module(batch, 0.0)
        optimiser.zero_grad()
        (losses.loss / losses.weight).backward()
        optimiser.step()
    after = served("after")
    assert before < 1.5 < 2.5 < after, (before, after)
    assert served("small", store_bits=8) == pytest.approx(after, abs=0.1)
    large, small = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("after", "small"))
    assert small < 0.6 * large


def test_an_earlier_export_goes_on_where_it_ended(tmp_path):
    method, module = make()
    folder = Path(written(method, module, tmp_path / "out"))
    _, other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    method.initialise(other, folder)
    assert all(map(torch.equal, module.state_dict().values(), other.state_dict().values()))
    method, wider = make(intermediate_size=96)
    with pytest.raises(ConfigError, match=r"gate_proj.weight has shape \[64, 32\] .* \[96, 32\] is to be"):
        method.initialise(wider, folder)
    method, deeper = make(num_layers=3)
    with pytest.raises(ConfigError, match=r"model.layers.2.* is missing"):
        method.initialise(deeper, folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 15}, "head_dim is 15; it must be an even number >= 2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"teacher_temperature": 0.0}, r"teacher_temperature is 0.0; it must be in \(0, 10\]"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads is 3 .* a multiple of num_kv_heads, 2"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)
