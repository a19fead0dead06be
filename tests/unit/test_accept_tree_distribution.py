"""Whatever tree is drafted, emitted tokens follow the target: chi-square over 20k trials, one row each.

As in test_acceptance_distribution.py: the target is a Markov chain, each trial runs steps until three tokens are out,
and their joint distribution is tested.
"""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.kvcache.rows import RowState
from draftloop.sampling import accept_tree
from draftloop.sampling.accept_tree import TreeTables, accept_tree_sampled, accept_tree_torch
from draftloop.sampling.noise import Stream, uniform
from draftloop.sampling.sampler import SamplingKind

TRIALS, VOCAB, TOKENS, FIRST = 20_000, 6, 3, 2
CPU = torch.device("cpu")
TREES = {
    "one": [(0,)],
    "wide": [(0,), (1,), (2,)],
    "all": [(rank,) for rank in range(VOCAB)],
    "two": [(0,), (1,), (0, 0), (0, 1), (1, 0)],
    "three": [(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 2)],
    "chain": [(0,), (0, 0), (0, 0, 0)],
}


def markov(seed: int, sharpness: float) -> Tensor:
    """[V, V]: logits of the next token after each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness


TARGET, DRAFT = markov(1, 1.0), markov(2, 1.0)
DRAFTERS = {"another model": DRAFT, "the target itself": TARGET, "the least likely": -TARGET}


def make_state(tree: DraftTree) -> RowState:
    state = RowState.create(
        num_rows=TRIALS, max_model_len=TOKENS + 12, num_drafts=tree.num_drafts, page_size=16, draft_vocab=0, device=CPU
    )
    state.temperature_M.fill_(1.0)
    state.seed_M.copy_(torch.arange(TRIALS + 1))
    state.tokens_ML[:, 0] = FIRST
    state.max_tokens_M.fill_(TOKENS + 12)
    return state


def draft(state: RowState, tree: DraftTree, model: Tensor) -> Tensor:
    """Write the likeliest tokens behind each place; what stands at each place, [M, Q]."""
    last = state.tokens_ML.gather(1, state.num_tokens_M[:, None].long() - 1).long()
    tokens = [last[:, 0]]
    for place, parent in enumerate(tree.parents, 1):
        rank = sum(other == parent for other in tree.parents[: place - 1])
        tokens.append(model[tokens[parent]].argsort(-1, descending=True)[:, rank])
    tokens_MQ = torch.stack(tokens, 1)
    state.drafts_MK.copy_(tokens_MQ[:, 1:])
    return tokens_MQ


def emit(choices: list[tuple[int, ...]], model: Tensor, rule) -> Tensor:
    """[trials, 3]"""
    tree = DraftTree.of_choices(choices)
    state, tables = make_state(tree), TreeTables.of(tree, CPU)
    rows = torch.arange(TRIALS, dtype=torch.int32)
    for _ in range(TOKENS):
        logits = TARGET[draft(state, tree, model)][:TRIALS].flatten(0, 1)
        rule(state, rows, logits, tables)
    assert (state.num_tokens_M[:TRIALS] > TOKENS).all()
    return state.tokens_ML[:TRIALS, 1 : 1 + TOKENS].long()


def sampled(state: RowState, rows: Tensor, logits: Tensor, tables: TreeTables) -> None:
    accept_tree_sampled(state, rows, logits, tables, kind=SamplingKind.SAMPLED)


def p_value(tokens: Tensor) -> float:
    probs = TARGET.double().softmax(-1)
    joint = probs[FIRST][:, None, None] * probs[:, :, None] * probs[None]
    base = torch.tensor([VOCAB**2, VOCAB, 1])
    found = torch.bincount((tokens * base).sum(-1), minlength=VOCAB**3).double()
    expected = joint.flatten() * TRIALS
    likely = expected > 8
    found, expected = (torch.cat([x[likely], x[~likely].sum()[None]]) for x in (found, expected))
    return stats.chisquare(found.numpy(), expected.numpy()).pvalue


@pytest.mark.parametrize("model", DRAFTERS)
@pytest.mark.parametrize("tree", TREES)
def test_emitted_tokens_follow_the_target(tree, model):
    assert p_value(emit(TREES[tree], DRAFTERS[model], sampled)) > 1e-4


def test_a_seed_says_the_same_whatever_tree_is_drafted():
    first, *others = (emit(TREES[tree], DRAFT, sampled) for tree in ("one", "chain", "two"))
    assert all(torch.equal(first, other) for other in others)


def test_a_place_accepts_as_often_as_its_children_are_likely():
    """The sum of p over them, which no rule can exceed."""
    tree = DraftTree.of_choices(TREES["wide"])
    state, tables = make_state(tree), TreeTables.of(tree, CPU)
    draft(state, tree, DRAFT)
    logits = TARGET[torch.full((TRIALS, tree.num_places), FIRST)].flatten(0, 1)
    _, outcome, _ = accept_tree_sampled(
        state, torch.arange(TRIALS, dtype=torch.int32), logits, tables, kind=SamplingKind.SAMPLED
    )
    likely = TARGET[FIRST].softmax(-1)[state.drafts_MK[0].long()].sum()
    assert outcome[:, 1].float().mean() == pytest.approx(likely.item(), abs=0.015)


# ---- what must be noticed -------------------------------------------------------------------


def one_noise_for_all_heights(state, rows, logits, tables) -> None:
    """The bonus token is drawn with the noise that chose the draft before it."""
    flat = tables._replace(heights_Q=torch.zeros_like(tables.heights_Q))
    targets = []

    def remember(*args, **options):
        targets.append(args[2])
        return accept_tree_torch(*args[:3], tables, *args[4:], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept_tree, "accept_tree_torch", remember)
        sampled(state, rows, logits, flat)
    assert targets


def tried_in_turn(state, rows, logits, tables, *, renormalised: bool, without: bool) -> None:
    """SpecInfer's rule step by step, or a way to get it wrong: children tried with their probability among what is
    left or among all (`renormalised`), and the replacement drawn `without` them or not."""
    num_places = tables.heights_Q.shape[0]
    probs = logits.softmax(-1).view(-1, num_places, VOCAB).clone()
    lengths = state.num_tokens_M[rows.long()][:, None]
    targets = torch.full(probs.shape[:2], -1)
    for place in range(num_places):
        p, left = probs[:, place], probs[:, place].clone()
        parents = tables.parents_Q[1:].tolist()
        for rank, child in enumerate(at for at, parent in enumerate(parents, 1) if parent == place):
            token = state.drafts_MK[: len(rows), child - 1].long()[:, None]
            among = left / left.sum(-1, keepdim=True).clamp(min=1e-30) if renormalised else p
            coin = uniform(state.seed_M[rows.long()][:, None] * 97 + rank, lengths + tables.heights_Q[place],
                           Stream.ACCEPT)  # fmt: skip
            stands = (coin < among.gather(1, token)) & (targets[:, place, None] < 0)
            targets[:, place] = torch.where(stands, token, targets[:, place, None])[:, 0]
            left.scatter_(1, token, 0.0)
        rest = left if without else p
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
        drawn = uniform(state.seed_M[rows.long()][:, None], lengths + tables.heights_Q[place], Stream.SAMPLE)
        drawn = ((rest / rest.sum(-1, keepdim=True)).cumsum(-1) < drawn).sum(-1).clamp(max=VOCAB - 1)
        targets[:, place] = torch.where(targets[:, place] < 0, drawn, targets[:, place])
    accept_tree_torch(state, rows, targets.flatten(), tables, None, vocab_size=VOCAB)


@pytest.mark.parametrize("tree", ["wide", "three"])
def test_trying_drafts_in_turn_is_the_same_distribution(tree):
    def rule(*args) -> None:
        tried_in_turn(*args, renormalised=True, without=True)

    assert p_value(emit(TREES[tree], DRAFT, rule)) > 1e-4


@pytest.mark.parametrize(("renormalised", "without"), [(False, True), (True, False), (False, False)])
def test_drafts_tried_in_turn_the_wrong_way_are_noticed(renormalised, without):
    def rule(*args) -> None:
        tried_in_turn(*args, renormalised=renormalised, without=without)

    assert p_value(emit(TREES["wide"], DRAFT, rule)) < 1e-9


@pytest.mark.parametrize("tree", ["two", "three"])
def test_noise_that_heights_share_is_noticed(tree):
    assert p_value(emit(TREES[tree], TARGET, one_noise_for_all_heights)) < 1e-9
