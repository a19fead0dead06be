"""Sampled drafts, from a vocabulary of the drafter's own or not: written as the target means them, and lossless."""

from __future__ import annotations

import pytest
import torch
from eagle_reference import hf_model
from scipy.stats import chisquare

from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.drafters.write import write_next
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.request import SamplingParams
from example_drafters import example_configs
from helpers import VOCAB, answers, engine, prompts, tiny_model

IDS = torch.tensor([1, 4, 5, 9])


def state(*, num_drafts: int = 3, vocab: int = 12) -> RowState:
    made = RowState.create(
        num_rows=3,
        max_model_len=32,
        num_drafts=num_drafts,
        page_size=16,
        draft_vocab=vocab,
        device=torch.device("cpu"),
    )
    made.draft_limit_M.fill_(num_drafts)
    made.num_tokens_M.copy_(torch.tensor([5, 6, 7, 1]))
    return made


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_are_ids_of_the_target(sampled):
    made, rows = state(), torch.tensor([2, 0], dtype=torch.int32)
    made.temperature_M.fill_(1.0)
    logits = torch.tensor([[0.0, 1.0, 30.0, 2.0], [25.0, 1.0, 0.0, 2.0]])
    write_next(made, rows, logits, vocab_size=12, sampled=sampled, target_ids_W=IDS)
    assert made.drafts_MK[[2, 0], 0].tolist() == [5, 1]
    assert made.num_drafted_M.tolist() == [1, 0, 1, 0]
    if sampled:
        probs = made.draft_probs_MKV[[2, 0], 0]
        torch.testing.assert_close(probs[:, IDS], logits.softmax(-1))
        assert probs.sum(-1).tolist() == pytest.approx([1, 1])
        others = [i for i in range(12) if i not in IDS]
        assert (probs[:, others] == 0).all()


def test_a_row_drafts_up_to_the_longest_sequence():
    made, rows = state(), torch.arange(3, dtype=torch.int32)
    for _ in range(3):
        write_next(made, rows, torch.eye(3, 12), vocab_size=12, sampled=False, longest=8)
    # rows of 5, 6 and 7 tokens: room for 3, 2 and 1 drafts
    assert [(row != NO_DRAFT).sum().item() for row in made.drafts_MK[:3]] == [3, 2, 1]
    assert made.num_drafted_M[:3].tolist() == [3, 3, 3], "the chain goes on, so that its shape stays"


@torch.no_grad()
def exact(prompt: list[int], temperature: float, place: int) -> torch.Tensor:
    """Distribution of an answer's token at a place, over all tokens before it."""
    model = hf_model(tiny_model())
    chances, batch = torch.ones(1), torch.tensor([prompt])
    for _ in range(place):
        chances_BV = (model(batch).logits[:, -1] / temperature).softmax(-1) * chances[:, None]
        chances = chances_BV.flatten()
        ids_BV = torch.arange(VOCAB).repeat(len(batch), 1)
        batch = torch.cat([batch.repeat_interleave(VOCAB, 0), ids_BV.flatten()[:, None]], 1)
    return chances @ (model(batch).logits[:, -1] / temperature).softmax(-1)


DRAWN = ("eagle3", "eagle", "dflash", "dspark", "medusa", "peagle", "cascade")
SHOWN_ELSEWHERE = {
    "draft_model": "tests/e2e/test_engine.py",
    "mtp": "below, and by what it shares with eagle",
    "pard": "tests/drafters/test_parallel.py",
    "gemma4_mtp": "tests/drafters/test_gemma4_mtp.py",
}
"""Where their distributions are compared with what they draw from, or with the target's."""


def test_whoever_draws_its_drafts_is_tested_for_the_targets_distribution():
    load_drafters()
    drawing = {name for name, drafter in DRAFTERS.items() if drafter.samples}
    assert drawing == {*DRAWN, *SHOWN_ELSEWHERE}, "a drafter that samples goes into DRAWN"


@pytest.mark.parametrize(
    ("method", "index", "place"),
    [
        *((method, 0, 1) for method in DRAWN),
        pytest.param("mtp", 1, 2, id="two modules, of which the second drafts it"),
    ],
)
def test_sampled_text_has_the_targets_distribution(method, index, place):
    """The token at a place from 1 on may be a draft. The head is poor, so most of what is accepted, and all of what
    replaces the rest, depends on its probabilities being right."""
    prompt, count, temperature = prompts(2)[1] if place == 1 else [7], 2000, 6.0
    llm = engine(
        speculative_config={**example_configs()[method][index], "num_speculative_tokens": 2},
        max_num_seqs=64,
        max_prefill_rows=64,
        max_num_batched_tokens=1024,
        cudagraph_capture_sizes=(64,),
        kv_cache_memory_bytes=1 << 26,
    )
    params = [SamplingParams(temperature=temperature, max_tokens=place + 1, seed=seed) for seed in range(count)]
    found = torch.tensor([tokens[place] for tokens in answers(llm.generate([prompt] * count, params))])
    assert llm.get_metrics()["spec_decode_num_accepted_tokens_per_pos"][place - 1] > 0.05 * count
    expected = exact(prompt, temperature, place) * count
    seen = torch.bincount(found, minlength=VOCAB).double()
    bins = torch.where(expected >= 8, torch.arange(VOCAB), VOCAB)  # what is rare goes together
    wanted, observed = (torch.zeros(VOCAB + 1).double().index_add(0, bins, x.double()) for x in (expected, seen))
    used = wanted > 0
    wanted = wanted[used] * observed.sum() / wanted.sum()
    assert chisquare(observed[used].numpy(), wanted.numpy()).pvalue > 1e-3
