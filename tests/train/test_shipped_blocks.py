"""The block drafter that is shipped drafts, number for number, what its training's own pass says.

A place, a layer or a position that training and serving see one apart costs acceptance and nothing else, so that
no other test would notice; and the toy models of the other tests have weights that may hide it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftloop import LLM, SamplingParams
from draftloop.bench.ask import render
from draftloop.bench.check_drafter import method_of
from draftloop.bench.prompts import load_prompts
from draftloop.drafters.dflash_files import MASK_EMBEDDING
from draftloop.models.resolve import SHIPPED, read_json, shipped
from draftloop.train.anchors import Anchors
from draftloop.train.dflash import BlockMethod, DFlashModule
from draftloop.train.method import Batch, Subject, method_class
from draftloop.train.options import METHOD_OPTIONS
from draftloop.train.packing import Packer, batch_fields
from draftloop.train.recording import Document, Documents
from draftloop.train.states import TargetStates

TARGET, NUM_TOKENS, ROW = "smollm2-135m", 16, 256


def served(name: str, num_drafts: int) -> tuple[list[int], list[tuple[int, Tensor]]]:
    """A greedy answer with its prompt, and of each block how many tokens were known and its logits, [drafts, ids]."""
    spec = {"method": method_of(name), "model": name, "num_speculative_tokens": num_drafts}
    llm = LLM(
        TARGET, dtype="float32", device="cpu", max_num_seqs=1, max_model_len=ROW, enforce_eager=True,
        kv_cache_memory_bytes=1 << 26, speculative_config=spec,
    )  # fmt: skip
    core, model, blocks, known = llm.engine.core, llm.engine.drafter.model, list[Tensor](), list[int]()
    logits = model.logits
    model.logits = lambda hidden: blocks.append(found := logits(hidden)) or found
    (prompt,) = render(llm, [load_prompts("mt_bench")[17].turns[0]], max_tokens=NUM_TOKENS)
    sequence = core.add("0", prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    while not core.idle:
        core.step()
        if core.scheduler.running:
            known.append(sequence.num_tokens)
    llm.close()
    return sequence.token_ids, list(zip(known, blocks, strict=False))


def trained(name: str, token_ids: list[int]) -> tuple[DFlashModule, Batch]:
    """The module of training with the shipped weights, and the text with the target's states."""
    folder = SHIPPED / name
    config = read_json(folder / "config.json")
    layers = config["transformer_layer_config"]
    options = {key: config[key] for key in ("block_size", "mask_token_id", "draft_vocab_size")}
    options |= {"num_layers": layers["num_hidden_layers"], "num_kv_heads": layers["num_key_value_heads"]}
    options |= {"intermediate_size": layers["intermediate_size"], "store_lm_head": False}
    options |= {"train_mask_embedding": (folder / MASK_EMBEDDING).exists()}
    if config.get("markov_rank"):
        options |= {"markov_head": config["markov_head_type"], "markov_rank": config["markov_rank"]}
    target = TargetStates(TARGET, device=torch.device("cpu"), dtype=torch.float32, row_tokens=ROW, compiled=False)
    model = target.model
    subject = Subject(
        name=TARGET, folder=None, config=target.config, embed_tokens=model.embed_tokens.detach(),
        lm_head=model.lm_head.detach(), final_norm=model.final_norm.detach(), eos_ids=(), row_tokens=ROW,
    )  # fmt: skip
    method = method_class(method_of(name))(METHOD_OPTIONS[method_of(name)](**options), subject)
    module = method.build(torch.arange(subject.vocab_size))
    assert isinstance(method, BlockMethod)
    assert isinstance(module, DFlashModule)
    method.initialise(module, folder)
    documents = Documents.of([Document(token_ids=token_ids, num_given=1, temperature=0.0)], subject.vocab_size)
    packer = Packer(documents, np.arange(1), row_tokens=ROW, rows_per_step=1, seed=0)
    rows = packer.rows([[0]])
    aux_BLX, hidden_BLC = target(rows, method.aux_layers)
    return module, Batch(**batch_fields(rows), aux_BLX=aux_BLX, hidden_BLC=hidden_BLC)


@torch.no_grad()
def test_what_is_served_is_what_was_trained():
    for name in shipped():
        if method_of(name) not in ("dflash", "dspark"):
            continue
        num_drafts = 7
        token_ids, blocks = served(name, num_drafts)
        module, batch = trained(name, token_ids)
        ids_W = module.draft_ids
        head_WC = module.subject.lm_head if ids_W is None else module.subject.lm_head[ids_W]
        for known, logits_KW in blocks:
            bonus = Anchors(
                index_BA=torch.tensor([[known - 1]]), valid_BA=torch.ones(1, 1, dtype=torch.bool), batch=batch
            )
            expected_KW = module.hidden(batch, bonus)[0, 0, :num_drafts] @ head_WC.T
            torch.testing.assert_close(logits_KW, expected_KW, rtol=1e-3, atol=1e-3)
        assert len(blocks) > 4
