"""The method dflash: what is trained is what is served, blocks see what they may, and training helps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy import served, served_length, toy_options, toy_target
from transformers import AutoModelForCausalLM

from draftloop.drafters.dflash_config import parse
from draftloop.drafters.dflash_files import read_mask_embedding
from draftloop.drafters.files import read_shapes
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.resolve import read_json
from draftloop.models.tensors import open_tensors
from draftloop.train.anchors import Anchors
from draftloop.train.dflash import BlockMethod, DFlashModule
from draftloop.train.method import Batch, Subject, method_class
from draftloop.train.options import METHOD_OPTIONS, DFlashOptions
from draftloop.train.run import run_train
from helpers import VOCAB, answers, greedy, make_engine, oracle, prompts, tiny_model

ROW = 40
LAYERS = (0, 1)


def subject() -> Subject:
    folder = Path(tiny_model())
    with open_tensors([folder / "model.safetensors"]) as tensors:
        names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        embed, head, norm = map(tensors.read, names)
    config = ModelConfig.from_hf(read_json(folder / "config.json"))
    return Subject(
        name="tiny",
        folder=folder,
        config=config,
        embed_tokens=embed,
        lm_head=head,
        final_norm=norm,
        eos_ids=(2,),
        row_tokens=ROW,
    )


def make(
    method: str = "dflash", *, subject_of: Subject | None = None, **options: Any
) -> tuple[BlockMethod, DFlashModule]:
    """With weights far enough from their start that every part shows."""
    torch.manual_seed(0)
    chosen = METHOD_OPTIONS[method](**{"aux_layer_ids": LAYERS, **options})
    made = method_class(method)(chosen, subject_of or subject())
    module = made.build(torch.arange(VOCAB))
    assert isinstance(made, BlockMethod)
    assert isinstance(module, DFlashModule)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made, module


def pack(rows: list[list[list[int]]], *, num_prompt: int = 1) -> Batch:
    """Documents in rows, with the target's states of transformers; all but the first tokens are to be learnt."""
    target = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    ids, document, position = (torch.zeros(len(rows), ROW, dtype=torch.int64) for _ in range(3))
    hidden = torch.zeros(len(rows), ROW, target.config.hidden_size)
    aux = torch.zeros(len(rows), ROW, len(LAYERS) * target.config.hidden_size)
    for row, documents in enumerate(rows):
        start = 0
        for number, tokens in enumerate(documents, 1):
            part = slice(start, start + len(tokens))
            ids[row, part], document[row, part] = torch.tensor(tokens), number
            position[row, part] = torch.arange(len(tokens))
            with torch.no_grad():
                out = target.model(torch.tensor([tokens]), output_hidden_states=True)
            hidden[row, part] = out.last_hidden_state[0]
            aux[row, part] = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], -1)
            start += len(tokens)
    return Batch(
        token_ids_BL=ids,
        document_BL=document,
        position_BL=position,
        learn_BL=(document > 0) & (position >= num_prompt),
        aux_BLX=aux,
        hidden_BLC=hidden,
    )


def texts() -> list[list[list[int]]]:
    long = prompts(6, longest=20)
    return [[long[2], long[4]], [long[1], [5, 6, 7, 8], long[5][:9]]]


def export(method: BlockMethod, module: DFlashModule, folder: Path) -> str:
    folder.mkdir()
    config, tensors = method.config(), method.tensors(module.state_dict())
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: w.contiguous() for k, w in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    method.files(folder)
    return str(folder)


