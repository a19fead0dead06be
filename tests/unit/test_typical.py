"""Typical acceptance: the rule itself against numpy, what is drawn behind it, and that it is lossy, as it says."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from test_acceptance_distribution import (
    POSITIONS_R,
    SEEDS_R,
    TARGET,
    TRIALS,
    VOCAB,
    chain,
    emit_tokens,
    of,
    p_value,
    sampled_drafts,
    self_draft,
)

from draftloop.config.speculative import SpeculativeConfig
from draftloop.errors import ConfigError
from draftloop.kernels.batch_invariance import batch_invariant
from draftloop.sampling.accept import accept_greedy
from draftloop.sampling.sampler import SamplingRows, probabilities
from draftloop.sampling.typical import accept_typical_rows

K = 3


def wanted_accepted(probs_QV: np.ndarray, drafts: list[int], threshold: float, alpha: float, base: float) -> int:
    """How many drafts stand: a loop over them, with the entropy in units of log(base)."""
    for place, draft in enumerate(drafts):
        p = probs_QV[place]
        entropy = -sum(x * np.log(x) for x in p if x > 0) / np.log(base)
        if not 0 <= draft < len(p) or p[draft] <= min(threshold, alpha * np.exp(-entropy)):
            return place
    return len(drafts)


def random_cases(rows: int = 3000) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(5)
    sharpness = torch.rand(rows, 1, 1, generator=noise) * 4
    logits = torch.randn(rows, K + 1, VOCAB, generator=noise) * sharpness
    logits[:, :, 0] = float("-inf")  # what a grammar or top_k forbids
    return logits.softmax(-1), torch.randint(-1, VOCAB + 2, (rows, K), generator=noise)


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.3), (1.0, 0.5), (0.02, 5.0)])
def test_drafts_stand_where_the_paper_says(threshold, alpha):
    probs, drafts = random_cases()
    index = torch.arange(len(probs))
    _, num = accept_typical_rows(probs, drafts, None, index, index, index, threshold=threshold, alpha=alpha)

    def wanted(base: float) -> list[int]:
        pairs = zip(probs.double().numpy(), drafts.tolist(), strict=True)
        return [wanted_accepted(p, row, threshold, alpha, base) for p, row in pairs]

    assert (num - 1).tolist() == wanted(np.e)
    assert len(set(wanted(np.e))) == K + 1
    if threshold > alpha / VOCAB and alpha < 5:  # entropy has a say, so the test sees one in other units
        assert (num - 1).tolist() != wanted(2)


def test_what_a_draft_was_drawn_from_has_no_say():
    probs, drafts = random_cases()
    index = torch.arange(len(probs))
    q = torch.rand(len(probs), K, VOCAB)
    with_q = accept_typical_rows(probs, drafts, q, index, index, index)
    assert all(map(torch.equal, with_q, accept_typical_rows(probs, drafts, None, index, index, index)))


def test_it_does_not_depend_on_how_many_rows_there_are_where_that_is_asked_for():
    probs, drafts = random_cases(50)
    index = torch.arange(50)
    rule = batch_invariant(accept_typical_rows)
    emitted, num = rule(probs, drafts, None, index, index, index)
    assert all(map(torch.equal, (emitted, num), accept_typical_rows(probs, drafts, None, index, index, index)))
    for one in range(0, 50, 7):
        row = slice(one, one + 1)
        alone = rule(probs[row], drafts[row], None, index[:1], index[row], index[row])
        assert all(map(torch.equal, alone, (emitted[row], num[row])))


def test_rows_without_temperature_accept_as_greedy_ones():
    rows = 2000
    noise = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, K + 1, VOCAB, generator=noise).round(decimals=1)  # with ties
    right = torch.rand(rows, K, generator=noise) < 0.8
    drafts = torch.where(right, logits[:, :-1].argmax(-1), torch.randint(-1, VOCAB, right.shape, generator=noise))
    zero, index = torch.zeros(rows), torch.arange(rows)
    sampling = SamplingRows(zero, zero.int(), zero + 1, zero, index)
    p = probabilities(logits.flatten(0, 1), sampling.repeat(K + 1)).view_as(logits)
    emitted = accept_typical_rows(p, drafts, None, index, index, index)
    assert all(map(torch.equal, emitted, accept_greedy(logits, drafts)))


def test_the_token_behind_the_last_draft_that_stands_is_drawn_from_the_target():
    drafts = torch.full((TRIALS, 1), int(TARGET[0].argmin()))  # is too rare to stand
    probs = TARGET[torch.tensor([0, 1])].expand(TRIALS, -1, -1)
    emitted, num = accept_typical_rows(probs, drafts, None, SEEDS_R, SEEDS_R, POSITIONS_R, threshold=0.2, alpha=9)
    assert (num == 1).all()
    wanted = (TARGET[0].double() / TARGET[0].double().sum() * TRIALS).numpy()

    def chance(tokens: torch.Tensor) -> float:
        return stats.chisquare(torch.bincount(tokens.long(), minlength=VOCAB).double().numpy(), wanted).pvalue

    assert chance(emitted[:, 0]) > 1e-3
    # what rejection sampling would put there, and what greedy replacement would
    without = TARGET[0].clone()
    without[drafts[0, 0]] = 0
    assert chance(torch.multinomial(without, TRIALS, replacement=True, generator=torch.Generator().manual_seed(0))) < (
        1e-9
    )
    assert chance(torch.full((TRIALS,), int(TARGET[0].argmax()))) < 1e-9


def test_it_is_lossy_and_without_drafts_it_is_not():
    draft = of(sampled_drafts, chain(VOCAB, 2))
    tokens, _ = emit_tokens(draft, SEEDS_R, POSITIONS_R, K, accept_typical_rows)
    assert p_value(tokens) < 1e-9
    nobody = partial(accept_typical_rows, threshold=1.0, alpha=1e9)  # min(1, ..): nothing is likelier than that
    tokens, accepted = emit_tokens(draft, SEEDS_R, POSITIONS_R, K, nobody)
    assert accepted.max() == 0
    assert p_value(tokens) > 1e-3


def test_more_drafts_stand_than_without_loss_where_the_drafter_is_near_the_target():
    _, accepted = emit_tokens(of(sampled_drafts, chain(VOCAB, 2)), SEEDS_R, POSITIONS_R, K, accept_typical_rows)
    _, lossless = emit_tokens(of(sampled_drafts, chain(VOCAB, 2)), SEEDS_R, POSITIONS_R, K)
    assert accepted.double().mean() > lossless.double().mean() + 0.2
    # but even the target's own rare drafts do not stand
    _, own = emit_tokens(self_draft, SEEDS_R, POSITIONS_R, K, accept_typical_rows)
    assert 1 < own.double().mean() < K


def test_a_position_that_says_nothing_ends_a_block_and_harms_no_neighbour():
    probs, drafts = random_cases(64)
    index = torch.arange(64)
    clean, _ = accept_typical_rows(probs, drafts, None, index, index, index)
    probs[::2, 0] = float("nan")
    broken, num = accept_typical_rows(probs, drafts, None, index, index, index)
    assert torch.equal(broken[1::2], clean[1::2])
    assert (num[::2] == 1).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"typical_acceptance_threshold": 0.1}, "threshold is 0.1, but rejection_sample_method is not 'typical'"),
        (
            {"rejection_sample_method": "block", "typical_acceptance_alpha": 0.1},
            "alpha is 0.1, but rejection_sample_method is not 'typical'",
        ),
        ({"rejection_sample_method": "typical", "typical_acceptance_threshold": 1.5}, r"must be in \(0, 1\]"),
        ({"rejection_sample_method": "typical", "typical_acceptance_threshold": 0}, r"must be in \(0, 1\]"),
        ({"rejection_sample_method": "typical", "typical_acceptance_alpha": 0}, "must be a number above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 2, **values})