@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_blocks_see_the_context_before_them_and_themselves(attention, recwarn):
    batch = pack(texts())
    anchors = Anchors.draw(batch, 5)
    if attention == "flex":
        blocks = anchors.blocks(4)
        b, q, k = torch.meshgrid(*(torch.arange(n) for n in (2, 20, ROW + 20)), indexing="ij")
        seen = blocks.mask_mod(b, torch.zeros_like(b), q, k)
    else:
        seen = anchors.mask(4)
    for row in range(2):
        for query in range(20):
            anchor, own = int(anchors.index_BA[row, query // 4]), query // 4
            document = batch.document_BL[row, anchor]
            for key in range(ROW):
                assert seen[row, query, key] == (key < anchor and batch.document_BL[row, key] == document)
            for key in range(20):
                assert seen[row, query, ROW + key] == (key // 4 == own)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same_loss():
    batch, losses = pack(texts()), []
    for attention in ("dense", "flex"):
        _, module = make(attention=attention, num_layers=2)
        torch.manual_seed(1)
        with torch.no_grad():
            losses.append(module(batch, 1.0))
    torch.testing.assert_close(losses[0].loss, losses[1].loss)
    assert torch.equal(losses[0].accepted_K, losses[1].accepted_K)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_compiled_training_on_a_gpu_has_the_same_gradients(method):
    batch, known, results = pack(texts()), subject(), []
    on_gpu = {name: value.cuda() for name, value in vars(batch).items()}
    tables = {name: getattr(known, name).cuda() for name in ("embed_tokens", "lm_head", "final_norm")}
    for attention, compiled in (("dense", False), ("flex", True)):
        _, module = make(method, attention=attention, subject_of=replace(known, **tables, compile=compiled))
        module.cuda()
        torch.manual_seed(1)
        module(Batch(**on_gpu), 0.0).loss.backward()
        results.append({name: weight.grad for name, weight in module.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-2, atol=1e-3 * gradient.abs().max().item())


def test_anchors_are_places_that_serving_may_begin_a_block_at():
    batch = pack([[[1, 2, 3, 4, 5, 6], [7, 8, 9]], [[1, 2]]], num_prompt=2)
    places = {(0, 2), (0, 3), (0, 4)}  # generated, and followed by what is to be learnt
    for _ in range(3):
        anchors = Anchors.draw(batch, 8)
        found = [
            (row, int(index))
            for row in range(2)
            for index, valid in zip(anchors.index_BA[row], anchors.valid_BA[row], strict=True)
            if valid
        ]
        assert len(found) == len(set(found))
        assert set(found) == places
    offset = torch.arange(1, 6)
    learn = anchors.learn(offset)
    assert not learn[~anchors.valid_BA].any()
    assert learn[0][anchors.index_BA[0] == 2].tolist() == [[True, True, True, False, False]], "documents end"


def blocks_of_the_reference(method: BlockMethod, folder: str, batch: Batch, anchors: Anchors) -> Tensor:
    """[B, A, K, C] by the independent reference that serving is tested against."""
    from dflash_reference import BlockReference

    mask = read_mask_embedding(Path(folder))
    config, _ = parse(
        read_json(Path(folder) / "config.json"), read_shapes(Path(folder)), method=method.method, name="x"
    )
    known = method.subject
    other = BlockReference(
        config, load_file(Path(folder) / "model.safetensors"), known.embed_tokens, known.lm_head, mask
    )
    rows = []
    for row in range(anchors.index_BA.shape[0]):
        for anchor in anchors.index_BA[row].tolist():
            inside = (batch.document_BL[row] == batch.document_BL[row, anchor]) & (torch.arange(ROW) < anchor)
            token = int(batch.token_ids_BL[row, anchor])
            hidden = other.block(token, batch.aux_BLX[row][inside], config.max_drafts + config.first_slot)
            rows.append(hidden[config.first_slot :])
    return torch.stack(rows).unflatten(0, anchors.index_BA.shape)


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_layers", "own_mask", "sizes"),
    [(1, False, {}), (2, True, {}), (2, True, {"num_kv_heads": 4, "intermediate_size": 24})],
)
def test_what_is_trained_is_what_is_served(tmp_path, num_layers, own_mask, sizes, monkeypatch):
    """Numbers against the reference that serving equals, and the engine's drafts against the module's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "drafters"))
    method, module = make(num_layers=num_layers, train_mask_embedding=own_mask, **sizes)
    batch = pack(texts())
    module.eval()
    module(batch, 1.0)  # which sees how large the target's states are
    anchors = Anchors.draw(batch, 6)
    hidden = module.hidden(batch, anchors)
    folder = export(method, module, tmp_path / "out")
    expected = blocks_of_the_reference(method, folder, batch, anchors)
    torch.testing.assert_close(hidden[anchors.valid_BA], expected[anchors.valid_BA], rtol=1e-4, atol=1e-4)
    llm = make_engine(speculative_config={"method": "dflash", "model": folder, "num_speculative_tokens": 7})
    core, state, compared = llm.engine.core, llm.engine.core.worker.state, 0
    core.add("0", prompts(3)[2], greedy(12))
    while not core.idle:
        core.step()
        for sequence in core.scheduler.running:
            known = sequence.token_ids
            block = pack([[known]])
            bonus = Anchors(
                index_BA=torch.tensor([[len(known) - 1]]), valid_BA=torch.ones(1, 1, dtype=torch.bool), batch=block
            )
            drafts = (module.hidden(block, bonus)[0, 0] @ method.subject.lm_head.T).argmax(-1)
            assert state.drafts_MK[sequence.row].tolist() == drafts.tolist()
            compared += 1
    assert compared > 6


def test_loss_and_acceptance_are_what_they_say():
    _, module = make(block_size=5, gamma=2.0)
    batch = pack(texts(), num_prompt=2)
    torch.manual_seed(3)
    losses = module(batch, 1.0)
    torch.manual_seed(3)
    anchors = Anchors.draw(batch, 256)
    with torch.no_grad():
        logits = module.hidden(batch, anchors) @ subject().lm_head.T
        p = F.softmax(batch.hidden_BLC @ subject().lm_head.T, -1)
    loss, weight, counted, accepted = torch.zeros(()), 0.0, [0] * 4, [0] * 4
    for row in range(2):
        for a, anchor in enumerate(anchors.index_BA[row].tolist()):
            right = True
            for j in range(1, 5):
                at = anchor + j
                same = at < ROW and batch.document_BL[row, at] == batch.document_BL[row, anchor]
                if not (anchors.valid_BA[row, a] and same):
                    continue
                share = math.exp(-(j - 1) / 2)
                loss -= share * (p[row, at - 1] * F.log_softmax(logits[row, a, j - 1], -1)).sum()
                weight += share
                right = right and bool(logits[row, a, j - 1].argmax() == batch.token_ids_BL[row, at])
                counted[j - 1] += 1
                accepted[j - 1] += right
    torch.testing.assert_close(losses.loss, loss, rtol=1e-4, atol=1e-4)
    assert losses.weight.item() == pytest.approx(weight, rel=1e-5)
    assert losses.counted_K.tolist() == counted
    assert losses.accepted_K.tolist() == accepted
    assert counted[0] > 20


def test_nothing_is_learnt_of_ids_that_are_not_drafted():
    method, module = make(draft_vocab_size=20)
    batch = pack(texts())
    assert method.drafter.has_map
    known = batch.hidden_BLC @ subject().lm_head.T
    assert 0 < module(batch, 1.0).weight < make()[1](batch, 1.0).weight
    assert set(module.draft_ids.tolist()) == set(range(VOCAB - 20, VOCAB)), "the most frequent"
    assert known.shape[-1] == VOCAB


@pytest.mark.parametrize("store", [True, False])
def test_a_reduced_vocabulary_is_served(tmp_path, store):
    method, module = make(draft_vocab_size=50, store_lm_head=store)
    module(pack(texts()), 1.0)
    folder = export(method, module, tmp_path / "out")
    assert ("lm_head.weight" in read_shapes(Path(folder))) == store
    llm = make_engine(speculative_config={"method": "dflash", "model": folder, "num_speculative_tokens": 3})
    assert torch.equal(llm.engine.drafter.model.lm_head, subject().lm_head[module.draft_ids])
    asked = prompts(2)
    assert answers(llm.generate(asked, greedy(10))) == [oracle(p, 10) for p in asked]


def test_an_earlier_export_goes_on_where_it_ended(tmp_path):
    method, module = make(train_mask_embedding=True)
    batch = pack(texts())
    module(batch, 1.0)
    folder = Path(export(method, module, tmp_path / "out"))
    again, other = make(train_mask_embedding=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    again.initialise(other, folder)
    anchors = Anchors.draw(batch, 4)
    torch.testing.assert_close(other.hidden(batch, anchors), module.hidden(batch, anchors), rtol=1e-4, atol=1e-4)
    for options, message in (
        ({"block_size": 6}, "has block_size 8, but 6 is to be trained"),
        ({"aux_layer_ids": (0, 2)}, r"reads layers \(0, 1\), but \(0, 2\) are to be trained"),
        ({"num_layers": 2}, "lacks layers.1"),
        ({"mask_token_id": 7}, "has mask_token_id 0, but 7 is to be trained"),
    ):
        again, other = make(**{"train_mask_embedding": True, **options})
        with pytest.raises(ConfigError, match=message):
            again.initialise(other, folder)
    again, other = make()
    with pytest.raises(ConfigError, match=r"has mask_embedding.pt; ask for --train-mask-embedding"):
        again.initialise(other, folder)


def test_training_raises_the_served_acceptance(tmp_path):
    """By the command: recorded, trained for seconds, exported in the speculators layout, and served."""
    options = toy_options(tmp_path / "out", method="dflash", recording=str(tmp_path / "said"))
    method_options = DFlashOptions(block_size=4, anchors=32)
    untrained = run_train(replace(options, out=str(tmp_path / "first"), steps=1, learning_rate=1e-9), method_options)
    before = served_length(untrained, method="dflash")
    drafter = run_train(options, method_options)
    after = served_length(drafter, method="dflash")
    assert before < 1.3 < 2.0 < after, (before, after)
    outputs, llm = served(drafter, method="dflash")
    plain = make_engine(toy_target(), enforce_eager=True)
    asked = [output.prompt_token_ids for output in outputs]
    assert answers(outputs) == answers(plain.generate(asked, greedy(40)))
    assert "speculators layout" in llm.engine.drafter.describe()
    assert sorted(path.name for path in drafter.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(read_shapes(drafter)), "borrowed"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_training_raises_acceptance_on_a_gpu(tmp_path, method):
    """Compiled, in bf16, with flex_attention."""
    options = toy_options(
        tmp_path / "out",
        method=method,
        device="cuda",
        row_tokens=128,
        batch_tokens=4096,
        record_tokens=40_000,
        held_out_tokens=4096,
    )
    drafter = run_train(options, METHOD_OPTIONS[method](block_size=4, anchors=64))
    log = [json.loads(line) for line in (drafter.parent / "log.jsonl").read_text().splitlines()]
    held_out = [row["held_out"]["acceptance_length"] for row in log if "held_out" in row]
    assert held_out[0] < 1.5 < 2.0 < held_out[-1]
    assert served_length(drafter, method=method) > 1.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, r"block_size is 1; it must be in \[2, 33\]"),
        ({"gamma": 0.0}, "gamma is 0.0; it must be above 0"),
        ({"anchors": 0}, "anchors is 0; it must be an integer >= 1"),
        ({"draft_vocab_size": VOCAB}, f"draft_vocab_size is {VOCAB}, but 'tiny' has {VOCAB} ids"),
        ({"mask_token_id": VOCAB}, f"mask_token_id is {VOCAB}, but 'tiny' has {VOCAB} ids"),
        ({"num_kv_heads": 3}, "num_heads is 4 in the model's config; it must be a multiple of num_kv_heads, 3"),
        ({"intermediate_size": 0}, "intermediate_size is 0; it must be an integer >= 1"),
        ({"aux_layer_ids": (3,)}, "aux_layer_ids names layer 3, but 'tiny' has 2 layers"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_the_mask_is_an_id_that_the_target_never_says():
    method, _ = make()
    assert method.config()["mask_token_id"] == 0
    torch.manual_seed(0)
    counts = torch.ones(VOCAB)
    counts[[2, 9]] = 0  # 2 ends a sequence
    method.build(counts)
    assert method.config()["mask_token_id"] == 0, "chosen once"
